/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How long a training thread waits for its next batch, and what its loaders did meanwhile.
 *
 * A thread seldom gets a batch in a single block: a poll shows that the batch is ready, then descriptors are passed and
 * memory is mapped. So several blocks of a thread with less than a millisecond of CPU time between them are one wait.
 *
 * Loaders are processes. If a process has no loaders, its own threads count as loaders, the waiting thread included.
 * Its own threads also count when the training thread reads its data itself: then the processes that it forked do
 * something else.
 */
#ifndef DATALOAD_BPF_H
#define DATALOAD_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "dataload/state.bpf.h"
#include "duration.h"
#include "phase_tracker.h"
#include "process.h"
#include "sched/state.bpf.h"
#include "task_state.h"
#include "thread.h"
#include "work.h"

#define WAIT_MERGE_GAP_NS 1000000ULL

/* Stores the sums of the work that explains a wait. */
static __always_inline void store_work_sums(struct zernel_process *process,
						 struct dataload_thread *wait, __u64 *sums,
						 __u64 now_ns)
{
	__u64 *work = wait->is_by_loaders ? process->dataload.loader_work :
					    process->dataload.own_work;

	for (int i = 0; i < ZERNEL_WORK_KINDS; i++)
		sums[i] = zernel_work_sum_at(&work[i], now_ns);
}

/* ns * part / whole, without overflow. */
static __always_inline __u64 scaled_share(__u64 ns, __u64 part, __u64 whole)
{
	__u64 q16 = (part << 16) / whole;

	return (ns >> 16) * q16 + ((ns & 0xffff) * q16 >> 16);
}

/* Splits the time of a wait by the work that loaders did during the wait. While any loader works, the wait is for that
 * work. */
static __noinline int split_wait_by_work(struct zernel_process *process, struct dataload_thread *wait,
				   __u64 waited_ns)
{
	__u64 part[ZERNEL_WORK_KINDS], worked_ns = 0, explained_ns;

	for (int i = 0; i < ZERNEL_WORK_KINDS; i++) {
		part[i] = zernel_work_ns_between(wait->work_before[i], wait->work_after[i]);
		worked_ns += part[i];
	}
	explained_ns = worked_ns < waited_ns ? worked_ns : waited_ns;
	for (int i = 0; i < ZERNEL_WORK_KINDS && worked_ns; i++)
		__sync_fetch_and_add(&process->dataload.waited_ns[i],
				     scaled_share(explained_ns, part[i], worked_ns));
	__sync_fetch_and_add(&process->dataload.waited_ns[ZERNEL_WORK_KINDS], waited_ns - explained_ns);
	return 0;
}

static __noinline int end_data_wait(struct zernel_thread *thread, struct zernel_process *process)
{
	struct dataload_thread *wait = &thread->dataload;
	__u64 waited_ns = wait->until_ns - wait->since_ns;
	bool end_was_missed = wait->until_ns < wait->since_ns;
	bool was_prepared_before = wait->is_own_work && waited_ns < WAIT_MERGE_GAP_NS;

	wait->since_ns = 0;
	if (end_was_missed || was_prepared_before)
		return 0;
	split_wait_by_work(process, wait, waited_ns);
	zernel_observe_duration(thread->process_handle, ZERNEL_DATALOAD, waited_ns);
	return 0;
}

/* Ends a wait that no copy confirms. A tentative or short wait does not count. */
static __always_inline void give_up_data_wait(struct zernel_thread *thread,
					      struct zernel_process *process)
{
	struct dataload_thread *wait = &thread->dataload;

	if (wait->is_tentative || wait->until_ns < wait->since_ns + WAIT_MERGE_GAP_NS)
		wait->since_ns = 0;
	else
		end_data_wait(thread, process);
}

/* Marks a thread that runs a training loop. The process of such a thread is no loader, even if a trainer forked the
 * process. */
static __always_inline void mark_training_loop(struct zernel_thread *thread,
					       struct zernel_process *process)
{
	thread->dataload.runs_training_loop = true;
	if (process->flags & ZERNEL_IS_LOADER)
		zernel_turn_loader_into_trainer(process);
}

/* Whether the thread takes batches although its process has no GPU: it runs the training loop, or
 * it is the main thread of a process that has loaders. */
static __always_inline bool takes_batches_without_gpu(struct zernel_thread *thread,
						      struct zernel_process *process, bool is_main)
{
	return !zernel_uses_gpu(process) &&
	       (thread->dataload.runs_training_loop || (is_main && process->loader_count));
}

/* From now on the thread gets its next batch. All of that time is a wait for data, also if the thread prepares the
 * batch itself. A thread that does not announce batches may do something else, so a later copy decides whether it was a
 * wait. */
static __noinline int begin_data_wait(struct zernel_thread *thread, struct zernel_process *process,
				      __u64 now_ns, bool is_announced)
{
	struct dataload_thread *wait = &thread->dataload;

	wait->since_ns = now_ns;
	wait->until_ns = now_ns;
	wait->cpu_ns_since_block = 0;
	wait->is_announced = is_announced;
	wait->is_tentative = !is_announced;
	wait->is_own_work = !is_announced;
	wait->is_by_loaders = is_announced && process->loader_count;
	store_work_sums(process, wait, wait->work_before, now_ns);
	store_work_sums(process, wait, wait->work_after, now_ns);
	return 0;
}

/* Whether the event after which the tracker is in this state ended an optimizer step, and the thread does
 * not announce its batches. */
static __always_inline bool has_just_ended_step(const struct zernel_tracker *tracker, __u64 now_ns)
{
	return tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE && tracker->flags & ZERNEL_UNDECIDED &&
	       tracker->undecided_since_ns == now_ns;
}

enum data_wait_certainty {
	NO_DATA_WAIT,
	POSSIBLE_DATA_WAIT,
	CERTAIN_DATA_WAIT,
};

/* Whether a block is a wait for data. The tracker has already seen the block. */
static __always_inline enum data_wait_certainty classify_data_wait(struct zernel_thread *thread,
							 struct zernel_process *process,
							 struct zernel_task_state *state,
							 __u8 reason)
{
	struct zernel_tracker *tracker = &state->tracker;
	bool waits_for_ipc = reason == SCHED_BLOCKED_POLL || reason == SCHED_BLOCKED_IPC;

	/* A thread that announces its batches has no other waits for data. If a thread of the process announces its
	 * steps, only threads that announce steps wait for data. */
	if (zernel_in_call(tracker) || tracker->flags & ZERNEL_ANNOUNCES_DATA ||
	    (process->step_announcer_tid && !(tracker->flags & ZERNEL_ANNOUNCES_UPDATES)))
		return NO_DATA_WAIT;
	if (takes_batches_without_gpu(thread, process, state->pid == state->tgid))
		return reason == SCHED_BLOCKED_IO || (waits_for_ipc && process->loader_count) ?
			       CERTAIN_DATA_WAIT :
			       NO_DATA_WAIT;
	if (!(tracker->flags & ZERNEL_TRAINING_THREAD))
		return NO_DATA_WAIT;
	if (waits_for_ipc && process->loader_count)
		return CERTAIN_DATA_WAIT;
	if (tracker->activity == ZERNEL_ACTIVITY_LOADING && reason != SCHED_BLOCKED_OTHER)
		return CERTAIN_DATA_WAIT;
	return tracker->flags & ZERNEL_WAIT_UNDECIDED ? POSSIBLE_DATA_WAIT : NO_DATA_WAIT;
}

/* Whether a block is for loader processes: not for a disk, the network or a page. */
static __always_inline bool is_block_for_loaders(const struct zernel_process *process, __u8 reason)
{
	return process->loader_count && reason != SCHED_BLOCKED_IO && reason != SCHED_BLOCKED_NETWORK &&
	       reason != SCHED_BLOCKED_FAULT;
}

/* The thread blocks. The tracker has already seen the block. */
static __noinline int begin_or_go_on_data_wait(struct zernel_thread *thread, struct zernel_process *process,
				 struct zernel_task_state *state, __u64 now_ns)
{
	struct dataload_thread *wait = &thread->dataload;
	enum data_wait_certainty kind = classify_data_wait(thread, process, state, thread->sched.last_block_reason);
	bool by_loaders = is_block_for_loaders(process, thread->sched.last_block_reason);
	/* A thread without loaders prepares its batch itself, on the CPU, within the wait. */
	bool goes_on = wait->cpu_ns_since_block <= WAIT_MERGE_GAP_NS || wait->is_own_work ||
		       (!wait->is_by_loaders && kind == CERTAIN_DATA_WAIT && zernel_uses_gpu(process));

	if (wait->since_ns && wait->is_announced) {
		/* In a process without a GPU, a thread that runs on after a wait has its batch. */
		if (!zernel_uses_gpu(process) && wait->until_ns > wait->since_ns &&
		    wait->cpu_ns_since_block > WAIT_MERGE_GAP_NS)
			return end_data_wait(thread, process);
		thread->sched.last_block_awaits = SCHED_AWAITS_DATA;
		return 0;
	}
	if (wait->since_ns && (!goes_on || (by_loaders && !wait->is_by_loaders)))
		give_up_data_wait(thread, process);
	if (kind == NO_DATA_WAIT)
		return 0;
	thread->sched.last_block_awaits = SCHED_AWAITS_DATA;
	if (!wait->since_ns) {
		wait->since_ns = now_ns;
		wait->is_announced = false;
		wait->is_own_work = false;
		wait->is_tentative = kind == POSSIBLE_DATA_WAIT;
		wait->is_by_loaders = by_loaders;
		store_work_sums(process, wait, wait->work_before, now_ns);
	} else if (kind == CERTAIN_DATA_WAIT) {
		wait->is_tentative = false;
	}
	return 0;
}

/* Drops a tentative wait: other threads of the process launched meanwhile, so the thread waited for
 * them. */
static __always_inline void drop_tentative_wait(struct zernel_thread *thread)
{
	if (thread->dataload.is_tentative)
		thread->dataload.since_ns = 0;
}

/* Called when a block of a thread that waits for data ends: the batch may be ready. */
static __always_inline void extend_data_wait(struct zernel_thread *thread, struct zernel_process *process,
				       __u64 now_ns)
{
	struct dataload_thread *wait = &thread->dataload;

	wait->until_ns = now_ns;
	wait->cpu_ns_since_block = 0;
	store_work_sums(process, wait, wait->work_after, now_ns);
}

/* Ends a wait that was announced. Without a GPU, nothing shows when a batch that loaders made was
 * received, except that the thread runs on. */
static __noinline int end_announced_wait(struct zernel_thread *thread,
					 struct zernel_process *process, __u64 now_ns)
{
	struct dataload_thread *wait = &thread->dataload;
	__u64 stretch_ns = thread->sched.run_state == SCHED_ON_CPU ? now_ns - thread->sched.since_ns :
								 0;
	bool runs_on = wait->cpu_ns_since_block + stretch_ns > WAIT_MERGE_GAP_NS;

	if (zernel_uses_gpu(process) || !wait->is_by_loaders || !runs_on)
		extend_data_wait(thread, process, now_ns);
	return end_data_wait(thread, process);
}

/* The thread uses the GPU while a wait is open: it has got its batch. */
static __noinline int end_data_wait_at_use(struct zernel_thread *thread, struct zernel_process *process,
				__u32 event, __u64 now_ns)
{
	struct dataload_thread *wait = &thread->dataload;
	bool copies = event == ZERNEL_COPY_TO_DEVICE;
	__u64 stretch_ns = thread->sched.run_state == SCHED_ON_CPU ? now_ns - thread->sched.since_ns :
								 0;

	if (wait->is_announced)
		return end_announced_wait(thread, process, now_ns);
	/* Clearing gradients does not end a wait: loops clear them between preparing a batch and copying it. */
	if (wait->is_own_work && (event == ZERNEL_ZERO_GRADIENTS || event == ZERNEL_UPDATE_END))
		return 0;
	if (wait->until_ns < wait->since_ns) {
		wait->since_ns = 0; /* the end of its block was missed */
		return 0;
	}
	if (wait->cpu_ns_since_block + stretch_ns <= WAIT_MERGE_GAP_NS || (copies && !wait->is_by_loaders))
		extend_data_wait(thread, process, now_ns);
	if (copies)
		end_data_wait(thread, process);
	else
		give_up_data_wait(thread, process);
	return 0;
}

#endif
