/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The event rule in the kernel: the twin of zernel-phase's PhaseTracker, which gives the reason for
 * each rule. It is fed with the events of one thread, by the thread itself or while it is being
 * switched.
 */
#ifndef ZERNEL_PHASE_TRACKER_H
#define ZERNEL_PHASE_TRACKER_H

#include "activity.h"
#include "awaited.h"
#include "task_state.h"
#include "tracker_event.h"
#include "waits.h"

static inline void zernel_count_fault(__u32 *fault)
{
	if (*fault != ~0U)
		(*fault)++;
}

/* A wait that no copy follows was not for data. */
static inline void zernel_end_loading(struct zernel_tracker *tracker)
{
	if (tracker->activity == ZERNEL_ACTIVITY_LOADING)
		tracker->flags &= ~ZERNEL_AWAITS_DATA_AFTER_UPDATE;
}

/* Turns to computing. The thread may still be between a backward pass and its optimizer step. */
static inline void zernel_set_computing(const struct zernel_tracker_config *config,
				  struct zernel_tracker *tracker)
{
	__u16 may_update = tracker->flags & ZERNEL_MAY_UPDATE;

	if (zernel_works_outside_steps(tracker))
		return;
	zernel_end_loading(tracker);
	zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_COMPUTING, tracker->now_ns);
	tracker->flags |= may_update;
}

/* Ends calls that an event other than their own leave shows to be over. */
static inline void zernel_end_calls_without_leave(struct zernel_tracker *tracker, __u16 calls)
{
	if (tracker->flags & calls & ZERNEL_IN_SYNC)
		zernel_count_fault(&tracker->lost_leave_events);
	if (tracker->flags & calls & ZERNEL_IN_COLLECTIVE)
		zernel_count_fault(&tracker->lost_leave_events);
	if (tracker->flags & calls)
		tracker->flags &= ~ZERNEL_MAY_UPDATE;
	tracker->flags &= ~calls;
}

/* Whether a late event is the end of a call that is still open, and not of an earlier one. */
static inline int zernel_closes_open_call(const struct zernel_tracker *tracker, __u64 at_ns,
					__u8 event)
{
	if (event == ZERNEL_GPU_SYNC_LEAVE)
		return tracker->flags & ZERNEL_IN_SYNC && tracker->sync_since_ns <= at_ns;
	if (event == ZERNEL_COPY_TO_HOST_LEAVE)
		return zernel_in_copy_to_host(tracker) && tracker->sync_since_ns <= at_ns;
	if (event == ZERNEL_COLLECTIVE_LEAVE)
		return tracker->flags & ZERNEL_IN_COLLECTIVE &&
		       tracker->collective_since_ns <= at_ns;
	return 0;
}

/* Ends a phase after its deadline. */
static inline void zernel_end_expired_phase(const struct zernel_tracker_config *config,
				 struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u8 next = zernel_in_call(tracker) ? ZERNEL_ACTIVITY_IDLE :
					      zernel_activity_after_deadline(tracker->activity);
	__u64 at_ns = tracker->deadline_ns;
	__u8 phase;

	zernel_count_fault(&tracker->expired_phases);
	tracker->flags &= ~ZERNEL_IS_BLOCKED;
	if (zernel_in_call(tracker)) {
		zernel_count_fault(&tracker->lost_leave_events);
		tracker->flags &=
			~(ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE | ZERNEL_COLLECTIVE_QUEUED);
	}
	zernel_set_activity(config, tracker, next, at_ns);
	phase = zernel_activity_phase(next);
	tracker->deadline_ns = phase == ZERNEL_UNKNOWN ? ZERNEL_NEVER : tracker->activity_until_ns;
	if (phase != zernel_word_phase(task->phase_word))
		zernel_transition(task, phase, at_ns);
}

/* Moves time on. The activity that follows may have a deadline that has passed too. */
static inline void zernel_advance_time(const struct zernel_tracker_config *config,
				  struct zernel_task_state *task, __u64 at_ns)
{
	struct zernel_tracker *tracker = &task->tracker;

	if (at_ns > tracker->now_ns)
		tracker->now_ns = at_ns;
	if (tracker->now_ns < tracker->deadline_ns)
		return;
	zernel_end_expired_phase(config, task);
	if (tracker->now_ns >= tracker->deadline_ns)
		zernel_end_expired_phase(config, task);
}

/* Whether the thread may have prepared a batch since its optimizer step, which it has not copied yet. */
static inline int zernel_may_hold_batch(const struct zernel_tracker_config *config,
					const struct zernel_tracker *tracker)
{
	return tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE && zernel_may_have_loaded(config, tracker);
}

/* Whether the sync began right after the optimizer step. The thread may have launched in between, to bound
 * a weight, say. */
static inline int zernel_sync_follows_update(const struct zernel_tracker_config *config,
					     const struct zernel_tracker *tracker)
{
	return tracker->flags & ZERNEL_IN_SYNC && tracker->activity == ZERNEL_ACTIVITY_COMPUTING &&
	       tracker->update_end_ns &&
	       tracker->sync_since_ns - tracker->update_end_ns < config->short_wait_max_ns;
}

static inline void zernel_enter_sync(const struct zernel_tracker_config *config,
				     struct zernel_tracker *tracker)
{
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC);
	tracker->sync_since_ns = tracker->now_ns;
	if (!(tracker->flags & ZERNEL_IN_COLLECTIVE))
		tracker->last_call_evidence_ns = tracker->now_ns;
	tracker->copies_to_host = 0;
	tracker->flags |= ZERNEL_IN_SYNC | ZERNEL_TRAINING_THREAD | ZERNEL_USES_GPU;
	/* A sync right after the optimizer step reads the loss. Before a later one the thread may have
	 * launched, whether that was observed or not. */
	if (zernel_may_hold_batch(config, tracker))
		zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_COMPUTING, tracker->now_ns);
	tracker->flags &= ~ZERNEL_UNDECIDED;
}

static inline void zernel_leave_sync(const struct zernel_tracker_config *config,
				     struct zernel_tracker *tracker)
{
	int follows_update = zernel_sync_follows_update(config, tracker);

	if (!(tracker->flags & ZERNEL_IN_SYNC))
		zernel_count_fault(&tracker->lost_enter_events);
	tracker->flags &= ~ZERNEL_IN_SYNC;
	if (tracker->flags & ZERNEL_IN_COLLECTIVE)
		return;
	tracker->flags &= ~(ZERNEL_COLLECTIVE_QUEUED | ZERNEL_LAUNCHED_SINCE_SYNC);
	if (zernel_is_in_announced_update(tracker)) {
		zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_UPDATING, tracker->now_ns);
		return;
	}
	if (tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE || follows_update) {
		zernel_begin_undecided_time(config, tracker);
		return;
	}
	zernel_set_computing(config, tracker);
	/* Time blocked on the GPU is no optimizer step. */
	if (tracker->flags & ZERNEL_MAY_UPDATE)
		tracker->undecided_since_ns = tracker->now_ns;
}

/* The length of the copy will show whether it waits for the GPU. */
static inline void zernel_enter_copy_to_host(struct zernel_tracker *tracker)
{
	if (tracker->flags & ZERNEL_IN_COLLECTIVE)
		return;
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC);
	tracker->sync_since_ns = tracker->now_ns;
	tracker->last_call_evidence_ns = tracker->now_ns;
	tracker->copies_to_host = 1;
	tracker->flags |= ZERNEL_IN_SYNC;
}

/* A long copy was a sync. The next sync waits for a collective that was queued before, too. */
static inline void zernel_leave_copy_to_host(const struct zernel_tracker_config *config,
					     struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u16 queued = tracker->flags & ZERNEL_COLLECTIVE_QUEUED;
	__u8 phase = zernel_sync_phase(tracker);
	__u64 now_ns = tracker->now_ns;

	if (!zernel_in_copy_to_host(tracker))
		return;
	tracker->flags &= ~ZERNEL_IN_SYNC;
	if (now_ns - tracker->sync_since_ns < config->short_wait_max_ns)
		return;
	if (phase != zernel_word_phase(task->phase_word))
		zernel_transition(task, phase, tracker->sync_since_ns);
	tracker->now_ns = tracker->sync_since_ns;
	zernel_enter_sync(config, tracker);
	tracker->now_ns = now_ns;
	zernel_leave_sync(config, tracker);
	tracker->flags |= queued;
}

static inline void zernel_enter_collective(struct zernel_tracker *tracker)
{
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
	tracker->collective_since_ns = tracker->now_ns;
	tracker->last_call_evidence_ns = tracker->now_ns;
	tracker->flags |= ZERNEL_IN_COLLECTIVE;
	tracker->flags &= ~(ZERNEL_COLLECTIVE_LAUNCHED | ZERNEL_UNDECIDED | ZERNEL_MAY_UPDATE);
}

static inline void zernel_leave_collective(struct zernel_tracker *tracker)
{
	if (!(tracker->flags & ZERNEL_IN_COLLECTIVE))
		zernel_count_fault(&tracker->lost_enter_events);
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC);
	tracker->flags &= ~(ZERNEL_IN_COLLECTIVE | ZERNEL_COLLECTIVE_QUEUED);
	if (!(tracker->flags & ZERNEL_LAUNCHED_SINCE_SYNC))
		tracker->flags |= ZERNEL_COLLECTIVE_QUEUED;
}

static inline void zernel_launch(const struct zernel_tracker_config *config,
				 struct zernel_tracker *tracker)
{
	int is_of_optimizer;

	tracker->flags |= ZERNEL_USES_GPU;
	if (tracker->flags & ZERNEL_IN_COLLECTIVE) {
		tracker->flags |= ZERNEL_COLLECTIVE_LAUNCHED;
		return;
	}
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC);
	tracker->flags &= ~(ZERNEL_COLLECTIVE_QUEUED | ZERNEL_UNDECIDED);
	tracker->flags |= ZERNEL_LAUNCHED_SINCE_SYNC;
	is_of_optimizer =
		tracker->activity == ZERNEL_ACTIVITY_UPDATING &&
		(tracker->flags & ZERNEL_ANNOUNCES_UPDATES ||
		 tracker->now_ns - tracker->last_marker_ns < config->optimizer_launch_max_ns);
	if (!is_of_optimizer)
		zernel_set_computing(config, tracker);
}

static inline void zernel_copy(const struct zernel_tracker_config *config,
			       struct zernel_task_state *task)
{
	const __u16 announces = ZERNEL_ANNOUNCES_DATA | ZERNEL_ANNOUNCES_UPDATES;
	struct zernel_tracker *tracker = &task->tracker;

	tracker->flags |= ZERNEL_USES_GPU;
	if (tracker->flags & ZERNEL_IN_COLLECTIVE && !(tracker->flags & ZERNEL_COLLECTIVE_LAUNCHED))
		return;
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
	tracker->flags |= ZERNEL_TRAINING_THREAD;
	/* An optimizer may copy too. The next batch is announced. */
	if (tracker->activity == ZERNEL_ACTIVITY_UPDATING && (tracker->flags & announces) == announces)
		return;
	if (zernel_is_in_announced_update(tracker))
		return;
	if (zernel_works_outside_steps(tracker))
		return;
	if (zernel_may_have_loaded(config, tracker)) {
		if (tracker->flags & ZERNEL_ANNOUNCES_UPDATES)
			tracker->flags |= ZERNEL_AWAITS_DATA_AFTER_UPDATE;
		zernel_attribute_time_to_loading(task);
	}
	/* The next sync may wait for this copy. */
	tracker->update_end_ns = 0;
	zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_COMPUTING, tracker->now_ns);
}

/* What the thread did since its backward pass was the optimizer's: clipping gradients, say. */
static inline void zernel_attribute_time_to_update(struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;

	if (tracker->flags & ZERNEL_MAY_UPDATE && !zernel_in_call(tracker))
		zernel_transition(task, ZERNEL_OPTIMIZER_STEP, tracker->undecided_since_ns);
}

/* The thread announces what it does from now on. */
static inline void zernel_announce(const struct zernel_tracker_config *config,
				   struct zernel_task_state *task, __u8 activity, __u16 flags)
{
	struct zernel_tracker *tracker = &task->tracker;

	if (activity == ZERNEL_ACTIVITY_UPDATING)
		zernel_attribute_time_to_update(task);
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
	zernel_end_loading(tracker);
	tracker->flags |= flags;
	zernel_set_activity(config, tracker, activity, tracker->now_ns);
}

/* The thread passes a function that only an optimizer calls, as after a closure's backward pass. */
static inline void zernel_handle_optimizer_marker(const struct zernel_tracker_config *config,
				      struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	int follows_backward = tracker->activity == ZERNEL_ACTIVITY_BACKWARD ||
			       tracker->flags & ZERNEL_MAY_UPDATE;

	tracker->last_marker_ns = tracker->now_ns;
	if (!(tracker->flags & ZERNEL_ANNOUNCES_UPDATES) || follows_backward) {
		zernel_announce(config, task, ZERNEL_ACTIVITY_UPDATING, ZERNEL_TRAINING_THREAD);
		return;
	}
	zernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE);
	tracker->flags |= ZERNEL_TRAINING_THREAD;
}

/* The forward pass of a closure is over. It began after the last marker of the optimizer step, or with the
 * step itself. */
static inline void zernel_attribute_time_to_forward(struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u64 start_ns = zernel_word_start_ns(task->phase_word);

	if (zernel_word_phase(task->phase_word) != ZERNEL_OPTIMIZER_STEP ||
	    !(tracker->flags & ZERNEL_ANNOUNCES_UPDATES))
		return;
	zernel_transition(task, ZERNEL_GPU_COMPUTE,
			  tracker->last_marker_ns > start_ns ? tracker->last_marker_ns : start_ns);
}

/* Whether the optimizer step has run no backward pass since its begin or its last marker. */
static inline int zernel_lacks_backward(const struct zernel_task_state *task)
{
	return task->tracker.last_marker_ns >= zernel_word_start_ns(task->phase_word);
}

/* A backward pass follows a forward pass. A thread that launches may serve the backward passes of others, and
 * begin another one inside. */
static inline void zernel_begin_backward(const struct zernel_tracker_config *config,
					 struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u16 trains = tracker->flags & ZERNEL_USES_GPU ? 0 : ZERNEL_TRAINING_THREAD;

	if (zernel_works_outside_steps(tracker))
		return;
	zernel_attribute_time_to_forward(task);
	/* Another thread launches, but this one syncs. */
	tracker->flags &= ~ZERNEL_COLLECTIVE_QUEUED;
	zernel_announce(config, task, ZERNEL_ACTIVITY_BACKWARD, ZERNEL_LAUNCHED_SINCE_SYNC | trains);
}

/* The thread updates the model. */
static inline void zernel_begin_update(const struct zernel_tracker_config *config,
				       struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;

	tracker->flags &= ~ZERNEL_IN_UPDATE;
	if (tracker->sees_update_ends)
		tracker->flags |= ZERNEL_IN_UPDATE;
	tracker->last_marker_ns = tracker->now_ns;
	zernel_announce(config, task, ZERNEL_ACTIVITY_UPDATING,
			ZERNEL_TRAINING_THREAD | ZERNEL_ANNOUNCES_UPDATES);
}

/* Clearing gradients is part of the update, if its end will be seen. Inside of a step it is a closure
 * that clears them, before its forward pass or between that and the backward pass. Between preparing a
 * batch and copying it, that does not end the preparation. If ends are not seen, gradients are cleared at
 * the end of an optimizer step, or before a forward pass: then it takes little time. */
static inline void zernel_zero_gradients(const struct zernel_tracker_config *config,
					 struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	int in_update = tracker->flags & ZERNEL_IN_UPDATE;
	int updates = tracker->activity == ZERNEL_ACTIVITY_UPDATING && !in_update;

	if (zernel_may_hold_batch(config, tracker))
		return;
	if (tracker->sees_update_ends && !in_update) {
		zernel_begin_update(config, task);
		return;
	}
	if (in_update && zernel_lacks_backward(task))
		zernel_attribute_time_to_forward(task);
	zernel_announce(config, task, updates ? ZERNEL_ACTIVITY_UPDATING : ZERNEL_ACTIVITY_COMPUTING,
			ZERNEL_TRAINING_THREAD);
}

/* An optimizer step, or the clearing of gradients, is over. */
static inline void zernel_leave_update(const struct zernel_tracker_config *config,
				       struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;

	tracker->sees_update_ends = 1;
	tracker->flags &= ~ZERNEL_IN_UPDATE;
	if (zernel_may_hold_batch(config, tracker))
		return;
	/* What follows the backward pass of a closure was the optimizer's. */
	zernel_attribute_time_to_update(task);
	zernel_announce(config, task, ZERNEL_ACTIVITY_AFTER_UPDATE, ZERNEL_TRAINING_THREAD);
	zernel_begin_undecided_time(config, tracker);
	tracker->update_end_ns = tracker->now_ns;
}

/* The thread has forked a process. If a batch follows, it started its loaders, and copying its memory
 * took most of the time since it last called or woke up. */
static inline void zernel_fork(const struct zernel_tracker_config *config,
			       struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	__u64 start_ns = zernel_word_start_ns(task->phase_word);
	int awaits_batch = tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE;

	if (zernel_in_call(tracker) || (tracker->flags & ZERNEL_UNDECIDED && !awaits_batch))
		return;
	if (awaits_batch)
		zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_COMPUTING, tracker->now_ns);
	tracker->flags &= ~ZERNEL_MAY_UPDATE;
	tracker->flags |= ZERNEL_UNDECIDED;
	tracker->undecided_since_ns =
		tracker->last_own_event_ns > start_ns ? tracker->last_own_event_ns : start_ns;
}

/* The thread has compiled. It may have waited in between, and goes on with what it compiled for. A
 * thread that only compiles has nothing to go on with. */
static inline void zernel_end_compile(const struct zernel_tracker_config *config,
				      struct zernel_tracker *tracker)
{
	const __u16 computes = ZERNEL_TRAINING_THREAD | ZERNEL_USES_GPU;

	if (tracker->activity == ZERNEL_ACTIVITY_COMPILING || tracker->activity == ZERNEL_ACTIVITY_IDLE)
		zernel_set_activity(config, tracker,
			       tracker->flags & computes ? ZERNEL_ACTIVITY_COMPUTING : ZERNEL_ACTIVITY_IDLE,
			       tracker->now_ns);
}

static inline void zernel_stop_observing(const struct zernel_tracker_config *config,
					 struct zernel_tracker *tracker)
{
	tracker->flags &= ~(ZERNEL_IN_SYNC | ZERNEL_IN_COLLECTIVE | ZERNEL_COLLECTIVE_QUEUED |
			    ZERNEL_LAUNCHED_SINCE_SYNC);
	zernel_set_activity(config, tracker, ZERNEL_ACTIVITY_IDLE, tracker->now_ns);
}

/* Applies an event by which the thread announces what it does next, or a block. */
static inline void zernel_apply_announcement(const struct zernel_tracker_config *config,
					     struct zernel_task_state *task, __u8 event)
{
	switch (event) {
	case ZERNEL_DATA_BEGIN:
		task->tracker.flags &= ~ZERNEL_IN_UPDATE;
		/* Its first batch comes now, and was not prepared after the optimizer step. */
		if (task->tracker.activity == ZERNEL_ACTIVITY_AFTER_UPDATE)
			task->tracker.flags &= ~ZERNEL_UNDECIDED;
		zernel_attribute_time_to_loading(task);
		zernel_announce(config, task, ZERNEL_ACTIVITY_LOADING,
				ZERNEL_TRAINING_THREAD | ZERNEL_ANNOUNCES_DATA);
		break;
	case ZERNEL_FORWARD_BEGIN:
		zernel_announce(config, task, ZERNEL_ACTIVITY_COMPUTING, ZERNEL_TRAINING_THREAD);
		break;
	case ZERNEL_BACKWARD_BEGIN:
		zernel_begin_backward(config, task);
		break;
	case ZERNEL_OPTIMIZER_BEGIN:
		zernel_begin_update(config, task);
		break;
	case ZERNEL_ZERO_GRADIENTS:
		zernel_zero_gradients(config, task);
		break;
	case ZERNEL_UPDATE_END:
		zernel_leave_update(config, task);
		break;
	case ZERNEL_OTHER_WORK_BEGIN:
		zernel_announce(config, task, ZERNEL_ACTIVITY_OTHER_WORK, 0);
		break;
	case ZERNEL_COMPILE_BEGIN:
		zernel_announce(config, task, ZERNEL_ACTIVITY_COMPILING, 0);
		break;
	case ZERNEL_COMPILE_END:
		zernel_end_compile(config, &task->tracker);
		break;
	default:
		zernel_begin_wait(config, task, event);
	}
}

static inline void zernel_apply_event(const struct zernel_tracker_config *config,
				struct zernel_task_state *task, __u8 event)
{
	struct zernel_tracker *tracker = &task->tracker;

	switch (event) {
	case ZERNEL_GPU_SYNC_ENTER:
		zernel_enter_sync(config, tracker);
		break;
	case ZERNEL_GPU_SYNC_LEAVE:
		zernel_leave_sync(config, tracker);
		break;
	case ZERNEL_COPY_TO_HOST_ENTER:
		zernel_enter_copy_to_host(tracker);
		break;
	case ZERNEL_COPY_TO_HOST_LEAVE:
		zernel_leave_copy_to_host(config, task);
		break;
	case ZERNEL_COLLECTIVE_ENTER:
		zernel_enter_collective(tracker);
		break;
	case ZERNEL_COLLECTIVE_LEAVE:
		zernel_leave_collective(tracker);
		break;
	case ZERNEL_LAUNCH:
		zernel_launch(config, tracker);
		break;
	case ZERNEL_COPY_TO_DEVICE:
		zernel_copy(config, task);
		break;
	case ZERNEL_OPTIMIZER_MARKER:
		zernel_handle_optimizer_marker(config, task);
		break;
	case ZERNEL_FORK:
		zernel_fork(config, task);
		break;
	case ZERNEL_NOT_OBSERVED:
		zernel_stop_observing(config, tracker);
		break;
	case ZERNEL_PREEMPT:
		zernel_preempt(tracker);
		break;
	case ZERNEL_RESUME:
	case ZERNEL_UNBLOCK:
	case ZERNEL_UNBLOCK_AFTER_LAUNCHES:
		break;
	default:
		zernel_apply_announcement(config, task, event);
	}
}

/* Changes the phase if the last event does. */
static inline void zernel_update_phase(const struct zernel_tracker_config *config,
				 struct zernel_task_state *task)
{
	struct zernel_tracker *tracker = &task->tracker;
	int waiting = tracker->flags & ZERNEL_IS_BLOCKED;
	__u8 phase;

	if (!zernel_in_call(tracker) && !waiting && tracker->activity_until_ns <= tracker->now_ns)
		zernel_set_activity(config, tracker, zernel_activity_after_deadline(tracker->activity),
			       tracker->now_ns);
	if (tracker->flags & ZERNEL_IN_COLLECTIVE) {
		phase = ZERNEL_NCCL_COLLECTIVE;
		tracker->deadline_ns =
			zernel_add_saturating(tracker->last_call_evidence_ns, config->collective_max_ns);
	} else if (tracker->flags & ZERNEL_IN_SYNC) {
		phase = zernel_in_copy_to_host(tracker) ? zernel_word_phase(task->phase_word) :
							  zernel_sync_phase(tracker);
		tracker->deadline_ns =
			zernel_add_saturating(tracker->last_call_evidence_ns, config->sync_max_ns);
	} else {
		phase = zernel_activity_phase(tracker->activity);
		tracker->deadline_ns = tracker->activity_until_ns;
	}
	if (phase == ZERNEL_UNKNOWN || tracker->flags & ZERNEL_IS_QUEUED)
		tracker->deadline_ns = ZERNEL_NEVER;
	else if (waiting)
		tracker->deadline_ns = tracker->wait_until_ns;
	if (phase != zernel_word_phase(task->phase_word))
		zernel_transition(task, phase, tracker->now_ns);
}

/* Starts to track a thread at `now_ns`. */
static inline void zernel_begin_tracking(struct zernel_task_state *task, __u64 now_ns)
{
	struct zernel_tracker *tracker = &task->tracker;

	tracker->now_ns = now_ns;
	tracker->deadline_ns = ZERNEL_NEVER;
	tracker->activity_until_ns = ZERNEL_NEVER;
	tracker->last_own_event_ns = now_ns;
	zernel_transition(task, ZERNEL_UNKNOWN, now_ns);
}

/* Takes in what the thread did at `at_ns`. */
static inline void zernel_track_event(const struct zernel_tracker_config *config,
				struct zernel_task_state *task, __u64 at_ns, __u8 event)
{
	if (at_ns < task->tracker.now_ns) {
		zernel_count_fault(&task->tracker.late_events);
		if (!zernel_closes_open_call(&task->tracker, at_ns, event))
			return;
	}
	zernel_advance_time(config, task, at_ns);
	if (zernel_attribute_wait(config, task, event)) {
		zernel_update_phase(config, task);
		return;
	}
	zernel_end_wait(config, &task->tracker, event);
	zernel_end_run_delay(&task->tracker);
	zernel_apply_event(config, task, event);
	zernel_update_phase(config, task);
	if (event != ZERNEL_PREEMPT && event != ZERNEL_RESUME)
		task->tracker.last_own_event_ns = task->tracker.now_ns;
}

#endif
