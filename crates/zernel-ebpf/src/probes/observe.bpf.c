/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The BPF programs of all probes, in one object. Every probed function runs the same programs: they do what all calls
 * have in common, as the function's row in the table says, and call the hooks of the function's probe. build.rs
 * generates the dispatch to these hooks from the list of probes.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "call.h"
#include "counter.h"
#include "duration.h"
#include "probe_dispatch.gen.h"
#include "sched/sampled_phases.bpf.h"
#include "sched/wakeups.bpf.h"
#include "steps.h"
#include "symbol.h"
#include "trace.h"
#include "uprobe.h"

#define HIT_INTERVAL_NS 250000000ULL
/* A thread that hits probes this often within HIT_INTERVAL_NS exceeds any budget. */
#define ALARM_HITS_PER_INTERVAL 2000

/* Wakes userspace, which otherwise checks the overhead at intervals. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} alarms SEC(".maps");

static __noinline int raise_alarm(struct zernel_process *process, __u64 elapsed_ns)
{
	struct zernel_settings *set = zernel_settings();

	/* A sampling window may exceed the budget: the time without probes after it makes up for
	 * it. */
	if (!set || set->is_window_open || !elapsed_ns)
		return 0;
	zernel_atomic_max(&process->busiest_hits_per_second, ALARM_HITS_PER_INTERVAL * 1000000000ULL / elapsed_ns);
	bpf_ringbuf_output(&alarms, &elapsed_ns, sizeof(elapsed_ns), 0);
	return 0;
}

/* Counts a probe hit for the overhead, per thread, because the budget is per thread. */
static __always_inline void count_hit(struct zernel_thread *thread, struct zernel_process *process,
				      __u64 now_ns)
{
	__u64 elapsed_ns = now_ns - thread->hit_interval_start_ns;

	__sync_fetch_and_add(&process->probe_hits, 1);
	thread->interval_hits++;
	if (elapsed_ns < HIT_INTERVAL_NS) {
		if (thread->interval_hits == ALARM_HITS_PER_INTERVAL)
			raise_alarm(process, elapsed_ns);
		return;
	}
	if (thread->hit_interval_start_ns)
		zernel_atomic_max(&process->busiest_hits_per_second, thread->interval_hits * 1000000000ULL / elapsed_ns);
	thread->hit_interval_start_ns = now_ns;
	thread->interval_hits = 0;
}

/* Whether calls are counted now. A sampled function is counted only in a sampling window. */
static __always_inline bool is_counted(const struct zernel_symbol *symbol)
{
	struct zernel_settings *set;

	if (!(symbol->flags & ZERNEL_IS_SAMPLED))
		return true;
	set = zernel_settings();
	return set && *(volatile __u32 *)&set->is_window_open;
}

/* Ends the open waits of a thread that makes a probed call. A copy to the host may not be a wait for the GPU, and the sync
 * that follows it ends them. */
static __always_inline void end_waits(struct zernel_thread *thread, struct zernel_process *process,
				      __u32 event, __u64 now_ns)
{
	if (event == ZERNEL_COPY_TO_HOST_ENTER)
		return;
	if (thread->dataload.since_ns)
		end_data_wait_at_use(thread, process, event, now_ns);
	if (thread->dist_sync.call_entered_ns)
		end_peer_wait(thread);
}

/* Whether an event is no evidence of a training loop. Any program may compile or save. */
static __always_inline bool is_outside_steps(__u32 event)
{
	return event == ZERNEL_OTHER_WORK_BEGIN || event == ZERNEL_COMPILE_BEGIN ||
	       event == ZERNEL_COMPILE_END;
}

/* Notes that the current thread announces batches, forward passes or optimizer steps. */
static __always_inline void note_announcement(struct zernel_thread *thread,
					      struct zernel_process *process, __u32 event,
					      __u64 now_ns)
{
	switch (event) {
	case ZERNEL_DATA_BEGIN:
		begin_data_wait(thread, process, now_ns, true);
		/* If another thread of the process announces steps, this thread gets batches for that thread. */
		if (!(process->flags & ZERNEL_ANNOUNCES_STEPS))
			process->step_announcer_tid = (__u32)bpf_get_current_pid_tgid();
		break;
	case ZERNEL_BACKWARD_BEGIN:
		process->dist_sync.backward_since_ns = now_ns;
		break;
	case ZERNEL_OPTIMIZER_BEGIN:
		if (!(process->flags & ZERNEL_ANNOUNCES_STEPS))
			process->flags |= ZERNEL_ANNOUNCES_STEPS;
		process->step_announcer_tid = (__u32)bpf_get_current_pid_tgid();
		break;
	}
}

/* Feeds an event of the current thread to its tracker. */
static __always_inline void observe_event(struct zernel_thread *thread, __u32 symbol, __u32 event,
					  __u64 now_ns)
{
	zernel_observe_event(now_ns, event, burst_ns_of(thread, now_ns), thread->process_handle, symbol);
}

/* Notes that the current thread may prepare its next batch itself, after an optimizer step or a sync.
 * Returns whether it may. */
static __always_inline bool note_end_of_step(struct zernel_thread *thread,
					     struct zernel_process *process, __u32 event,
					     __u64 now_ns)
{
	struct zernel_task_state *state;

	if (event != ZERNEL_UPDATE_END && event != ZERNEL_GPU_SYNC_LEAVE &&
	    event != ZERNEL_COPY_TO_HOST_LEAVE)
		return false;
	state = zernel_get_or_create_task(bpf_get_current_task_btf(), now_ns);
	if (!state || !has_just_ended_step(&state->tracker, now_ns))
		return false;
	begin_data_wait(thread, process, now_ns, false);
	return true;
}

/* Traces the entry of a function that gives the tracker no event. */
static __always_inline void trace_call_without_event(struct zernel_thread *thread, __u32 symbol, __u64 now_ns)
{
	struct zernel_task_state *state;

	if (!zernel_traces_events)
		return;
	state = zernel_get_or_create_task(bpf_get_current_task_btf(), now_ns);
	if (state)
		zernel_trace_if_enabled(state, thread->process_handle, now_ns, ZERNEL_TRACE_CALL, symbol);
}

/* Handles the entry of a probed call. Returns 1 if the return of the call need not be probed. */
static __always_inline int observe_entry(struct pt_regs *ctx)
{
	__u32 id = bpf_get_attach_cookie(ctx);
	const struct zernel_symbol *symbol = zernel_symbol(id);
	__u64 now_ns = bpf_ktime_get_ns();
	__u64 stack = PT_REGS_SP(ctx);
	struct zernel_open_call *call;
	struct zernel_process *process;
	struct zernel_thread *thread;
	__u64 registers[ZERNEL_ARGUMENT_REGISTERS];

	if (!symbol || !is_counted(symbol))
		return 1;
	thread = zernel_current_thread(now_ns);
	if (!thread)
		return 1;
	process = zernel_process(thread->process_handle);
	if (!process)
		return 1;
	count_hit(thread, process, now_ns);
	if (process->is_uncounted)
		return 1;
	thread->last_phase_call_ns = now_ns;
	note_driver_use(symbol, process);
	call = zernel_push_call(thread, stack);
	if (!call)
		return 1;
	call->symbol = id;
	call->probe_values[0] = 0;
	call->probe_values[1] = 0;
	call->return_address = 0;
	zernel_read_argument_registers(ctx, registers);
	for (int i = 0; i < ZERNEL_KEPT_ARGUMENTS; i++) {
		__u32 nth = symbol->kept_arguments[i];

		call->arguments[i] = nth ? zernel_nth_argument(registers, stack, nth) : 0;
	}
	probe_enter(symbol, thread, call);
	zernel_mark_step(symbol, symbol->mark, process, thread->process_handle, now_ns);
	if (symbol->enter_event != ZERNEL_NONE) {
		end_waits(thread, process, symbol->enter_event, now_ns);
		observe_event(thread, id, symbol->enter_event, now_ns);
	}
	/* The time that the probe itself takes is not part of the call's duration. */
	call->since_ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int observe_return(struct pt_regs *ctx)
{
	__u64 now_ns = bpf_ktime_get_ns();
	__u64 stack = PT_REGS_SP(ctx);
	int result = PT_REGS_RC(ctx);
	struct zernel_thread *thread =
		zernel_task_storage(&threads, bpf_get_current_task_btf(), false);
	const struct zernel_symbol *symbol;
	struct zernel_process *process;
	struct zernel_open_call *call;
	struct zernel_counter *counter;
	bool failed;

	call = thread ? zernel_pop_call(thread, stack) : NULL;
	symbol = call ? zernel_symbol(call->symbol) : NULL;
	counter = call ? zernel_counter(thread->process_handle, call->symbol) : NULL;
	if (!symbol || !counter)
		return 0;
	failed = symbol->flags & ZERNEL_RETURNS_STATUS && probe_failed(symbol, result);
	/* Keeps the compiler from generating all code below twice, once per outcome. */
	barrier_var(failed);
	probe_leave(symbol, thread, call, now_ns, result, failed);
	if (failed)
		__sync_fetch_and_add(&counter->failed_calls, 1);
	else if (symbol->bytes_argument)
		__sync_fetch_and_add(&counter->bytes,
				     call->arguments[(symbol->bytes_argument - 1U) % ZERNEL_KEPT_ARGUMENTS]);
	__sync_fetch_and_add(&counter->calls, 1);
	if (symbol->duration_kind != ZERNEL_NONE)
		zernel_observe_duration(thread->process_handle, symbol->duration_kind, now_ns - call->since_ns);
	if (symbol->leave_event == ZERNEL_GPU_SYNC_LEAVE || symbol->leave_event == ZERNEL_COPY_TO_HOST_LEAVE)
		observe_sync_for_collective(thread->process_handle, now_ns);
	if (symbol->leave_event != ZERNEL_NONE)
		observe_event(thread, call->symbol, symbol->leave_event, now_ns);
	process = zernel_process(thread->process_handle);
	/* A thread that prepares its batch itself launches after it has copied the batch. */
	if (process && note_end_of_step(thread, process, symbol->leave_event, now_ns))
		return 0;
	if (are_launches_presumed(symbol, thread, call, now_ns))
		observe_event(thread, call->symbol, ZERNEL_LAUNCH, now_ns);
	return 0;
}

/* The entry of a function whose return is not probed. */
static __always_inline int observe_entry_only(struct pt_regs *ctx)
{
	__u32 id = bpf_get_attach_cookie(ctx);
	const struct zernel_symbol *symbol = zernel_symbol(id);
	__u64 now_ns = bpf_ktime_get_ns();
	struct zernel_thread *thread;
	struct zernel_process *process;
	struct zernel_counter *counter;
	struct zernel_function_entry entry = {};

	if (!symbol || !is_counted(symbol))
		return 0;
	entry.arguments[0] = PT_REGS_PARM1(ctx);
	barrier_var(entry.arguments[0]);
	entry.arguments[1] = PT_REGS_PARM2(ctx);
	barrier_var(entry.arguments[1]);
	entry.arguments[2] = PT_REGS_PARM3(ctx);
	entry.event = symbol->enter_event;
	entry.mark = symbol->mark;
	thread = symbol->flags & ZERNEL_IS_NO_ML_EVIDENCE ?
			 find_observed_thread(bpf_get_current_task_btf()) :
			 zernel_current_thread(now_ns);
	process = thread ? zernel_process(thread->process_handle) : NULL;
	counter = process ? zernel_counter(thread->process_handle, id) : NULL;
	if (!counter)
		return 0;
	count_hit(thread, process, now_ns);
	if (process->is_uncounted)
		return 0;
	__sync_fetch_and_add(&counter->calls, 1);
	probe_read(symbol, thread, &entry);
	if (entry.is_ignored)
		return 0;
	thread->last_phase_call_ns = now_ns;
	end_waits(thread, process, entry.event, now_ns);
	if (!is_outside_steps(entry.event))
		probe_mark(symbol, thread, process, now_ns);
	zernel_mark_step(symbol, entry.mark, process, thread->process_handle, now_ns);
	if (entry.event != ZERNEL_NONE)
		observe_event(thread, id, entry.event, now_ns);
	else
		trace_call_without_event(thread, id, now_ns);
	note_announcement(thread, process, entry.event, now_ns);
	note_end_of_step(thread, process, entry.event, now_ns);
	count_compilation(thread, process, entry.event, now_ns);
	note_backward_begin(symbol, process, thread, now_ns);
	return 0;
}

/* Since about Linux 7.0, bpf_session_is_return() takes the program's context. */
extern bool bpf_session_is_return(void) __weak __ksym;
extern bool bpf_session_is_return___ctx(void *ctx) __weak __ksym;

static __always_inline bool is_return(void *ctx)
{
	if (bpf_ksym_exists(bpf_session_is_return___ctx))
		return bpf_session_is_return___ctx(ctx);
	return bpf_session_is_return();
}

/* The three ways to attach: entry and return in one link, in a link each, in a perf event each. */
ZERNEL_UPROBE("uprobe.session", call_session)
{
	return is_return(ctx) ? observe_return(ctx) : observe_entry(ctx);
}

ZERNEL_UPROBE("uprobe.multi", call_enter_multi)
{
	observe_entry(ctx);
	return 0;
}

ZERNEL_UPROBE("uprobe.multi", call_leave_multi)
{
	return observe_return(ctx);
}

ZERNEL_UPROBE("uprobe", call_enter_perf)
{
	observe_entry(ctx);
	return 0;
}

ZERNEL_UPROBE("uprobe", call_leave_perf)
{
	return observe_return(ctx);
}

/* C++ functions get entry probes only, each in its own link: an exception that unwinds through a
 * return probe, or a session, kills the process. */
ZERNEL_UPROBE("uprobe.multi", call_mark_multi)
{
	return observe_entry_only(ctx);
}

ZERNEL_UPROBE("uprobe", call_mark_perf)
{
	return observe_entry_only(ctx);
}

/* Adds the phases of an exiting training thread to those of its process. */
static __always_inline void add_phases_to_process(struct task_struct *task,
						  struct zernel_thread *thread)
{
	struct zernel_task_state *state = bpf_task_storage_get(&zernel_tasks, task, 0, 0);
	struct zernel_process *process = zernel_process(thread->process_handle);

	if (!state || !process || !(state->tracker.flags & ZERNEL_TRAINING_THREAD))
		return;
	zernel_transition(state, ZERNEL_UNKNOWN, bpf_ktime_get_ns());
	/* The flag is cleared before the sums are changed, so that no reader counts the phases twice. */
	state->tracker.flags &= ~ZERNEL_TRAINING_THREAD;
	for (int phase = 0; phase < ZERNEL_PHASES; phase++)
		__sync_fetch_and_add(&process->phase_ns[phase], state->phase_ns[phase]);
}

/* Ends what is published about a thread that exits. The thread's storage may exist for seconds after the thread has
 * exited. */
static __always_inline void end_published_state(struct task_struct *task)
{
	struct zernel_task_state *state = bpf_task_storage_get(&zernel_tasks, task, 0, 0);

	if (!state)
		return;
	state->flags = 0;
	zernel_publish_class(state, bpf_ktime_get_ns());
	zernel_write_hint(task, state, false);
}

/* Traces that the current thread exits or calls exec. */
static __always_inline void trace_exit(struct task_struct *task, struct zernel_thread *thread)
{
	struct zernel_task_state *state;

	if (!zernel_traces_events || !thread->process_handle)
		return;
	state = bpf_task_storage_get(&zernel_tasks, task, 0, 0);
	if (state)
		zernel_trace_if_enabled(state, thread->process_handle, bpf_ktime_get_ns(), ZERNEL_TRACE_EXIT,
			     ZERNEL_NONE);
}

/* Called when a thread exits, perhaps the last thread of its process. */
SEC("tp_btf/sched_process_exit")
int process_exit(__u64 *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx[0];
	struct task_struct *current = bpf_get_current_task_btf();
	struct zernel_thread *thread = find_observed_thread(current);

	if (thread) {
		trace_exit(current, thread);
		add_phases_to_process(current, thread);
		forget_thread(thread);
		end_published_state(current);
	}
	if (zernel_has_exited(task))
		zernel_end_process(task);
	return 0;
}

/* After exec, the process counts as a new one. */
SEC("tp_btf/sched_process_exec")
int process_exec(__u64 *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx[0];
	struct task_struct *current = bpf_get_current_task_btf();
	struct zernel_thread *thread = find_observed_thread(current);

	if (zernel_end_process(task)) {
		if (thread) {
			trace_exit(current, thread);
			forget_thread(thread);
		}
		bpf_task_storage_delete(&threads, current);
		bpf_task_storage_delete(&zernel_tasks, current);
		zernel_clear_hint(current);
	}
	return 0;
}

/* Writes the state of every observed task. */
SEC("iter/task")
int dump_tasks(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct zernel_task_state *state;

	if (!task)
		return 0;
	state = zernel_task_storage(&zernel_tasks, task, false);
	if (state)
		bpf_seq_write(ctx->meta->seq, state, sizeof(*state));
	return 0;
}

/* Deletes the states that an observer left behind when it was killed. */
SEC("iter/task")
int forget_tasks(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task)
		bpf_task_storage_delete(&zernel_tasks, task);
	return 0;
}

/* Clears the hints of all tasks. */
SEC("iter/task")
int clear_hints(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task)
		zernel_clear_hint(task);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
