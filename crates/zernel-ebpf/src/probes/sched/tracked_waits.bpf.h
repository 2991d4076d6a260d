/* SPDX-License-Identifier: GPL-2.0-only */
/* Passes blocks and wake-ups of a thread to its tracker, and to the probes that measure waits. */
#ifndef SCHED_TRACKED_WAITS_BPF_H
#define SCHED_TRACKED_WAITS_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "dataload/dataload.bpf.h"
#include "dist_sync/dist_sync.bpf.h"
#include "phase_tracker.h"
#include "process.h"
#include "sched/block_reason.bpf.h"
#include "sched/state.bpf.h"
#include "settings.h"
#include "shared_state.h"
#include "thread.h"
#include "trace.h"

/* Feeds an event to the tracker of a thread, unless the thread is sampled instead. */
static __noinline int track_event(struct zernel_task_state *state, __u32 process, __u64 now_ns,
				  __u32 event)
{
	struct zernel_settings *set = zernel_settings();

	if (!set || state->flags & ZERNEL_TASK_IS_SAMPLED)
		return 0;
	zernel_track_event(&set->tracker, state, now_ns, event);
	zernel_publish_class(state, now_ns);
	zernel_trace_if_enabled(state, process, now_ns, event, ZERNEL_NONE);
	return 0;
}

/* Whether the calls of a process are observed. If the calls of a process are not observed, its phases and waits are
 * unknown. */
static __noinline bool is_observed(struct zernel_thread *thread, struct zernel_process *process,
				   struct zernel_task_state *state, __u64 now_ns)
{
	struct zernel_settings *set = zernel_settings();

	if (!process->is_uncounted && set && !*(volatile __u64 *)&set->is_suspended)
		return true;
	track_event(state, thread->process_handle, now_ns, ZERNEL_NOT_OBSERVED);
	thread->dataload.since_ns = 0;
	thread->dist_sync.since_ns = 0;
	thread->dist_sync.call_entered_ns = 0;
	thread->torch.records = 0;
	drop_compilation(&thread->torch, &process->torch);
	return false;
}

/* Passes a block to the tracker and to the probes that measure waits. */
static __noinline int track_block(struct zernel_thread *thread, struct zernel_process *process,
				  struct zernel_task_state *state, __u64 now_ns)
{
	__u8 event;

	thread->sched.last_block_awaits = SCHED_AWAITS_NOTHING;
	thread->torch.compile_ns_at_block = process->torch.compile_ns;
	thread->dist_sync.peer_blocks_before =
		zernel_work_sum_at(&process->dist_sync.peer_blocks, now_ns);
	if (!is_observed(thread, process, state, now_ns))
		return 0;
	if (begin_block_for_peers(thread)) {
		begin_peer_block(thread, process, now_ns);
		track_event(state, thread->process_handle, now_ns, ZERNEL_COLLECTIVE_ENTER);
		track_event(state, thread->process_handle, now_ns, ZERNEL_BLOCK_FUTEX);
		return 0;
	}
	event = event_of_block(thread, process, state, now_ns);
	/* A driver may sleep in a call, as in a copy that waits for the GPU. */
	if (event == ZERNEL_BLOCK_SLEEP && thread->open_call_count)
		event = ZERNEL_BLOCK_OTHER;
	track_event(state, thread->process_handle, now_ns, event);
	begin_or_go_on_data_wait(thread, process, state, now_ns);
	return 0;
}

/* Whether other threads of the process may have launched while the thread was blocked. While launches are sampled,
 * and not probed in a window, other threads may have launched if one that makes probed calls was on a CPU. */
static __always_inline bool may_have_launched(const struct zernel_process *process,
					      const struct zernel_task_state *state)
{
	struct zernel_settings *set = zernel_settings();
	__u64 since_ns = state->tracker.wait_since_ns;

	if (!set || process->marks.launched_ns > since_ns)
		return true;
	if (!set->are_launches_sampled || (set->is_window_open && !process->misses_window))
		return false;
	return process->sched.caller_on_cpu || process->sched.caller_left_ns > since_ns;
}

/* Other threads compiled while the thread was blocked, or from before that on. Threads compile a model before they
 * launch the work that this thread waits for. */
static __always_inline void track_awaited_compile(struct zernel_thread *thread,
						  struct zernel_process *process,
						  struct zernel_task_state *state, __u64 now_ns)
{
	__s64 compile_ns = process->torch.compile_ns - thread->torch.compile_ns_at_block;
	__u64 since_ns = state->tracker.wait_since_ns;
	__s64 until_ns = process->torch.compiled_until_ns - since_ns;

	if (!(state->tracker.flags & ZERNEL_IS_BLOCKED) || compile_ns <= 0 || until_ns <= 0)
		return;
	track_event(state, thread->process_handle,
		    since_ns + (compile_ns < until_ns ? compile_ns : until_ns),
		    ZERNEL_AWAITED_COMPILE);
}

/* The thread that ended the block was in collectives meanwhile. As much of the block was for peers. If that is less
 * than half, a wait for data stays one. */
static __always_inline void track_awaited_collective(struct zernel_thread *thread,
						     const struct zernel_process *process,
						     struct zernel_task_state *state, __u64 now_ns)
{
	__u64 since_ns = state->tracker.wait_since_ns;
	__u64 peers_ns = peer_blocks_in_wait(thread, process, since_ns, now_ns);
	bool is_for_peers = peers_ns >= (now_ns - since_ns) / 2;

	if (is_for_peers || state->tracker.activity != ZERNEL_ACTIVITY_LOADING)
		track_event(state, thread->process_handle, since_ns + peers_ns, ZERNEL_AWAITED_COLLECTIVE);
	if (is_for_peers && !thread->dataload.is_announced)
		thread->dataload.since_ns = 0;
}

/* The thread that ended the block shows what the block was for. */
static __always_inline void track_hand_over(struct zernel_thread *thread,
					    const struct zernel_process *process,
					    struct zernel_task_state *state, __u64 now_ns)
{
	__u8 handed = thread->sched.handed_by_waker;

	if (handed == SCHED_HANDED_COLLECTIVE) {
		track_awaited_collective(thread, process, state, now_ns);
	} else if (handed == SCHED_HANDED_DATA) {
		track_event(state, thread->process_handle, now_ns, ZERNEL_AWAITED_DATA);
		if (state->tracker.activity == ZERNEL_ACTIVITY_LOADING)
			thread->dataload.is_tentative = false;
	}
}

static __noinline int track_unblock(struct zernel_thread *thread, struct zernel_process *process,
				    struct zernel_task_state *state, __u64 now_ns)
{
	bool waits_for_launches = may_have_launched(process, state);

	end_counting_peer_block(thread, process, now_ns);
	if (!is_observed(thread, process, state, now_ns))
		return 0;
	note_end_of_backward(process, state, now_ns);
	track_awaited_compile(thread, process, state, now_ns);
	if (thread->sched.handed_by_waker)
		track_hand_over(thread, process, state, now_ns);
	track_event(state, thread->process_handle, now_ns,
		    waits_for_launches ? ZERNEL_UNBLOCK_AFTER_LAUNCHES : ZERNEL_UNBLOCK);
	if (thread->sched.last_block_awaits == SCHED_AWAITS_PEERS) {
		thread->dist_sync.peer_wait_ended_ns = now_ns;
		track_event(state, thread->process_handle, now_ns, ZERNEL_COLLECTIVE_LEAVE);
		end_peer_block(thread, process, state, now_ns);
	} else if (thread->sched.last_block_awaits == SCHED_AWAITS_DATA && thread->dataload.since_ns) {
		if (waits_for_launches && !(state->tracker.flags & ZERNEL_ANNOUNCES_UPDATES))
			drop_tentative_wait(thread);
		extend_data_wait(thread, process, now_ns);
	}
	return 0;
}

#endif
