/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What tells one step of a training loop from the next. It happens a few times a step and is told to
 * userspace one by one, without waking it; userspace finds the steps.
 */
#ifndef ZERNEL_STEPS_H
#define ZERNEL_STEPS_H

#include "observe.h"

/* One of them, as userspace reads it. */
struct zernel_step_mark {
	__u64 at_ns;
	__u32 process; /* index */
	__u16 launches; /* since the one before */
	__u8 mark; /* enum zernel_mark */
	__u8 missing; /* sorts that are missing before it, as bits */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 512 * 1024);
} step_marks SEC(".maps");

/* No map says what is in a ring buffer: this does, to those who compare their mirror of it. */
const volatile struct zernel_step_mark zernel_step_mark_layout = {};

/* No training loop needs more of them. What does has a share of the ring buffer, not all of it. */
#define MARKS_MAX 1024
#define MARKS_WINDOW_NS 250000000ULL

/* A model that is copied to the host uses up its sort, and hides no update. */
static __always_inline enum zernel_mark_sort sort_of(__u32 mark)
{
	return mark <= ZERNEL_MARK_REDUCE ? ZERNEL_MARKS_TRAINING : ZERNEL_MARKS_USE;
}

static __always_inline bool has_marks_left(struct zernel_process *process, __u32 mark, __u64 now_ns)
{
	if (now_ns > process->marks_since_ns + MARKS_WINDOW_NS) {
		process->marks_since_ns = now_ns;
		process->marks[ZERNEL_MARKS_TRAINING] = 0;
		process->marks[ZERNEL_MARKS_USE] = 0;
	}
	return process->marks[sort_of(mark)]++ < MARKS_MAX;
}

/* An optimizer updates a model with many calls in a row: one is enough. */
static __always_inline bool is_repeated(const struct zernel_process *process, __u32 mark)
{
	return mark == ZERNEL_MARK_OPTIMIZER && process->last_mark == mark;
}

__noinline int zernel_tell_mark(__u32 process_index, __u32 mark, __u64 now_ns)
{
	struct zernel_process *process = zernel_process(process_index);
	struct zernel_step_mark told = {};
	__u32 launches;

	if (!process || is_repeated(process, mark))
		return 0;
	process->last_mark = mark;
	if (!has_marks_left(process, mark, now_ns)) {
		process->marks_missing |= 1 << sort_of(mark);
		return 0;
	}
	told.at_ns = now_ns;
	told.process = process_index;
	launches = process->launches;
	told.launches = launches < 0xffff ? launches : 0xffff;
	told.mark = mark;
	told.missing = process->marks_missing;
	process->marks_missing = 0;
	/* The next one tells that this one is missing. */
	if (bpf_ringbuf_output(&step_marks, &told, sizeof(told), BPF_RB_NO_WAKEUP))
		process->marks_missing = told.missing | 1 << sort_of(mark);
	else
		__sync_fetch_and_add(&process->launches, -launches);
	return 0;
}

/* The current thread calls a function that may tell one step from the next. */
static __always_inline void zernel_mark_step(const struct zernel_symbol *symbol,
					     struct zernel_process *process, __u32 process_index,
					     __u64 now_ns)
{
	if (symbol->flags & ZERNEL_LAUNCHES)
		__sync_fetch_and_add(&process->launches, 1);
	if (symbol->mark && !(symbol->flags & ZERNEL_SAMPLED))
		zernel_tell_mark(process_index, symbol->mark, now_ns);
}

#endif
