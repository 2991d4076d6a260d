/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * cpu.max. The kernel limits the tasks of its own scheduler only, so this one does it itself. A
 * limited cgroup has a budget. Time that its tasks run, or those of its descendants, is taken off
 * it, and every period adds the quota. Without a budget its tasks wait in one queue, which a timer
 * looks through. Time is charged at ticks, so a cgroup may overrun by a tick per CPU; the debt is
 * taken off the next periods. To the kernel's watchdog these tasks are runnable, so each of them
 * is chosen to run now and then. A task that begins to run without a budget is preempted at once.
 * A task that is killed needs no budget.
 */
#ifndef ZERNEL_SCHED_BANDWIDTH_H
#define ZERNEL_SCHED_BANDWIDTH_H

#include "cgroup.bpf.h"
#include "clock.bpf.h"

/* Time between two looks at the tasks that wait for a budget: a tick of most kernels. */
#define THROTTLE_TIMER_INTERVAL_NS 4000000ULL
/* A task waits for a budget for two fifths of the watchdog's time at most. A debt is never larger
 * than what its cgroup is paid in that time. */
#define LONGEST_THROTTLE_NS (2 * settings.watchdog_ns / 5)
/* The kernel's number for a cgroup without a limit is ~0; 10 years are none either. */
#define NO_LIMIT_US (10ULL * 365 * 24 * 3600 * 1000000)

/* How many cgroups have a limit. */
static __s64 limited_cgroups;

/* Adds the quota of the periods that have begun, without letting a budget grow past one quota. */
static void refill_budget(struct cgroup_node *node, __u64 now_ns)
{
	__u64 periods;

	bpf_spin_lock(&node->lock);
	if (node->period_ns && !is_before(now_ns, node->next_refill_ns)) {
		periods = (now_ns - node->next_refill_ns) / node->period_ns + 1;
		node->next_refill_ns += periods * node->period_ns;
		if (periods > 1000)
			periods = 1000;
		node->budget_ns += periods * node->quota_ns;
		if (node->budget_ns > (__s64)node->quota_ns)
			node->budget_ns = node->quota_ns;
	}
	bpf_spin_unlock(&node->lock);
}

/* Whether a cgroup or one of its ancestors has used up its budget. */
static bool is_throttled(__u32 index, __u64 now_ns)
{
	struct cgroup_node *node;
	int level;

	if (!limited_cgroups)
		return false;
	for (level = 0; level < MAX_CGROUP_DEPTH && index != ROOT_CGROUP_INDEX; level++) {
		node = cgroup_node_at(index);
		if (!node)
			return false;
		if (node->quota_ns) {
			if (!is_before(now_ns, node->next_refill_ns))
				refill_budget(node, now_ns);
			if (node->budget_ns <= 0)
				return true;
		}
		index = node->parent;
	}
	return false;
}

static bool is_dying(const struct task_struct *p)
{
	return p->flags & PF_EXITING || p->signal->flags & SIGNAL_GROUP_EXIT;
}

/* Whether a task of a cgroup has to wait for a budget. */
static bool must_wait_for_budget(const struct task_struct *p, __u32 index, __u64 now_ns)
{
	return is_throttled(index, now_ns) && !is_dying(p);
}

static void charge_budget(struct cgroup_node *node, __u64 used_ns)
{
	__s64 largest_debt = (LONGEST_THROTTLE_NS / (node->period_ns ?: 1) ?: 1) * node->quota_ns;

	bpf_spin_lock(&node->lock);
	node->budget_ns -= used_ns;
	if (node->budget_ns < -largest_debt)
		node->budget_ns = -largest_debt;
	bpf_spin_unlock(&node->lock);
}

/* Takes the time that a task ran off all limits that apply to it. */
static void charge_budgets(__u32 index, __u64 used_ns)
{
	struct cgroup_node *node;
	int level;

	if (!limited_cgroups)
		return;
	for (level = 0; level < MAX_CGROUP_DEPTH && index != ROOT_CGROUP_INDEX; level++) {
		node = cgroup_node_at(index);
		if (!node)
			return;
		if (node->quota_ns)
			charge_budget(node, used_ns);
		index = node->parent;
	}
}

/* Sets the limit of a cgroup; a quota of 0 removes it. */
static void set_cgroup_limit(__u32 index, __u64 quota_ns, __u64 period_ns)
{
	struct cgroup_node *node = cgroup_node_at(index);
	bool had_limit;

	if (!node || index == ROOT_CGROUP_INDEX || (node->quota_ns == quota_ns && node->period_ns == period_ns))
		return;
	had_limit = node->quota_ns;
	bpf_spin_lock(&node->lock);
	node->quota_ns = quota_ns;
	node->period_ns = period_ns;
	node->budget_ns = quota_ns;
	node->next_refill_ns = 0;
	bpf_spin_unlock(&node->lock);
	if (quota_ns)
		refill_budget(node, scx_bpf_now());
	__sync_fetch_and_add(&limited_cgroups, (__s64) !!quota_ns - (__s64)had_limit);
}

#endif
