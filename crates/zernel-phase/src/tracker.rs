//! The event rule: exact phase intervals of one thread from its own events.
//!
//! Probes report when a thread enters and leaves GPU syncs and collectives, launches work, copies
//! data, and blocks. [`PhaseTracker`] turns these events into phase intervals without gap or
//! overlap. `PyTorch` announces what its training thread does: it begins to get a batch, a backward
//! pass, an optimizer step. Then these announcements decide:
//!
//! | the thread | phase |
//! |---|---|
//! | is in a collective, or in a sync when only a collective was enqueued since the last sync | `NcclCollective` |
//! | is in any other GPU sync | `GpuCompute` |
//! | copied to the host for at least 1 ms: since the begin of the copy | as in a GPU sync |
//! | announced that it gets a batch; until it copies, launches, syncs or announces something else | `DataLoading` |
//! | forked a process and announces a batch next: since it last called or woke up before the fork | `DataLoading` |
//! | announced an optimizer step; until that ends. If ends are not seen: until it syncs or announces anything but that it clears gradients | `OptimizerStep` |
//! | launched between the end of the backward pass and the announced optimizer step, as for clipping | `OptimizerStep` |
//! | was in an optimizer step and begins a backward pass: since the last marker of the step, or since its announcement | `GpuCompute` |
//! | passes a marker after a backward pass, in a step with a closure | `OptimizerStep` |
//! | is back from the backward pass of a closure, in an optimizer step whose end is seen; until it clears gradients again | `OptimizerStep` |
//! | is in a backward pass, on this thread or on another one that this thread waits for | `GpuCompute` |
//! | launched, copied or synced last | `GpuCompute` |
//! | announced that it writes a checkpoint; until it announces a batch, a forward pass or an optimizer step | `Unknown` |
//! | announced that it compiles; until that ends, or it announces a batch, a forward pass or an optimizer step | `Unknown` |
//! | waits, but not for data, while another thread compiles, as for a backward pass | `Unknown` |
//! | waits for a thread that is in a collective meanwhile, outside of a backward pass | `NcclCollective` |
//! | had none of these events for too long, or is not observed | `Unknown` |
//!
//! A thread that announces nothing loads data only where something shows it:
//!
//! | the thread | phase |
//! |---|---|
//! | waits for I/O or polls after its step, or did so last | `DataLoading` |
//! | copies, at least 1 ms after its announced optimizer step and without launches since; a sync right after the step does not count | `DataLoading` since then |
//! | waits for I/O after launches, and copies next | `DataLoading` |
//! | waits on a futex for a thread that loads data | `DataLoading` |
//! | waited on a futex and copied next, while no other thread of its process launched, or after announced optimizer steps | `DataLoading` |
//! | called a function that only optimizers call; launches right after it belong to it | `OptimizerStep` |
//!
//! A short wait, as for a lock or a page, does not end an activity. A longer sleep, or wait for a request, ends computing. A thread that only launches,
//! such as the thread of the backward pass, is `Unknown` while it waits. So is a thread that syncs or
//! copies for another one, which announces its steps. It computes again when it
//! wakes up after launches of other threads. Only a thread's own events count: if another thread
//! runs the collectives, that thread is in `NcclCollective`.
//!
//! The tracker tolerates lost and late events. Every phase has a deadline, counted from its last
//! event and suspended while the thread is blocked, or runnable and not running; after the deadline
//! the thread is `Unknown` until its next event. A call ends when another event contradicts it. A late event never changes
//! a reported interval.

mod activity;
mod config;
mod copy_to_host;
mod event;
mod faults;
mod update;
mod waits;

pub use config::TrackerConfig;
pub use event::{BlockReason, PhaseInterval, ThreadEvent};
pub use faults::TrackerFaults;

use crate::task_state::WorkloadPhase;
use activity::Activity;
use faults::count_fault;
use waits::Wait;

/// Turns the events of one thread into phase intervals.
///
/// Closed intervals go to any collection: a `Vec`, or a
/// [`PhaseTimeAccumulator`](crate::PhaseTimeAccumulator) for sums.
///
/// ```
/// use zernel_phase::{PhaseTimeAccumulator, PhaseTracker, ThreadEvent, TrackerConfig};
///
/// let mut times = PhaseTimeAccumulator::default();
/// let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
/// tracker.observe(100, ThreadEvent::Launch, &mut times);
/// tracker.observe(300, ThreadEvent::GpuSyncEnter, &mut times);
/// tracker.observe(900, ThreadEvent::GpuSyncLeave, &mut times);
/// tracker.finish(1_000, &mut times);
/// assert_eq!(times.gpu_compute_ns, 900);
/// assert_eq!(times.total_ns(), 1_000);
/// ```
#[derive(Debug, Clone)]
pub struct PhaseTracker {
    config: TrackerConfig,
    /// Phase of the open interval. `start_ns` and `deadline_ns` belong to it.
    phase: WorkloadPhase,
    start_ns: u64,
    deadline_ns: u64,
    /// Latest time seen.
    now_ns: u64,
    activity: Activity,
    activity_until_ns: u64,
    /// Time of entry into the sync that the thread is in. `collective_since_ns` is the same for a
    /// collective.
    sync_since_ns: Option<u64>,
    /// Whether that sync is a copy to the host, which may not wait for the GPU.
    copies_to_host: bool,
    collective_since_ns: Option<u64>,
    /// Time of the last evidence for the call that the thread is in.
    last_call_evidence_ns: u64,
    wait: Option<Wait>,
    /// When the thread was preempted. Deadlines stand still until it runs again.
    queued_since_ns: Option<u64>,
    /// Time of the last event other than losing its CPU or getting it back.
    last_own_event_ns: u64,
    /// Start of a time that may have been spent on data: a wait, the work before a fork, or what follows an optimizer
    /// step. A copy or a batch that follows decides that it was.
    undecided_since_ns: Option<u64>,
    /// End of the backward pass. If an optimizer step follows, it began then.
    update_since_ns: Option<u64>,
    /// Time of the last optimizer marker or announced optimizer step.
    last_marker_ns: u64,
    /// End of its last optimizer step.
    update_end_ns: Option<u64>,
    /// Whether the thread announces when it gets a batch.
    announces_data: bool,
    /// Whether the thread announces its optimizer steps.
    announces_updates: bool,
    /// Whether its last wait that a copy followed was for data. It announces its optimizer steps.
    awaits_data_after_update: bool,
    /// Whether the ends of its optimizer steps are seen.
    sees_update_ends: bool,
    /// Whether it is in an optimizer step whose end will be seen.
    in_update: bool,
    /// Whether the thread has launched, copied or synced.
    uses_gpu: bool,
    /// Whether the thread copies, syncs or passes markers. It is then a training thread, not one
    /// that only launches on behalf of another.
    is_training_thread: bool,
    launched_since_sync: bool,
    /// Whether only a collective was enqueued since the last sync.
    collective_queued: bool,
    /// Whether the current collective has launched its kernel.
    collective_launched: bool,
    faults: TrackerFaults,
}

impl PhaseTracker {
    /// Creates a tracker of a thread that is `Unknown` from `now_ns` on.
    #[must_use]
    pub fn new(config: TrackerConfig, now_ns: u64) -> Self {
        Self {
            config,
            phase: WorkloadPhase::Unknown,
            start_ns: now_ns,
            deadline_ns: u64::MAX,
            now_ns,
            activity: Activity::Idle,
            activity_until_ns: u64::MAX,
            sync_since_ns: None,
            copies_to_host: false,
            collective_since_ns: None,
            last_call_evidence_ns: 0,
            wait: None,
            queued_since_ns: None,
            last_own_event_ns: now_ns,
            undecided_since_ns: None,
            update_since_ns: None,
            last_marker_ns: 0,
            update_end_ns: None,
            announces_data: false,
            announces_updates: false,
            awaits_data_after_update: false,
            sees_update_ends: false,
            in_update: false,
            uses_gpu: false,
            is_training_thread: false,
            launched_since_sync: false,
            collective_queued: false,
            collective_launched: false,
            faults: TrackerFaults::default(),
        }
    }

    /// Applies an event at `at_ns` and appends the intervals that it closes to `closed`.
    pub fn observe(
        &mut self,
        at_ns: u64,
        event: ThreadEvent,
        closed: &mut impl Extend<PhaseInterval>,
    ) {
        if at_ns < self.now_ns {
            count_fault(&mut self.faults.late_events, true);
            if !self.closes_open_call(at_ns, event) {
                return;
            }
        }
        self.advance_time(at_ns, closed);
        if self.attribute_wait(event, closed) {
            self.update_phase(closed);
            return;
        }
        // A thread with any other event is running, so it is not blocked any more.
        self.end_wait(event);
        self.end_run_delay();
        self.apply_event(event, closed);
        self.update_phase(closed);
        if !matches!(event, ThreadEvent::Preempt | ThreadEvent::Resume) {
            self.last_own_event_ns = self.now_ns;
        }
    }

    /// Returns the phase at `now_ns` if no further event arrives before.
    #[must_use]
    pub fn phase_at(&self, now_ns: u64) -> WorkloadPhase {
        if now_ns < self.deadline_ns {
            return self.phase;
        }
        let mut expired = self.clone();
        expired.advance_time(now_ns, &mut Vec::new());
        expired.phase
    }

    /// Returns the time at which the phase ends without further events; `u64::MAX` for never.
    #[must_use]
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Closes the open interval at `now_ns`, when the thread has exited or is no longer observed.
    pub fn finish(mut self, now_ns: u64, closed: &mut impl Extend<PhaseInterval>) -> TrackerFaults {
        self.advance_time(now_ns, closed);
        self.close(self.now_ns, WorkloadPhase::Unknown, closed);
        self.faults
    }

    /// Returns the counts of lost and late events so far.
    #[must_use]
    pub fn faults(&self) -> TrackerFaults {
        self.faults
    }

    /// Whether a late event is the leave event of the open call, and not of an earlier call.
    fn closes_open_call(&self, at_ns: u64, event: ThreadEvent) -> bool {
        let since_ns = match event {
            ThreadEvent::GpuSyncLeave => self.sync_since_ns,
            ThreadEvent::CopyToHostLeave => self.copy_to_host_since_ns(),
            ThreadEvent::CollectiveLeave => self.collective_since_ns,
            _ => None,
        };
        since_ns.is_some_and(|since_ns| since_ns <= at_ns)
    }

    /// Advances the time to `at_ns` and ends the phase if its deadline has passed. The activity that follows may have a
    /// deadline that has passed too.
    fn advance_time(&mut self, at_ns: u64, closed: &mut impl Extend<PhaseInterval>) {
        self.now_ns = self.now_ns.max(at_ns);
        for _ in 0..2 {
            if self.now_ns < self.deadline_ns {
                return;
            }
            self.end_expired_phase(closed);
        }
    }

    fn end_expired_phase(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        let next = match self.is_in_call() {
            true => Activity::Idle,
            false => self.activity.after_deadline(),
        };
        let at_ns = self.deadline_ns;
        count_fault(&mut self.faults.expired_phases, true);
        self.wait = None;
        if self.is_in_call() {
            count_fault(&mut self.faults.lost_leave_events, true);
            self.sync_since_ns = None;
            self.collective_since_ns = None;
            self.collective_queued = false;
        }
        self.set_activity(next, at_ns);
        self.deadline_ns = match next.phase() {
            WorkloadPhase::Unknown => u64::MAX,
            _ => self.activity_until_ns,
        };
        if next.phase() != self.phase {
            self.close(at_ns, next.phase(), closed);
        }
    }

    fn apply_event(&mut self, event: ThreadEvent, closed: &mut impl Extend<PhaseInterval>) {
        match event {
            ThreadEvent::GpuSyncEnter => self.enter_sync(),
            ThreadEvent::GpuSyncLeave => self.leave_sync(),
            ThreadEvent::CopyToHostEnter => self.enter_copy_to_host(),
            ThreadEvent::CopyToHostLeave => self.leave_copy_to_host(closed),
            ThreadEvent::CollectiveEnter => self.enter_collective(),
            ThreadEvent::CollectiveLeave => self.leave_collective(),
            ThreadEvent::Launch => self.handle_launch(),
            ThreadEvent::CopyToDevice => self.copy_to_device(closed),
            ThreadEvent::OptimizerMarker => self.handle_optimizer_marker(closed),
            ThreadEvent::DataBegin => {
                // Its first batch comes now, and was not prepared after the optimizer step.
                if self.activity == Activity::AfterUpdate {
                    self.undecided_since_ns = None;
                }
                self.announces_data = true;
                self.in_update = false;
                self.attribute_time_to_loading(closed);
                self.announce(Activity::Loading, closed);
            }
            ThreadEvent::ForwardBegin => self.announce(Activity::Computing, closed),
            ThreadEvent::BackwardBegin if self.works_outside_steps() => {}
            ThreadEvent::BackwardBegin => self.begin_backward(closed),
            ThreadEvent::OptimizerBegin => self.begin_update(closed),
            ThreadEvent::ZeroGradients => self.zero_gradients(closed),
            ThreadEvent::UpdateEnd => self.end_update(closed),
            ThreadEvent::OtherWorkBegin => self.announce(Activity::OtherWork, closed),
            ThreadEvent::CompileBegin => self.announce(Activity::Compiling, closed),
            ThreadEvent::CompileEnd => self.end_compile(),
            ThreadEvent::Fork => self.handle_fork(),
            ThreadEvent::NotObserved => self.stop_observing(),
            ThreadEvent::Block(reason) => self.begin_wait(reason, closed),
            ThreadEvent::Preempt => self.queued_since_ns = Some(self.now_ns),
            ThreadEvent::Resume
            | ThreadEvent::Unblock
            | ThreadEvent::UnblockAfterLaunches
            | ThreadEvent::AwaitedCompile
            | ThreadEvent::AwaitedCollective
            | ThreadEvent::AwaitedData => {}
        }
    }

    fn enter_sync(&mut self) {
        self.end_sync_without_leave();
        self.sync_since_ns = Some(self.now_ns);
        self.copies_to_host = false;
        if self.collective_since_ns.is_none() {
            self.last_call_evidence_ns = self.now_ns;
        }
        self.is_training_thread = true;
        self.uses_gpu = true;
        self.note_sync_after_update();
        self.undecided_since_ns = None;
    }

    fn leave_sync(&mut self) {
        count_fault(
            &mut self.faults.lost_enter_events,
            self.sync_since_ns.is_none(),
        );
        let sync_follows_update = self.sync_follows_update();
        self.sync_since_ns = None;
        if self.collective_since_ns.is_some() {
            return; // the sync was part of the collective
        }
        self.collective_queued = false;
        self.launched_since_sync = false;
        if self.is_in_announced_update() {
            self.set_activity(Activity::Updating, self.now_ns);
            return;
        }
        if self.activity == Activity::AfterUpdate || sync_follows_update {
            self.begin_undecided_time();
            return;
        }
        self.set_computing();
        // Time blocked on the GPU is no optimizer step.
        self.update_since_ns = self.update_since_ns.map(|_| self.now_ns);
    }

    /// The phase of a sync.
    fn sync_phase(&self) -> WorkloadPhase {
        match self.collective_queued {
            true => WorkloadPhase::NcclCollective,
            false => WorkloadPhase::GpuCompute,
        }
    }

    fn enter_collective(&mut self) {
        self.end_sync_without_leave();
        self.end_collective_without_leave();
        self.collective_since_ns = Some(self.now_ns);
        self.last_call_evidence_ns = self.now_ns;
        self.collective_launched = false;
        self.undecided_since_ns = None;
        self.update_since_ns = None;
    }

    fn leave_collective(&mut self) {
        count_fault(
            &mut self.faults.lost_enter_events,
            self.collective_since_ns.is_none(),
        );
        self.end_sync_without_leave();
        self.collective_since_ns = None;
        self.collective_queued = !self.launched_since_sync;
    }

    fn handle_launch(&mut self) {
        self.uses_gpu = true;
        if self.collective_since_ns.is_some() {
            self.collective_launched = true;
            return;
        }
        self.end_sync_without_leave();
        self.collective_queued = false;
        self.launched_since_sync = true;
        self.undecided_since_ns = None;
        if !self.launches_for_optimizer() {
            self.set_computing();
        }
    }

    /// Turns to computing. The thread may still be between a backward pass and its optimizer step.
    fn set_computing(&mut self) {
        if self.works_outside_steps() {
            return;
        }
        self.awaits_data_after_update &= self.activity != Activity::Loading;
        let update_since_ns = self.update_since_ns;
        self.set_activity(Activity::Computing, self.now_ns);
        self.update_since_ns = update_since_ns;
    }

    fn copy_to_device(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        self.uses_gpu = true;
        if self.collective_since_ns.is_some() {
            // A collective copies only before its launch. A copy after it means that the leave
            // event was lost.
            if !self.collective_launched {
                return;
            }
            self.end_collective_without_leave();
        }
        self.end_sync_without_leave();
        self.is_training_thread = true;
        // An optimizer may copy too. The next batch is announced.
        let may_be_of_optimizer =
            self.activity == Activity::Updating && self.announces_data && self.announces_updates;
        let is_of_optimizer = may_be_of_optimizer || self.is_in_announced_update();
        if is_of_optimizer || self.works_outside_steps() {
            return;
        }
        if self.may_have_loaded() {
            self.awaits_data_after_update |= self.announces_updates;
            self.attribute_time_to_loading(closed);
        }
        // The next sync may wait for this copy.
        self.update_end_ns = None;
        self.set_activity(Activity::Computing, self.now_ns);
    }

    /// A batch follows an undecided time: the thread got data since then.
    fn attribute_time_to_loading(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if let Some(since_ns) = self.undecided_since_ns.take()
            && self.phase != WorkloadPhase::DataLoading
        {
            self.close(
                since_ns.max(self.start_ns),
                WorkloadPhase::DataLoading,
                closed,
            );
        }
    }

    /// The thread has forked a process. If a batch follows, it started its loaders, and copying its memory took most of
    /// the time since it last called or woke up.
    fn handle_fork(&mut self) {
        let awaits_batch = self.activity == Activity::AfterUpdate;
        if self.is_in_call() || (self.undecided_since_ns.is_some() && !awaits_batch) {
            return;
        }
        let since_ns = self.last_own_event_ns.max(self.start_ns);
        if awaits_batch {
            self.set_activity(Activity::Computing, self.now_ns);
        }
        self.update_since_ns = None;
        self.undecided_since_ns = Some(since_ns);
    }

    /// The thread announces what it does from now on.
    fn announce(&mut self, activity: Activity, closed: &mut impl Extend<PhaseInterval>) {
        if activity == Activity::Updating {
            self.attribute_time_to_update(closed);
        }
        self.end_sync_without_leave();
        self.end_collective_without_leave();
        self.awaits_data_after_update &= self.activity != Activity::Loading;
        // A thread that launches may serve the backward passes of others, begin another one inside, or compile it.
        self.is_training_thread |= match activity {
            Activity::Backward => !self.uses_gpu,
            _ => activity.is_part_of_step(),
        };
        self.set_activity(activity, self.now_ns);
    }

    /// The thread has compiled. It may have waited in between, and goes on with what it compiled for. A thread that only
    /// compiles has nothing to go on with.
    fn end_compile(&mut self) {
        if !matches!(self.activity, Activity::Compiling | Activity::Idle) {
            return;
        }
        let next = match self.is_training_thread || self.uses_gpu {
            true => Activity::Computing,
            false => Activity::Idle,
        };
        self.set_activity(next, self.now_ns);
    }

    fn stop_observing(&mut self) {
        self.sync_since_ns = None;
        self.collective_since_ns = None;
        self.collective_queued = false;
        self.launched_since_sync = false;
        self.set_activity(Activity::Idle, self.now_ns);
    }

    /// Sets the phase and its deadline after an event. Closes the open interval if the phase
    /// changed.
    fn update_phase(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if !self.is_in_call() && self.wait.is_none() && self.activity_until_ns <= self.now_ns {
            self.set_activity(self.activity.after_deadline(), self.now_ns);
        }
        let (phase, shown_ns, max_ns) = match (self.collective_since_ns, self.sync_since_ns) {
            (Some(_), _) => (
                WorkloadPhase::NcclCollective,
                self.last_call_evidence_ns,
                self.config.collective_max_ns,
            ),
            (None, Some(_)) => (
                match self.copies_to_host {
                    true => self.phase,
                    false => self.sync_phase(),
                },
                self.last_call_evidence_ns,
                self.config.sync_max_ns,
            ),
            (None, None) => (self.activity.phase(), self.activity_until_ns, 0),
        };
        self.deadline_ns = match self.wait {
            _ if phase == WorkloadPhase::Unknown || self.queued_since_ns.is_some() => u64::MAX,
            Some(wait) => wait.until_ns,
            None => shown_ns.saturating_add(max_ns),
        };
        if phase != self.phase {
            self.close(self.now_ns, phase, closed);
        }
    }

    /// Ends the open interval at `end_ns` and starts one in phase `next`.
    fn close(&mut self, end_ns: u64, next: WorkloadPhase, closed: &mut impl Extend<PhaseInterval>) {
        if end_ns > self.start_ns {
            closed.extend([PhaseInterval {
                phase: self.phase,
                start_ns: self.start_ns,
                end_ns,
            }]);
        }
        self.phase = next;
        self.start_ns = end_ns;
    }

    fn set_activity(&mut self, activity: Activity, from_ns: u64) {
        self.activity = activity;
        self.activity_until_ns = from_ns.saturating_add(activity.max_ns(&self.config));
        self.undecided_since_ns = None;
        self.update_since_ns = None;
    }

    /// Whether the thread still does work that is no part of a step, such as compiling or saving. It may launch, copy and sync meanwhile, and run backward
    /// passes without data.
    fn works_outside_steps(&self) -> bool {
        !self.activity.is_part_of_step() && self.now_ns < self.activity_until_ns
    }

    fn is_in_call(&self) -> bool {
        self.sync_since_ns.is_some() || self.collective_since_ns.is_some()
    }

    fn end_sync_without_leave(&mut self) {
        let open = self.sync_since_ns.take().is_some();
        self.count_lost_leave(open);
    }

    fn end_collective_without_leave(&mut self) {
        let open = self.collective_since_ns.take().is_some();
        self.count_lost_leave(open);
    }

    fn count_lost_leave(&mut self, is_lost: bool) {
        count_fault(&mut self.faults.lost_leave_events, is_lost);
        self.update_since_ns = self.update_since_ns.filter(|_| !is_lost);
    }
}

#[cfg(test)]
mod collective_tests;
#[cfg(test)]
mod compile_tests;
#[cfg(test)]
mod copy_to_host_tests;
#[cfg(test)]
mod loop_tests;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;
