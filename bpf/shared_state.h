/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Task states that a scheduler reads. The map is pinned and outlives this object; a heartbeat
 * beside it shows whether an observer still writes it.
 */
#ifndef ZERNEL_SHARED_STATE_H
#define ZERNEL_SHARED_STATE_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "phase_tracker.h"
#include "settings.h"
#include "storage.h"
#include "task_state.h"
#include "trace.h"

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct zernel_task_state);
} zernel_tasks SEC(".maps");

struct zernel_heartbeat {
	__u64 beat_ns;
	__u32 owner; /* pid of the observer */
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct zernel_heartbeat);
} zernel_heartbeats SEC(".maps");

/* The state of a task of an ML process, created if need be. */
static __always_inline struct zernel_task_state *zernel_task(struct task_struct *task, __u64 now_ns)
{
	struct zernel_task_state *state = zernel_task_storage(&zernel_tasks, task, true);

	if (state && !state->phase_word) {
		state->pid = task->pid;
		state->tgid = task->tgid;
		state->gpu_id = ZERNEL_NO_GPU;
		state->flags = ZERNEL_TASK_IS_ML;
		zernel_track_begin(state, now_ns);
	}
	return state;
}

/* Feeds an event of the current thread to its tracker. The thread belongs to `process`, has called
 * `symbol`, and has been on a CPU for `burst_ns`. */
__noinline int zernel_observe_event(__u64 now_ns, __u32 event, __u64 burst_ns, __u32 process,
				    __u32 symbol)
{
	struct zernel_settings *set = zernel_settings();
	struct zernel_task_state *state = zernel_task(bpf_get_current_task_btf(), now_ns);

	if (!state || !set)
		return 0;
	state->cpu_burst_ns = burst_ns;
	zernel_track(&set->tracker, state, now_ns, event);
	zernel_trace(state, process, now_ns, event, symbol);
	if (event == ZERNEL_GPU_SYNC_LEAVE)
		state->last_gpu_sync_ns = now_ns;
	if (event == ZERNEL_COLLECTIVE_ENTER)
		state->flags |= ZERNEL_TASK_NCCL_ACTIVE;
	else if (event == ZERNEL_COLLECTIVE_LEAVE)
		state->flags &= ~ZERNEL_TASK_NCCL_ACTIVE;
	return 0;
}

#endif
