/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Phases by the sampled rule, for processes that use a GPU and whose calls are not probed. The kernel loads these
 * programs only if userspace asks for sampled phases.
 *
 * Userspace names these processes and runs sample_tasks on each of them ten times per second. Where a thread is and
 * what it waited for is known from context switches, the utilization of its GPU from userspace. Calls are unknown: the
 * rule sees no GPU sync and no collective, unless they were probed before.
 *
 * While a thread is sampled, its tracker gets no events (track_event() returns at once), so only sample_tasks writes
 * its phase. A probed call ends the sampling of its thread. When sampling begins, the thread may be in its tracker on
 * another CPU; then its phase may be wrong until the next sample.
 */
#ifndef SCHED_SAMPLED_PHASES_BPF_H
#define SCHED_SAMPLED_PHASES_BPF_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "hints.h"
#include "phase_rule.h"
#include "process.h"
#include "sched/sched.bpf.h"
#include "settings.h"
#include "shared_state.h"
#include "storage.h"
#include "task_state.h"
#include "thread.h"

/* A phase is given up this long after its last sample: then userspace has stopped sampling. */
#define SAMPLED_MAX_NS 1000000000ULL

/* Returns the input of the sampled rule at this moment. A thread that is blocked or runs for long has older values in
 * its state. */
static __always_inline void take_sample(struct zernel_phase_sample *sample,
					const struct zernel_thread *thread,
					const struct zernel_task_state *state, __u64 now_ns)
{
	const struct sched_thread *run = &thread->sched;
	__u64 elapsed_ns = now_ns - run->recent_since_ns;
	__u64 io_ns = run->recent_io_ns;

	zernel_read_sample(sample, state);
	sample->cpu_burst_ns = run->run_state == SCHED_ON_CPU ? burst_ns_of(thread, now_ns) : 0;
	if (elapsed_ns < AVERAGING_INTERVAL_NS)
		return;
	if (run->run_state == SCHED_BLOCKED && run->last_block_reason == SCHED_BLOCKED_IO)
		io_ns += now_ns - run->since_ns;
	sample->io_wait_f32 = zernel_f32_from_q16(recent_io_q16(state, io_ns, elapsed_ns));
}

static __noinline int sample_thread(struct zernel_thread *thread, struct zernel_process *process,
				    struct zernel_task_state *state, __u64 now_ns)
{
	struct zernel_settings *set = zernel_settings();
	struct zernel_phase_sample sample = {};

	if (!set)
		return 0;
	if (!(state->flags & ZERNEL_TASK_IS_SAMPLED)) {
		track_event(state, thread->process_handle, now_ns, ZERNEL_NOT_OBSERVED);
		state->candidate_streak = 0;
		state->flags |= ZERNEL_TASK_IS_SAMPLED;
	}
	publish_gpu(state, process);
	take_sample(&sample, thread, state, now_ns);
	zernel_report_sample(&set->sampled_rule, state, &sample, now_ns);
	state->tracker.deadline_ns = now_ns + SAMPLED_MAX_NS;
	zernel_publish_class(state, now_ns);
	return 0;
}

static __noinline int end_thread_sampling(struct zernel_thread *thread, struct zernel_task_state *state,
				  __u64 now_ns)
{
	state->flags &= ~ZERNEL_TASK_IS_SAMPLED;
	track_event(state, thread->process_handle, now_ns, ZERNEL_NOT_OBSERVED);
	return 0;
}

/* Samples the threads of one process, or ends their sampling. */
SEC("iter/task")
int sample_tasks(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct zernel_task_state *state;
	struct zernel_process *process;
	struct zernel_thread *thread;
	__u64 now_ns = bpf_ktime_get_ns();

	if (!task || task->flags & PF_EXITING)
		return 0;
	thread = zernel_task_storage(&threads, task, false);
	if (!thread)
		return 0;
	process = zernel_process(thread->process_handle);
	if (!process)
		return 0;
	state = zernel_task_storage(&zernel_tasks, task, false);
	if (!state || !(state->flags & ZERNEL_TASK_IS_ML))
		return 0;
	if (process->is_sampled) {
		/* The process was forked by an observed one, but uses a GPU itself, so it is no loader. */
		if (process->flags & ZERNEL_IS_LOADER)
			zernel_turn_loader_into_trainer(process);
		publish_trainer_if_changed(thread, state, process, now_ns);
		sample_thread(thread, process, state, now_ns);
	} else if (state->flags & ZERNEL_TASK_IS_SAMPLED) {
		end_thread_sampling(thread, state, now_ns);
	}
	zernel_write_hint(task, state, true);
	return 0;
}

/* Makes one process an observed one, although none of its calls was probed. */
SEC("iter/task")
int admit_tasks(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct zernel_thread *thread;
	__u32 handle;

	if (!task || !task->mm || task->flags & PF_EXITING)
		return 0;
	thread = zernel_task_storage(&threads, task, false);
	if (thread && thread->process_handle)
		return 0;
	handle = zernel_get_or_create_handle(task, bpf_ktime_get_ns());
	if (handle)
		create_thread_storage(task, handle);
	/* The process may have exited before it had a handle. */
	if (zernel_has_exited(task))
		zernel_end_process(task);
	return 0;
}

#endif
