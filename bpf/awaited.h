/* SPDX-License-Identifier: GPL-2.0-only */
/* What a wait turns out to have been for, at its end: the twin of attribute_wait() of zernel-phase's waits. */
#ifndef ZERNEL_AWAITED_H
#define ZERNEL_AWAITED_H

#include "activity.h"
#include "task_state.h"
#include "tracker_event.h"
#include "waits.h"

/* The wait so far was for a compilation, so it belongs to no phase. A wait for data does. */
static inline void zernel_attribute_wait_to_compile(struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u64 since_ns = tracker->wait_since_ns, waited_ns = tracker->now_ns - since_ns;

	if (!(tracker->flags & ZERNEL_IS_BLOCKED) || zernel_in_call(tracker) ||
	    tracker->activity == ZERNEL_ACTIVITY_LOADING ||
	    zernel_word_phase(task->phase_word) == ZERNEL_UNKNOWN)
		return;
	tracker->wait_since_ns = tracker->now_ns;
	tracker->activity_until_ns_before_wait =
		zernel_add_saturating(tracker->activity_until_ns_before_wait, waited_ns);
	tracker->activity_until_ns = zernel_add_saturating(tracker->activity_until_ns, waited_ns);
	tracker->undecided_since_ns = tracker->now_ns;
	zernel_transition(task, ZERNEL_UNKNOWN, since_ns);
}

/* The wait so far was for a thread that was in a collective, so it was for peers; the rest may be for data. The
 * backward pass of a thread that waits for it goes on meanwhile. */
static inline void zernel_attribute_wait_to_collective(const struct zernel_tracker_config *config,
					    struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u64 since_ns = tracker->wait_since_ns, waited_ns = tracker->now_ns - since_ns;
	int announced = tracker->activity == ZERNEL_ACTIVITY_LOADING &&
			tracker->flags & ZERNEL_ANNOUNCES_DATA;

	if (!(tracker->flags & ZERNEL_IS_BLOCKED) || zernel_in_call(tracker) || announced ||
	    tracker->activity == ZERNEL_ACTIVITY_BACKWARD ||
	    zernel_word_phase(task->phase_word) == ZERNEL_UNKNOWN)
		return;
	if (tracker->activity == ZERNEL_ACTIVITY_LOADING || tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE) {
		zernel_begin_undecided_time(config, tracker);
	} else {
		tracker->activity_until_ns =
			zernel_add_saturating(tracker->activity_until_ns, waited_ns);
		tracker->flags &= ~ZERNEL_UNDECIDED;
		tracker->undecided_since_ns = tracker->now_ns;
	}
	tracker->flags &= ~ZERNEL_AWAITS_DATA_AFTER_UPDATE;
	tracker->wait_since_ns = tracker->now_ns;
	tracker->activity_before_wait = tracker->activity;
	tracker->activity_until_ns_before_wait = tracker->activity_until_ns;
	zernel_transition(task, ZERNEL_NCCL_COLLECTIVE, since_ns);
}

/* The wait so far was for a thread that loads data, so it was for a batch. */
static inline void zernel_attribute_wait_to_data(const struct zernel_tracker_config *config,
				      struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;

	if (!(tracker->flags & ZERNEL_IS_BLOCKED) || !(tracker->flags & ZERNEL_WAIT_UNDECIDED) ||
	    tracker->now_ns - tracker->wait_since_ns < config->short_wait_max_ns)
		return;
	if (!(tracker->flags & ZERNEL_UNDECIDED))
		tracker->undecided_since_ns = tracker->wait_since_ns;
	tracker->flags |= ZERNEL_UNDECIDED;
	zernel_attribute_time_to_loading(task);
	zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_LOADING, tracker->now_ns);
	if (tracker->flags & ZERNEL_ANNOUNCES_UPDATES)
		tracker->flags |= ZERNEL_AWAITS_DATA_AFTER_UPDATE;
}

/* Takes in what the thread has waited for; it still waits. Returns whether the event is of that kind. */
static inline int zernel_attribute_wait(const struct zernel_tracker_config *config,
				     struct zernel_task_state *task, __u8 event)
{
	switch (event) {
	case ZERNEL_AWAITED_COMPILE:
		zernel_attribute_wait_to_compile(task);
		return 1;
	case ZERNEL_AWAITED_COLLECTIVE:
		zernel_attribute_wait_to_collective(config, task);
		return 1;
	case ZERNEL_AWAITED_DATA:
		zernel_attribute_wait_to_data(config, task);
		return 1;
	default:
		return 0;
	}
}

#endif
