//! The event rule: exact phase intervals of one thread from its own events.
//!
//! Probes see a thread enter and leave the calls that matter, launch work, copy data, and block.
//! [`PhaseTracker`] turns those events into phase intervals that follow each other without gap or
//! overlap:
//!
//! | the thread | phase |
//! |---|---|
//! | is in a collective, or syncs with nothing but a collective handed to the GPU since the last sync | `NcclCollective` |
//! | is in any other GPU sync | `GpuCompute` |
//! | launched last | `GpuCompute` |
//! | waits for I/O, or did so last | `DataLoading` |
//! | copied to the device last, or synced right after it | `DataLoading` |
//! | polls, or waits on a futex, when its step is over: for its next batch | `DataLoading` |
//! | waited on a futex after launches: for its next batch if a copy follows, else for the backward pass | `DataLoading` or `GpuCompute` |
//! | passed an optimizer marker; launches right behind it belong to it | `OptimizerStep` |
//! | returned from a sync, and never showed a marker | `OptimizerStep`, for one short burst |
//! | did nothing of the kind for too long | `Unknown` |
//!
//! A short wait, as for a lock or a page, interrupts an activity and does not end it. A thread that
//! only launches, such as the one of the backward pass, is `Unknown` while it waits for more. A
//! thread is judged by its own events alone: where collectives run on another thread than the step,
//! that other thread shows them.
//!
//! No event is trusted to arrive. Every phase has a deadline, counted from the last event that
//! showed it and standing still while the thread is known to be blocked, after which the thread is
//! `Unknown` until its next event; a call that another event proves over is over; and an event that
//! arrives after a later one never rewrites what was reported.

mod config;

use serde::{Deserialize, Serialize};

pub use config::TrackerConfig;

use crate::task_state::{PhaseTimeAccumulator, WorkloadPhase};

/// Something a thread did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ThreadEvent {
    /// Entered a call that waits for the GPU.
    GpuSyncEnter,
    /// Left it.
    GpuSyncLeave,
    /// Entered a collective call.
    CollectiveEnter,
    /// Left it.
    CollectiveLeave,
    /// Launched work on the GPU.
    Launch,
    /// Copied data to the GPU.
    CopyToDevice,
    /// Went off its CPU to wait.
    Block(BlockReason),
    /// Can run again.
    Unblock,
    /// Passed a point that only an optimizer step passes.
    OptimizerMarker,
}

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockReason {
    /// A disk, a network file system, a pipe being read as a file.
    Io,
    /// Another thread.
    Futex,
    /// A file descriptor becoming ready.
    Poll,
    /// Anything else, such as a sleep: says nothing about the phase.
    Other,
}

/// A stretch of time in one phase: from `start_ns` up to, not including, `end_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // the names say it all
pub struct PhaseInterval {
    pub phase: WorkloadPhase,
    pub start_ns: u64,
    pub end_ns: u64,
}

impl PhaseInterval {
    /// How long it lasted.
    #[must_use]
    pub fn duration_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

impl Extend<PhaseInterval> for PhaseTimeAccumulator {
    fn extend<I: IntoIterator<Item = PhaseInterval>>(&mut self, intervals: I) {
        for interval in intervals {
            self.record(interval.phase, interval.duration_ns());
        }
    }
}

/// What a thread does while it is in no call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Activity {
    Idle,
    Loading,
    Launching,
    /// The burst after a sync, taken for the optimizer's.
    Burst,
    /// In a marked optimizer step.
    Updating,
    /// What it launched is done, and so is the step: it has nothing to do but get the next batch.
    Drained,
}

impl Activity {
    fn phase(self) -> WorkloadPhase {
        match self {
            Self::Idle | Self::Drained => WorkloadPhase::Unknown,
            Self::Loading => WorkloadPhase::DataLoading,
            Self::Launching => WorkloadPhase::GpuCompute,
            Self::Burst | Self::Updating => WorkloadPhase::OptimizerStep,
        }
    }

    /// Whether a short wait leaves it as it was.
    fn survives_short_waits(self) -> bool {
        match self {
            Self::Launching | Self::Burst | Self::Updating | Self::Drained => true,
            Self::Idle | Self::Loading => false,
        }
    }

    /// What is left of it when nothing showed it for too long.
    fn after_deadline(self) -> Self {
        match self {
            Self::Burst | Self::Updating | Self::Drained => Self::Drained,
            Self::Idle | Self::Loading | Self::Launching => Self::Idle,
        }
    }
}

/// What was seen that cannot be, or came too late: the quality of a tracker's input. Counts saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TrackerFaults {
    /// Calls ended by evidence other than their own leave event.
    pub lost_leaves: u32,
    /// Leave events of calls that were never seen to begin.
    pub lost_enters: u32,
    /// Events stamped before one already applied.
    pub late: u32,
    /// Phases given up at their deadline.
    pub expired: u32,
}

fn count_fault(fault: &mut u32, happened: bool) {
    *fault = fault.saturating_add(happened.into());
}

/// A wait that is not over yet, and what it interrupted.
#[derive(Debug, Clone, Copy)]
struct Wait {
    since_ns: u64,
    activity: Activity,
    activity_until_ns: u64,
    /// After launches, on a futex: for data, or for the thread of the backward pass.
    is_undecided: bool,
}

/// Turns the events of one thread into phase intervals.
///
/// Closed intervals go to whatever collects them: a `Vec`, or a [`PhaseTimeAccumulator`] for sums.
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
/// assert_eq!(times.gpu_compute_ns, 800);
/// assert_eq!(times.optimizer_step_ns, 100);
/// assert_eq!(times.total_ns(), 1_000);
/// ```
#[derive(Debug, Clone)]
pub struct PhaseTracker {
    config: TrackerConfig,
    /// The interval still open, and when its phase is given up.
    phase: WorkloadPhase,
    start_ns: u64,
    deadline_ns: u64,
    /// The latest time reported up to.
    now_ns: u64,
    activity: Activity,
    activity_until_ns: u64,
    /// When the calls the thread is in were entered.
    sync_since_ns: Option<u64>,
    collective_since_ns: Option<u64>,
    /// When the call the thread is in was last shown.
    call_shown_ns: u64,
    wait: Option<Wait>,
    /// The last wait after launches that may have been for data: a copy would tell.
    undecided_since_ns: Option<u64>,
    last_marker_ns: Option<u64>,
    /// It copies, syncs or marks: it drives the steps, and does not only launch for another thread.
    drives_steps: bool,
    launched_since_sync: bool,
    /// Nothing but a collective was handed to the GPU since the last sync.
    collective_queued: bool,
    /// The collective it is in has launched its kernel.
    collective_launched: bool,
    faults: TrackerFaults,
}

impl PhaseTracker {
    /// A tracker of a thread of which nothing is known before `now_ns`.
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
            collective_since_ns: None,
            call_shown_ns: 0,
            wait: None,
            undecided_since_ns: None,
            last_marker_ns: None,
            drives_steps: false,
            launched_since_sync: false,
            collective_queued: false,
            collective_launched: false,
            faults: TrackerFaults::default(),
        }
    }

    /// Takes in what the thread did at `at_ns`; intervals that this closes go to `closed`.
    pub fn observe(
        &mut self,
        at_ns: u64,
        event: ThreadEvent,
        closed: &mut impl Extend<PhaseInterval>,
    ) {
        if at_ns < self.now_ns {
            count_fault(&mut self.faults.late, true);
            if !self.closes_open_call(at_ns, event) {
                return;
            }
        }
        self.advance(at_ns, closed);
        // Whatever it does, it runs: if it was blocked, it is no longer.
        self.end_wait();
        self.apply(event, closed);
        self.update_phase(closed);
    }

    /// The phase at `now_ns`, if nothing more happens until then.
    #[must_use]
    pub fn phase_at(&self, now_ns: u64) -> WorkloadPhase {
        if now_ns < self.deadline_ns {
            self.phase
        } else {
            WorkloadPhase::Unknown
        }
    }

    /// When the phase is given up if nothing more happens; `u64::MAX` for never.
    #[must_use]
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Closes the open interval at `now_ns`: the thread has ended, or is no longer watched.
    pub fn finish(mut self, now_ns: u64, closed: &mut impl Extend<PhaseInterval>) -> TrackerFaults {
        self.advance(now_ns, closed);
        self.close(self.now_ns, WorkloadPhase::Unknown, closed);
        self.faults
    }

    /// What was wrong with the events so far.
    #[must_use]
    pub fn faults(&self) -> TrackerFaults {
        self.faults
    }

    /// Whether a late event is the end of a call that is still open, and not of an earlier one.
    fn closes_open_call(&self, at_ns: u64, event: ThreadEvent) -> bool {
        let since_ns = match event {
            ThreadEvent::GpuSyncLeave => self.sync_since_ns,
            ThreadEvent::CollectiveLeave => self.collective_since_ns,
            _ => None,
        };
        since_ns.is_some_and(|since_ns| since_ns <= at_ns)
    }

    /// Moves time on, giving up the phase if its deadline has passed.
    fn advance(&mut self, at_ns: u64, closed: &mut impl Extend<PhaseInterval>) {
        self.now_ns = self.now_ns.max(at_ns);
        if self.now_ns < self.deadline_ns {
            return;
        }
        self.close(self.deadline_ns, WorkloadPhase::Unknown, closed);
        self.deadline_ns = u64::MAX;
        count_fault(&mut self.faults.expired, true);
        self.wait = None;
        if self.is_in_call() {
            count_fault(&mut self.faults.lost_leaves, true);
            self.sync_since_ns = None;
            self.collective_since_ns = None;
            self.collective_queued = false;
            self.set_activity(Activity::Idle);
        } else {
            self.set_activity(self.activity.after_deadline());
        }
    }

    fn apply(&mut self, event: ThreadEvent, closed: &mut impl Extend<PhaseInterval>) {
        match event {
            ThreadEvent::GpuSyncEnter => self.enter_sync(),
            ThreadEvent::GpuSyncLeave => self.leave_sync(),
            ThreadEvent::CollectiveEnter => self.enter_collective(),
            ThreadEvent::CollectiveLeave => self.leave_collective(),
            ThreadEvent::Launch => self.launch(),
            ThreadEvent::CopyToDevice => self.copy_to_device(closed),
            ThreadEvent::OptimizerMarker => self.pass_marker(),
            ThreadEvent::Block(reason) => self.block(reason),
            ThreadEvent::Unblock => {}
        }
    }

    fn enter_sync(&mut self) {
        self.end_sync_without_leave();
        self.sync_since_ns = Some(self.now_ns);
        if self.collective_since_ns.is_none() {
            self.call_shown_ns = self.now_ns;
        }
        self.drives_steps = true;
        self.undecided_since_ns = None;
    }

    fn leave_sync(&mut self) {
        count_fault(&mut self.faults.lost_enters, self.sync_since_ns.is_none());
        self.sync_since_ns = None;
        if self.collective_since_ns.is_some() {
            return; // the collective's own
        }
        self.collective_queued = false;
        self.launched_since_sync = false;
        match self.activity {
            // A copy from pageable memory syncs by itself.
            Activity::Loading => self.set_activity(Activity::Loading),
            _ => self.set_activity(self.activity_after_sync()),
        }
    }

    fn enter_collective(&mut self) {
        self.end_sync_without_leave();
        self.end_collective_without_leave();
        self.collective_since_ns = Some(self.now_ns);
        self.call_shown_ns = self.now_ns;
        self.collective_launched = false;
        self.undecided_since_ns = None;
    }

    fn leave_collective(&mut self) {
        count_fault(
            &mut self.faults.lost_enters,
            self.collective_since_ns.is_none(),
        );
        self.end_sync_without_leave();
        self.collective_since_ns = None;
        self.collective_queued = !self.launched_since_sync;
        // The optimizer's burst comes after the collective that follows a sync.
        if matches!(self.activity, Activity::Burst | Activity::Drained) {
            self.set_activity(self.activity_after_sync());
        }
    }

    fn launch(&mut self) {
        if self.collective_since_ns.is_some() {
            self.collective_launched = true;
            return;
        }
        self.end_sync_without_leave();
        self.collective_queued = false;
        self.launched_since_sync = true;
        self.undecided_since_ns = None;
        if !self.launches_for_optimizer() {
            self.set_activity(Activity::Launching);
        }
    }

    fn copy_to_device(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if self.collective_since_ns.is_some() {
            // It copies before it launches; afterwards only a lost leave explains a copy.
            if !self.collective_launched {
                return;
            }
            self.end_collective_without_leave();
        }
        self.end_sync_without_leave();
        self.drives_steps = true;
        if let Some(since_ns) = self.undecided_since_ns.take() {
            self.close(since_ns, WorkloadPhase::DataLoading, closed);
        }
        self.set_activity(Activity::Loading);
    }

    fn pass_marker(&mut self) {
        self.end_sync_without_leave();
        self.end_collective_without_leave();
        self.drives_steps = true;
        self.last_marker_ns = Some(self.now_ns);
        self.set_activity(Activity::Updating);
    }

    fn block(&mut self, reason: BlockReason) {
        let after_launches = reason == BlockReason::Futex
            && self.activity == Activity::Launching
            && !self.is_in_call();
        self.wait = Some(Wait {
            since_ns: self.now_ns,
            activity: self.activity,
            activity_until_ns: self.activity_until_ns,
            is_undecided: after_launches,
        });
        if !self.is_in_call() && self.waits_for_data(reason) {
            self.set_activity(Activity::Loading);
        } else if after_launches && !self.drives_steps {
            self.set_activity(Activity::Idle);
        }
    }

    fn waits_for_data(&self, reason: BlockReason) -> bool {
        match reason {
            BlockReason::Io => true,
            BlockReason::Poll => self.activity != Activity::Idle,
            // After launches it may be for the thread of the backward pass.
            BlockReason::Futex => !matches!(self.activity, Activity::Idle | Activity::Launching),
            BlockReason::Other => false,
        }
    }

    /// Ends a wait. Deadlines stood still meanwhile.
    fn end_wait(&mut self) {
        let Some(wait) = self.wait.take() else {
            return;
        };
        let waited_ns = self.now_ns - wait.since_ns;
        let is_short = waited_ns < self.config.short_wait_max_ns;
        if self.is_in_call() {
            self.call_shown_ns += waited_ns;
        } else if is_short && wait.activity.survives_short_waits() {
            self.activity = wait.activity;
            self.activity_until_ns = wait.activity_until_ns.saturating_add(waited_ns);
        } else if self.activity == Activity::Loading {
            self.set_activity(Activity::Loading);
        } else {
            self.activity_until_ns = self.activity_until_ns.saturating_add(waited_ns);
            if wait.is_undecided && self.activity == Activity::Launching {
                self.undecided_since_ns = Some(wait.since_ns);
            }
        }
    }

    /// Closes the open interval if the event just applied changed the phase.
    fn update_phase(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if !self.is_in_call() && self.wait.is_none() && self.activity_until_ns <= self.now_ns {
            self.set_activity(self.activity.after_deadline());
        }
        let (phase, shown_ns, max_ns) = match (self.collective_since_ns, self.sync_since_ns) {
            (Some(_), _) => (
                WorkloadPhase::NcclCollective,
                self.call_shown_ns,
                self.config.collective_max_ns,
            ),
            (None, Some(_)) if self.collective_queued => (
                WorkloadPhase::NcclCollective,
                self.call_shown_ns,
                self.config.sync_max_ns,
            ),
            (None, Some(_)) => (
                WorkloadPhase::GpuCompute,
                self.call_shown_ns,
                self.config.sync_max_ns,
            ),
            (None, None) => (self.activity.phase(), self.activity_until_ns, 0),
        };
        self.deadline_ns = match self.wait {
            _ if phase == WorkloadPhase::Unknown => u64::MAX,
            Some(wait) => wait.since_ns.saturating_add(self.config.blocked_max_ns),
            None => shown_ns.saturating_add(max_ns),
        };
        if phase != self.phase {
            self.close(self.now_ns, phase, closed);
        }
    }

    /// Ends the open interval at `end_ns` and begins one in `next`.
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

    fn set_activity(&mut self, activity: Activity) {
        let max_ns = match activity {
            Activity::Idle | Activity::Drained => u64::MAX,
            Activity::Loading => self.config.loading_max_ns,
            Activity::Launching => self.config.launching_max_ns,
            Activity::Updating => self.config.optimizer_max_ns,
            Activity::Burst => self.config.optimizer_burst_max_ns,
        };
        self.activity = activity;
        self.activity_until_ns = self.now_ns.saturating_add(max_ns);
        self.undecided_since_ns = None;
    }

    /// A thread that marks its optimizer steps is not guessed at.
    fn activity_after_sync(&self) -> Activity {
        match self.last_marker_ns {
            Some(_) => Activity::Drained,
            None => Activity::Burst,
        }
    }

    fn launches_for_optimizer(&self) -> bool {
        self.activity == Activity::Updating
            && self.last_marker_ns.is_some_and(|marker_ns| {
                self.now_ns - marker_ns < self.config.optimizer_launch_max_ns
            })
    }

    fn is_in_call(&self) -> bool {
        self.sync_since_ns.is_some() || self.collective_since_ns.is_some()
    }

    fn end_sync_without_leave(&mut self) {
        let open = self.sync_since_ns.take().is_some();
        count_fault(&mut self.faults.lost_leaves, open);
    }

    fn end_collective_without_leave(&mut self) {
        let open = self.collective_since_ns.take().is_some();
        count_fault(&mut self.faults.lost_leaves, open);
    }
}

#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;
