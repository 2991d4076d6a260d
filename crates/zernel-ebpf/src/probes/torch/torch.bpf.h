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
};
ZERNEL_IN_BTF(enum, torch_role);

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

#define torch_read torch_read
static __always_inline void torch_read(const struct zernel_symbol *symbol,
				       struct zernel_entry *entry)
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
		entry->is_other = entry->event == ZERNEL_NONE;
		if (entry->event == ZERNEL_OPTIMIZER_BEGIN)
			entry->mark = ZERNEL_MARK_OPTIMIZER;
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
