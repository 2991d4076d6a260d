/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Ranks: which tasks go first. A thread is critical if a training step waits for it, as the probes see it: it
 * launches work, is in a collective, updates the model, or fetches its next batch. Neither its
 * kind of work nor that of loaders counts without privilege, or without a running observer.
 */
#ifndef ZERNEL_SCHED_RANK_H
#define ZERNEL_SCHED_RANK_H

#include "feed.bpf.h"
#include "guarantee.bpf.h"
#include "handoff.bpf.h"
#include "siblings.bpf.h"
#include "observer_clock.bpf.h"

/* Number of CPUs, besides the proposed one, that are looked at to find one that runs something of a lower rank. */
#define LOWER_RANK_CPU_CANDIDATES 4

static enum rank rank_of_class(__u64 class_word)
{
	switch (zernel_word_class(class_word)) {
	case ZERNEL_CLASS_CRITICAL:
	/* When the GPU will be done is unknown, so the thread stays on its CPU. */
	case ZERNEL_CLASS_GPU_WAIT:
		return RANK_CRITICAL;
	case ZERNEL_CLASS_FEED:
		if (!(settings.enabled_policies & POLICY_FEED))
			return RANK_ORDINARY;
		return zernel_word_role(class_word) == ZERNEL_ROLE_LOADER ? RANK_FEED : RANK_CRITICAL;
	default:
		return RANK_ORDINARY;
	}
}

/* The rank of a task that runs, or became runnable at `now_ns`. */
static enum rank rank_of_task(struct task_struct *p, const struct task *task, __u64 now_ns)
{
	const struct zernel_task_state *state;
	enum rank rank = RANK_ORDINARY;

	if (settings.privilege == PRIVILEGE_NOBODY || !is_privileged(p, task) ||
	    !has_live_observer(now_ns))
		return RANK_ORDINARY;
	if (inherits_critical_rank(p, task, now_ns))
		return RANK_CRITICAL;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	if (state)
		rank = rank_of_class(class_word_at(state, now_ns));
	return rank == RANK_ORDINARY && has_waiting_critical_sibling(p) ? RANK_FEED : rank;
}

/* A critical thread of a process has blocked. Moves its siblings in a queue to that of loaders. */
__attribute__((noinline)) int raise_queued_siblings(__u64 queue, __u32 process, __u64 now_ns)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	struct task *task;
	int raised = 0, i;

	if (!scx_bpf_dsq_nr_queued(queue))
		return 0;
	if (!bpf_iter_scx_dsq_new(&it, queue, 0)) {
		bpf_for(i, 0, SIBLING_TASK_CANDIDATES) {
			p = bpf_iter_scx_dsq_next(&it);
			if (!p || raised == MAX_RAISED_SIBLINGS)
				break;
			task = p->tgid == process ? task_of(p) : NULL;
			if (!task || rank_of_task(p, task, now_ns) != RANK_FEED ||
			    !scx_bpf_dsq_move_vtime(&it, p, RANK_QUEUE(queue, RANK_FEED), 0))
				continue;
			/* Its weight is counted under the lock of its CPU, so not before it runs (set_task_and_cpu_rank). */
			counters.raised++;
			raised++;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	return 0;
}

/* Raises the siblings of the task that a CPU ran last if that is a critical thread that has blocked. */
static void raise_siblings(struct task_struct *prev, __s32 cpu, __u64 now_ns)
{
	const struct task *task = task_of(prev);

	if (!task || !task->waits_for_thread)
		return;
	raise_queued_siblings(LLC_QUEUE(llc_of(cpu)), prev->tgid, now_ns);
	raise_queued_siblings(CPU_QUEUE(cpu), prev->tgid, now_ns);
}

/* Whether a task inherits from the current one, which wakes it. */
static bool inherit_from_waker(struct task_struct *p, struct task *task, enum rank rank, __u64 now_ns)
{
	struct task_struct *waker = bpf_get_current_task_btf();
	struct task *from;

	if (!(settings.enabled_policies & POLICY_HANDOFF) || waker->tgid != p->tgid || waker == p)
		return false;
	from = task_of(waker);
	if (!from)
		return false;
	end_inheritance(from, p);
	if (rank == RANK_CRITICAL || rank_of_task(waker, from, now_ns) != RANK_CRITICAL)
		return false;
	inherit_from_critical_waker(p, task, waker, from, now_ns);
	return true;
}

/* The rank of a task that wakes up. */
static enum rank rank_of_waking(struct task_struct *p, struct task *task, __u64 now_ns)
{
	const struct zernel_task_state *state;
	enum rank rank;

	if (settings.privilege == PRIVILEGE_NOBODY || !is_privileged(p, task))
		return RANK_ORDINARY;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	if (state)
		note_trainer_wakes_up(p, class_word_at(state, now_ns), now_ns);
	rank = rank_of_task(p, task, now_ns);
	return inherit_from_waker(p, task, rank, now_ns) ? RANK_CRITICAL : rank;
}

/* Whether a task that wakes up may preempt what a CPU runs. */
static bool may_preempt_by_rank(const struct task_struct *p, __u32 number, enum rank rank, __u64 now_ns)
{
	const struct cpu *cpu = cpu_at(number);

	return cpu->running_weight && cpu->rank < rank && bpf_cpumask_test_cpu(number, p->cpus_ptr) &&
	       may_go_first(number, now_ns);
}

/* A CPU whose running task a waking one should preempt, `cpu` if it can be, and one with an
 * ordinary task rather than one with a loader; -1: none of those looked at. */
static __s32 find_cpu_of_lower_rank(struct task_struct *p, const struct task *task, __s32 cpu,
			    enum rank rank, __u64 now_ns)
{
	__u32 first = next_preemption_candidate++, step, other;
	__s32 best;

	if (rank == RANK_ORDINARY || (rank == RANK_FEED && !feeds_waiting_process(p, task, now_ns)))
		return -1;
	best = may_preempt_by_rank(p, cpu, rank, now_ns) ? cpu : -1;
	if (best >= 0 && cpu_at(cpu)->rank == RANK_ORDINARY)
		return cpu;
	for (step = 0; step < LOWER_RANK_CPU_CANDIDATES; step++) {
		other = (first + step) % (settings.cpu_count ?: 1);
		if (!may_preempt_by_rank(p, other, rank, now_ns))
			continue;
		if (cpu_at(other)->rank == RANK_ORDINARY)
			return other;
		if (best < 0)
			best = other;
	}
	return best;
}

/* Notes the rank with which a task runs. */
static void set_task_and_cpu_rank(struct cpu *cpu, struct task *task, __u32 number, enum rank rank,
		      __u64 now_ns)
{
	bool goes_first = rank == RANK_FEED ? !pinned_lost_too_much(number, now_ns) :
					 rank == RANK_CRITICAL && !cpu->task_waits_too_long &&
						 may_go_first(number, now_ns);

	task->rank = goes_first ? rank : RANK_ORDINARY;
	count_ordinary_weight(task, rank == RANK_ORDINARY);
	set_running_rank(cpu, rank, true, now_ns);
}

#endif
