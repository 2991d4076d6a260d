/* SPDX-License-Identifier: GPL-2.0-only */
/* Writes the task states that a scheduler reads. */
#ifndef ZERNEL_SHARED_STATE_H
#define ZERNEL_SHARED_STATE_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "decisions.h"
#include "hints.h"
#include "phase_tracker.h"
#include "preemption.h"
#include "settings.h"
#include "storage.h"
#include "task_maps.h"
#include "task_state.h"
#include "trace.h"

/* The state of a task of an ML process, created if need be. */
static __always_inline struct zernel_task_state *zernel_get_or_create_task(struct task_struct *task, __u64 now_ns)
{
	struct zernel_task_state *state = zernel_task_storage(&zernel_tasks, task, true);

	if (state && !state->phase_word) {
		state->pid = task->pid;
		state->tgid = task->tgid;
		state->trainer = task->tgid;
		state->gpu_id = ZERNEL_NO_GPU;
		state->flags = ZERNEL_TASK_IS_ML;
		zernel_begin_tracking(state, now_ns);
		zernel_publish_class(state, now_ns);
	}
	return state;
}

/* Feeds an event of the current thread to its tracker. The thread belongs to `process`, has called
 * `symbol`, and has been on a CPU for `burst_ns`. */
__noinline int zernel_observe_event(__u64 now_ns, __u32 event, __u64 burst_ns, __u32 process,
				    __u32 symbol)
{
	struct zernel_settings *set = zernel_settings();
	struct task_struct *task = bpf_get_current_task_btf();
	struct zernel_task_state *state = zernel_get_or_create_task(task, now_ns);

	if (!state || !set)
		return 0;
	zernel_enable_decision_counting(task);
	/* If the thread were preempted within an update of its state, the switch would update a state that is half
	 * changed. */
	zernel_disable_preemption();
	state->cpu_burst_ns = burst_ns;
	state->flags &= ~ZERNEL_TASK_IS_SAMPLED;
	zernel_track_event(&set->tracker, state, now_ns, event);
	zernel_publish_class(state, now_ns);
	zernel_trace_if_enabled(state, process, now_ns, event, symbol);
	if (event == ZERNEL_GPU_SYNC_LEAVE)
		state->last_gpu_sync_ns = now_ns;
	if (event == ZERNEL_COLLECTIVE_ENTER)
		state->flags |= ZERNEL_TASK_NCCL_ACTIVE;
	else if (event == ZERNEL_COLLECTIVE_LEAVE)
		state->flags &= ~ZERNEL_TASK_NCCL_ACTIVE;
	if (zernel_counts_decisions)
		zernel_count_run_time(task, process, state->class_word, now_ns, true);
	zernel_enable_preemption();
	zernel_write_hint(task, state, true);
	return 0;
}

#endif
