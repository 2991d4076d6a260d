/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Siblings. A critical thread that blocks, and not for the GPU, waits for another thread: the one
 * that holds Python's global lock, a thread that loads data, a pool. Which one is unknown, so all
 * threads of its process rise to the rank of loaders until it wakes up: those that become runnable, and
 * the first of those that wait in a queue of its CPU (raise_queued_siblings).
 */
#ifndef ZERNEL_SCHED_SIBLINGS_H
#define ZERNEL_SCHED_SIBLINGS_H

#include "state.bpf.h"
#include "observer_clock.bpf.h"

/* Tasks of a queue that are looked at when a critical thread blocks, and how many of them may rise. */
#define SIBLING_TASK_CANDIDATES 32
#define MAX_RAISED_SIBLINGS 4

/* Whether a critical thread of a task's process waits for another thread. */
static bool has_waiting_critical_sibling(struct task_struct *p)
{
	const struct task *process;

	if (!(settings.enabled_policies & POLICY_SIBLINGS))
		return false;
	process = process_state_of(p);
	return process && process->waiting_critical_threads > 0;
}

static void set_waits_for_thread(struct task_struct *p, struct task *task, bool waits)
{
	struct task *process;

	if (task->waits_for_thread == waits)
		return;
	process = process_state_of(p);
	if (!process)
		return;
	task->waits_for_thread = waits;
	__sync_fetch_and_add(&process->waiting_critical_threads, waits ? 1 : -1);
}

/* Notes that a critical thread blocks. One that exits never wakes up. */
static void note_critical_thread_blocks(struct task_struct *p, struct task *task, __u64 now_ns)
{
	const struct zernel_task_state *state;

	if (!(settings.enabled_policies & POLICY_SIBLINGS) || p->flags & PF_EXITING)
		return;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	if (state && !(class_word_at(state, now_ns) & ZERNEL_CLASS_IN_SYNC))
		set_waits_for_thread(p, task, true);
}

/* A thread leaves for another scheduling class, in which nobody sees it wake up. A thread that exits waits for
 * nobody, and its main thread may be freed. */
static void forget_waits_for_thread(struct task_struct *p, struct task *task)
{
	if (!(p->flags & PF_EXITING))
		set_waits_for_thread(p, task, false);
}

#endif
