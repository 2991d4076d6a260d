/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which thread ends a wait. A thread whose wake-up ends a trainer's wait for data loads data, whatever the loader
 * is made of: a pool of threads, a queue, a child that writes to a pipe.
 *
 * This runs in the thread that wakes another one, or in an interrupt on top of any thread. So it runs
 * while the woken thread may still be on its way to sleep on another CPU. It reads what that thread last
 * wrote, and writes only fields that no other program writes.
 */
#ifndef SCHED_WAKEUPS_BPF_H
#define SCHED_WAKEUPS_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "phase_tracker.h"
#include "process.h"
#include "sched/sched.bpf.h"
#include "sched/state.bpf.h"
#include "settings.h"
#include "task_state.h"
#include "thread.h"

/* Whether a system call may hand something to another thread. An interrupt wakes threads too; the thread
 * below it is seldom in one of these calls. The numbers are those of x86-64. */
static __always_inline bool is_hand_over_call(unsigned long call)
{
	switch (call) {
	case 1: /* write */
	case 20: /* writev */
	case 44: /* sendto */
	case 46: /* sendmsg */
	case 60: /* exit: another thread joins this one */
	case FUTEX_CALL:
	case 307: /* sendmmsg */
	case 454: /* futex_wake */
		return true;
	default:
		return false;
	}
}

/* Whether a blocked thread waits for another thread or process, and not for a lock. */
static __always_inline bool awaits_hand_over(const struct sched_thread *run)
{
	return run->run_state == SCHED_BLOCKED && run->last_block_lock == SCHED_NO_LOCK &&
	       (run->last_block_reason == SCHED_BLOCKED_FUTEX || run->last_block_reason == SCHED_BLOCKED_IPC ||
		run->last_block_reason == SCHED_BLOCKED_POLL);
}

/* Whether a thread has waited long enough for what ends its wait to mean something. A thread that is made to release
 * Python's lock waits until another one has taken it, which seldom takes as long. The tracker of a thread that has only
 * begun to block shows its wait before. */
static __always_inline bool has_waited_long_enough(const struct zernel_tracker *tracker)
{
	struct zernel_settings *set = zernel_settings();

	return set && tracker->flags & ZERNEL_IS_BLOCKED &&
	       bpf_ktime_get_ns() - tracker->wait_since_ns >= set->tracker.short_wait_max_ns;
}

/* Whether a blocked thread runs a training loop and waits for data. */
static __always_inline bool awaits_data(const struct zernel_tracker *tracker)
{
	return tracker->flags & ZERNEL_TRAINING_THREAD && tracker->activity == ZERNEL_ACTIVITY_LOADING &&
	       !zernel_in_call(tracker);
}

/* Whether a blocked thread may wait for its next batch, after its optimizer step. */
static __always_inline bool may_await_data(const struct zernel_tracker *tracker)
{
	return tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE && tracker->flags & ZERNEL_UNDECIDED &&
	       !zernel_in_call(tracker);
}

/* A thread that is not observed ended a trainer's wait for data. If a child of the trainer did,
 * userspace has it adopted. */
static __always_inline void note_helper_child(struct zernel_process *process, struct task_struct *waker)
{
	struct task_struct *parent = BPF_CORE_READ(waker, real_parent);
	__u32 forked_by = BPF_CORE_READ(parent, tgid);

	if (forked_by == process->pid)
		process->dataload.helper = (__u32)waker->tgid;
	else if (BPF_CORE_READ(parent, real_parent, tgid) == (int)process->pid)
		process->dataload.helper = forked_by;
}

/* A thread of the same process ended a wait. If it makes probed calls, it may do other work for the one that
 * waited. */
static __always_inline void note_hand_over_in_process(struct zernel_thread *by,
						  struct zernel_thread *thread,
						  const struct zernel_tracker *tracker)
{
	__u64 now_ns = bpf_ktime_get_ns();

	if (by->dist_sync.peer_wait_ended_ns > tracker->wait_since_ns) {
		thread->sched.handed_by_waker = SCHED_HANDED_COLLECTIVE;
		return;
	}
	if (awaits_data(tracker) || (!by->last_phase_call_ns && may_await_data(tracker)))
		by->sched.ended_data_wait_ns = now_ns;
	if (has_handed_over_data(&by->sched, now_ns))
		thread->sched.handed_by_waker = SCHED_HANDED_DATA;
}

/* The current thread wakes an observed one. */
static __noinline int note_hand_over(struct task_struct *woken, struct zernel_thread *thread)
{
	struct task_struct *waker = bpf_get_current_task_btf();
	struct pt_regs *registers = (struct pt_regs *)bpf_task_pt_regs(waker);
	struct zernel_thread *by;
	struct zernel_process *process;
	struct zernel_task_state *state;

	if (!is_hand_over_call(registers->orig_rax))
		return 0;
	process = zernel_process(thread->process_handle);
	state = bpf_task_storage_get(&zernel_tasks, woken, 0, 0);
	if (!process || !state)
		return 0;
	by = find_observed_thread(waker);
	if (state->flags & ZERNEL_TASK_IS_LOADER) {
		thread->sched.is_woken_by_trainer = by && by->process_handle == process->trainer_handle;
		return 0;
	}
	if (!has_waited_long_enough(&state->tracker))
		return 0;
	if (by && by->process_handle == thread->process_handle)
		note_hand_over_in_process(by, thread, &state->tracker);
	else if (!by && awaits_data(&state->tracker))
		note_helper_child(process, waker);
	return 0;
}

/* Argument: the task that is woken up. */
SEC("tp_btf/sched_waking")
int sched_waking(__u64 *ctx)
{
	struct task_struct *woken = (struct task_struct *)ctx[0];
	struct zernel_thread *thread = find_observed_thread(woken);

	if (thread && awaits_hand_over(&thread->sched))
		note_hand_over(woken, thread);
	return 0;
}

#endif
