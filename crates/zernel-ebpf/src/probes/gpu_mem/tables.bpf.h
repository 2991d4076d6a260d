/* SPDX-License-Identifier: GPL-2.0-only */
/* The tables of allocations and of memory accounts, which tenants share. */
#ifndef GPU_MEM_TABLES_BPF_H
#define GPU_MEM_TABLES_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "limits.h"
#include "losses.h"
#include "process.h"
#include "tenants.h"

enum memory_kind {
	MEMORY_ADDRESS,
	MEMORY_HANDLE,
	MEMORY_MAPPING,
};
ZERNEL_IN_BTF(enum, memory_kind);

struct allocation_key {
	__u64 object; /* by kind: an address, a handle, or the address of a mapping */
	__u32 process;
	__u32 kind; /* enum memory_kind */
};

/* A bit of a caller, alone or beside an address: memory from pools. No address in user space has this bit. */
enum gpu_mem_caller_bit {
	MEMORY_POOLED_BIT = 63,
};
ZERNEL_IN_BTF(enum, gpu_mem_caller_bit);

#define MEMORY_POOLED (1ULL << MEMORY_POOLED_BIT)

/* The home of memory: the address of its context in the lower 48 bits, and the epoch above. Address
 * 0 stands for the primary context of the device, and for a thread without a known context. */
enum gpu_mem_context_epoch {
	MEMORY_EPOCH_SHIFT = 48,
};
ZERNEL_IN_BTF(enum, gpu_mem_context_epoch);

#define MEMORY_CONTEXT_MASK ((1ULL << MEMORY_EPOCH_SHIFT) - 1)
/* Created memory outlives contexts. */
#define MEMORY_OF_NO_CONTEXT MEMORY_CONTEXT_MASK
/* Returned instead of a home if an account has no room. */
#define MEMORY_NOT_ACCOUNTED (~0ULL)

struct allocation {
	__u64 bytes;
	__u64 caller; /* of a mapping: the handle */
	__u64 context_epoch;
	__u32 device;
	__u32 references;
};

/* Without a caller: the account of a device, or of a context that is not a device's primary one. */
struct account_key {
	__u64 caller; /* 0: all callers together */
	__u64 context_epoch; /* without a caller: the context, in epoch 0 */
	__u32 process;
	__u32 device; /* of the account of a context: MEMORY_ANY_DEVICE */
};

enum gpu_mem_device {
	MEMORY_ANY_DEVICE = 0xfffffffeU,
};
ZERNEL_IN_BTF(enum, gpu_mem_device);

struct account {
	__u64 current_bytes; /* of a device or a caller */
	__u64 peak_bytes; /* of a device, like the next two */
	__u64 allocations;
	__u64 frees;
	__u64 held_bytes_and_epoch; /* by the context: bytes, and its epoch above */
	__u64 held_allocations;
	__u64 unknown_context; /* of a device: a context that may be its primary one */
	__u32 device; /* of a context */
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, ZERNEL_ALLOCATIONS);
	__type(key, struct allocation_key);
	__type(value, struct allocation);
} allocations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, ZERNEL_MEMORY_ACCOUNTS);
	__type(key, struct account_key);
	__type(value, struct account);
} memory_accounts SEC(".maps");

/* Adds an allocation, unless the map has an allocation with the same key or is full. */
static __always_inline bool add_allocation(const struct allocation_key *key,
					   const struct allocation *allocation)
{
	if (bpf_map_update_elem(&allocations, key, allocation, BPF_NOEXIST))
		return false;
	zernel_count_process_entries(key->process, ZERNEL_ALLOCATION_TABLE, 1);
	return true;
}

/* Deletes an allocation; false if the map does not have the allocation. */
static __always_inline bool delete_allocation(const struct allocation_key *key)
{
	if (bpf_map_delete_elem(&allocations, key))
		return false;
	zernel_count_process_entries(key->process, ZERNEL_ALLOCATION_TABLE, -1);
	return true;
}

/* Adds an allocation, or replaces one whose end was not seen; false if there is no room. */
static __always_inline bool set_allocation(const struct allocation_key *key,
					   const struct allocation *allocation)
{
	if (add_allocation(key, allocation) ||
	    !bpf_map_update_elem(&allocations, key, allocation, BPF_EXIST))
		return true;
	ZERNEL_COUNT_LOST(allocations);
	return false;
}

/* Whether a process may have another allocation, because its tenant has not used up its share. */
static __always_inline bool may_add_allocation(__u32 process)
{
	return zernel_process_may_add_entry(process, ZERNEL_ALLOCATION_TABLE);
}

/* An account, which is opened if there is none; NULL if none is free for the tenant. */
static __always_inline struct account *get_or_create_account(const struct account_key *key)
{
	static const struct account empty;
	struct account *account = bpf_map_lookup_elem(&memory_accounts, key);

	if (account)
		return account;
	if (!zernel_process_may_add_entry(key->process, ZERNEL_ACCOUNT_TABLE))
		return NULL;
	if (!bpf_map_update_elem(&memory_accounts, key, &empty, BPF_NOEXIST))
		zernel_count_process_entries(key->process, ZERNEL_ACCOUNT_TABLE, 1);
	account = bpf_map_lookup_elem(&memory_accounts, key);
	if (!account)
		ZERNEL_COUNT_LOST(memory_accounts);
	return account;
}

static __always_inline struct account *device_account(__u32 process, __u32 device)
{
	struct account_key key = { .process = process, .device = device };

	return get_or_create_account(&key);
}

static __always_inline struct account *context_account(__u32 process, __u64 context)
{
	struct account_key key = { .context_epoch = context,
				   .process = process,
				   .device = MEMORY_ANY_DEVICE };

	return get_or_create_account(&key);
}

/* Subtracts bytes from the memory that a context holds; false if the epoch in which the memory was allocated is over. */
static __always_inline bool subtract_held_bytes(struct account *account, __u64 epoch, __u64 bytes)
{
	for (int tries = 0; tries < 16; tries++) {
		__u64 seen = *(volatile __u64 *)&account->held_bytes_and_epoch;

		if (seen >> MEMORY_EPOCH_SHIFT != epoch)
			return false;
		if (__sync_val_compare_and_swap(&account->held_bytes_and_epoch, seen, seen - bytes) == seen) {
			__sync_fetch_and_add(&account->held_allocations, -1ULL);
			return true;
		}
	}
	ZERNEL_COUNT_LOST(memory_accounts);
	return false;
}

#endif
