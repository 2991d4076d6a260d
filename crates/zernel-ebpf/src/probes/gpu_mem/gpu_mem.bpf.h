/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * GPU memory: how much each process holds, by device and by calling code.
 *
 * A freed allocation leaves the map when the call is entered, and comes back if the call fails:
 * once the driver has freed an address, another thread may get it before the first one returns.
 *
 * Memory from pools has accounts of its own besides those of all memory. When the pool functions
 * are sampled, pooled memory is unknown, and userspace subtracts it.
 *
 * Created memory is held by its handle and by each of its mappings. It is freed with the last of
 * them, in any order.
 */
#ifndef GPU_MEM_BPF_H
#define GPU_MEM_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "cuda_context/cuda_context.bpf.h"
#include "histogram.h"
#include "losses.h"
#include "symbol.h"
#include "thread.h"

enum gpu_mem_role {
	MEMORY_ALLOCATE, /* arguments: where the address is stored, bytes */
	MEMORY_ALLOCATE_PITCHED, /* arguments: where the address is stored, where the pitch is,
				    height */
	MEMORY_FREE, /* argument: the address */
	MEMORY_CREATE, /* arguments: where the handle is stored, bytes, properties */
	MEMORY_RETAIN, /* argument: where the handle is stored */
	MEMORY_RELEASE, /* argument: the handle */
	MEMORY_MAP, /* arguments: the address, bytes, the handle */
	MEMORY_UNMAP, /* arguments: the address, bytes */
	MEMORY_ALLOCATE_POOLED, /* arguments: those of MEMORY_ALLOCATE */
};
ZERNEL_IN_BTF(enum, gpu_mem_role);

enum memory_kind {
	MEMORY_ADDRESS,
	MEMORY_HANDLE,
	MEMORY_MAPPING,
};

/* Mappings that one call may remove. */
#define MAPPINGS_AT_ONCE (1 << 16)

struct allocation_key {
	__u64 object; /* by kind: an address, a handle, or the address of a mapping */
	__u32 process;
	__u32 kind; /* enum memory_kind */
};

/* A bit of a caller, alone or beside an address: memory from pools. No address in user space has
 * it. */
enum gpu_mem_caller_bit {
	MEMORY_POOLED_BIT = 63,
};
ZERNEL_IN_BTF(enum, gpu_mem_caller_bit);

#define MEMORY_POOLED (1ULL << MEMORY_POOLED_BIT)

struct allocation {
	__u64 bytes;
	__u64 caller; /* of a mapping: the handle */
	__u64 context; /* destroying it frees the memory; 0: unknown or none */
	__u32 device;
	__u32 references;
};

struct account_key {
	__u64 caller; /* 0: all callers together */
	__u32 process;
	__u32 device;
};

struct account {
	__u64 current_bytes;
	__u64 peak_bytes;
	__u64 allocations;
	__u64 frees;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 17);
	__type(key, struct allocation_key);
	__type(value, struct allocation);
} allocations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 14);
	__type(key, struct account_key);
	__type(value, struct account);
} memory_accounts SEC(".maps");

static __always_inline struct account *find_account(__u32 process, __u32 device, __u64 caller)
{
	struct account_key key = { .caller = caller, .process = process, .device = device };
	struct account *account = bpf_map_lookup_elem(&memory_accounts, &key);
	struct account empty = {};

	if (account)
		return account;
	bpf_map_update_elem(&memory_accounts, &key, &empty, BPF_NOEXIST);
	account = bpf_map_lookup_elem(&memory_accounts, &key);
	if (!account)
		ZERNEL_LOST(memory_accounts);
	return account;
}

__noinline int book_allocation(__u32 process, __u32 device, __u64 caller, __u64 bytes)
{
	struct account *account = find_account(process, device, caller);

	if (!account)
		return 0;
	zernel_raise(&account->peak_bytes,
		     __sync_fetch_and_add(&account->current_bytes, bytes) + bytes);
	__sync_fetch_and_add(&account->allocations, 1);
	return 0;
}

__noinline int book_free(__u32 process, __u32 device, __u64 caller, __u64 bytes)
{
	struct account *account = find_account(process, device, caller);

	if (!account)
		return 0;
	__sync_fetch_and_add(&account->current_bytes, -bytes);
	__sync_fetch_and_add(&account->frees, 1);
	return 0;
}

static __always_inline void record_allocation(struct zernel_thread *thread,
					      struct zernel_open_call *call, __u32 kind,
					      __u32 device, __u64 bytes)
{
	struct allocation_key key = { .process = thread->process, .kind = kind };
	struct allocation allocation = {
		.bytes = bytes,
		.caller = call->caller,
		.context = thread->cuda_context.current,
		.device = device,
		.references = 1,
	};
	__u64 caller = call->caller & ~MEMORY_POOLED;

	bpf_probe_read_user(&key.object, sizeof(key.object), (void *)call->arguments[0]);
	if (bpf_map_update_elem(&allocations, &key, &allocation, BPF_ANY)) {
		ZERNEL_LOST(allocations);
		return;
	}
	book_allocation(thread->process, device, 0, bytes);
	book_allocation(thread->process, device, caller, bytes);
	if (caller != call->caller) {
		book_allocation(thread->process, device, MEMORY_POOLED, bytes);
		book_allocation(thread->process, device, call->caller, bytes);
	}
}

static __always_inline void record_free(__u32 process, const struct allocation *allocation)
{
	__u64 caller = allocation->caller & ~MEMORY_POOLED;

	book_free(process, allocation->device, 0, allocation->bytes);
	book_free(process, allocation->device, caller, allocation->bytes);
	if (caller != allocation->caller) {
		book_free(process, allocation->device, MEMORY_POOLED, allocation->bytes);
		book_free(process, allocation->device, allocation->caller, allocation->bytes);
	}
}

/* A context that is destroyed or emptied. */
struct context_end {
	__u64 context; /* 0: the primary context of the device */
	__u32 process;
	__u32 device;
};

static long free_with_context(void *map, struct allocation_key *key, struct allocation *found,
			      struct context_end *ending)
{
	struct context_key of = { .context = found->context, .process = key->process };
	struct allocation gone = *found;
	__u32 *known;

	if (key->process != ending->process || key->kind != MEMORY_ADDRESS)
		return 0;
	if (ending->context && gone.context != ending->context)
		return 0;
	known = bpf_map_lookup_elem(&contexts, &of);
	if (!ending->context && (known ? *known : gone.device | CONTEXT_IS_PRIMARY) !=
					(ending->device | CONTEXT_IS_PRIMARY))
		return 0;
	if (!bpf_map_delete_elem(&allocations, key))
		record_free(ending->process, &gone);
	return 0;
}

__noinline int free_context(__u32 process, __u64 context, __u32 device)
{
	struct context_end ending = { .context = context, .process = process, .device = device };

	bpf_for_each_map_elem(&allocations, free_with_context, &ending, 0);
	return 0;
}

/* The device on which memory is created; false if it is host memory. */
static __always_inline bool created_on(__u64 properties, __u32 *device)
{
	struct {
		__u32 type, handle_types, location_type, location;
	} asked = {};

	bpf_probe_read_user(&asked, sizeof(asked), (void *)properties);
	*device = asked.location;
	return asked.location_type == 1;
}

/* Adds or drops a reference to a handle; the last one frees the memory. */
static __always_inline void change_references(__u32 process, __u64 handle, __s32 change)
{
	struct allocation_key key = { .object = handle, .process = process, .kind = MEMORY_HANDLE };
	struct allocation *found = bpf_map_lookup_elem(&allocations, &key);
	struct allocation gone;

	if (!found || (__s32)__sync_fetch_and_add(&found->references, change) + change > 0)
		return;
	gone = *found;
	if (!bpf_map_delete_elem(&allocations, &key))
		record_free(process, &gone);
}

struct unmapping {
	__u64 address;
	__u64 end;
	__u32 process;
	__u32 reserved;
};

static long unmap_next(__u64 index, void *context)
{
	struct unmapping *rest = context;
	struct allocation_key key = {
		.object = rest->address,
		.process = rest->process,
		.kind = MEMORY_MAPPING,
	};
	struct allocation *found = bpf_map_lookup_elem(&allocations, &key);
	__u64 handle;

	if (rest->address >= rest->end || !found)
		return 1;
	handle = found->caller;
	rest->address += found->bytes;
	if (!bpf_map_delete_elem(&allocations, &key))
		change_references(rest->process, handle, -1);
	return 0;
}

/* Removes all mappings in a range. */
__noinline int unmap_memory(__u32 process, __u64 address, __u64 bytes)
{
	struct unmapping rest = { .address = address, .end = address + bytes, .process = process };

	bpf_loop(MAPPINGS_AT_ONCE, unmap_next, &rest, 0);
	return 0;
}

__noinline int map_memory(__u32 process, __u64 address, __u64 bytes, __u64 handle)
{
	struct allocation_key whole = { .object = handle,
					.process = process,
					.kind = MEMORY_HANDLE };
	struct allocation_key key = { .object = address,
				      .process = process,
				      .kind = MEMORY_MAPPING };
	struct allocation mapping = { .bytes = bytes, .caller = handle, .references = 1 };

	/* If something was mapped here, its unmapping was not seen. */
	unmap_memory(process, address, bytes);
	/* Host memory, imported memory, or memory created before the probes were attached. */
	if (!bpf_map_lookup_elem(&allocations, &whole))
		return 0;
	if (bpf_map_update_elem(&allocations, &key, &mapping, BPF_ANY))
		ZERNEL_LOST(allocations);
	else
		change_references(process, handle, 1);
	return 0;
}

#define gpu_mem_enter gpu_mem_enter
static __always_inline void gpu_mem_enter(const struct zernel_symbol *symbol,
					  struct zernel_thread *thread,
					  struct zernel_open_call *call)
{
	struct allocation_key key = { .process = thread->process, .kind = MEMORY_ADDRESS };
	struct allocation *found;

	bpf_probe_read_user(&call->caller, sizeof(call->caller), (void *)call->stack);
	if (symbol->role != MEMORY_FREE || symbol->flags & ZERNEL_SAMPLED)
		return;
	key.object = call->arguments[0];
	found = bpf_map_lookup_elem(&allocations, &key);
	if (!found)
		return;
	call->scratch[0] = found->bytes;
	call->scratch[1] = found->device;
	call->caller = found->caller;
	call->arguments[1] = found->context;
	if (bpf_map_delete_elem(&allocations, &key))
		call->scratch[0] = 0;
}

static __always_inline void free_leave(struct zernel_thread *thread, struct zernel_open_call *call,
				       bool failed)
{
	struct allocation_key key = {
		.object = call->arguments[0],
		.process = thread->process,
		.kind = MEMORY_ADDRESS,
	};
	struct allocation allocation = {
		.bytes = call->scratch[0],
		.caller = call->caller,
		.context = call->arguments[1],
		.device = call->scratch[1],
		.references = 1,
	};

	call->arguments[3] = call->scratch[0];
	if (!call->scratch[0])
		return;
	if (failed)
		bpf_map_update_elem(&allocations, &key, &allocation, BPF_NOEXIST);
	else
		record_free(thread->process, &allocation);
}

#define gpu_mem_leave gpu_mem_leave
static __always_inline void gpu_mem_leave(const struct zernel_symbol *symbol,
					  struct zernel_thread *thread,
					  struct zernel_open_call *call, __u64 now_ns, int result,
					  bool failed)
{
	__u64 handle = 0, pitch = 0;
	__u32 device;

	if (symbol->role == MEMORY_FREE) {
		free_leave(thread, call, failed);
		return;
	}
	if (failed)
		return;
	switch (symbol->role) {
	case MEMORY_ALLOCATE_POOLED:
		if (symbol->flags & ZERNEL_SAMPLED)
			break;
		call->caller |= MEMORY_POOLED;
		/* fallthrough */
	case MEMORY_ALLOCATE:
		record_allocation(thread, call, MEMORY_ADDRESS, current_device(thread),
				  call->arguments[1]);
		break;
	case MEMORY_ALLOCATE_PITCHED:
		bpf_probe_read_user(&pitch, sizeof(pitch), (void *)call->arguments[1]);
		call->arguments[3] = pitch * call->arguments[2];
		record_allocation(thread, call, MEMORY_ADDRESS, current_device(thread),
				  call->arguments[3]);
		break;
	case MEMORY_CREATE:
		if (created_on(call->arguments[2], &device))
			record_allocation(thread, call, MEMORY_HANDLE, device, call->arguments[1]);
		break;
	case MEMORY_RETAIN:
		bpf_probe_read_user(&handle, sizeof(handle), (void *)call->arguments[0]);
		change_references(thread->process, handle, 1);
		break;
	case MEMORY_RELEASE:
		change_references(thread->process, call->arguments[0], -1);
		break;
	case MEMORY_MAP:
		map_memory(thread->process, call->arguments[0], call->arguments[1],
			   call->arguments[2]);
		break;
	case MEMORY_UNMAP:
		unmap_memory(thread->process, call->arguments[0], call->arguments[1]);
		break;
	}
}

#endif
