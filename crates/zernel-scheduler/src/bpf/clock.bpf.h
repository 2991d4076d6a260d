/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Virtual clocks. A task's virtual time grows while it runs: by the time that it ran, times 100,
 * divided by its effective weight. A clock follows the virtual time of the tasks that are chosen to
 * run, and so shows how far all tasks should have come.
 */
#ifndef ZERNEL_SCHED_CLOCK_H
#define ZERNEL_SCHED_CLOCK_H

#include "globals.bpf.h"
#include "sched_ext.bpf.h"

#define SECOND_NS 1000000000ULL
/* The speed of a clock is measured over windows of this length. */
#define RATE_WINDOW_NS (SECOND_NS / 10)
/* A task may lag behind its clock by what the clock advances in this time: more is forgotten. */
#define MAX_LAG_NS (SECOND_NS / 10)
/* A task may be ahead of its clock by what the clock advances in this time. It bounds how long a
 * task of tiny weight waits, because the kernel's watchdog ejects a scheduler that lets one wait. */
#define MAX_LEAD_NS (settings.watchdog_ns / 5)

struct clock {
	__u64 now;
	__u64 window_start_ns;
	__u64 window_start_vtime;
	__u64 vtime_per_ms; /* how much it advances in a millisecond; 0: not measured yet */
	/* The guarantee of tasks that are pinned to a CPU: see guarantee.bpf.h. */
	__u64 promised_vtime;
	__u64 promised_up_to_ns;
};

static __always_inline bool is_before(__u64 left, __u64 right)
{
	return (__s64)(left - right) < 0;
}

/* How much a clock advances in `ns`. */
static __u64 clock_advance_in(const struct clock *clock, __u64 ns)
{
	return (clock->vtime_per_ms ?: 1000000) * (ns / 1000000);
}

/* Measures the speed of a clock once per window. A CPU that took `now_ns` before another one began
 * the window sees a negative time, and of several CPUs that end a window at once, one measures. */
static void clock_measure(struct clock *clock, __u64 now_ns)
{
	__u64 before_ns = clock->window_start_ns;
	__s64 elapsed_ns = now_ns - before_ns;

	if (elapsed_ns < (__s64)RATE_WINDOW_NS ||
	    !__sync_bool_compare_and_swap(&clock->window_start_ns, before_ns, now_ns))
		return;
	if (before_ns)
		clock->vtime_per_ms = (clock->now - clock->window_start_vtime) / ((__u64)elapsed_ns / 1000000);
	clock->window_start_vtime = clock->now;
}

/* Advances the clock to the virtual time of a task that was chosen to run. If several CPUs do so at once, some
 * of the advance is lost until the next task is chosen. */
static void clock_advance_to(struct clock *clock, __u64 vtime, __u64 now_ns)
{
	if (is_before(clock->now, vtime))
		clock->now = vtime;
	clock_measure(clock, now_ns);
}

/* `vtime`, at most as far behind the clock as `lag`, and not too far ahead. */
static __u64 clock_bound(const struct clock *clock, __u64 vtime, __u64 lag)
{
	__u64 lead = clock_advance_in(clock, MAX_LEAD_NS);

	if (is_before(vtime, clock->now - lag))
		return clock->now - lag;
	if (is_before(clock->now + lead, vtime))
		return clock->now + lead;
	return vtime;
}

#endif
