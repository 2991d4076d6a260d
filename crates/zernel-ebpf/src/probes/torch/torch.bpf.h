/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * PyTorch: calls that only a training loop makes. They are C++ functions, so only their entry is
 * probed.
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

/* How the names of what PyTorch's compiler does end. */
#define COMPILER_SUFFIX "(dynamo_timed)"

static __always_inline bool is_of_compiler(const struct torch_string *name)
{
	char end[sizeof(COMPILER_SUFFIX) - 1] = {};
	__u64 at = name->text + name->length - sizeof(end);

	return !bpf_probe_read_user(end, sizeof(end), (void *)at) &&
	       NAME_BEGINS(end, COMPILER_SUFFIX);
}

/* What the name of a recorded function announces. */
static __noinline __u32 announced_by(__u64 string)
{
	struct torch_string read = {};
	char name[RECORD_NAME_BYTES] = {};

	if (bpf_probe_read_user(&read, sizeof(read), (void *)string) ||
	    read.length < sizeof("Optimizer.step#") - 1)
		return ZERNEL_NONE;
	/* A shorter name ends in zero, and memory after it may not be readable. */
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
	return is_of_compiler(&read) ? ZERNEL_OTHER_WORK_BEGIN : ZERNEL_NONE;
}

static __always_inline __u64 record_of(__u32 event)
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

/* The thread begins to record a function. Clearing gradients outside of a closure is part of the
 * update, if its end will be seen. */
static __always_inline __u32 begin_record(struct torch_thread *torch, __u32 event)
{
	__u64 around = innermost_record(torch);

	torch->records = torch->records << TORCH_RECORD_BITS | record_of(event);
	if (event == ZERNEL_OPTIMIZER_BEGIN)
		torch->updates = 1;
	if (event == ZERNEL_ZERO_GRADIENTS && torch->sees_ends && around != TORCH_RECORDS_UPDATE)
		return ZERNEL_OPTIMIZER_BEGIN;
	return event;
}

/* The record that began last ends. A closure that cleared gradients goes on with its forward pass. A
 * thread without optimizer steps may get batches for another thread. Ends of records before the first
 * end that is seen were missed. */
static __always_inline __u32 end_record(struct torch_thread *torch)
{
	__u64 ended = innermost_record(torch);

	torch->records = torch->sees_ends ? torch->records >> TORCH_RECORD_BITS : 0;
	torch->sees_ends = 1;
	switch (ended) {
	case TORCH_RECORDS_DATA:
		return torch->updates ? ZERNEL_FORWARD_BEGIN : ZERNEL_NONE;
	case TORCH_RECORDS_UPDATE:
		return ZERNEL_UPDATE_END;
	case TORCH_RECORDS_ZERO_GRADIENTS:
		return innermost_record(torch) == TORCH_RECORDS_UPDATE ? ZERNEL_FORWARD_BEGIN :
									 ZERNEL_UPDATE_END;
	default:
		return ZERNEL_NONE;
	}
}

#define torch_read torch_read
static __always_inline void torch_read(const struct zernel_symbol *symbol,
				       struct zernel_thread *thread, struct zernel_entry *entry)
{
	__u64 graph = 0;

	switch (symbol->role) {
	case TORCH_BACKWARD_THREAD:
		/* Threads that serve backward passes of others have no graph of their own. */
		bpf_probe_read_user(&graph, sizeof(graph), (void *)entry->arguments[1]);
		entry->is_other = !graph;
		break;
	case TORCH_RECORD_FUNCTION:
		entry->event = announced_by(entry->arguments[1]);
		if (entry->event == ZERNEL_OPTIMIZER_BEGIN)
			entry->mark = ZERNEL_MARK_OPTIMIZER;
		entry->event = begin_record(&thread->torch, entry->event);
		entry->is_other = entry->event == ZERNEL_NONE;
		break;
	case TORCH_RECORD_END:
		entry->event = end_record(&thread->torch);
		entry->is_other = entry->event == ZERNEL_NONE;
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
