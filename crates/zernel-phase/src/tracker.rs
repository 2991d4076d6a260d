//! The event rule: exact phase intervals of one thread from its own events.
//!
//! Probes see a thread enter and leave the calls that matter, launch work, copy data, and block.
//! [`PhaseTracker`] turns those events into phase intervals that follow each other without gap or
//! overlap:
//!
//! | the thread | phase |
//! |---|---|
//! | is in a collective, or syncs on one with no launch since | `NcclCollective` |
//! | is in any other GPU sync | `GpuCompute` |
//! | launched last | `GpuCompute` |
//! | waited for I/O or polled last, or copied to the device | `DataLoading` |
//! | waits on a futex after its sync or optimizer step: for its next batch | `DataLoading` |
//! | passed an optimizer marker; launches right behind it belong to it | `OptimizerStep` |
//! | returned from a sync, and never showed a marker | `OptimizerStep`, for one short burst |
//! | did nothing of the kind for too long | `Unknown` |
//!
//! No event is trusted to arrive. Every phase has a deadline, counted from the last event that
//! showed it, after which the thread is `Unknown` until its next event; a call that another event
//! proves over is over; and an event that arrives after a later one never rewrites what was reported.

use serde::{Deserialize, Serialize};

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

/// How long a phase is believed without further evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrackerConfig {
    /// In a call that was entered and not left.
    pub call_max_ns: u64,
    /// Loading or launching, after the last event that shows it.
    pub activity_max_ns: u64,
    /// In an optimizer step, after its last marker.
    pub optimizer_max_ns: u64,
    /// In an optimizer step guessed from the CPU burst after a sync.
    pub optimizer_burst_max_ns: u64,
    /// A launch within this time after a marker belongs to the optimizer.
    pub optimizer_launch_max_ns: u64,
}

impl Default for TrackerConfig {
    fn default() -> Self {
        Self {
            call_max_ns: 60_000_000_000,
            activity_max_ns: 10_000_000_000,
            optimizer_max_ns: 1_000_000_000,
            optimizer_burst_max_ns: 5_000_000,
            optimizer_launch_max_ns: 1_000_000,
        }
    }
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

    /// What is left of it when nothing showed it for too long.
    fn expired(self) -> Self {
        match self {
            Self::Burst | Self::Updating | Self::Drained => Self::Drained,
            Self::Idle | Self::Loading | Self::Launching => Self::Idle,
        }
    }
}

/// What was seen that cannot be, or came too late: the quality of a tracker's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TrackerFaults {
    /// Calls ended by evidence other than their own leave event.
    pub lost_leaves: u64,
    /// Leave events of calls that were never seen to begin.
    pub lost_enters: u64,
    /// Events stamped before one already applied.
    pub late: u64,
    /// Phases given up at their deadline.
    pub expired: u64,
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
    /// The last work handed to the GPU was a collective.
    collective_queued: bool,
    /// What the thread is blocked on shows that it waits for data.
    awaiting_data: bool,
    last_marker_ns: Option<u64>,
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
            collective_queued: false,
            awaiting_data: false,
            last_marker_ns: None,
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
            self.faults.late = self.faults.late.saturating_add(1);
            if !self.ends_open_call(at_ns, event) {
                return;
            }
        }
        self.advance(at_ns, closed);
        self.apply(event);
        self.settle(closed);
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
    fn ends_open_call(&self, at_ns: u64, event: ThreadEvent) -> bool {
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
        self.faults.expired = self.faults.expired.saturating_add(1);
        if self.in_call() {
            self.faults.lost_leaves = self.faults.lost_leaves.saturating_add(1);
            self.sync_since_ns = None;
            self.collective_since_ns = None;
            self.collective_queued = false;
            self.turn_to(Activity::Idle);
        } else {
            self.turn_to(self.activity.expired());
        }
    }

    fn apply(&mut self, event: ThreadEvent) {
        match event {
            ThreadEvent::GpuSyncEnter => {
                self.end_sync_unseen();
                self.sync_since_ns = Some(self.now_ns);
            }
            ThreadEvent::GpuSyncLeave => {
                self.count_lost_enter(self.sync_since_ns);
                self.sync_since_ns = None;
                // Inside a collective the sync is the collective's own.
                if self.collective_since_ns.is_none() {
                    self.collective_queued = false;
                    self.turn_to(self.after_sync());
                }
            }
            ThreadEvent::CollectiveEnter => {
                self.end_sync_unseen();
                self.end_collective_unseen();
                self.collective_since_ns = Some(self.now_ns);
            }
            ThreadEvent::CollectiveLeave => {
                self.count_lost_enter(self.collective_since_ns);
                self.end_sync_unseen();
                self.collective_since_ns = None;
                self.collective_queued = true;
                // The optimizer's burst comes after the collective that follows a sync.
                if matches!(self.activity, Activity::Burst | Activity::Drained) {
                    self.turn_to(self.after_sync());
                }
            }
            ThreadEvent::Launch | ThreadEvent::CopyToDevice
                if self.collective_since_ns.is_some() => {} // the collective's own
            ThreadEvent::Launch => {
                self.end_sync_unseen();
                self.collective_queued = false;
                if !self.launches_for_optimizer() {
                    self.turn_to(Activity::Launching);
                }
            }
            ThreadEvent::CopyToDevice => {
                self.end_sync_unseen();
                self.turn_to(Activity::Loading);
            }
            ThreadEvent::OptimizerMarker => {
                self.end_sync_unseen();
                self.end_collective_unseen();
                self.last_marker_ns = Some(self.now_ns);
                self.turn_to(Activity::Updating);
            }
            ThreadEvent::Block(reason) => {
                self.awaiting_data = !self.in_call() && self.waits_for_data(reason);
                if self.awaiting_data {
                    self.turn_to(Activity::Loading);
                }
            }
            ThreadEvent::Unblock => {
                if std::mem::take(&mut self.awaiting_data) && !self.in_call() {
                    self.turn_to(Activity::Loading);
                }
            }
        }
    }

    /// Closes the open interval if the event just applied changed the phase.
    fn settle(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if !self.in_call() && self.activity_until_ns <= self.now_ns {
            self.turn_to(self.activity.expired());
        }
        let (phase, deadline_ns) = match (self.collective_since_ns, self.sync_since_ns) {
            (Some(since_ns), _) => (WorkloadPhase::NcclCollective, self.call_deadline(since_ns)),
            (None, Some(since_ns)) if self.collective_queued => {
                (WorkloadPhase::NcclCollective, self.call_deadline(since_ns))
            }
            (None, Some(since_ns)) => (WorkloadPhase::GpuCompute, self.call_deadline(since_ns)),
            (None, None) => (self.activity.phase(), self.activity_until_ns),
        };
        self.deadline_ns = deadline_ns;
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

    fn turn_to(&mut self, activity: Activity) {
        let max_ns = match activity {
            Activity::Idle | Activity::Drained => u64::MAX,
            Activity::Loading | Activity::Launching => self.config.activity_max_ns,
            Activity::Updating => self.config.optimizer_max_ns,
            Activity::Burst => self.config.optimizer_burst_max_ns,
        };
        self.activity = activity;
        self.activity_until_ns = self.now_ns.saturating_add(max_ns);
    }

    /// A thread that marks its optimizer steps is not guessed at.
    fn after_sync(&self) -> Activity {
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

    fn waits_for_data(&self, reason: BlockReason) -> bool {
        match reason {
            BlockReason::Io | BlockReason::Poll => true,
            // After launches it waits for the thread that runs the backward pass.
            BlockReason::Futex => !matches!(self.activity, Activity::Idle | Activity::Launching),
            BlockReason::Other => false,
        }
    }

    fn in_call(&self) -> bool {
        self.sync_since_ns.is_some() || self.collective_since_ns.is_some()
    }

    fn call_deadline(&self, since_ns: u64) -> u64 {
        since_ns.saturating_add(self.config.call_max_ns)
    }

    fn end_sync_unseen(&mut self) {
        let lost = self.sync_since_ns.take().is_some();
        self.faults.lost_leaves = self.faults.lost_leaves.saturating_add(lost.into());
    }

    fn end_collective_unseen(&mut self) {
        let lost = self.collective_since_ns.take().is_some();
        self.faults.lost_leaves = self.faults.lost_leaves.saturating_add(lost.into());
    }

    fn count_lost_enter(&mut self, since_ns: Option<u64>) {
        self.faults.lost_enters = self
            .faults
            .lost_enters
            .saturating_add(since_ns.is_none().into());
    }
}

#[cfg(test)]
mod tests;
