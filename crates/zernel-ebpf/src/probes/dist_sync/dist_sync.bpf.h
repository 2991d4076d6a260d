/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Waits for peers: in a GPU sync with nothing but collectives queued, and on the futex of a CPU collective (c10d's
 * gloo). The return of a CPU collective is not probed, because an exception may leave the function. So a wait for such
 * a collective lasts from the entry to the end of the block that follows after at most a millisecond of CPU time, and
 * the wait for all gradients of a model to the end of the last such block.
 */
#ifndef DIST_SYNC_BPF_H
#define DIST_SYNC_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "btf.h"
#include "dataload/dataload.bpf.h"
#include "dist_sync/state.bpf.h"
#include "duration.h"
#include "phase_tracker.h"
#include "process.h"
#include "sched/state.bpf.h"
#include "settings.h"
#include "shared_state.h"
#include "storage.h"
#include "symbol.h"
#include "task_state.h"
#include "thread.h"
#include "work.h"

enum dist_sync_role {
	SYNC_AWAIT_PEERS,
	SYNC_AWAIT_GRADIENTS,
	SYNC_REDUCE_ON_CPU,
};
ZERNEL_IN_BTF(enum, dist_sync_role);

/* The thread begins to wait for a CPU collective. */
static __always_inline void begin_peer_wait(struct zernel_thread *thread, bool is_for_gradients,
					    __u64 now_ns)
{
	thread->dist_sync.is_for_gradients = is_for_gradients;
	thread->dist_sync.call_entered_ns = now_ns;
	thread->dist_sync.cpu_ns_since_block = 0;
	/* The time that the thread has been on the CPU so far is not part of the wait. */
	if (thread->sched.run_state == SCHED_ON_CPU)
		thread->dist_sync.cpu_ns_since_block -= now_ns - thread->sched.since_ns;
}

static __noinline int end_peer_wait(struct zernel_thread *thread)
{
	struct dist_sync_thread *wait = &thread->dist_sync;

	if (wait->since_ns && wait->until_ns > wait->since_ns)
		zernel_observe_duration(thread->process_handle, ZERNEL_DIST_SYNC,
					wait->until_ns - wait->since_ns);
	wait->since_ns = 0;
	wait->call_entered_ns = 0;
	return 0;
}

/* Counts a block of the thread in a collective. The end of its last block may have been missed. */
static __always_inline void begin_peer_block(struct zernel_thread *thread,
					     struct zernel_process *process, __u64 now_ns)
{
	if (!thread->dist_sync.is_blocked)
		zernel_begin_work(&process->dist_sync.peer_blocks, now_ns);
	thread->dist_sync.is_blocked = true;
}

static __always_inline void end_counting_peer_block(struct zernel_thread *thread,
					     struct zernel_process *process, __u64 now_ns)
{
	if (thread->dist_sync.is_blocked)
		zernel_end_work(&process->dist_sync.peer_blocks, now_ns);
	thread->dist_sync.is_blocked = false;
}

/* For how much of a wait from `since_ns` on threads of the process were blocked in collectives. Two threads that
 * are blocked at the same time count twice. */
static __always_inline __u64 peer_blocks_in_wait(const struct zernel_thread *thread,
						 const struct zernel_process *process,
						 __u64 since_ns, __u64 now_ns)
{
	__u64 peers_ns = zernel_work_ns_between(thread->dist_sync.peer_blocks_before,
					zernel_work_sum_at(&process->dist_sync.peer_blocks, now_ns));

	return peers_ns < now_ns - since_ns ? peers_ns : now_ns - since_ns;
}

/* Called when the thread blocks; returns whether the thread waits for peers. */
static __always_inline bool begin_block_for_peers(struct zernel_thread *thread)
{
	struct dist_sync_thread *wait = &thread->dist_sync;

	if (!wait->call_entered_ns)
		return false;
	/* A wait for Python's lock neither belongs to a collective nor ends it. */
	if (thread->sched.last_block_lock == SCHED_PYTHON_LOCK)
		return false;
	if ((__s64)wait->cpu_ns_since_block > (__s64)WAIT_MERGE_GAP_NS ||
	    thread->sched.last_block_reason != SCHED_BLOCKED_FUTEX ||
	    (wait->since_ns && !wait->is_for_gradients)) {
		end_peer_wait(thread);
		return false;
	}
	if (!wait->since_ns)
		wait->since_ns = wait->call_entered_ns;
	thread->sched.last_block_awaits = SCHED_AWAITS_PEERS;
	return true;
}

/* The training thread comes back from a backward pass that another thread ran. */
static __always_inline void note_end_of_backward(struct zernel_process *process,
						 const struct zernel_task_state *state,
						 __u64 now_ns)
{
	if (state->tracker.activity == ZERNEL_ACTIVITY_BACKWARD &&
	    state->tracker.flags & ZERNEL_TRAINING_THREAD)
		process->dist_sync.backward_until_ns = now_ns;
}

/*
 * Called when a block of a thread that runs backward passes ends. This thread idles after each backward pass, and only
 * the training thread shows when the pass is over. So the thread waits for peers only until the training thread comes
 * back from the backward pass.
 */
static __noinline int end_backward_helper_block(struct zernel_thread *thread, struct zernel_process *process,
				       __u64 block_ns, __u64 now_ns)
{
	__u64 begin_ns = process->dist_sync.backward_since_ns;
	__u64 back_ns = process->dist_sync.backward_until_ns;
	bool is_within = begin_ns > back_ns && begin_ns <= block_ns;

	if (back_ns <= block_ns && !is_within)
		return end_peer_wait(thread);
	thread->dist_sync.until_ns = back_ns > block_ns && back_ns < now_ns ? back_ns : now_ns;
	thread->dist_sync.cpu_ns_since_block = 0;
	__sync_fetch_and_add(&process->dist_sync.helper_wait_ns,
			     thread->dist_sync.until_ns - block_ns);
	return back_ns > block_ns ? end_peer_wait(thread) : 0;
}

/* Called when a block in which the thread waited for peers ends. */
static __noinline int end_peer_block(struct zernel_thread *thread, struct zernel_process *process,
				     const struct zernel_task_state *state, __u64 now_ns)
{
	bool trains = process->step_announcer_tid ? process->step_announcer_tid == state->pid :
					   state->tracker.flags & ZERNEL_TRAINING_THREAD;

	if (!trains && zernel_uses_gpu(process) && process->dist_sync.backward_since_ns)
		return end_backward_helper_block(thread, process, state->tracker.wait_since_ns, now_ns);
	thread->dist_sync.until_ns = now_ns;
	thread->dist_sync.cpu_ns_since_block = 0;
	return 0;
}

/* The current thread leaves a GPU sync, or a copy to the host, which is a sync if it is long. The tracker has not received
 * that event yet. */
static __noinline int observe_sync_for_collective(__u32 process, __u64 now_ns)
{
	struct zernel_task_state *state =
		zernel_task_storage(&zernel_tasks, bpf_get_current_task_btf(), false);
	struct zernel_settings *set = zernel_settings();
	struct zernel_tracker *tracker;

	if (!state || !set)
		return 0;
	tracker = &state->tracker;
	if (zernel_in_copy_to_host(tracker) && now_ns - tracker->sync_since_ns < set->tracker.short_wait_max_ns)
		return 0;
	if (tracker->flags & ZERNEL_IN_SYNC && tracker->flags & ZERNEL_COLLECTIVE_QUEUED &&
	    !(tracker->flags & ZERNEL_IN_COLLECTIVE) && now_ns > tracker->sync_since_ns)
		zernel_observe_duration(process, ZERNEL_DIST_SYNC, now_ns - tracker->sync_since_ns);
	return 0;
}

#define dist_sync_mark dist_sync_mark
static __always_inline void dist_sync_mark(const struct zernel_symbol *symbol,
					   struct zernel_thread *thread,
					   struct zernel_process *process, __u64 now_ns)
{
	if (symbol->role == SYNC_REDUCE_ON_CPU) {
		process->dist_sync.cpu_reductions++;
		return;
	}
	/* With a GPU, only reductions that go through the CPU block. NCCL's reductions block no thread. */
	if (symbol->role == SYNC_AWAIT_GRADIENTS && zernel_uses_gpu(process)) {
		if (process->dist_sync.cpu_reductions) {
			process->dist_sync.cpu_reductions = 0;
			begin_peer_wait(thread, true, now_ns);
		}
		return;
	}
	mark_training_loop(thread, process);
	begin_peer_wait(thread, symbol->role == SYNC_AWAIT_GRADIENTS, now_ns);
}

#endif
