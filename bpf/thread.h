/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Observed threads: task storage that the probes keep for themselves. Userspace never reads it;
 * what a scheduler may read is in shared_state.h.
 */
#ifndef ZERNEL_THREAD_H
#define ZERNEL_THREAD_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "limits.h"
#include "losses.h"
#include "probe_parts.gen.h"
#include "process.h"
#include "shared_state.h"
#include "storage.h"

#define ZERNEL_MAX_OPEN_CALLS 8
/* How long a thread whose process got no handle waits before its calls ask for one again. A refusal costs more than the
 * rest of a probe, and no process has a record that the overhead could count for. */
#define ZERNEL_ADMIT_AGAIN_AFTER_NS 1000000000ULL

/* A call that was entered and has not returned; see call.h. */
struct zernel_open_call {
	__u64 stack_pointer; /* the stack pointer when it was entered */
	__u64 since_ns;
	__u64 return_address; /* its return address, if its probe needs it */
	__u64 arguments[ZERNEL_KEPT_ARGUMENTS];
	__u64 probe_values[2]; /* values that its probe keeps from entry to return */
	__u32 symbol;
	__u32 reserved;
};

struct zernel_thread {
	__u64 hit_interval_start_ns; /* start of the interval for which `interval_hits` counts; 0: no probe hit yet */
	__u64 interval_hits;
	__u64 admit_again_ns; /* without a handle: its process is not given one before */
	__u64 last_phase_call_ns; /* its last probed call that means something for its phase; 0: none yet */
	__u32 process_handle; /* 0: none yet, or the thread exits */
	__u32 open_call_count;
	ZERNEL_THREAD_PARTS /* one struct for each probe that keeps state per thread */
	struct zernel_open_call open_calls[ZERNEL_MAX_OPEN_CALLS];
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_thread);
} threads SEC(".maps");

/* The state of the current thread, which has an event at `now_ns`. Creates it, which makes the
 * thread's process an observed one. A tracker that began later would ignore the event. */
static __always_inline struct zernel_thread *zernel_current_thread(__u64 now_ns)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct zernel_thread *thread = zernel_task_storage(&threads, task, true);

	if (!thread) {
		ZERNEL_COUNT_LOST(threads);
		return NULL;
	}
	if (!thread->process_handle && now_ns >= thread->admit_again_ns) {
		thread->admit_again_ns = now_ns + ZERNEL_ADMIT_AGAIN_AFTER_NS;
		thread->process_handle = zernel_get_or_create_handle(task, now_ns);
		zernel_get_or_create_task(task, now_ns);
	}
	return thread;
}

#endif
