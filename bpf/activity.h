/* SPDX-License-Identifier: GPL-2.0-only */
/* What a thread does outside of calls: the twin of zernel-phase's Activity. */
#ifndef ZERNEL_ACTIVITY_H
#define ZERNEL_ACTIVITY_H

#include "task_state.h"
#include "tracker_event.h"

#define ZERNEL_NEVER (~0ULL)

static inline __u8 zernel_activity_phase(__u8 activity)
{
	switch (activity) {
	case ZERNEL_ACTIVITY_LOADING:
	case ZERNEL_ACTIVITY_RECEIVING_BATCH:
		return ZERNEL_DATA_LOADING;
	case ZERNEL_ACTIVITY_COMPUTING:
	case ZERNEL_ACTIVITY_BACKWARD:
	case ZERNEL_ACTIVITY_AFTER_UPDATE:
		return ZERNEL_GPU_COMPUTE;
	case ZERNEL_ACTIVITY_UPDATING:
		return ZERNEL_OPTIMIZER_STEP;
	default:
		return ZERNEL_UNKNOWN;
	}
}

/* What an activity becomes when no event shows it for too long. */
static inline __u8 zernel_activity_after_deadline(__u8 activity)
{
	return activity == ZERNEL_ACTIVITY_RECEIVING_BATCH ? ZERNEL_ACTIVITY_COMPUTING : ZERNEL_ACTIVITY_IDLE;
}

static inline int zernel_is_part_of_step(__u8 activity)
{
	return activity != ZERNEL_ACTIVITY_OTHER_WORK && activity != ZERNEL_ACTIVITY_COMPILING;
}

/* Whether a short wait leaves an activity as it was. */
static inline int zernel_survives_short_waits(__u8 activity)
{
	return activity != ZERNEL_ACTIVITY_LOADING;
}

/* How long an activity lasts without an event that shows it. */
static inline __u64 zernel_activity_max_ns(const struct zernel_tracker_config *config, __u8 activity)
{
	switch (activity) {
	case ZERNEL_ACTIVITY_LOADING:
		return config->loading_max_ns;
	case ZERNEL_ACTIVITY_RECEIVING_BATCH:
		return config->short_wait_max_ns;
	case ZERNEL_ACTIVITY_COMPUTING:
	case ZERNEL_ACTIVITY_AFTER_UPDATE:
	case ZERNEL_ACTIVITY_OTHER_WORK:
		return config->launching_max_ns;
	case ZERNEL_ACTIVITY_BACKWARD:
	case ZERNEL_ACTIVITY_COMPILING:
		return config->sync_max_ns;
	case ZERNEL_ACTIVITY_UPDATING:
		return config->optimizer_max_ns;
	default:
		return ZERNEL_NEVER;
	}
}

static inline __u64 zernel_add_saturating(__u64 a, __u64 b)
{
	return a > ZERNEL_NEVER - b ? ZERNEL_NEVER : a + b;
}

static inline int zernel_in_call(const struct zernel_tracker *tracker)
{
	return tracker->flags & (ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
}

/* Whether the thread copies to the host. It may wait for the GPU meanwhile. */
static inline int zernel_in_copy_to_host(const struct zernel_tracker *tracker)
{
	return tracker->flags & ZERNEL_IN_SYNC && tracker->copies_to_host;
}

/* The phase of a sync. */
static inline __u8 zernel_sync_phase(const struct zernel_tracker *tracker)
{
	return tracker->flags & ZERNEL_COLLECTIVE_QUEUED ? ZERNEL_NCCL_COLLECTIVE :
							   ZERNEL_GPU_COMPUTE;
}

/* Whether the thread still does what is no part of a step. It may launch, copy and sync meanwhile,
 * and run backward passes without data. */
static inline int zernel_works_outside_steps(const struct zernel_tracker *tracker)
{
	return !zernel_is_part_of_step(tracker->activity) &&
	       tracker->now_ns < tracker->activity_until_ns;
}

/* Whether the optimizer works, and its end will be seen. A wait for the GPU does not end that. */
static inline int zernel_is_in_announced_update(const struct zernel_tracker *tracker)
{
	return tracker->flags & ZERNEL_IN_UPDATE && tracker->activity == ZERNEL_ACTIVITY_UPDATING;
}

/* Turns to an activity at `from_ns`. */
static inline void zernel_set_activity(const struct zernel_tracker_config *config,
				  struct zernel_tracker *tracker, __u8 activity, __u64 from_ns)
{
	__u64 limit_ns = zernel_activity_max_ns(config, activity);

	tracker->activity = activity;
	tracker->activity_until_ns = zernel_add_saturating(from_ns, limit_ns);
	tracker->flags &= ~(ZERNEL_UNDECIDED | ZERNEL_MAY_UPDATE);
}

#endif
