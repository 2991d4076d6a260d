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
#include "task_maps.h"

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

/* Notes that a thread wakes another one of its process. `rank`: that of the woken thread. */
static void hand_off(struct task_struct *p, struct task *task, enum rank rank, __u64 now_ns)
{
	struct task_struct *waker = bpf_get_current_task_btf();
	const struct zernel_task_state *state;
	__u32 donor = waker->pid;
	struct task *from;

	/* The compiler would merge this read with that of from->donor, which the verifier refuses. */
	barrier_var(donor);
	if (!(settings.policies & POLICY_HANDOFF) || waker->tgid != p->tgid || waker == p)
		return;
	from = task_of(waker);
	if (!from)
		return;
	if (from->donor == p->pid)
		from->heir_until_ns = 0;
	if (rank == CRITICAL || from->rank != CRITICAL)
		return;
	if (is_heir(waker, from, now_ns)) {
		make_heir(p, task, from->donor, from->heir_until_ns);
		return;
	}
	state = bpf_task_storage_get(&zernel_tasks, waker, 0, 0);
	if (state)
		make_heir(p, task, donor, state->class_until_ns);
}

#endif
