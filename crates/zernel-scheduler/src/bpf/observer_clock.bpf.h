/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The observer's clock. The observer writes times of CLOCK_MONOTONIC, which the kernel keeps in step with
 * real seconds. The scheduler's clock counts those of the CPUs, so after days the two are seconds apart. What
 * the observer wrote is compared with the time by its own clock.
 */
#ifndef ZERNEL_SCHED_OBSERVER_CLOCK_H
#define ZERNEL_SCHED_OBSERVER_CLOCK_H

#include "globals.bpf.h"
#include "task_maps.h"

/* How far the observer's clock is ahead of the scheduler's. */
static __s64 observer_lead_ns;

static void update_observer_lead(void)
{
	observer_lead_ns = bpf_ktime_get_ns() - scx_bpf_now();
}

/* Whether an observer writes the task states that this program reads. One with another layout writes another map. */
static bool has_live_observer(__u64 now_ns)
{
	__u32 observer = ZERNEL_HEART_OBSERVER;
	const struct zernel_heartbeat *heart = bpf_map_lookup_elem(&zernel_heartbeats, &observer);

	return heart && heart->layout_hash == settings.layout_hash && zernel_is_observed(now_ns + observer_lead_ns);
}

static __u64 class_word_at(const struct zernel_task_state *state, __u64 now_ns)
{
	return zernel_class_word_at(state, now_ns + observer_lead_ns);
}

/* When the class of a task ends if no further event comes, by the scheduler's clock. */
static __u64 class_until_ns(const struct zernel_task_state *state)
{
	__u64 until_ns = state->class_until_ns;

	return until_ns == ZERNEL_CLASS_NO_DEADLINE ? until_ns : until_ns - observer_lead_ns;
}

#endif
