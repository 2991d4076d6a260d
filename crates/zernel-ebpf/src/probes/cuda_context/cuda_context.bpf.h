/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The device a thread works on: every context belongs to a device, and a thread has a current
 * context.
 */
#ifndef CUDA_CONTEXT_BPF_H
#define CUDA_CONTEXT_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "cuda_context/state.bpf.h"
#include "losses.h"
#include "process.h"
#include "symbol.h"
#include "thread.h"

enum cuda_context_role {
	CONTEXT_INIT,
	CONTEXT_OPEN, /* arguments: where the context is stored, the device */
	CONTEXT_CREATE, /* arguments: those of CONTEXT_OPEN; the context becomes current */
	CONTEXT_SET, /* argument: the context that replaces the current one; 0 pops the current one */
	CONTEXT_PUSH, /* argument: the context that becomes current until it is popped */
	CONTEXT_POP,
	CONTEXT_DESTROY, /* argument: the context; it is popped if it is current */
	CONTEXT_RESET, /* argument: the device; its primary context is emptied */
};
ZERNEL_IN_BTF(enum, cuda_context_role);

/* In a value of `contexts`: the device's primary context, which all libraries of a process share. */
#define CONTEXT_IS_PRIMARY (1U << 31)

struct context_key {
	__u64 context;
	__u32 process;
	__u32 reserved;
};

/* The device of each context. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct context_key);
	__type(value, __u32);
} contexts SEC(".maps");

/* Notes a call that works only once the driver is initialised. */
static __always_inline void note_driver_use(const struct zernel_symbol *symbol,
				     struct zernel_process *process)
{
	bool is_init = symbol->probe == ZERNEL_PROBE_CUDA_CONTEXT && symbol->role == CONTEXT_INIT;

	/* NCCL initialises the driver itself. */
	if (!is_init && symbol->probe != ZERNEL_PROBE_NCCL &&
	    !(process->flags & ZERNEL_USED_DRIVER))
		process->flags |= ZERNEL_USED_DRIVER;
}

/* Frees all memory of a context; 0 means the primary context of the device. Defined by gpu_mem. */
int free_context(__u32 process, __u64 context, __u32 device);

__noinline int open_context(__u32 handle, __u64 context, __u32 device, __u32 kind)
{
	__u32 known = device | kind;
	struct context_key key = { .context = context, .process = handle };
	struct zernel_process *process = zernel_process(handle);

	if (!process)
		return 0;
	bpf_map_update_elem(&contexts, &key, &known, BPF_ANY);
	if (process->flags & ZERNEL_IS_LOADER)
		zernel_turn_loader_into_trainer(process);
	if (process->device == ZERNEL_NO_GPU)
		process->device = device;
	else if (process->device != device)
		process->flags |= ZERNEL_OPENED_SEVERAL_DEVICES;
	return 0;
}

static __always_inline void push_context(struct zernel_thread *thread, __u64 context)
{
	/* 64 bits wide: old verifiers forget the check when the compiler copies 32 bits. */
	__u64 below = thread->cuda_context.pushed_count;

	barrier_var(below);
	if (below < CUDA_CONTEXT_DEPTH)
		thread->cuda_context.contexts_below[below] = thread->cuda_context.current_context;
	else
		ZERNEL_COUNT_LOST(contexts);
	thread->cuda_context.pushed_count++;
	thread->cuda_context.current_context = context;
}

/* Contexts that were pushed before the thread was observed, or too deep, are unknown: the process's
 * first device is assumed for them. */
static __always_inline void pop_context(struct zernel_thread *thread)
{
	__u64 below = thread->cuda_context.pushed_count;

	thread->cuda_context.current_context = 0;
	if (!below)
		return;
	thread->cuda_context.pushed_count = --below;
	barrier_var(below);
	if (below < CUDA_CONTEXT_DEPTH)
		thread->cuda_context.current_context = thread->cuda_context.contexts_below[below];
}

#define cuda_context_leave cuda_context_leave
static __always_inline void cuda_context_leave(const struct zernel_symbol *symbol,
					       struct zernel_thread *thread,
					       struct zernel_open_call *call, __u64 now_ns,
					       int result, bool failed)
{
	struct zernel_process *process = zernel_process(thread->process_handle);
	__u64 context = 0;

	if (failed || !process)
		return;
	switch (symbol->role) {
	case CONTEXT_INIT:
		/* Every library initialises the driver; only the first call shows the process's
		 * start. */
		if (!(process->flags & ZERNEL_USED_DRIVER))
			process->flags |= ZERNEL_SAW_DRIVER_INIT;
		break;
	case CONTEXT_OPEN:
	case CONTEXT_CREATE:
		bpf_probe_read_user(&context, sizeof(context), (void *)call->arguments[0]);
		open_context(thread->process_handle, context, call->arguments[1],
			     symbol->role == CONTEXT_OPEN ? CONTEXT_IS_PRIMARY : 0);
		if (symbol->role == CONTEXT_CREATE)
			push_context(thread, context);
		break;
	case CONTEXT_SET:
		if (call->arguments[0])
			thread->cuda_context.current_context = call->arguments[0];
		else
			pop_context(thread);
		break;
	case CONTEXT_PUSH:
		push_context(thread, call->arguments[0]);
		break;
	case CONTEXT_POP:
		pop_context(thread);
		break;
	case CONTEXT_DESTROY:
		free_context(thread->process_handle, call->arguments[0], 0);
		if (thread->cuda_context.current_context == call->arguments[0])
			pop_context(thread);
		break;
	case CONTEXT_RESET:
		free_context(thread->process_handle, 0, call->arguments[0]);
		break;
	}
}

#endif
