/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Feeding. Loaders go before ordinary tasks. The loaders of a hungry trainer also preempt them
 * when they wake up. A trainer is hungry while it waits for data, and to a loader until that loader
 * blocks: then the trainer's queue is full.
 */
#ifndef ZERNEL_SCHED_FEED_H
#define ZERNEL_SCHED_FEED_H

#include "siblings.bpf.h"
#include "state.bpf.h"
#include "observer_clock.bpf.h"

/* Whether the current task loads data for a process. */
static bool is_woken_by_loader(__u32 process)
{
	const struct zernel_task_state *state =
		bpf_task_storage_get(&zernel_tasks, bpf_get_current_task_btf(), 0, 0);

	return state && state->trainer == process &&
	       zernel_word_role(state->class_word) == ZERNEL_ROLE_LOADER;
}

/* Notes that a training thread wakes up. It waited for data if the probes saw it, or if a loader
 * wakes it. */
static void note_trainer_wakes_up(struct task_struct *p, __u64 class_word, __u64 now_ns)
{
	struct task *process;

	if (!(settings.enabled_policies & POLICY_FEED) ||
	    zernel_word_role(class_word) != ZERNEL_ROLE_TRAINER)
		return;
	process = process_state_of(p);
	if (!process)
		return;
	process->last_training_tid = p->pid;
	if (zernel_word_reason(class_word) == ZERNEL_REASON_DATA || is_woken_by_loader(p->tgid))
		process->data_wait_ended_ns = now_ns;
}

/* Whether a thread is blocked until it gets data. */
static bool waits_for_data(__u32 pid, __u64 now_ns)
{
	struct task_struct *p = bpf_task_from_pid(pid);
	const struct zernel_task_state *state;
	__u64 word = 0;

	if (!p)
		return false;
	state = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	if (state)
		word = class_word_at(state, now_ns);
	bpf_task_release(p);
	return word & ZERNEL_CLASS_BLOCKED && zernel_word_reason(word) == ZERNEL_REASON_DATA;
}

/* Whether the process that a loader works for is hungry, or waits for another of its threads. */
static bool feeds_waiting_process(struct task_struct *p, const struct task *task, __u64 now_ns)
{
	const struct zernel_task_state *loader = bpf_task_storage_get(&zernel_tasks, p, 0, 0);
	struct task_struct *leader = loader ? bpf_task_from_pid(loader->trainer) : NULL;
	const struct task *process;
	__u32 trainer = 0;
	bool waited = false;

	if (!leader)
		return has_waiting_critical_sibling(p);
	process = bpf_task_storage_get(&tasks, leader, 0, 0);
	if (process) {
		trainer = process->last_training_tid;
		waited = is_before(task->blocked_ns, process->data_wait_ended_ns);
	}
	bpf_task_release(leader);
	return waited || has_waiting_critical_sibling(p) || (trainer && waits_for_data(trainer, now_ns));
}

#endif
