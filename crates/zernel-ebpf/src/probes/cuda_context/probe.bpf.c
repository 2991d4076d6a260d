/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * On which device a thread works: contexts belong to devices, and a thread has a current context.
 */
enum cuda_context_role {
	CONTEXT_INIT,
	CONTEXT_OPEN, /* arguments: where the context is stored, the device */
	CONTEXT_CREATE, /* the same; it becomes current */
	CONTEXT_SET, /* argument: the context that takes the place of the current one; 0 pops that */
	CONTEXT_PUSH, /* the same, until it is popped */
	CONTEXT_POP,
	CONTEXT_DESTROY, /* argument: the context, which is popped if it is current */
	CONTEXT_RESET, /* argument: the device, whose own context is emptied */
};

/* A device's own context, which those who use the device share, in what is known of a context. */
#define CONTEXT_IS_PRIMARY (1U << 31)

struct context_key {
	__u64 context;
	__u32 process;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct context_key);
	__type(value, __u32);
} contexts SEC(".maps");

/* Notes the first call that only works once the driver is initialised. */
static __always_inline void note_use(const struct zernel_symbol *symbol,
				     struct zernel_process *process)
{
	bool is_init = symbol->probe == ZERNEL_CUDA_CONTEXT && symbol->role == CONTEXT_INIT;

	/* NCCL initialises it itself. */
	if (!is_init && symbol->probe != ZERNEL_NCCL && !(process->flags & ZERNEL_USED_DRIVER))
		process->flags |= ZERNEL_USED_DRIVER;
}

/* CUDA's number of the device that the thread works on, or ZERNEL_NO_GPU. */
static __always_inline __u32 current_device(struct zernel_thread *thread)
{
	struct context_key key = { .context = thread->context, .process = thread->process };
	__u32 *device = key.context ? bpf_map_lookup_elem(&contexts, &key) : NULL;
	struct zernel_process *process;

	if (device)
		return *device & ~CONTEXT_IS_PRIMARY;
	process = zernel_process(thread->process);
	return process ? process->device : ZERNEL_NO_GPU;
}

/* Frees what was allocated in a context, or if that is 0, in the device's own; see gpu_mem. */
int free_context(__u32 process, __u64 context, __u32 device);

__noinline int open_context(__u32 index, __u64 context, __u32 device, __u32 kind)
{
	__u32 known = device | kind;
	struct context_key key = { .context = context, .process = index };
	struct zernel_process *process = zernel_process(index);

	if (!process)
		return 0;
	bpf_map_update_elem(&contexts, &key, &known, BPF_ANY);
	if (process->flags & ZERNEL_IS_LOADER)
		zernel_is_trainer(process);
	if (process->device == ZERNEL_NO_GPU)
		process->device = device;
	else if (process->device != device)
		process->flags |= ZERNEL_SEVERAL_DEVICES;
	return 0;
}

static __always_inline void push_context(struct zernel_thread *thread, __u64 context)
{
	/* Of 64 bits, because old verifiers lose the check of a copy of 32. */
	__u64 below = thread->contexts_pushed;

	barrier_var(below);
	if (below < ZERNEL_CONTEXT_DEPTH)
		thread->contexts_below[below] = thread->context;
	else
		ZERNEL_LOST(contexts);
	thread->contexts_pushed++;
	thread->context = context;
}

/* What was pushed before the thread was known, or too deep, is not known: the first device stands for
 * it. */
static __always_inline void pop_context(struct zernel_thread *thread)
{
	__u64 below = thread->contexts_pushed;

	thread->context = 0;
	if (!below)
		return;
	thread->contexts_pushed = --below;
	barrier_var(below);
	if (below < ZERNEL_CONTEXT_DEPTH)
		thread->context = thread->contexts_below[below];
}

static __always_inline void cuda_context_leave(const struct zernel_symbol *symbol,
					       struct zernel_thread *thread,
					       struct zernel_open_call *call)
{
	struct zernel_process *process = zernel_process(thread->process);
	__u64 context = 0;

	if (!process)
		return;
	switch (symbol->role) {
	case CONTEXT_INIT:
		/* Every library that uses the driver initialises it: only the first one counts. */
		if (!(process->flags & ZERNEL_USED_DRIVER))
			process->flags |= ZERNEL_SAW_INIT;
		break;
	case CONTEXT_OPEN:
	case CONTEXT_CREATE:
		bpf_probe_read_user(&context, sizeof(context), (void *)call->arguments[0]);
		open_context(thread->process, context, call->arguments[1],
			     symbol->role == CONTEXT_OPEN ? CONTEXT_IS_PRIMARY : 0);
		if (symbol->role == CONTEXT_CREATE)
			push_context(thread, context);
		break;
	case CONTEXT_SET:
		if (call->arguments[0])
			thread->context = call->arguments[0];
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
		free_context(thread->process, call->arguments[0], 0);
		if (thread->context == call->arguments[0])
			pop_context(thread);
		break;
	case CONTEXT_RESET:
		free_context(thread->process, 0, call->arguments[0]);
		break;
	}
}
