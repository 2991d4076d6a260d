/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Threads of ML processes on and off their CPUs: how long they run, how long they are runnable and
 * do not run, and why they are blocked.
 *
 * Threads of an observed process, and the processes it forks to load data, get storage when they
 * are forked, or from an iterator. Other threads have none. A context switch checks that first, and
 * for most threads does nothing else.
 *
 * When a thread runs again, the kernel's own account shows since when it was runnable. Wake-ups show
 * only which thread ended a wait; see wakeups.bpf.h.
 *
 * A thread's storage is written by its own calls and while it is being switched, which never happens
 * on two CPUs at once. Only adopt_tasks writes from elsewhere, and only to a thread that had no storage,
 * sample_tasks, which writes phase and class of threads that are not tracked, and sched_waking, which
 * writes fields of its own.
 */
#ifndef SCHED_BPF_H
#define SCHED_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "dataload/dataload.bpf.h"
#include "decisions.h"
#include "dist_sync/dist_sync.bpf.h"
#include "duration.h"
#include "hints.h"
#include "losses.h"
#include "phase_tracker.h"
#include "process.h"
#include "sched/block_reason.bpf.h"
#include "sched/state.bpf.h"
#include "sched/tracked_waits.bpf.h"
#include "settings.h"
#include "shared_state.h"
#include "storage.h"
#include "task_state.h"
#include "thread.h"
#include "trace.h"
#include "work.h"

#define PF_EXITING 0x4
/* Length of the intervals, about a second each, after which the recent share of I/O is updated. */
#define AVERAGING_INTERVAL_NS (1ULL << 30)
/* After a thread was without a CPU for this time, its earlier averages mean nothing. */
#define AVERAGES_STALE_AFTER_NS (16 * AVERAGING_INTERVAL_NS)

/* How far the scheduler's clock is ahead of bpf_ktime_get_ns(), as last seen: the two drift apart
 * slowly. */
static volatile __u64 scheduler_clock_ahead_ns;

/* How long the current thread has been on a CPU since it last blocked. */
static __always_inline __u64 burst_ns_of(const struct zernel_thread *thread, __u64 now_ns)
{
	const struct sched_thread *run = &thread->sched;
	__u64 stretch_ns = run->run_state == SCHED_ON_CPU ? now_ns - run->since_ns : 0;

	return run->burst_ns + stretch_ns + 1;
}

/* The kind of work that the run state of a loading thread counts as; ZERNEL_WORK_KINDS: no work. */
static __always_inline __u32 work_kind_of(const struct sched_thread *run)
{
	switch (run->run_state) {
	case SCHED_ON_CPU:
		return ZERNEL_WORK_PREPARE;
	case SCHED_RUNNABLE:
		return ZERNEL_WORK_QUEUED;
	case SCHED_BLOCKED:
		return run->last_block_reason == SCHED_BLOCKED_IO || run->last_block_reason == SCHED_BLOCKED_NETWORK ||
				       run->last_block_reason == SCHED_BLOCKED_FAULT ?
			       ZERNEL_WORK_FETCH :
			       ZERNEL_WORK_KINDS;
	default:
		return ZERNEL_WORK_KINDS;
	}
}

/* Changes the run state of a thread, and adds the time in the old state to the sums. */
static __noinline int set_run_state(struct zernel_thread *thread, struct zernel_process *process,
				    __u8 state, __u64 now_ns)
{
	struct sched_thread *run = &thread->sched;
	struct zernel_process *trainer = zernel_process(run->counting_trainer);
	__u32 work = work_kind_of(run);

	barrier_var(work);
	if (work < ZERNEL_WORK_KINDS) {
		zernel_end_work(&process->dataload.own_work[work], now_ns);
		if (trainer)
			zernel_end_work(&trainer->dataload.loader_work[work], now_ns);
	}
	run->run_state = state;
	run->since_ns = now_ns;
	if (run->counting_trainer != process->trainer_handle) {
		run->counting_trainer = process->trainer_handle;
		trainer = zernel_process(run->counting_trainer);
	}
	work = work_kind_of(run);
	barrier_var(work);
	if (work < ZERNEL_WORK_KINDS) {
		zernel_begin_work(&process->dataload.own_work[work], now_ns);
		if (trainer)
			zernel_begin_work(&trainer->dataload.loader_work[work], now_ns);
	}
	return 0;
}

/* Ends the counted work of a thread that exits after its process record was freed. */
static __noinline int end_counted_work(struct zernel_thread *thread, __u64 now_ns)
{
	struct sched_thread *run = &thread->sched;
	struct zernel_process *trainer = zernel_process(run->counting_trainer);
	__u32 work = work_kind_of(run);

	barrier_var(work);
	if (trainer && work < ZERNEL_WORK_KINDS)
		zernel_end_work(&trainer->dataload.loader_work[work], now_ns);
	run->run_state = SCHED_STATE_UNKNOWN;
	run->counting_trainer = 0;
	thread->process_handle = 0;
	return 0;
}

/* Moves part of a block, in which the thread was runnable, to ZERNEL_WORK_QUEUED. */
static __always_inline void move_block_to_queued_work(__u64 *works, __u32 work, __u64 ns)
{
	if (work == ZERNEL_WORK_FETCH)
		zernel_move_work(&works[ZERNEL_WORK_FETCH], &works[ZERNEL_WORK_QUEUED], ns);
	else
		__sync_fetch_and_add(&works[ZERNEL_WORK_QUEUED], zernel_work_timestamp(ns));
}

/* Publishes the GPU of a thread: that of its process, or of the process that it loads data for. */
static __always_inline void publish_gpu(struct zernel_task_state *state,
					const struct zernel_process *process)
{
	const struct zernel_process *user =
		process->flags & ZERNEL_IS_LOADER ? zernel_process(process->trainer_handle) : process;
	__u64 gpu = user ? user->gpu : 0;

	state->gpu_id = (__u32)gpu - 1; /* ZERNEL_NO_GPU, if it is not known */
	state->gpu_utilization = gpu >> 32;
}

/* The share of I/O after another interval, in which the thread waited for I/O for `io_ns`. The result is a running
 * average: half of the last interval, half of the average before. */
static __always_inline __u32 recent_io_q16(const struct zernel_task_state *state, __u64 io_ns,
					   __u64 elapsed_ns)
{
	__u64 average;

	if (elapsed_ns >= AVERAGES_STALE_AFTER_NS)
		return 0;
	average = (state->io_wait_q16 + (io_ns << 16) / elapsed_ns) / 2;
	return average > ZERNEL_Q16_ONE ? ZERNEL_Q16_ONE : average;
}

/* Brings what is published of the last second up to date. Recent values are running averages. */
static __always_inline void update_recent_averages(struct sched_thread *run, struct zernel_task_state *state,
					  const struct zernel_process *process, __u64 now_ns)
{
	__u64 elapsed_ns = now_ns - run->recent_since_ns;

	if (elapsed_ns < AVERAGING_INTERVAL_NS)
		return;
	state->io_wait_q16 = recent_io_q16(state, run->recent_io_ns, elapsed_ns);
	state->futex_waits = elapsed_ns < AVERAGES_STALE_AFTER_NS ?
				     (state->futex_waits + run->recent_futex_waits) / 2 :
				     0;
	run->recent_since_ns = now_ns;
	run->recent_io_ns = 0;
	run->recent_futex_waits = 0;
	publish_gpu(state, process);
}

/* Publishes whether a thread loads data, and for which process. */
static __noinline int publish_trainer(const struct zernel_thread *thread,
				      struct zernel_task_state *state,
				      const struct zernel_process *process, __u64 now_ns)
{
	const struct zernel_process *trainer = zernel_process(process->trainer_handle);
	bool is_forked = process->flags & ZERNEL_IS_LOADER;

	if (loads_data(thread, process, state, now_ns))
		state->flags |= ZERNEL_TASK_IS_LOADER;
	else
		state->flags &= ~ZERNEL_TASK_IS_LOADER;
	state->trainer = !is_forked ? state->tgid : trainer ? trainer->pid : 0;
	zernel_publish_class(state, now_ns);
	if (!is_forked)
		zernel_trace_if_enabled(state, thread->process_handle, now_ns,
			     state->flags & ZERNEL_TASK_IS_LOADER ? ZERNEL_TRACE_LOADING_BEGIN :
								    ZERNEL_TRACE_LOADING_END,
			     ZERNEL_NONE);
	return 0;
}

/* A thread may turn out to load data, or to load none any more. A process that was forked to load data may turn out to train. */
static __always_inline void publish_trainer_if_changed(const struct zernel_thread *thread,
					 struct zernel_task_state *state,
					 const struct zernel_process *process, __u64 now_ns)
{
	bool was_loader = state->flags & ZERNEL_TASK_IS_LOADER;

	if (loads_data(thread, process, state, now_ns) != was_loader)
		publish_trainer(thread, state, process, now_ns);
}

/* How long a thread that is being switched in was runnable. */
static __always_inline __u64 run_delay_of(struct task_struct *task, struct sched_thread *run,
				      __u64 now_ns)
{
	__u64 absent_ns = now_ns - run->since_ns;
	__u64 queued = task->sched_info.last_queued;
	__u64 delay_ns = task->sched_info.run_delay - run->run_delay_at_block_ns;
	__u64 clock_ahead_ns = scheduler_clock_ahead_ns;

	if (run->run_state == SCHED_RUNNABLE)
		return absent_ns;
	if (queued && clock_ahead_ns && (__s64)(now_ns + clock_ahead_ns - queued) > 0)
		delay_ns += now_ns + clock_ahead_ns - queued;
	return delay_ns < absent_ns ? delay_ns : absent_ns;
}

/* Whether the thread makes probed calls that mean something for its phase. The time limit is long, because the calls of
 * sampled functions are seen only in sampling windows. */
static __always_inline bool makes_probed_calls(const struct zernel_thread *thread, __u64 now_ns)
{
	return thread->last_phase_call_ns && now_ns - thread->last_phase_call_ns < SCHED_ROLE_TIMEOUT_NS;
}

/* Records a thread's time off its CPU; for `delay_ns` of it the thread was runnable. */
static __noinline int end_time_off_cpu(struct zernel_thread *thread, struct zernel_process *process,
				  __u64 delay_ns, __u64 now_ns)
{
	struct sched_thread *run = &thread->sched;
	struct zernel_process *trainer = zernel_process(run->counting_trainer);
	__u64 blocked_ns = now_ns - run->since_ns - delay_ns;
	__u32 reason = run->last_block_reason;
	__u32 work = work_kind_of(run);

	__sync_fetch_and_add(&process->sched.run_delay_ns, delay_ns);
	if (makes_probed_calls(thread, now_ns))
		__sync_fetch_and_add(&process->sched.calling_run_delay_ns, delay_ns);
	zernel_observe_duration(thread->process_handle, ZERNEL_RUN_DELAY, delay_ns);
	if (run->run_state != SCHED_BLOCKED)
		return 0;
	barrier_var(reason);
	if (reason < SCHED_BLOCK_REASONS)
		__sync_fetch_and_add(&process->sched.blocked_ns[reason], blocked_ns);
	if (reason == SCHED_BLOCKED_IO)
		run->recent_io_ns += blocked_ns;
	move_block_to_queued_work(process->dataload.own_work, work, delay_ns);
	if (trainer)
		move_block_to_queued_work(trainer->dataload.loader_work, work, delay_ns);
	return 0;
}

static __noinline int switched_in(struct task_struct *task, struct zernel_thread *thread,
				  __u64 now_ns)
{
	struct zernel_process *process = zernel_process(thread->process_handle);
	struct zernel_task_state *state = bpf_task_storage_get(&zernel_tasks, task, 0, 0);
	struct sched_thread *run = &thread->sched;
	__u64 delay_ns = run_delay_of(task, run, now_ns);

	if (!process)
		return thread->process_handle ? end_counted_work(thread, now_ns) : 0;
	if (zernel_counts_decisions && state &&
	    (run->run_state == SCHED_RUNNABLE || run->run_state == SCHED_BLOCKED))
		zernel_count_delay(thread->process_handle, state->class_word, delay_ns, run->has_blocked);
	if (run->run_state == SCHED_ON_CPU)
		ZERNEL_COUNT_LOST(switches);
	else if (run->run_state != SCHED_STATE_UNKNOWN)
		end_time_off_cpu(thread, process, delay_ns, now_ns);
	set_run_state(thread, process, SCHED_ON_CPU, now_ns);
	if (!state)
		return 0;
	state->cpu_burst_ns = run->burst_ns + 1;
	update_recent_averages(run, state, process, now_ns);
	publish_trainer_if_changed(thread, state, process, now_ns);
	if (run->has_blocked)
		track_unblock(thread, process, state, now_ns);
	else if (state->tracker.flags & ZERNEL_IS_QUEUED)
		track_event(state, thread->process_handle, now_ns, ZERNEL_RESUME);
	run->has_blocked = false;
	zernel_write_hint(task, state, false);
	if (zernel_counts_decisions)
		zernel_count_run_time(task, thread->process_handle, state->class_word, now_ns, true);
	if (makes_probed_calls(thread, now_ns))
		process->sched.caller_on_cpu = task->pid;
	return 0;
}

/*
 * A thread that is being switched out was on a CPU, even if its switch in was not seen: some kernels
 * raise no event for switches away from some threads. The kernel's own account shows since when.
 */
static __always_inline void recover_missed_switch_in(struct task_struct *task,
					      struct zernel_thread *thread, __u64 now_ns)
{
	struct sched_thread *run = &thread->sched;
	__u64 clock_ahead_ns = scheduler_clock_ahead_ns;
	__u64 arrived_ns = task->sched_info.last_arrival - clock_ahead_ns;

	if (run->run_state != SCHED_RUNNABLE && run->run_state != SCHED_BLOCKED)
		return;
	if (clock_ahead_ns && arrived_ns - run->since_ns <= now_ns - run->since_ns)
		switched_in(task, thread, arrived_ns);
	else
		ZERNEL_COUNT_LOST(switches);
}

/* Adds the time since a thread was switched in to its CPU time, and returns that time. */
static __always_inline __u64 end_time_on_cpu(struct zernel_thread *thread,
					 struct zernel_process *process, __u64 now_ns)
{
	__u64 stretch_ns = now_ns - thread->sched.since_ns;

	__sync_fetch_and_add(&process->sched.on_cpu_ns, stretch_ns);
	if (makes_probed_calls(thread, now_ns))
		__sync_fetch_and_add(&process->sched.calling_on_cpu_ns, stretch_ns);
	return stretch_ns;
}

static __always_inline void switched_out(struct task_struct *task, struct zernel_thread *thread,
					 __u64 now_ns, bool blocks)
{
	struct zernel_process *process = zernel_process(thread->process_handle);
	struct zernel_task_state *state = bpf_task_storage_get(&zernel_tasks, task, 0, 0);
	struct sched_thread *run = &thread->sched;

	if (!process) {
		if (thread->process_handle)
			end_counted_work(thread, now_ns);
		return;
	}
	recover_missed_switch_in(task, thread, now_ns);
	if (run->run_state == SCHED_ON_CPU) {
		__u64 stretch_ns = end_time_on_cpu(thread, process, now_ns);

		scheduler_clock_ahead_ns = task->sched_info.last_arrival - run->since_ns;
		run->burst_ns += stretch_ns;
		thread->dataload.cpu_ns_since_block += stretch_ns;
		thread->dist_sync.cpu_ns_since_block += stretch_ns;
	}
	__sync_fetch_and_add(&process->sched.switches, 1);
	if (process->sched.caller_on_cpu == task->pid)
		process->sched.caller_on_cpu = 0;
	if (makes_probed_calls(thread, now_ns))
		process->sched.caller_left_ns = now_ns;
	if (state)
		state->cpu_burst_ns = 0;
	if (zernel_counts_decisions && state)
		zernel_count_run_time(task, thread->process_handle, state->class_word, now_ns, false);
	if (!blocks) {
		set_run_state(thread, process, SCHED_RUNNABLE, now_ns);
		/* If the tracker has no deadline, there is nothing to suspend. */
		if (state && state->tracker.deadline_ns != ZERNEL_NEVER)
			track_event(state, thread->process_handle, now_ns, ZERNEL_PREEMPT);
		zernel_write_hint(task, state, false);
		return;
	}
	run->burst_ns = 0;
	run->run_delay_at_block_ns = task->sched_info.run_delay;
	run->last_block_reason = block_reason(task);
	if (run->last_block_reason == SCHED_BLOCKED_POLL && process->flags & ZERNEL_IS_LOADER)
		run->last_block_reason = block_reason_of_poll(task);
	run->last_block_lock = run->last_block_reason == SCHED_BLOCKED_FUTEX ? lock_of_block(task, now_ns) : SCHED_NO_LOCK;
	run->handed_by_waker = SCHED_HANDED_NOTHING;
	run->has_blocked = true;
	set_run_state(thread, process, SCHED_BLOCKED, now_ns);
	if (run->last_block_reason == SCHED_BLOCKED_FUTEX)
		run->recent_futex_waits++;
	if (state)
		track_block(thread, process, state, now_ns);
	zernel_write_hint(task, state, false);
}

/* The storage of an observed thread. Most threads have no task storage at all; the pointer shows
 * that without a call. */
static __always_inline struct zernel_thread *find_observed_thread(struct task_struct *task)
{
	return task->bpf_storage ? bpf_task_storage_get(&threads, task, 0, 0) : NULL;
}

/* Arguments: whether it is preempted, the previous task, the next one, the previous one's state. */
SEC("tp_btf/sched_switch")
int sched_switch(__u64 *ctx)
{
	bool preempted = ctx[0];
	struct task_struct *from = (struct task_struct *)ctx[1];
	struct task_struct *to = (struct task_struct *)ctx[2];
	unsigned int state = ctx[3];
	struct zernel_thread *thread = find_observed_thread(from);

	if (thread)
		switched_out(from, thread, bpf_ktime_get_ns(), !preempted && state);
	thread = find_observed_thread(to);
	if (thread)
		switched_in(to, thread, bpf_ktime_get_ns());
	return 0;
}

/* Gives a handle to a process that was forked by an observed one. */
static __always_inline __u32 admit_loader(struct task_struct *task, __u32 forked_by)
{
	struct zernel_process *parent = zernel_process(forked_by), *trainer, *process;
	__u32 handle = zernel_get_or_create_handle(task, bpf_ktime_get_ns());

	process = zernel_process(handle);
	if (!parent || !process)
		return handle;
	process->trainer_handle = parent->flags & ZERNEL_IS_LOADER ? parent->trainer_handle : forked_by;
	process->flags |= ZERNEL_IS_LOADER;
	trainer = zernel_process(process->trainer_handle);
	if (trainer)
		__sync_fetch_and_add(&trainer->loader_count, 1);
	return handle;
}

static __always_inline struct zernel_thread *create_thread_storage(struct task_struct *task, __u32 handle)
{
	struct zernel_thread *thread = zernel_task_storage(&threads, task, true);
	struct zernel_process *process = zernel_process(handle);
	__u64 now_ns = bpf_ktime_get_ns();
	struct zernel_task_state *state;

	if (!thread) {
		ZERNEL_COUNT_LOST(threads);
		return NULL;
	}
	thread->process_handle = handle;
	state = zernel_get_or_create_task(task, now_ns);
	if (state && process)
		publish_trainer_if_changed(thread, state, process, now_ns);
	zernel_write_hint(task, state, true);
	zernel_enable_decision_counting(task);
	return thread;
}

/* Stops observing the current thread, which exits or calls exec. The record of the process may be freed before this
 * thread has exited: closing a file may take seconds. */
static __always_inline void forget_thread(struct zernel_thread *thread)
{
	struct zernel_process *process = zernel_process(thread->process_handle);
	__u64 now_ns = bpf_ktime_get_ns();

	if (process) {
		if (thread->sched.run_state == SCHED_ON_CPU)
			end_time_on_cpu(thread, process, now_ns);
		if (thread->dataload.since_ns)
			give_up_data_wait(thread, process);
		end_peer_wait(thread);
		end_counting_peer_block(thread, process, now_ns);
		drop_compilation(&thread->torch, &process->torch);
		set_run_state(thread, process, SCHED_STATE_UNKNOWN, now_ns);
	}
	end_counted_work(thread, now_ns);
}

/* The current thread has forked a process. */
static __always_inline void track_fork(struct task_struct *task)
{
	struct zernel_task_state *state = bpf_task_storage_get(&zernel_tasks, task, 0, 0);
	struct zernel_thread *thread = find_observed_thread(task);

	if (thread && state)
		track_event(state, thread->process_handle, bpf_ktime_get_ns(), ZERNEL_FORK);
}

SEC("tp_btf/sched_process_fork")
int process_fork(__u64 *ctx)
{
	struct task_struct *parent = (struct task_struct *)ctx[0];
	struct task_struct *child = (struct task_struct *)ctx[1];
	__u32 handle = zernel_find_process_handle(parent);
	struct zernel_process *process;
	struct zernel_thread *thread;

	if (!handle)
		return 0;
	if (child->tgid != parent->tgid) {
		/* vfork(): the child shares its parent's memory until it calls exec, so it loads no
		 * data. (The kernel sets vfork_done only after this.) */
		if (child->mm == parent->mm)
			return 0;
		track_fork(parent);
		handle = admit_loader(child, handle);
	}
	process = zernel_process(handle);
	thread = process ? create_thread_storage(child, handle) : NULL;
	if (thread)
		set_run_state(thread, process, SCHED_RUNNABLE, bpf_ktime_get_ns());
	return 0;
}

/* Whether a parent forked a child in the program that both still run. The kernel counts calls of exec: a child starts with
 * its parent's count. A child whose parent has exited gets another parent, so the files are compared too. */
static __always_inline bool runs_program_of_parent(struct task_struct *child, struct task_struct *parent)
{
	return child->self_exec_id == child->parent_exec_id && child->parent_exec_id == parent->self_exec_id &&
	       BPF_CORE_READ(child, mm, exe_file, f_inode) == BPF_CORE_READ(parent, mm, exe_file, f_inode);
}

/* Whether a child works for its parent, although it runs another program. */
static __always_inline bool is_helper_child(struct task_struct *task, __u32 parent)
{
	struct zernel_process *process = zernel_process(parent);

	return process && process->dataload.helper == (__u32)task->tgid;
}

/* Adopts threads and children that existed before their process was observed. */
SEC("iter/task")
int adopt_tasks(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task, *parent;
	struct zernel_thread *thread;
	__u32 handle;

	if (!task || !task->mm || task->flags & PF_EXITING)
		return 0;
	thread = zernel_task_storage(&threads, task, false);
	if (thread && thread->process_handle) {
		zernel_get_or_create_task(task, bpf_ktime_get_ns());
		return 0;
	}
	handle = zernel_find_process_handle(task);
	if (!handle) {
		parent = task->real_parent;
		if (!parent || task->vfork_done)
			return 0;
		handle = zernel_find_process_handle(parent);
		if (!handle || !(runs_program_of_parent(task, parent) || is_helper_child(task, handle)))
			return 0;
		handle = admit_loader(task, handle);
	}
	if (!handle)
		return 0;
	create_thread_storage(task, handle);
	/* The process may have exited before it had a handle. */
	if (zernel_has_exited(task))
		zernel_end_process(task);
	return 0;
}

#endif
