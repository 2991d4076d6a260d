/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * No task waits for ever. How long a task waits depends on how fast its clock advances, and that may
 * change while it waits: beside a task of great weight the clock slows down, and a task that was ahead of
 * it a little would wait for minutes. The kernel's watchdog ejects a scheduler that lets a task wait.
 * So a timer looks at the waiting tasks. One that has waited for longer than MAX_LEAD_NS goes to
 * the front of its queue; beside tasks that may be critical, one that has waited for longer than the guarantee
 * allows (max_fair_wait_ns). Weights are not exact then. This gives the task no credit: when it runs, it is no further
 * behind than before. Critical threads wait in the order in which they came, so nothing is moved there: see
 * critical_vtime. A thread of the observer may wait for MIN_LONG_WAIT_NS: its heart beats five times a second, and
 * without a beat for a second nobody has a rank.
 */
#ifndef ZERNEL_SCHED_AGING_H
#define ZERNEL_SCHED_AGING_H

#include "queue.bpf.h"

struct aging_timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct aging_timer);
} aging_timers SEC(".maps");

/* Whether a task has waited for too long and is not at the front yet. */
static bool must_age(const struct task_struct *p, const struct task *task, __u64 front, __u64 now_ns)
{
	__u64 max_wait_ns = MAX_LEAD_NS;

	if (!has_waited(task->runnable_ns, MIN_LONG_WAIT_NS, now_ns))
		return false;
	if (settings.privilege != PRIVILEGE_NOBODY || is_observer(p))
		max_wait_ns = max_fair_wait_ns(p, task);
	return has_waited(task->runnable_ns, max_wait_ns, now_ns) && is_before(front, p->scx.dsq_vtime);
}

/* Moves the tasks of a queue that have waited for too long to its front. */
__attribute__((noinline)) int age_queue(__u64 queue, __u64 now_ns)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	struct task *task;
	__u64 front;

	if (!scx_bpf_dsq_nr_queued(queue))
		return 0;
	/* The verifier takes a global function for sleepable if a sleepable program sets a timer that calls
	 * it. */
	bpf_rcu_read_lock();
	if (!bpf_iter_scx_dsq_new(&it, queue, 0)) {
		while ((p = bpf_iter_scx_dsq_next(&it))) {
			task = task_of(p);
			if (!task)
				continue;
			/* Where a clock is slow, tasks may be further behind it than its front. */
			front = front_vtime(task, is_observer(p) ? MAX_LEAD_NS : 0);
			if (!must_age(p, task, front, now_ns))
				continue;
			/* Only the first move sees the original virtual time. */
			if (!task->vtime_before_aging)
				task->vtime_before_aging = p->scx.dsq_vtime;
			scx_bpf_dsq_move_set_vtime(&it, front);
			if (scx_bpf_dsq_move_vtime(&it, p, queue, 0))
				counters.aged++;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	bpf_rcu_read_unlock();
	return 0;
}

/* A task that was moved to the front of its queue runs. It is as far behind the others as it was before, and not ahead
 * of them, so that it gives way after a slice and their clock does not jump. */
static void end_aging(struct task_struct *p, struct task *task)
{
	const struct clock *clock = clock_of(task);
	__u64 vtime = task->vtime_before_aging;

	if (!vtime)
		return;
	task->vtime_before_aging = 0;
	if (is_before(clock->now, vtime))
		vtime = clock->now;
	set_vtime(p, clock_bound(clock, vtime, clock_advance_in(clock, MAX_LAG_NS)));
}

static void age_rank_queues(__u64 queue, __u64 now_ns)
{
	age_queue(queue, now_ns);
	if (settings.may_privilege)
		age_queue(RANK_QUEUE(queue, RANK_FEED), now_ns);
}

static int on_aging_timer(void *map, int *key, struct aging_timer *timer)
{
	__u64 now_ns = scx_bpf_now();
	__u32 index;

	/* Until the next time it is less than a thousandth of that off. */
	update_observer_lead();
	for (index = 0; index < MAX_LLCS && index < settings.llc_count; index++)
		age_rank_queues(LLC_QUEUE(index), now_ns);
	for (index = 0; index < MAX_CPUS && index < settings.cpu_count; index++)
		age_rank_queues(CPU_QUEUE(index), now_ns);
	bpf_timer_start(&timer->timer, MIN_LONG_WAIT_NS / 2, 0);
	return 0;
}

static __s32 start_aging_timer(void)
{
	__u32 first = 0;
	struct aging_timer *timer = bpf_map_lookup_elem(&aging_timers, &first);

	if (!timer)
		return -22; /* EINVAL */
	bpf_timer_init(&timer->timer, &aging_timers, CLOCK_MONOTONIC);
	bpf_timer_set_callback(&timer->timer, on_aging_timer);
	update_observer_lead();
	return bpf_timer_start(&timer->timer, MIN_LONG_WAIT_NS / 2, 0);
}

#endif
