/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Reports step marks to userspace, one by one, through a ring buffer. A mark does not wake the
 * reader.
 */
#ifndef ZERNEL_STEPS_H
#define ZERNEL_STEPS_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "mark.h"
#include "process.h"
#include "symbol.h"
#include "tenants.h"

#define STEP_MARKS_BYTES (512 * 1024)

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, STEP_MARKS_BYTES);
} step_marks SEC(".maps");

/* At most this many marks of a class per interval: no training loop makes more, and no process may
 * fill the ring buffer. */
#define MAX_MARKS_PER_INTERVAL 1024
#define MARK_INTERVAL_NS 250000000ULL
/* While the ring buffer is more than half full, a tenant has at most this many marks in it: many
 * processes of one tenant must not fill the ring buffer for all. */
#define MAX_MARKS_OF_TENANT 2048

/* Classes have separate limits, so that copying a whole model to the host hides no optimizer step. */
static __always_inline enum zernel_mark_class class_of_mark(__u32 mark)
{
	return mark <= ZERNEL_MARK_REDUCE ? ZERNEL_MARKS_TRAINING : ZERNEL_MARKS_GPU_USE;
}

static __always_inline bool may_report_mark(struct zernel_process *process, __u32 mark, __u64 now_ns)
{
	if (now_ns > process->marks.since_ns + MARK_INTERVAL_NS) {
		process->marks.since_ns = now_ns;
		process->marks.interval_marks[ZERNEL_MARKS_TRAINING] = 0;
		process->marks.interval_marks[ZERNEL_MARKS_GPU_USE] = 0;
	}
	return process->marks.interval_marks[class_of_mark(mark)]++ < MAX_MARKS_PER_INTERVAL;
}

/* Counts a mark of a tenant. Userspace sets the count to 0 when it has read the marks. */
static __always_inline bool tenant_may_report_mark(const struct zernel_process *process)
{
	struct zernel_tenant *tenant = zernel_tenant(process->tenant);

	if (!tenant)
		return false;
	if (__sync_fetch_and_add(&tenant->unread_step_marks, 1) < MAX_MARKS_OF_TENANT)
		return true;
	return bpf_ringbuf_query(&step_marks, BPF_RB_AVAIL_DATA) < STEP_MARKS_BYTES / 2;
}

/* Whether this is another call of the same optimizer step: an optimizer makes many in a row. */
static __always_inline bool is_repeated_mark(const struct zernel_process *process, __u32 mark)
{
	return mark == ZERNEL_MARK_OPTIMIZER && process->marks.last_mark == mark;
}

__noinline int zernel_report_mark(__u32 handle, __u32 mark, __u64 now_ns)
{
	struct zernel_process *process = zernel_process(handle);
	struct zernel_step_mark report = {};
	__u32 launches;

	if (!process || is_repeated_mark(process, mark))
		return 0;
	process->marks.last_mark = mark;
	if (!may_report_mark(process, mark, now_ns) || !tenant_may_report_mark(process)) {
		process->marks.missing_classes |= 1 << class_of_mark(mark);
		return 0;
	}
	report.at_ns = now_ns;
	report.process = handle;
	launches = process->marks.launches;
	report.launches = launches < 0xffff ? launches : 0xffff;
	report.mark = mark;
	report.missing_classes = process->marks.missing_classes;
	process->marks.missing_classes = 0;
	/* If the buffer is full, the next mark reports this one as missing. */
	if (bpf_ringbuf_output(&step_marks, &report, sizeof(report), BPF_RB_NO_WAKEUP))
		process->marks.missing_classes = report.missing_classes | 1 << class_of_mark(mark);
	else
		__sync_fetch_and_add(&process->marks.launches, -launches);
	return 0;
}

/* The current thread calls a function that may launch or be a step mark. */
static __always_inline void zernel_mark_step(const struct zernel_symbol *symbol, __u32 mark,
					     struct zernel_process *process, __u32 handle,
					     __u64 now_ns)
{
	if (symbol->flags & ZERNEL_LAUNCHES_WORK) {
		__sync_fetch_and_add(&process->marks.launches, 1);
		process->marks.launched_ns = now_ns;
	}
	if (mark && !(symbol->flags & ZERNEL_IS_SAMPLED))
		zernel_report_mark(handle, mark, now_ns);
}

#endif
