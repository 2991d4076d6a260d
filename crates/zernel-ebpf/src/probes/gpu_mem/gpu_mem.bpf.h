/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * GPU memory: how much each process holds, by device and by calling code.
 *
 * A freed allocation leaves the map when the call is entered, and comes back if the call fails: once the driver has
 * freed an address, another thread may get it before the first one returns.
 *
 * Memory from pools is counted twice: in accounts of its own and in those of all memory. While the pool functions are
 * sampled, the amount of pooled memory is unknown, and userspace subtracts its last known amount.
 *
 * Created memory is held by its handle and by each of its mappings. Created memory is freed once its handle has
 * been released and all its mappings have been removed, in either order.
 *
 * All other memory belongs to a CUDA context, and is freed with the context. A context has a word with the bytes that
 * it holds and its epoch, which counts how often it was emptied. Each allocation and each account of a caller belongs
 * to one epoch of a context. So emptying a context is one change of the context's word. After that, what belongs to an
 * earlier epoch counts no more, and userspace deletes it.
 */
#ifndef GPU_MEM_BPF_H
#define GPU_MEM_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "cuda_context/cuda_context.bpf.h"
#include "gpu_mem/tables.bpf.h"
#include "histogram.h"
#include "losses.h"
#include "symbol.h"
#include "thread.h"
#include "tenants.h"

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

/* The most mappings that one call may remove. */
#define MAX_MAPPINGS_PER_CALL (1 << 16)

/* Adds the bytes of an allocation to the accounts of its device and its context. Returns the home of the allocation, or
 * MEMORY_NOT_ACCOUNTED. */
__noinline __u64 account_allocation(__u32 process, __u32 device, __u64 context, __u64 bytes)
{
	struct account *total = device_account(process, device), *owner = total;
	__u64 epoch = 0;

	if (!total)
		return MEMORY_NOT_ACCOUNTED;
	if (context && context != MEMORY_OF_NO_CONTEXT) {
		owner = context_account(process, context);
		if (!owner)
			return MEMORY_NOT_ACCOUNTED;
		owner->device = device;
	}
	if (context != MEMORY_OF_NO_CONTEXT) {
		epoch = __sync_fetch_and_add(&owner->held_bytes_and_epoch, bytes & MEMORY_CONTEXT_MASK) >>
			MEMORY_EPOCH_SHIFT;
		__sync_fetch_and_add(&owner->held_allocations, 1);
	}
	zernel_atomic_max(&total->peak_bytes,
		     __sync_fetch_and_add(&total->current_bytes, bytes) + bytes);
	__sync_fetch_and_add(&total->allocations, 1);
	return context | epoch << MEMORY_EPOCH_SHIFT;
}

/* Subtracts the bytes of an allocation from the accounts of its device and its context; false if the memory was freed
 * with an earlier epoch of the context. Both accounts exist since the memory was allocated. */
__noinline int account_free(__u32 process, __u32 device, __u64 context_epoch, __u64 bytes)
{
	__u64 context = context_epoch & MEMORY_CONTEXT_MASK;
	struct account_key key = { .process = process, .device = device };
	struct account *total = bpf_map_lookup_elem(&memory_accounts, &key), *owner = total;

	if (context && context != MEMORY_OF_NO_CONTEXT) {
		key.context_epoch = context;
		key.device = MEMORY_ANY_DEVICE;
		owner = bpf_map_lookup_elem(&memory_accounts, &key);
	}
	if (!total || !owner)
		return false;
	if (context != MEMORY_OF_NO_CONTEXT &&
	    !subtract_held_bytes(owner, context_epoch >> MEMORY_EPOCH_SHIFT, bytes & MEMORY_CONTEXT_MASK))
		return false;
	__sync_fetch_and_add(&total->current_bytes, -bytes);
	__sync_fetch_and_add(&total->frees, 1);
	return true;
}

__noinline int add_bytes_to_caller(__u64 caller, __u64 context_epoch, __u32 process, __u32 device, __u64 bytes)
{
	struct account_key key = {
		.caller = caller, .context_epoch = context_epoch, .process = process, .device = device
	};
	struct account *account = get_or_create_account(&key);

	if (account)
		__sync_fetch_and_add(&account->current_bytes, bytes);
	return 0;
}

/* Does not open an account: if there was none for the caller, its memory was not added either. */
__noinline int subtract_bytes_from_caller(__u64 caller, __u64 context_epoch, __u32 process, __u32 device, __u64 bytes)
{
	struct account_key key = {
		.caller = caller, .context_epoch = context_epoch, .process = process, .device = device
	};
	struct account *account = bpf_map_lookup_elem(&memory_accounts, &key);

	if (account)
		__sync_fetch_and_add(&account->current_bytes, -bytes);
	return 0;
}

/* Changes the accounts of an allocation's caller with a function. */
static __always_inline void change_caller_accounts(__u32 process,
						   const struct allocation *allocation,
						   int (*change)(__u64, __u64, __u32, __u32, __u64))
{
	__u64 caller = allocation->caller & ~MEMORY_POOLED, context_epoch = allocation->context_epoch;
	__u64 bytes = allocation->bytes;
	__u32 device = allocation->device;

	/* 0 if the return address could not be read: that is the key of the device. */
	if (caller)
		change(caller, context_epoch, process, device, bytes);
	if (caller != allocation->caller) {
		change(MEMORY_POOLED, context_epoch, process, device, bytes);
		if (caller)
			change(allocation->caller, context_epoch, process, device, bytes);
	}
}

static __always_inline void record_free(__u32 process, const struct allocation *allocation)
{
	if (account_free(process, allocation->device, allocation->context_epoch, allocation->bytes))
		change_caller_accounts(process, allocation, subtract_bytes_from_caller);
}

/* Books the allocation at an address as freed. The driver gave the address out again, so the call that freed it was not
 * observed. */
__noinline int record_missed_free(__u32 process, __u64 address)
{
	struct allocation_key key = { .object = address, .process = process, .kind = MEMORY_ADDRESS };
	struct allocation *found = bpf_map_lookup_elem(&allocations, &key);
	struct allocation freed;

	if (!found)
		return 0;
	freed = *found;
	if (delete_allocation(&key))
		record_free(process, &freed);
	return 0;
}

static __always_inline void record_allocation(struct zernel_thread *thread,
					      struct zernel_open_call *call, __u32 kind,
					      __u32 device, __u64 context, __u64 bytes)
{
	struct allocation_key key = { .process = thread->process_handle, .kind = kind };
	struct allocation allocation = {
		.bytes = bytes,
		.caller = call->return_address,
		.device = device,
		.references = 1,
	};

	bpf_probe_read_user(&key.object, sizeof(key.object), (void *)call->arguments[0]);
	if (kind == MEMORY_ADDRESS)
		record_missed_free(thread->process_handle, key.object);
	if (!may_add_allocation(thread->process_handle))
		return;
	allocation.context_epoch = account_allocation(thread->process_handle, device, context, bytes);
	if (allocation.context_epoch == MEMORY_NOT_ACCOUNTED)
		return;
	if (!set_allocation(&key, &allocation)) {
		account_free(thread->process_handle, device, allocation.context_epoch, bytes);
		return;
	}
	change_caller_accounts(thread->process_handle, &allocation, add_bytes_to_caller);
}

/* The device of a context that was opened before its process was observed: that of its first
 * memory, or the process's first device. */
__noinline __u32 presumed_device(__u32 handle, __u64 context)
{
	struct account_key key = { .context_epoch = context,
				   .process = handle,
				   .device = MEMORY_ANY_DEVICE };
	struct account *account = context ? bpf_map_lookup_elem(&memory_accounts, &key) : NULL;
	struct zernel_process *process = zernel_process(handle);
	__u32 device = process ? process->device : ZERNEL_NO_GPU;

	if (account)
		return account->device;
	account = context ? device_account(handle, device) : NULL;
	if (account && !account->unknown_context)
		account->unknown_context = context;
	return device;
}

/* Records memory in the current context of the thread. */
static __always_inline void record_in_current_context(struct zernel_thread *thread,
					      struct zernel_open_call *call, __u64 bytes)
{
	struct context_key key = { .context = thread->cuda_context.current_context,
				   .process = thread->process_handle };
	__u32 *known = key.context ? bpf_map_lookup_elem(&contexts, &key) : NULL;
	__u64 context = key.context & MEMORY_CONTEXT_MASK;
	__u32 device;

	if (known) {
		device = *known & ~CONTEXT_IS_PRIMARY;
		context = *known & CONTEXT_IS_PRIMARY ? 0 : context;
	} else {
		device = presumed_device(thread->process_handle, context);
	}
	record_allocation(thread, call, MEMORY_ADDRESS, device, context, bytes);
}

/* Begins the next epoch of a context, which frees the memory of the context. */
static __always_inline void free_memory_of_context(struct account *total, struct account *owner)
{
	for (int tries = 0; tries < 16; tries++) {
		__u64 seen = *(volatile __u64 *)&owner->held_bytes_and_epoch;
		__u64 next = (seen & ~MEMORY_CONTEXT_MASK) + MEMORY_CONTEXT_MASK + 1;

		if (__sync_val_compare_and_swap(&owner->held_bytes_and_epoch, seen, next) != seen)
			continue;
		__sync_fetch_and_add(&total->current_bytes, -(seen & MEMORY_CONTEXT_MASK));
		__sync_fetch_and_add(&total->frees,
				     __sync_lock_test_and_set(&owner->held_allocations, 0));
		return;
	}
	ZERNEL_COUNT_LOST(memory_accounts);
}

/* Frees the memory of a context that is not a device's primary one. */
static __always_inline void free_memory_of_other_context(__u32 process, __u64 context)
{
	struct account_key key = { .context_epoch = context & MEMORY_CONTEXT_MASK,
				   .process = process,
				   .device = MEMORY_ANY_DEVICE };
	struct account *owner = bpf_map_lookup_elem(&memory_accounts, &key);
	struct account *total = owner ? device_account(process, owner->device) : NULL;

	if (total)
		free_memory_of_context(total, owner);
}

__noinline int free_context(__u32 process, __u64 context, __u32 device)
{
	struct context_key key = { .context = context, .process = process };
	__u32 *known = context ? bpf_map_lookup_elem(&contexts, &key) : NULL;
	bool is_primary = !context || (known && *known & CONTEXT_IS_PRIMARY);
	struct account *total;

	if (!is_primary) {
		free_memory_of_other_context(process, context);
		return 0;
	}
	if (known)
		device = *known & ~CONTEXT_IS_PRIMARY;
	total = bpf_map_lookup_elem(&memory_accounts,
				    &(struct account_key){ .process = process, .device = device });
	if (!total)
		return 0;
	free_memory_of_context(total, total);
	if (!context && total->unknown_context)
		free_memory_of_other_context(process, total->unknown_context);
	return 0;
}

/* Finds the device on which memory is created; false if the memory is host memory. */
static __always_inline bool device_of_created_memory(__u64 properties, __u32 *device)
{
	struct {
		__u32 type, handle_types, location_type, location;
	} asked = {};

	bpf_probe_read_user(&asked, sizeof(asked), (void *)properties);
	*device = asked.location;
	return asked.location_type == 1;
}

/* Adds or drops a reference to a handle; dropping the last reference frees the memory. */
static __always_inline void change_handle_references(__u32 process, __u64 handle, __s32 change)
{
	struct allocation_key key = { .object = handle, .process = process, .kind = MEMORY_HANDLE };
	struct allocation *found = bpf_map_lookup_elem(&allocations, &key);
	struct allocation freed;

	if (!found || (__s32)__sync_fetch_and_add(&found->references, change) + change > 0)
		return;
	freed = *found;
	if (delete_allocation(&key))
		record_free(process, &freed);
}

struct unmapping {
	__u64 address;
	__u64 end;
	__u32 process;
	__u32 reserved;
};

static long unmap_next_mapping(__u64 index, void *context)
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
	if (delete_allocation(&key))
		change_handle_references(rest->process, handle, -1);
	return 0;
}

/* Removes all mappings in a range. */
__noinline int unmap_memory(__u32 process, __u64 address, __u64 bytes)
{
	struct unmapping rest = { .address = address, .end = address + bytes, .process = process };

	bpf_loop(MAX_MAPPINGS_PER_CALL, unmap_next_mapping, &rest, 0);
	return 0;
}

__noinline int map_memory(__u32 process, __u64 address, __u64 bytes, __u64 handle)
{
	struct allocation_key key = { .object = handle, .process = process, .kind = MEMORY_HANDLE };
	struct allocation mapping = { .bytes = bytes, .caller = handle, .references = 1 };

	/* If memory was mapped at this address before, the call that unmapped it was not observed. */
	unmap_memory(process, address, bytes);
	/* Host memory, imported memory, or memory created before the probes were attached. */
	if (!bpf_map_lookup_elem(&allocations, &key) || !may_add_allocation(process))
		return 0;
	key.object = address;
	key.kind = MEMORY_MAPPING;
	if (set_allocation(&key, &mapping))
		change_handle_references(process, handle, 1);
	return 0;
}

#define gpu_mem_enter gpu_mem_enter
static __always_inline void gpu_mem_enter(const struct zernel_symbol *symbol,
					  struct zernel_thread *thread,
					  struct zernel_open_call *call)
{
	struct allocation_key key = { .process = thread->process_handle, .kind = MEMORY_ADDRESS };
	struct allocation *found;

	bpf_probe_read_user(&call->return_address, sizeof(call->return_address), (void *)call->stack_pointer);
	if (symbol->role != MEMORY_FREE || symbol->flags & ZERNEL_IS_SAMPLED)
		return;
	key.object = call->arguments[0];
	found = bpf_map_lookup_elem(&allocations, &key);
	if (!found)
		return;
	call->probe_values[0] = found->bytes;
	call->probe_values[1] = found->device;
	call->return_address = found->caller;
	call->arguments[1] = found->context_epoch;
	if (!delete_allocation(&key))
		call->probe_values[0] = 0;
}

static __always_inline void finish_free(struct zernel_thread *thread, struct zernel_open_call *call,
					bool failed)
{
	struct allocation_key key = {
		.object = call->arguments[0],
		.process = thread->process_handle,
		.kind = MEMORY_ADDRESS,
	};
	struct allocation allocation = {
		.bytes = call->probe_values[0],
		.caller = call->return_address,
		.context_epoch = call->arguments[1],
		.device = call->probe_values[1],
		.references = 1,
	};

	call->arguments[3] = call->probe_values[0];
	if (!call->probe_values[0])
		return;
	if (failed)
		add_allocation(&key, &allocation);
	else
		record_free(thread->process_handle, &allocation);
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
		finish_free(thread, call, failed);
		return;
	}
	if (failed)
		return;
	switch (symbol->role) {
	case MEMORY_ALLOCATE_POOLED:
		if (symbol->flags & ZERNEL_IS_SAMPLED)
			break;
		call->return_address |= MEMORY_POOLED;
		/* fallthrough */
	case MEMORY_ALLOCATE:
		record_in_current_context(thread, call, call->arguments[1]);
		break;
	case MEMORY_ALLOCATE_PITCHED:
		bpf_probe_read_user(&pitch, sizeof(pitch), (void *)call->arguments[1]);
		call->arguments[3] = pitch * call->arguments[2];
		record_in_current_context(thread, call, call->arguments[3]);
		break;
	case MEMORY_CREATE:
		if (device_of_created_memory(call->arguments[2], &device))
			record_allocation(thread, call, MEMORY_HANDLE, device, MEMORY_OF_NO_CONTEXT,
					  call->arguments[1]);
		break;
	case MEMORY_RETAIN:
		bpf_probe_read_user(&handle, sizeof(handle), (void *)call->arguments[0]);
		change_handle_references(thread->process_handle, handle, 1);
		break;
	case MEMORY_RELEASE:
		change_handle_references(thread->process_handle, call->arguments[0], -1);
		break;
	case MEMORY_MAP:
		map_memory(thread->process_handle, call->arguments[0], call->arguments[1],
			   call->arguments[2]);
		break;
	case MEMORY_UNMAP:
		unmap_memory(thread->process_handle, call->arguments[0], call->arguments[1]);
		break;
	}
}

#endif
