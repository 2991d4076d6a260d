/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Critical threads first. A critical thread is one that a training step waits for, as the probes
 * see it: it launches work, is in a collective, or updates the model. A critical thread of a
 * privileged task runs at once, preempting others, and is kept on its CPU.
 *
 * The guarantee bounds what others lose. Were everybody treated fairly, the shared clock would
 * advance by CPUs / (sum of the weights of all runnable tasks). The promised clock advances at a
 * fraction of that speed, the guarantee. Critical threads do not advance the shared clock, so it
 * slows down while they take more than their share. Once it is 10 ms behind the promised clock,
 * critical threads are scheduled like all others, until it has caught up.
 */
#ifndef ZERNEL_SCHED_CRITICAL_H
#define ZERNEL_SCHED_CRITICAL_H

#include "queue.bpf.h"
#include "task_maps.h"

/* How far the shared clock may fall behind the promised one, in virtual time of a task with nice 0.
 */
#define LARGEST_LOSS 10000000LL
/* A CPU serves its queues at least this often. */
#define LONGEST_HOLD_NS (SECOND_NS / 10)
/* CPUs that are looked at to find one that runs nothing critical. */
#define CRITICAL_CANDIDATES 4

static __u64 promised;
static __u64 promised_up_to_ns;

static bool is_privileged(const struct task *task)
{
	__u32 index = task->node, level;
	struct node *node;

	if (settings.privilege == PRIVILEGE_ALL)
		return true;
	if (settings.privilege == PRIVILEGE_TREE)
		return task->in_tree;
	if (settings.privilege != PRIVILEGE_CGROUP)
		return false;
	for (level = 0; level < MAX_DEPTH && index != ROOT; level++) {
		if (index == privileged_node)
			return true;
		node = node_at(index);
		if (!node)
			return false;
		index = node->parent;
	}
	return false;
}

/* Whether a step waits for a task that is runnable now. */
static bool is_critical(struct task_struct *p, const struct task *task, __u64 now_ns)
{
	const struct zernel_task_state *state;

	if (settings.privilege == PRIVILEGE_NOBODY || !is_privileged(task))
		return false;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	if (!state ||
	    zernel_word_class(zernel_class_word_at(state, now_ns)) != ZERNEL_CLASS_CRITICAL)
		return false;
	return zernel_is_observed(now_ns);
}

/* Advances the promised clock. Of several CPUs that do it at once, one succeeds. */
static void promise(__u64 now_ns)
{
	__u64 before_ns = promised_up_to_ns;
	__s64 elapsed_ns = now_ns - before_ns;
	__s64 weight = root_active;

	if (elapsed_ns <= 0 || !__sync_bool_compare_and_swap(&promised_up_to_ns, before_ns, now_ns))
		return;
	if (weight > 0 && elapsed_ns < (__s64)SECOND_NS)
		promised += (__u64)elapsed_ns * settings.cpus * settings.guarantee_percent / weight;
	/* What others got beyond the promise is no credit. */
	if (is_before(promised, shared_clock.now))
		promised = shared_clock.now;
}

/* Nobody loses anything while a CPU is idle. */
static void promise_kept(__u64 now_ns)
{
	if (settings.privilege == PRIVILEGE_NOBODY)
		return;
	promised_up_to_ns = now_ns;
	promised = shared_clock.now;
}

/* Whether critical threads may go first now. */
static bool may_go_first(__u64 now_ns)
{
	promise(now_ns);
	if ((__s64)(promised - shared_clock.now) < LARGEST_LOSS)
		return true;
	counters.guarantee_hits++;
	return false;
}

/* Whether the running critical thread of a CPU may go on. Pinned tasks, and those that may use few
 * CPUs, can starve although others do well: they get their turn as well. */
static bool may_be_kept(__u32 number, __u64 now_ns)
{
	if (scx_bpf_dsq_nr_queued(CPU_QUEUE(number)) ||
	    now_ns - cpu_at(number)->served_ns > LONGEST_HOLD_NS)
		return false;
	return may_go_first(now_ns);
}

/* A CPU that runs nothing critical, `cpu` if it can be; -1: none of those looked at. */
static __s32 find_uncritical_cpu(struct task_struct *p, __s32 cpu)
{
	__u32 first = next_candidate++, step, other;

	if (!cpu_at(cpu)->runs_critical && bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
		return cpu;
	for (step = 0; step < CRITICAL_CANDIDATES; step++) {
		other = (first + step) % (settings.cpus ?: 1);
		if (!cpu_at(other)->runs_critical && cpu_at(other)->weight &&
		    bpf_cpumask_test_cpu(other, p->cpus_ptr))
			return other;
	}
	return -1;
}

#endif
