/* SPDX-License-Identifier: GPL-2.0-only */
/* The timer that lets tasks run again whose cgroup has a budget again. It runs while there are
 * limits. */
#ifndef ZERNEL_SCHED_THROTTLE_TIMER_H
#define ZERNEL_SCHED_THROTTLE_TIMER_H

#include "queue.bpf.h"

struct throttle_timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct throttle_timer);
} throttle_timers SEC(".maps");

static struct throttle_timer *throttle_timer(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&throttle_timers, &first);
}

static bool is_throttled_too_long(const struct task *task, __u64 now_ns)
{
	/* It may have become runnable on another CPU after `now_ns`. */
	return (__s64)(now_ns - task->runnable_ns) > (__s64)LONGEST_THROTTLE_NS;
}

/* A task waits for a CPU from now on. */
static void end_throttling(struct task *task, __u64 now_ns)
{
	task->is_throttled = false;
	task->runnable_ns = now_ns;
}

static void release_throttled(__u64 now_ns)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	struct task *task;
	__s32 cpu;

	if (!bpf_iter_scx_dsq_new(&it, THROTTLED_QUEUE, 0)) {
		while ((p = bpf_iter_scx_dsq_next(&it))) {
			task = task_of(p);
			if (!task || (must_wait_for_budget(p, task->cgroup_node, now_ns) && !is_throttled_too_long(task, now_ns)))
				continue;
			end_throttling(task, now_ns);
			cpu = scx_bpf_task_cpu(p);
			if (scx_bpf_dsq_move_vtime(&it, p, queue_of_task(task, cpu), 0))
				wake_idle_cpu(p, task, cpu);
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
}

static int on_throttle_timer(void *map, int *key, struct throttle_timer *timer)
{
	if (scx_bpf_dsq_nr_queued(THROTTLED_QUEUE)) {
		/* Up to 6.17 the verifier takes the callback for sleepable, as the program that set it is. */
		bpf_rcu_read_lock();
		release_throttled(scx_bpf_now());
		bpf_rcu_read_unlock();
	}
	if (limited_cgroups || scx_bpf_dsq_nr_queued(THROTTLED_QUEUE))
		bpf_timer_start(&timer->timer, THROTTLE_TIMER_INTERVAL_NS, 0);
	return 0;
}

static __s32 prepare_throttle_timer(void)
{
	struct throttle_timer *timer = throttle_timer();

	if (!timer)
		return -22; /* EINVAL */
	bpf_timer_init(&timer->timer, &throttle_timers, CLOCK_MONOTONIC);
	bpf_timer_set_callback(&timer->timer, on_throttle_timer);
	return 0;
}

/* Sets the limit of a cgroup, and starts the timer unless the quota is 0, which is no limit. */
static void limit_cgroup(__u32 index, __u64 quota_ns, __u64 period_ns)
{
	struct throttle_timer *timer = throttle_timer();

	set_cgroup_limit(index, quota_ns, period_ns);
	if (quota_ns && timer)
		bpf_timer_start(&timer->timer, THROTTLE_TIMER_INTERVAL_NS, 0);
}

#endif
