/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a scheduler that follows the classes would have decided, for `zernel sched --dry-run`. Off
 * unless userspace asks for it before the programs are loaded; then the verifier removes this code,
 * and the maps are not created.
 *
 * The decisions are counted where the kernel's own scheduler decided otherwise: a thread that
 * waited for a CPU would not have waited.
 */
#ifndef ZERNEL_DECISIONS_H
#define ZERNEL_DECISIONS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "class.h"
#include "limits.h"
#include "storage.h"

/* Not 0: decisions are counted. Userspace sets it before the programs are loaded. */
const volatile __u32 zernel_counts_decisions SEC(".rodata.decisions");

/* A shorter delay is that of a switch or of an idle CPU, which no scheduler avoids. */
#define ZERNEL_MIN_AVOIDABLE_DELAY_NS 50000ULL

/* Counts of one class of a process, summed over its threads while they are in that class. */
struct zernel_decisions {
	__u64 process; /* handle; another one: the row belongs to an earlier process */
	__u64 run_ns; /* on a CPU */
	__u64 delay_ns; /* runnable and not running */
	__u64 wakeups;
	__u64 would_preempt; /* wake-ups that waited for a CPU, and would have preempted */
	__u64 would_keep; /* preemptions of a thread that would have been kept on its CPU */
	__u64 saved_ns; /* run delays after these wake-ups and preemptions, which a scheduler would have saved */
	__u64 would_lend; /* spinning waits that would have lent their CPU */
};
ZERNEL_IN_BTF(struct, zernel_decisions);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ZERNEL_PROCESSES * ZERNEL_CLASSES);
	__type(key, __u32);
	__type(value, struct zernel_decisions);
} decisions SEC(".maps");

struct zernel_uncounted_run {
	__u64 since_ns; /* on a CPU since then, as far as it is not counted; 0: not on a CPU */
	__u8 class;
	__u8 reserved[7];
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_uncounted_run);
} uncounted_runs SEC(".maps");

static __always_inline struct zernel_decisions *zernel_decisions_of(__u32 process, __u8 class)
{
	__u32 index = zernel_process_index(process) * ZERNEL_CLASSES + class;
	struct zernel_decisions *row = bpf_map_lookup_elem(&decisions, &index);

	if (row && row->process != process) {
		__builtin_memset(row, 0, sizeof(*row));
		row->process = process;
	}
	return row;
}

/* Counts the time on a CPU since the last call, for the class that the thread had. */
static __noinline int zernel_count_run_time(struct task_struct *task, __u32 process, __u64 class_word,
				       __u64 now_ns, bool goes_on)
{
	struct zernel_uncounted_run *thread =
		bpf_task_storage_get(&uncounted_runs, task, 0, 0);
	__u8 class = zernel_word_class(class_word);
	struct zernel_decisions *row;

	if (!thread)
		return 0;
	row = zernel_decisions_of(process, thread->class);
	if (row && thread->since_ns && now_ns > thread->since_ns)
		__sync_fetch_and_add(&row->run_ns, now_ns - thread->since_ns);
	if (goes_on && class == ZERNEL_CLASS_GPU_WAIT &&
	    (thread->class != class || !thread->since_ns)) {
		row = zernel_decisions_of(process, class);
		if (row)
			__sync_fetch_and_add(&row->would_lend, 1);
	}
	thread->class = class;
	thread->since_ns = goes_on ? now_ns : 0;
	return 0;
}

/* Counts that a thread runs again after it was runnable for `delay_ns`. Its class is the one that
 * it had when it became runnable. */
static __noinline int zernel_count_delay(__u32 process, __u64 class_word, __u64 delay_ns,
					 bool woke_up)
{
	__u8 class = zernel_word_class(class_word);
	struct zernel_decisions *row = zernel_decisions_of(process, class);
	bool is_preferred = class == ZERNEL_CLASS_CRITICAL || class == ZERNEL_CLASS_FEED;

	if (!row)
		return 0;
	__sync_fetch_and_add(&row->delay_ns, delay_ns);
	if (woke_up)
		__sync_fetch_and_add(&row->wakeups, 1);
	if (!is_preferred || delay_ns < ZERNEL_MIN_AVOIDABLE_DELAY_NS)
		return 0;
	/* Only a critical thread is kept on its CPU: a loader takes its turn like others. */
	if (woke_up)
		__sync_fetch_and_add(&row->would_preempt, 1);
	else if (class == ZERNEL_CLASS_CRITICAL)
		__sync_fetch_and_add(&row->would_keep, 1);
	else
		return 0;
	__sync_fetch_and_add(&row->saved_ns, delay_ns);
	return 0;
}

/* Creates the storage for counting decisions about a thread: a context switch must not allocate any. */
static __always_inline void zernel_enable_decision_counting(struct task_struct *task)
{
	if (zernel_counts_decisions)
		zernel_task_storage(&uncounted_runs, task, true);
}

#endif
