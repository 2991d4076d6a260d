/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Hand-off. A critical thread wakes another thread of its process and waits for it: a backward
 * pass, a stream, a proxy of a collective. The step then waits for that thread, so it is critical
 * too, until it wakes the thread that it inherits from, or the class of that thread ends. The last
 * two heirs of a process count.
 */
#ifndef ZERNEL_SCHED_HANDOFF_H
#define ZERNEL_SCHED_HANDOFF_H

#include "state.bpf.h"
#include "observer_clock.bpf.h"

/* Threads of a process that may inherit at once. */
#define MAX_INHERITING_THREADS 2

static bool inherits_critical_rank(struct task_struct *p, const struct task *task, __u64 now_ns)
{
	const struct task *process;

	if (!(settings.enabled_policies & POLICY_HANDOFF) || task->inherits_until_ns <= now_ns)
		return false;
	process = process_state_of(p);
	return process && process->handoff_count - task->handoff_number < MAX_INHERITING_THREADS;
}

static void let_inherit_critical_rank(struct task_struct *p, struct task *task, __u32 donor, __u64 until_ns)
{
	struct task *process = process_state_of(p);

	if (!process)
		return;
	counters.handoffs++;
	task->rank_donor = donor;
	task->inherits_until_ns = until_ns;
	task->handoff_number = __sync_fetch_and_add(&process->handoff_count, 1) + 1;
}

/* A thread that wakes the one it inherits from has done its part. */
static void end_inheritance(struct task *waker, const struct task_struct *woken)
{
	if (waker->rank_donor == woken->pid)
		waker->inherits_until_ns = 0;
}

/* A critical thread wakes another one of its process. An heir hands on what it inherited. */
static void inherit_from_critical_waker(struct task_struct *p, struct task *task, struct task_struct *waker,
		     const struct task *from, __u64 now_ns)
{
	const struct zernel_task_state *state;
	__u32 donor = waker->pid;

	/* The compiler would merge this read with that of from->rank_donor, which the verifier refuses. */
	barrier_var(donor);
	if (inherits_critical_rank(waker, from, now_ns)) {
		let_inherit_critical_rank(p, task, from->rank_donor, from->inherits_until_ns);
		return;
	}
	state = bpf_task_storage_get(&zernel_tasks, waker, 0, 0);
	if (state)
		let_inherit_critical_rank(p, task, donor, class_until_ns(state));
}

#endif
