/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Waits for peers: in a GPU sync that nothing but collectives are queued for, and in the futex that a
 * collective of the CPU (c10d's gloo) waits on. When such a call returns is not seen, because an
 * exception may leave it; so the wait lasts from its entry to the end of the last block that follows
 * with no more than a millisecond of CPU time before it.
 */

/* The thread begins to wait for a collective of the CPU. */
static __always_inline void await_peers(struct zernel_thread *thread, __u64 now_ns)
{
	thread->peers.armed_ns = now_ns;
	thread->peers.cpu_ns = 0;
	/* What it ran so far is not its wait's. */
	if (thread->run.state == ZERNEL_ON_CPU)
		thread->peers.cpu_ns -= now_ns - thread->run.since_ns;
}

static __noinline int end_peer_wait(struct zernel_thread *thread)
{
	struct zernel_wait *wait = &thread->peers;

	if (wait->since_ns && wait->until_ns > wait->since_ns)
		zernel_observe_duration(thread->process, ZERNEL_DIST_SYNC,
					wait->until_ns - wait->since_ns);
	wait->since_ns = 0;
	wait->armed_ns = 0;
	return 0;
}

/* The thread blocks; whether that is for peers. */
static __always_inline bool peer_block(struct zernel_thread *thread)
{
	struct zernel_wait *wait = &thread->peers;

	if (!wait->armed_ns)
		return false;
	if ((__s64)wait->cpu_ns > (__s64)WAIT_MERGE_NS ||
	    thread->run.reason != ZERNEL_BLOCKED_FUTEX) {
		end_peer_wait(thread);
		return false;
	}
	if (!wait->since_ns)
		wait->since_ns = wait->armed_ns;
	thread->run.awaits = ZERNEL_AWAITS_PEERS;
	return true;
}

/* The current thread leaves a GPU sync, of which the tracker does not know yet. */
static __noinline int sync_left(__u32 process, __u64 now_ns)
{
	struct zernel_task_state *state =
		zernel_kept_of(&zernel_tasks, bpf_get_current_task_btf(), false);
	struct zernel_tracker *tracker;

	if (!state)
		return 0;
	tracker = &state->tracker;
	if (tracker->flags & ZERNEL_IN_SYNC && tracker->flags & ZERNEL_COLLECTIVE_QUEUED &&
	    !(tracker->flags & ZERNEL_IN_COLLECTIVE) && now_ns > tracker->sync_since_ns)
		zernel_observe_duration(process, ZERNEL_DIST_SYNC, now_ns - tracker->sync_since_ns);
	return 0;
}
