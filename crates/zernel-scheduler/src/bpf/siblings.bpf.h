/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Siblings. A critical thread that blocks, and not for the GPU, waits for another thread: the one
 * that holds Python's global lock, a thread that loads data, a pool. Which one is unknown, so all
 * threads of its process rise to the rank of loaders until it wakes up: those that become runnable, and
 * the first of those that wait in a queue of its CPU (raise_queued).
 */
#ifndef ZERNEL_SCHED_SIBLINGS_H
#define ZERNEL_SCHED_SIBLINGS_H

#include "state.bpf.h"
#include "observer_clock.bpf.h"

/* Tasks of a queue that are looked at when a critical thread blocks, and how many of them may rise. */
#define SIBLING_CANDIDATES 32
#define MAX_RAISED 4

/* Whether a critical thread of a task's process waits for another thread. */
static bool is_waited_for(struct task_struct *p)
{
	const struct task *process;

	if (!(settings.policies & POLICY_SIBLINGS))
		return false;
	process = process_of(p);
	return process && process->waiting_threads > 0;
}

static void set_waiting(struct task_struct *p, struct task *task, bool waits)
{
	struct task *process;

	if (task->waits == waits)
		return;
	process = process_of(p);
	if (!process)
		return;
	task->waits = waits;
	__sync_fetch_and_add(&process->waiting_threads, waits ? 1 : -1);
}

/* Notes that a critical thread blocks. One that exits never wakes up. */
static void note_block(struct task_struct *p, struct task *task, __u64 now_ns)
{
	const struct zernel_task_state *state;

	if (!(settings.policies & POLICY_SIBLINGS) || p->flags & PF_EXITING)
		return;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	if (state && !(class_word_at(state, now_ns) & ZERNEL_CLASS_IN_SYNC))
		set_waiting(p, task, true);
}

/* A thread leaves for another scheduling class, in which nobody sees it wake up. A thread that exits waits for
 * nobody, and its main thread may be freed. */
static void forget_block(struct task_struct *p, struct task *task)
{
	if (!(p->flags & PF_EXITING))
		set_waiting(p, task, false);
}

#endif
