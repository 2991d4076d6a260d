/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The trace: every event that a phase tracker receives, with the phase that follows, through a ring
 * buffer. It is off unless userspace asks for it before the programs are loaded; then the verifier
 * removes this code, and the ring buffer has its least size.
 */
#ifndef ZERNEL_TRACE_H
#define ZERNEL_TRACE_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "losses.h"
#include "task_state.h"

/* Not 0: events are traced. Userspace sets it before the programs are loaded. */
const volatile __u32 zernel_traces_events SEC(".rodata.trace");

/* Events of the trace that no tracker receives, beside those of enum zernel_event. */
enum zernel_trace_event {
	ZERNEL_TRACE_CALL = 0xf0, /* the thread enters a probed function without tracker event */
	ZERNEL_TRACE_EXIT = 0xf1, /* the thread exits or calls exec */
	ZERNEL_TRACE_LOADING_BEGIN = 0xf2, /* the thread loads data for its own process, from here on */
	ZERNEL_TRACE_LOADING_END = 0xf3, /* the thread no longer loads data for its own process */
};
ZERNEL_IN_BTF(enum, zernel_trace_event);

struct zernel_trace_record {
	__u64 at_ns; /* the event */
	__u64 phase_word; /* after the event */
	__u64 deadline_ns; /* after the event */
	__u32 tid;
	__u32 process; /* handle */
	__u16 delay_ns; /* from the event to this record; 0xffff: at least that long */
	__u16 flags; /* enum zernel_tracker_flags, after the event */
	__u8 event; /* enum zernel_event or enum zernel_trace_event */
	__u8 symbol; /* the probed function, or ZERNEL_NONE */
	__u8 reserved[2];
};
ZERNEL_IN_BTF(struct, zernel_trace_record);

/* Userspace enlarges it if events are traced. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} trace_records SEC(".maps");

static __noinline int zernel_write_trace_record(const struct zernel_task_state *state, __u32 process,
					 __u64 at_ns, __u32 event, __u32 symbol)
{
	__u64 delay_ns = bpf_ktime_get_ns() - at_ns;
	struct zernel_trace_record record = {
		.at_ns = at_ns,
		.phase_word = state->phase_word,
		.deadline_ns = state->tracker.deadline_ns,
		.tid = state->pid,
		.process = process,
		.delay_ns = delay_ns < 0xffff ? delay_ns : 0xffff,
		.flags = state->tracker.flags,
		.event = event,
		.symbol = symbol,
	};

	/* The reader polls: waking it would cost the thread more than the record. */
	if (bpf_ringbuf_output(&trace_records, &record, sizeof(record), BPF_RB_NO_WAKEUP))
		ZERNEL_COUNT_LOST(trace);
	return 0;
}

/* Traces an event of a thread after its tracker has received it. */
static __always_inline void zernel_trace_if_enabled(const struct zernel_task_state *state, __u32 process,
					 __u64 at_ns, __u32 event, __u32 symbol)
{
	if (zernel_traces_events)
		zernel_write_trace_record(state, process, at_ns, event, symbol);
}

#endif
