/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * PyTorch: calls that only a training loop makes. These functions are C++ functions, so only their entries are probed.
 */
#ifndef TORCH_BPF_H
#define TORCH_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "call.h"
#include "dataload/dataload.bpf.h"
#include "mark.h"
#include "phase_tracker.h"
#include "process.h"
#include "symbol.h"
#include "thread.h"

enum torch_role {
	TORCH_BACKWARD,
	TORCH_OPTIMIZER,
	TORCH_BACKWARD_THREAD, /* arguments: the engine, a pointer to the graph of the pass */
	TORCH_RECORD_FUNCTION, /* arguments: the place of the result, a std::string */
	TORCH_CHECKPOINT,
	TORCH_RECORD_END,
	TORCH_COUNTER, /* arguments: the counter's handle, length and text of its name */
	TORCH_COUNTER_START, /* arguments: the place of the result, the handle */
	TORCH_COUNTER_STOP, /* argument: the handle */
	TORCH_LAYER,
};
ZERNEL_IN_BTF(enum, torch_role);

/* What the name of a recorded function announces. */
enum torch_record {
	TORCH_RECORDS_NOTHING, /* no record is open */
	TORCH_RECORDS_OTHER,
	TORCH_RECORDS_DATA,
	TORCH_RECORDS_UPDATE,
	TORCH_RECORDS_ZERO_GRADIENTS,
};

/* Bytes of a name that are compared. */
#define RECORD_NAME_BYTES 24

/* A std::string of libstdc++. */
struct torch_string {
	__u64 text;
	__u64 length;
};

/* Whether a name begins with a literal. */
#define NAME_BEGINS(name, literal) name_begins(name, literal, sizeof(literal) - 1)

static __always_inline bool name_begins(const char *name, const char *literal, __u32 length)
{
#pragma unroll
	for (__u32 i = 0; i < length; i++) {
		if (name[i] != literal[i])
			return false;
	}
	return true;
}

/* What the name of a recorded function announces. */
static __noinline __u32 event_of_record_name(__u64 string)
{
	struct torch_string read = {};
	char name[RECORD_NAME_BYTES] = {};

	if (bpf_probe_read_user(&read, sizeof(read), (void *)string) ||
	    read.length < sizeof("Optimizer.step#") - 1)
		return ZERNEL_NONE;
	/* A shorter name ends in a zero byte, and memory after the name may not be readable. */
	if (read.length < sizeof(name)) {
		if (bpf_probe_read_user_str(name, sizeof(name), (void *)read.text) < 0)
			return ZERNEL_NONE;
	} else if (bpf_probe_read_user(name, sizeof(name), (void *)read.text)) {
		return ZERNEL_NONE;
	}
	if (NAME_BEGINS(name, "Optimizer.step#"))
		return ZERNEL_OPTIMIZER_BEGIN;
	if (NAME_BEGINS(name, "Optimizer.zero_grad#"))
		return ZERNEL_ZERO_GRADIENTS;
	if (NAME_BEGINS(name, "enumerate(DataLoader)#"))
		return ZERNEL_DATA_BEGIN;
	if (NAME_BEGINS(name, "DistributedDataParallel.") ||
	    NAME_BEGINS(name, "FullyShardedDataParallel"))
		return ZERNEL_FORWARD_BEGIN;
	return ZERNEL_NONE;
}

static __always_inline __u64 record_kind_of_event(__u32 event)
{
	switch (event) {
	case ZERNEL_DATA_BEGIN:
		return TORCH_RECORDS_DATA;
	case ZERNEL_OPTIMIZER_BEGIN:
		return TORCH_RECORDS_UPDATE;
	case ZERNEL_ZERO_GRADIENTS:
		return TORCH_RECORDS_ZERO_GRADIENTS;
	default:
		return TORCH_RECORDS_OTHER;
	}
}

static __always_inline __u64 innermost_record(const struct torch_thread *torch)
{
	return torch->records & ((1 << TORCH_RECORD_BITS) - 1);
}

/* Called when the thread begins to record a function. */
static __always_inline __u32 begin_record(struct torch_thread *torch, __u32 event)
{
	torch->records = torch->records << TORCH_RECORD_BITS | record_kind_of_event(event);
	if (event == ZERNEL_OPTIMIZER_BEGIN)
		torch->has_seen_update = 1;
	return event;
}

/* Called when the record that began last ends. A closure that cleared gradients goes on with its forward pass. A thread
 * without optimizer steps may get batches for another thread. Ends of records before the first end that is seen were
 * missed. */
static __always_inline __u32 end_record(struct torch_thread *torch)
{
	__u64 ended = innermost_record(torch);

	torch->records = torch->has_seen_record_end ? torch->records >> TORCH_RECORD_BITS : 0;
	torch->has_seen_record_end = 1;
	switch (ended) {
	case TORCH_RECORDS_DATA:
		return torch->has_seen_update ? ZERNEL_FORWARD_BEGIN : ZERNEL_NONE;
	case TORCH_RECORDS_UPDATE:
		return ZERNEL_UPDATE_END;
	case TORCH_RECORDS_ZERO_GRADIENTS:
		return innermost_record(torch) == TORCH_RECORDS_UPDATE ? ZERNEL_FORWARD_BEGIN :
									 ZERNEL_UPDATE_END;
	default:
		return ZERNEL_NONE;
	}
}

/* Names of the counters that time whole compilations, and the later trials of the compiled kernels. */
#define COMPILE_COUNTER "pytorch.wait_counter.dynamo_compile"
#define WHOLE_COMPILE_COUNTER "pytorch.wait_counter.entire_"

static __noinline bool is_compile_counter(__u64 text, __u64 length)
{
	char name[sizeof(COMPILE_COUNTER) - 1] = {};

	if (length < sizeof(name) || bpf_probe_read_user(name, sizeof(name), (void *)text))
		return false;
	return NAME_BEGINS(name, COMPILE_COUNTER) || NAME_BEGINS(name, WHOLE_COMPILE_COUNTER);
}

/* Returns the address that identifies a wait counter: all handles of one counter begin with the same address. */
static __always_inline __u64 wait_counter_of_handle(__u64 handle)
{
	__u64 counter = 0;

	bpf_probe_read_user(&counter, sizeof(counter), (void *)handle);
	return counter;
}

/* PyTorch makes a handle of a counter, then starts it. Of all counters of a compilation, the one that starts first
 * stops last; it may be started again inside the compilation. */
static __always_inline __u32 start_wait_counter(struct torch_thread *torch, __u64 counter)
{
	if (torch->has_compile_handle) {
		torch->has_compile_handle = 0;
		torch->compile_counter = counter;
		torch->compile_depth = 1;
		return ZERNEL_COMPILE_BEGIN;
	}
	if (torch->compile_depth && counter == torch->compile_counter)
		torch->compile_depth++;
	return ZERNEL_NONE;
}

static __always_inline __u32 stop_wait_counter(struct torch_thread *torch, __u64 counter)
{
	if (!torch->compile_depth || counter != torch->compile_counter)
		return ZERNEL_NONE;
	torch->compile_depth--;
	return torch->compile_depth ? ZERNEL_NONE : ZERNEL_COMPILE_END;
}

static __always_inline void count_compilation(struct zernel_thread *thread,
					     struct zernel_process *process, __u32 event,
					     __u64 now_ns)
{
	if (event == ZERNEL_COMPILE_BEGIN) {
		thread->torch.compile_since_ns = now_ns;
		process->torch.compiling_since_ns = now_ns;
	} else if (event == ZERNEL_COMPILE_END) {
		process->torch.compiling_since_ns = 0;
		process->torch.compiled_until_ns = now_ns;
		__sync_fetch_and_add(&process->torch.compile_ns,
				     now_ns - thread->torch.compile_since_ns);
	}
}

/* Notes that PyTorch computes in the process of a thread. */
static __always_inline void note_model_run(const struct zernel_thread *thread)
{
	struct zernel_process *process = zernel_process(thread->process_handle);

	if (process && !(process->flags & ZERNEL_RUNS_MODELS))
		process->flags |= ZERNEL_RUNS_MODELS;
}

#define BACKWARD_THREAD_NAME "pt_autograd"

/* Whether the current thread only serves backward passes that other threads asked for. Hooks of such a pass may update
 * the model, but the pass goes on: it is no optimizer step of a loop. */
static __noinline bool serves_backward_passes(void)
{
	char name[16] = {};

	return !bpf_get_current_comm(name, sizeof(name)) && NAME_BEGINS(name, BACKWARD_THREAD_NAME);
}

#define torch_read torch_read
static __always_inline void torch_read(const struct zernel_symbol *symbol,
				       struct zernel_thread *thread, struct zernel_function_entry *entry)
{
	struct zernel_process *process;
	__u64 graph = 0;

	switch (symbol->role) {
	case TORCH_BACKWARD_THREAD:
		/* Threads that serve backward passes of other threads have no graph of their own. */
		bpf_probe_read_user(&graph, sizeof(graph), (void *)entry->arguments[1]);
		entry->is_ignored = !graph;
		break;
	case TORCH_OPTIMIZER:
		entry->is_ignored = serves_backward_passes();
		break;
	case TORCH_RECORD_FUNCTION:
		entry->is_ignored = serves_backward_passes();
		if (entry->is_ignored)
			break;
		entry->event = event_of_record_name(entry->arguments[1]);
		if (entry->event == ZERNEL_OPTIMIZER_BEGIN)
			entry->mark = ZERNEL_MARK_OPTIMIZER;
		/* No batch is asked for inside of a compilation: its end was missed. */
		process = entry->event == ZERNEL_DATA_BEGIN ? zernel_process(thread->process_handle) : NULL;
		if (process)
			drop_compilation(&thread->torch, &process->torch);
		entry->event = begin_record(&thread->torch, entry->event);
		entry->is_ignored = entry->event == ZERNEL_NONE;
		break;
	case TORCH_RECORD_END:
		entry->event = end_record(&thread->torch);
		entry->is_ignored = entry->event == ZERNEL_NONE;
		break;
	case TORCH_COUNTER:
		if (!thread->torch.compile_depth &&
		    is_compile_counter(entry->arguments[2], entry->arguments[1]))
			thread->torch.has_compile_handle = 1;
		entry->is_ignored = 1;
		break;
	case TORCH_COUNTER_START:
		entry->event = start_wait_counter(&thread->torch, wait_counter_of_handle(entry->arguments[1]));
		if (entry->event == ZERNEL_COMPILE_BEGIN)
			note_model_run(thread);
		entry->is_ignored = entry->event == ZERNEL_NONE;
		break;
	case TORCH_LAYER:
		/* It is counted, and is no evidence of a phase. */
		note_model_run(thread);
		entry->is_ignored = 1;
		break;
	case TORCH_COUNTER_STOP:
		entry->event = stop_wait_counter(&thread->torch, wait_counter_of_handle(entry->arguments[0]));
		entry->is_ignored = entry->event == ZERNEL_NONE;
		break;
	}
}

#define torch_mark torch_mark
static __always_inline void torch_mark(const struct zernel_symbol *symbol,
				       struct zernel_thread *thread, struct zernel_process *process,
				       __u64 now_ns)
{
	mark_training_loop(thread, process);
}

#endif
