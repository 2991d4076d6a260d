/* SPDX-License-Identifier: GPL-2.0-only */
/* What a blocked thread waits for, and what it does after: the twin of zernel-phase's waits. */
#ifndef ZERNEL_WAITS_H
#define ZERNEL_WAITS_H

#include "activity.h"
#include "task_state.h"
#include "tracker_event.h"

/* Whether the thread has launched and not synced since. It may then read the disk for data, or for a library
 * whose kernels come next. */
static inline int zernel_is_launching(const struct zernel_tracker *tracker)
{
	return tracker->activity == ZERNEL_ACTIVITY_COMPUTING &&
	       tracker->flags & ZERNEL_LAUNCHED_SINCE_SYNC;
}

/* The activity of a thread that blocks outside of calls. A thread that announces when it gets data
 * loads at no other time. */
static inline __u8 zernel_activity_in_block(const struct zernel_tracker *tracker, __u8 event)
{
	__u8 activity = tracker->activity;

	if (activity == ZERNEL_ACTIVITY_RECEIVING_BATCH)
		return ZERNEL_ACTIVITY_LOADING;
	if (!zernel_is_part_of_step(activity) && !(tracker->flags & ZERNEL_TRAINING_THREAD))
		return ZERNEL_ACTIVITY_IDLE;
	if (tracker->flags & ZERNEL_ANNOUNCES_DATA || !zernel_is_part_of_step(activity))
		return activity;
	switch (event) {
	case ZERNEL_BLOCK_REQUEST:
		return ZERNEL_ACTIVITY_IDLE;
	case ZERNEL_BLOCK_IO:
	case ZERNEL_BLOCK_POLL:
		if (event == ZERNEL_BLOCK_IO && zernel_is_launching(tracker))
			return activity;
		return activity == ZERNEL_ACTIVITY_IDLE ? ZERNEL_ACTIVITY_IDLE : ZERNEL_ACTIVITY_LOADING;
	case ZERNEL_BLOCK_FUTEX:
		if ((activity == ZERNEL_ACTIVITY_COMPUTING || activity == ZERNEL_ACTIVITY_BACKWARD) &&
		    !(tracker->flags & ZERNEL_TRAINING_THREAD))
			return ZERNEL_ACTIVITY_IDLE;
		if (activity == ZERNEL_ACTIVITY_UPDATING && !(tracker->flags & ZERNEL_ANNOUNCES_UPDATES))
			return ZERNEL_ACTIVITY_COMPUTING;
		if ((activity == ZERNEL_ACTIVITY_UPDATING || activity == ZERNEL_ACTIVITY_AFTER_UPDATE) &&
		    tracker->flags & ZERNEL_AWAITS_DATA_AFTER_UPDATE &&
		    !zernel_is_in_announced_update(tracker))
			return ZERNEL_ACTIVITY_LOADING;
		return activity;
	default:
		return activity;
	}
}

/* Whether a wait in this activity is either for data or for something else: a wait on a futex for another
 * thread, a read of the disk for a library. */
static inline int zernel_is_undecided(const struct zernel_tracker *tracker, __u8 event)
{
	if (tracker->flags & ZERNEL_ANNOUNCES_DATA || zernel_is_in_announced_update(tracker))
		return 0;
	if (event == ZERNEL_BLOCK_IO)
		return zernel_is_launching(tracker);
	if (event != ZERNEL_BLOCK_FUTEX)
		return 0;
	return tracker->activity == ZERNEL_ACTIVITY_COMPUTING || tracker->activity == ZERNEL_ACTIVITY_UPDATING ||
	       tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE;
}

/* How long a blocked thread keeps its phase. A thread that sleeps does not compute. */
static inline __u64 zernel_wait_max_ns(const struct zernel_tracker_config *config,
				      const struct zernel_tracker *tracker, __u8 event)
{
	int computes = tracker->activity == ZERNEL_ACTIVITY_COMPUTING ||
		       tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE;

	return event == ZERNEL_BLOCK_SLEEP && computes && !zernel_in_call(tracker) ?
		       config->short_wait_max_ns :
		       config->blocked_max_ns;
}

/* A batch follows an undecided time: the thread got data since then. */
static inline void zernel_attribute_time_to_loading(struct zernel_task_state *task)
{
	__u64 start_ns = zernel_word_start_ns(task->phase_word);
	__u64 since_ns = task->tracker.undecided_since_ns;

	if (task->tracker.flags & ZERNEL_UNDECIDED &&
	    zernel_word_phase(task->phase_word) != ZERNEL_DATA_LOADING)
		zernel_transition(task, ZERNEL_DATA_LOADING,
				  since_ns > start_ns ? since_ns : start_ns);
}

/* Whether the undecided time is long enough to prepare a batch. */
static inline int zernel_may_have_loaded(const struct zernel_tracker_config *config,
					 const struct zernel_tracker *tracker)
{
	return tracker->flags & ZERNEL_UNDECIDED &&
	       tracker->now_ns - tracker->undecided_since_ns >= config->short_wait_max_ns;
}

/* The optimizer step is over. If the thread copies next, it prepared a batch until then: a thread that
 * announces its batches does so elsewhere. */
static inline void zernel_begin_undecided_time(const struct zernel_tracker_config *config,
				      struct zernel_tracker *tracker)
{
	zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_AFTER_UPDATE, tracker->now_ns);
	if (tracker->flags & ZERNEL_ANNOUNCES_DATA)
		return;
	tracker->undecided_since_ns = tracker->now_ns;
	tracker->flags |= ZERNEL_UNDECIDED;
}

static inline void zernel_begin_wait(const struct zernel_tracker_config *config,
				struct zernel_task_state *task, __u8 event)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u8 activity;

	tracker->flags |= ZERNEL_IS_BLOCKED;
	tracker->flags &= ~ZERNEL_WAIT_UNDECIDED;
	tracker->wait_since_ns = tracker->now_ns;
	tracker->wait_until_ns = zernel_add_saturating(tracker->now_ns,
						       zernel_wait_max_ns(config, tracker, event));
	tracker->activity_before_wait = tracker->activity;
	tracker->activity_until_ns_before_wait = tracker->activity_until_ns;
	if (zernel_in_call(tracker))
		return;
	activity = zernel_activity_in_block(tracker, event);
	/* A thread that reads or polls after its optimizer step prepares a batch, and goes on with that. So does
	 * one that waits for another thread, if it has worked since the step. */
	if (tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE && activity == ZERNEL_ACTIVITY_LOADING &&
	    (event != ZERNEL_BLOCK_FUTEX || zernel_may_have_loaded(config, tracker))) {
		zernel_attribute_time_to_loading(task);
		tracker->activity_before_wait = ZERNEL_ACTIVITY_LOADING;
	}
	if (activity != tracker->activity)
		zernel_set_activity(config, tracker, activity, tracker->now_ns);
	if (zernel_is_undecided(tracker, event))
		tracker->flags |= ZERNEL_WAIT_UNDECIDED;
}

/* Ends a wait in the activity that it began in. A thread that only launches wakes up to launch,
 * whether its launches are observed or not. */
static inline void zernel_end_long_wait(const struct zernel_tracker_config *config,
					struct zernel_tracker *tracker, __u8 event)
{
	if (tracker->activity == ZERNEL_ACTIVITY_LOADING) {
		int sees_batch = tracker->flags & ZERNEL_USES_GPU ||
				 (tracker->flags & ZERNEL_ANNOUNCES_DATA &&
				  tracker->sees_update_ends);
		int uses_batch = tracker->flags & ZERNEL_TRAINING_THREAD && !sees_batch;

		zernel_set_activity(config, tracker, uses_batch ? ZERNEL_ACTIVITY_RECEIVING_BATCH : ZERNEL_ACTIVITY_LOADING,
			       tracker->now_ns);
		return;
	}
	if (tracker->activity == ZERNEL_ACTIVITY_IDLE && event == ZERNEL_UNBLOCK_AFTER_LAUNCHES &&
	    zernel_activity_phase(tracker->activity_before_wait) == ZERNEL_GPU_COMPUTE) {
		zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_COMPUTING, tracker->now_ns);
		return;
	}
	tracker->activity_until_ns = zernel_add_saturating(
		tracker->activity_until_ns, tracker->now_ns - tracker->wait_since_ns);
	/* A thread that announces its steps also announces the backward passes that it waits for. */
	if (tracker->flags & ZERNEL_WAIT_UNDECIDED &&
	    (event != ZERNEL_UNBLOCK_AFTER_LAUNCHES ||
	     tracker->flags & ZERNEL_ANNOUNCES_UPDATES)) {
		/* Work before the wait that is too short to prepare a batch is not part of it. */
		if (!(tracker->flags & ZERNEL_UNDECIDED) ||
		    tracker->wait_since_ns <=
			    zernel_add_saturating(tracker->undecided_since_ns,
						  config->short_wait_max_ns))
			tracker->undecided_since_ns = tracker->wait_since_ns;
		tracker->flags &= ~ZERNEL_MAY_UPDATE;
		tracker->flags |= ZERNEL_UNDECIDED;
	}
}

/* Ends a wait. Deadlines move by its length. */
static inline void zernel_end_wait(const struct zernel_tracker_config *config,
				   struct zernel_tracker *tracker, __u8 event)
{
	__u64 waited_ns = tracker->now_ns - tracker->wait_since_ns;

	if (!(tracker->flags & ZERNEL_IS_BLOCKED))
		return;
	tracker->flags &= ~ZERNEL_IS_BLOCKED;
	if (zernel_in_call(tracker)) {
		tracker->last_call_evidence_ns += waited_ns;
	} else if (tracker->activity == ZERNEL_ACTIVITY_BACKWARD) {
		tracker->activity_until_ns =
			zernel_add_saturating(tracker->activity_until_ns, waited_ns);
		tracker->flags &= ~ZERNEL_UNDECIDED;
		tracker->flags |= ZERNEL_MAY_UPDATE;
		tracker->undecided_since_ns = tracker->now_ns;
		/* After the pass of a closure the optimizer goes on. Waits inside of the pass, as for
		 * a lock, see no launches. */
		if (tracker->flags & ZERNEL_IN_UPDATE &&
		    event == ZERNEL_UNBLOCK_AFTER_LAUNCHES)
			zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_UPDATING, tracker->now_ns);
	} else if (waited_ns >= config->short_wait_max_ns) {
		zernel_end_long_wait(config, tracker, event);
	} else if (zernel_survives_short_waits(tracker->activity_before_wait)) {
		tracker->activity = tracker->activity_before_wait;
		tracker->activity_until_ns =
			zernel_add_saturating(tracker->activity_until_ns_before_wait, waited_ns);
	} else {
		zernel_set_activity(config, tracker, tracker->activity, tracker->now_ns);
	}
}

static inline void zernel_preempt(struct zernel_tracker *tracker)
{
	tracker->flags |= ZERNEL_IS_QUEUED;
	tracker->queued_since_ns = tracker->now_ns;
}

/* Ends the time in which the thread was runnable and did not run. Deadlines move by its length. */
static inline void zernel_end_run_delay(struct zernel_tracker *tracker)
{
	__u64 queued_ns = tracker->now_ns - tracker->queued_since_ns;

	if (!(tracker->flags & ZERNEL_IS_QUEUED))
		return;
	tracker->flags &= ~ZERNEL_IS_QUEUED;
	tracker->last_call_evidence_ns += queued_ns;
	tracker->activity_until_ns = zernel_add_saturating(tracker->activity_until_ns, queued_ns);
}

#endif
