/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The event rule in the kernel: the twin of zernel-phase's PhaseTracker, which gives the reason for
 * each rule. It is fed with the events of one thread, by the thread itself or while it is being
 * switched.
 */
#ifndef ZERNEL_PHASE_TRACKER_H
#define ZERNEL_PHASE_TRACKER_H

#include "task_state.h"

enum zernel_event {
	ZERNEL_GPU_SYNC_ENTER,
	ZERNEL_GPU_SYNC_LEAVE,
	ZERNEL_COLLECTIVE_ENTER,
	ZERNEL_COLLECTIVE_LEAVE,
	ZERNEL_LAUNCH,
	ZERNEL_COPY_TO_DEVICE,
	ZERNEL_BLOCK_IO,
	ZERNEL_BLOCK_FUTEX,
	ZERNEL_BLOCK_POLL,
	ZERNEL_BLOCK_OTHER,
	ZERNEL_UNBLOCK,
	ZERNEL_OPTIMIZER_MARKER,
};

struct zernel_tracker_config {
	__u64 sync_max_ns;
	__u64 collective_max_ns;
	__u64 blocked_max_ns;
	__u64 loading_max_ns;
	__u64 launching_max_ns;
	__u64 optimizer_max_ns;
	__u64 optimizer_burst_max_ns;
	__u64 optimizer_launch_max_ns;
	__u64 short_wait_max_ns;
};

#define ZERNEL_NEVER (~0ULL)

static inline __u64 zernel_add_saturating(__u64 a, __u64 b)
{
	return a > ZERNEL_NEVER - b ? ZERNEL_NEVER : a + b;
}

static inline void zernel_count(__u32 *fault)
{
	if (*fault != ~0U)
		(*fault)++;
}

static inline int zernel_in_call(const struct zernel_tracker *tracker)
{
	return tracker->flags & (ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
}

static inline __u8 zernel_activity_phase(__u8 activity)
{
	switch (activity) {
	case ZERNEL_LOADING:
		return ZERNEL_DATA_LOADING;
	case ZERNEL_LAUNCHING:
		return ZERNEL_GPU_COMPUTE;
	case ZERNEL_BURST:
	case ZERNEL_UPDATING:
		return ZERNEL_OPTIMIZER_STEP;
	default:
		return ZERNEL_UNKNOWN;
	}
}

/* What an activity becomes when no event shows it for too long. */
static inline __u8 zernel_activity_expired(__u8 activity)
{
	switch (activity) {
	case ZERNEL_BURST:
	case ZERNEL_UPDATING:
	case ZERNEL_DRAINED:
		return ZERNEL_DRAINED;
	default:
		return ZERNEL_IDLE;
	}
}

/* Whether a short wait leaves an activity as it was. */
static inline int zernel_is_part_of_a_step(__u8 activity)
{
	return activity != ZERNEL_IDLE && activity != ZERNEL_LOADING;
}

static inline void zernel_turn_to(const struct zernel_tracker_config *config,
				  struct zernel_tracker *tracker, __u8 activity)
{
	__u64 max_ns = ZERNEL_NEVER;

	if (activity == ZERNEL_LOADING)
		max_ns = config->loading_max_ns;
	else if (activity == ZERNEL_LAUNCHING)
		max_ns = config->launching_max_ns;
	else if (activity == ZERNEL_UPDATING)
		max_ns = config->optimizer_max_ns;
	else if (activity == ZERNEL_BURST)
		max_ns = config->optimizer_burst_max_ns;
	tracker->activity = activity;
	tracker->activity_until_ns = zernel_add_saturating(tracker->now_ns, max_ns);
	tracker->flags &= ~ZERNEL_UNDECIDED;
}

/* Ends calls that an event other than their own leave shows to be over. */
static inline void zernel_end_unseen(struct zernel_tracker *tracker, __u16 calls)
{
	if (tracker->flags & calls & ZERNEL_IN_SYNC)
		zernel_count(&tracker->lost_leaves);
	if (tracker->flags & calls & ZERNEL_IN_COLLECTIVE)
		zernel_count(&tracker->lost_leaves);
	tracker->flags &= ~calls;
}

static inline __u8 zernel_after_sync(const struct zernel_tracker *tracker)
{
	return tracker->flags & ZERNEL_MARKED ? ZERNEL_DRAINED : ZERNEL_BURST;
}

static inline int zernel_waits_for_data(const struct zernel_tracker *tracker, __u8 event)
{
	switch (event) {
	case ZERNEL_BLOCK_IO:
		return 1;
	case ZERNEL_BLOCK_POLL:
		return tracker->activity != ZERNEL_IDLE;
	case ZERNEL_BLOCK_FUTEX:
		return tracker->activity != ZERNEL_IDLE && tracker->activity != ZERNEL_LAUNCHING;
	default:
		return 0;
	}
}

/* Whether a late event is the end of a call that is still open, and not of an earlier one. */
static inline int zernel_ends_open_call(const struct zernel_tracker *tracker, __u64 at_ns,
					__u8 event)
{
	if (event == ZERNEL_GPU_SYNC_LEAVE)
		return tracker->flags & ZERNEL_IN_SYNC && tracker->sync_since_ns <= at_ns;
	if (event == ZERNEL_COLLECTIVE_LEAVE)
		return tracker->flags & ZERNEL_IN_COLLECTIVE &&
		       tracker->collective_since_ns <= at_ns;
	return 0;
}

/* Moves time on. A phase whose deadline has passed ends. */
static inline void zernel_advance(const struct zernel_tracker_config *config,
				  struct zernel_task_state *task, __u64 at_ns)
{
	struct zernel_tracker *tracker = &task->tracker;

	if (at_ns > tracker->now_ns)
		tracker->now_ns = at_ns;
	if (tracker->now_ns < tracker->deadline_ns)
		return;
	if (zernel_word_phase(task->phase_word) != ZERNEL_UNKNOWN)
		zernel_transition(task, ZERNEL_UNKNOWN, tracker->deadline_ns);
	tracker->deadline_ns = ZERNEL_NEVER;
	zernel_count(&tracker->expired);
	tracker->flags &= ~ZERNEL_WAITING;
	if (zernel_in_call(tracker)) {
		zernel_count(&tracker->lost_leaves);
		tracker->flags &=
			~(ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE | ZERNEL_COLLECTIVE_QUEUED);
		zernel_turn_to(config, tracker, ZERNEL_IDLE);
	} else {
		zernel_turn_to(config, tracker, zernel_activity_expired(tracker->activity));
	}
}

static inline void zernel_block(const struct zernel_tracker_config *config,
				struct zernel_tracker *tracker, __u8 event)
{
	int in_call = zernel_in_call(tracker);
	int after_launches = event == ZERNEL_BLOCK_FUTEX && tracker->activity == ZERNEL_LAUNCHING &&
			     !in_call;

	tracker->flags |= ZERNEL_WAITING;
	tracker->flags &= ~ZERNEL_WAIT_UNDECIDED;
	if (after_launches)
		tracker->flags |= ZERNEL_WAIT_UNDECIDED;
	tracker->wait_since_ns = tracker->now_ns;
	tracker->wait_activity = tracker->activity;
	tracker->wait_activity_until_ns = tracker->activity_until_ns;
	if (!in_call && zernel_waits_for_data(tracker, event))
		zernel_turn_to(config, tracker, ZERNEL_LOADING);
	else if (after_launches && !(tracker->flags & ZERNEL_TRAINING_THREAD))
		zernel_turn_to(config, tracker, ZERNEL_IDLE);
}

/* Ends a wait. Deadlines move by its length. */
static inline void zernel_end_wait(const struct zernel_tracker_config *config,
				   struct zernel_tracker *tracker)
{
	__u64 waited_ns = tracker->now_ns - tracker->wait_since_ns;

	if (!(tracker->flags & ZERNEL_WAITING))
		return;
	tracker->flags &= ~ZERNEL_WAITING;
	if (zernel_in_call(tracker)) {
		tracker->call_shown_ns += waited_ns;
	} else if (waited_ns < config->short_wait_max_ns &&
		   zernel_is_part_of_a_step(tracker->wait_activity)) {
		tracker->activity = tracker->wait_activity;
		tracker->activity_until_ns =
			zernel_add_saturating(tracker->wait_activity_until_ns, waited_ns);
	} else if (tracker->activity == ZERNEL_LOADING) {
		zernel_turn_to(config, tracker, ZERNEL_LOADING);
	} else {
		tracker->activity_until_ns =
			zernel_add_saturating(tracker->activity_until_ns, waited_ns);
		if (tracker->flags & ZERNEL_WAIT_UNDECIDED &&
		    tracker->activity == ZERNEL_LAUNCHING) {
			tracker->flags |= ZERNEL_UNDECIDED;
			tracker->undecided_since_ns = tracker->wait_since_ns;
		}
	}
}

static inline void zernel_leave_sync(const struct zernel_tracker_config *config,
				     struct zernel_tracker *tracker)
{
	if (!(tracker->flags & ZERNEL_IN_SYNC))
		zernel_count(&tracker->lost_enters);
	tracker->flags &= ~ZERNEL_IN_SYNC;
	if (tracker->flags & ZERNEL_IN_COLLECTIVE)
		return;
	tracker->flags &= ~(ZERNEL_COLLECTIVE_QUEUED | ZERNEL_LAUNCHED_SINCE_SYNC);
	zernel_turn_to(config, tracker,
		       tracker->activity == ZERNEL_LOADING ? ZERNEL_LOADING :
							     zernel_after_sync(tracker));
}

static inline void zernel_leave_collective(const struct zernel_tracker_config *config,
					   struct zernel_tracker *tracker)
{
	if (!(tracker->flags & ZERNEL_IN_COLLECTIVE))
		zernel_count(&tracker->lost_enters);
	zernel_end_unseen(tracker, ZERNEL_IN_SYNC);
	tracker->flags &= ~(ZERNEL_IN_COLLECTIVE | ZERNEL_COLLECTIVE_QUEUED);
	if (!(tracker->flags & ZERNEL_LAUNCHED_SINCE_SYNC))
		tracker->flags |= ZERNEL_COLLECTIVE_QUEUED;
	if (tracker->activity == ZERNEL_BURST || tracker->activity == ZERNEL_DRAINED)
		zernel_turn_to(config, tracker, zernel_after_sync(tracker));
}

static inline void zernel_launch(const struct zernel_tracker_config *config,
				 struct zernel_tracker *tracker)
{
	if (tracker->flags & ZERNEL_IN_COLLECTIVE) {
		tracker->flags |= ZERNEL_COLLECTIVE_LAUNCHED;
		return;
	}
	zernel_end_unseen(tracker, ZERNEL_IN_SYNC);
	tracker->flags &= ~(ZERNEL_COLLECTIVE_QUEUED | ZERNEL_UNDECIDED);
	tracker->flags |= ZERNEL_LAUNCHED_SINCE_SYNC;
	if (tracker->activity != ZERNEL_UPDATING ||
	    tracker->now_ns - tracker->last_marker_ns >= config->optimizer_launch_max_ns)
		zernel_turn_to(config, tracker, ZERNEL_LAUNCHING);
}

static inline void zernel_copy(const struct zernel_tracker_config *config,
			       struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;

	if (tracker->flags & ZERNEL_IN_COLLECTIVE && !(tracker->flags & ZERNEL_COLLECTIVE_LAUNCHED))
		return;
	zernel_end_unseen(tracker, ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
	tracker->flags |= ZERNEL_TRAINING_THREAD;
	if (tracker->flags & ZERNEL_UNDECIDED)
		zernel_transition(task, ZERNEL_DATA_LOADING, tracker->undecided_since_ns);
	zernel_turn_to(config, tracker, ZERNEL_LOADING);
}

static inline void zernel_apply(const struct zernel_tracker_config *config,
				struct zernel_task_state *task, __u8 event)
{
	struct zernel_tracker *tracker = &task->tracker;

	switch (event) {
	case ZERNEL_GPU_SYNC_ENTER:
		zernel_end_unseen(tracker, ZERNEL_IN_SYNC);
		tracker->sync_since_ns = tracker->now_ns;
		if (!(tracker->flags & ZERNEL_IN_COLLECTIVE))
			tracker->call_shown_ns = tracker->now_ns;
		tracker->flags |= ZERNEL_IN_SYNC | ZERNEL_TRAINING_THREAD;
		tracker->flags &= ~ZERNEL_UNDECIDED;
		break;
	case ZERNEL_GPU_SYNC_LEAVE:
		zernel_leave_sync(config, tracker);
		break;
	case ZERNEL_COLLECTIVE_ENTER:
		zernel_end_unseen(tracker, ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
		tracker->collective_since_ns = tracker->now_ns;
		tracker->call_shown_ns = tracker->now_ns;
		tracker->flags |= ZERNEL_IN_COLLECTIVE;
		tracker->flags &= ~(ZERNEL_COLLECTIVE_LAUNCHED | ZERNEL_UNDECIDED);
		break;
	case ZERNEL_COLLECTIVE_LEAVE:
		zernel_leave_collective(config, tracker);
		break;
	case ZERNEL_LAUNCH:
		zernel_launch(config, tracker);
		break;
	case ZERNEL_COPY_TO_DEVICE:
		zernel_copy(config, task);
		break;
	case ZERNEL_OPTIMIZER_MARKER:
		zernel_end_unseen(tracker, ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
		tracker->flags |= ZERNEL_MARKED | ZERNEL_TRAINING_THREAD;
		tracker->last_marker_ns = tracker->now_ns;
		zernel_turn_to(config, tracker, ZERNEL_UPDATING);
		break;
	case ZERNEL_UNBLOCK:
		break;
	default:
		zernel_block(config, tracker, event);
	}
}

/* Changes the phase if the last event does. */
static inline void zernel_settle(const struct zernel_tracker_config *config,
				 struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	int waiting = tracker->flags & ZERNEL_WAITING;
	__u8 phase;

	if (!zernel_in_call(tracker) && !waiting && tracker->activity_until_ns <= tracker->now_ns)
		zernel_turn_to(config, tracker, zernel_activity_expired(tracker->activity));
	if (tracker->flags & ZERNEL_IN_COLLECTIVE) {
		phase = ZERNEL_NCCL_COLLECTIVE;
		tracker->deadline_ns =
			zernel_add_saturating(tracker->call_shown_ns, config->collective_max_ns);
	} else if (tracker->flags & ZERNEL_IN_SYNC) {
		phase = tracker->flags & ZERNEL_COLLECTIVE_QUEUED ? ZERNEL_NCCL_COLLECTIVE :
								    ZERNEL_GPU_COMPUTE;
		tracker->deadline_ns =
			zernel_add_saturating(tracker->call_shown_ns, config->sync_max_ns);
	} else {
		phase = zernel_activity_phase(tracker->activity);
		tracker->deadline_ns = tracker->activity_until_ns;
	}
	if (phase == ZERNEL_UNKNOWN)
		tracker->deadline_ns = ZERNEL_NEVER;
	else if (waiting)
		tracker->deadline_ns =
			zernel_add_saturating(tracker->wait_since_ns, config->blocked_max_ns);
	if (phase != zernel_word_phase(task->phase_word))
		zernel_transition(task, phase, tracker->now_ns);
}

/* Starts to track a thread at `now_ns`. */
static inline void zernel_track_begin(struct zernel_task_state *task, __u64 now_ns)
{
	struct zernel_tracker *tracker = &task->tracker;

	tracker->now_ns = now_ns;
	tracker->deadline_ns = ZERNEL_NEVER;
	tracker->activity_until_ns = ZERNEL_NEVER;
	zernel_transition(task, ZERNEL_UNKNOWN, now_ns);
}

/* Takes in what the thread did at `at_ns`. */
static inline void zernel_track(const struct zernel_tracker_config *config,
				struct zernel_task_state *task, __u64 at_ns, __u8 event)
{
	if (at_ns < task->tracker.now_ns) {
		zernel_count(&task->tracker.late);
		if (!zernel_ends_open_call(&task->tracker, at_ns, event))
			return;
	}
	zernel_advance(config, task, at_ns);
	zernel_end_wait(config, &task->tracker);
	zernel_apply(config, task, event);
	zernel_settle(config, task);
}

#endif
