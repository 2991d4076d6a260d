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
#define MAX_HEIRS 2

static bool is_heir(struct task_struct *p, const struct task *task, __u64 now_ns)
{
	const struct task *process;

	if (!(settings.policies & POLICY_HANDOFF) || task->heir_until_ns <= now_ns)
		return false;
	process = process_of(p);
	return process && process->handoffs - task->handoff < MAX_HEIRS;
}

static void make_heir(struct task_struct *p, struct task *task, __u32 donor, __u64 until_ns)
{
	struct task *process = process_of(p);

	if (!process)
		return;
	counters.handoffs++;
	task->donor = donor;
	task->heir_until_ns = until_ns;
	task->handoff = __sync_fetch_and_add(&process->handoffs, 1) + 1;
}

/* A thread that wakes the one it inherits from has done its part. */
static void end_inheritance(struct task *waker, const struct task_struct *woken)
{
	if (waker->donor == woken->pid)
		waker->heir_until_ns = 0;
}

/* A critical thread wakes another one of its process. An heir hands on what it inherited. */
static void hand_off(struct task_struct *p, struct task *task, struct task_struct *waker,
		     const struct task *from, __u64 now_ns)
{
	const struct zernel_task_state *state;
	__u32 donor = waker->pid;

	/* The compiler would merge this read with that of from->donor, which the verifier refuses. */
	barrier_var(donor);
	if (is_heir(waker, from, now_ns)) {
		make_heir(p, task, from->donor, from->heir_until_ns);
		return;
	}
	state = bpf_task_storage_get(&zernel_tasks, waker, 0, 0);
	if (state)
		make_heir(p, task, donor, class_until_ns(state));
}

#endif
