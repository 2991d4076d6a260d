//! Waits: what a blocked thread waits for, and what it does after.

use super::activity::Activity;
use super::{BlockReason, PhaseInterval, PhaseTracker, ThreadEvent};
use crate::task_state::WorkloadPhase;

/// A wait in progress, and the activity that it interrupted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    pub(super) since_ns: u64,
    /// When the phase of the thread is given up, if it is still blocked then.
    pub(super) until_ns: u64,
    activity: Activity,
    activity_until_ns: u64,
    /// Whether the wait is either for data or for another thread.
    is_undecided: bool,
}

impl PhaseTracker {
    pub(super) fn begin_wait(
        &mut self,
        reason: BlockReason,
        closed: &mut impl Extend<PhaseInterval>,
    ) {
        let mut wait = Wait {
            since_ns: self.now_ns,
            until_ns: self.now_ns.saturating_add(self.wait_max_ns(reason)),
            activity: self.activity,
            activity_until_ns: self.activity_until_ns,
            is_undecided: false,
        };
        if !self.is_in_call() {
            let activity = self.activity_in_block(reason);
            // A thread that reads or polls after its optimizer step prepares a batch, and goes on with that. So does one
            // that waits for another thread, if it has worked since the step.
            if self.activity == Activity::AfterUpdate
                && activity == Activity::Loading
                && (reason != BlockReason::Futex || self.may_have_loaded())
            {
                self.attribute_time_to_loading(closed);
                wait.activity = Activity::Loading;
            }
            if activity != self.activity {
                self.set_activity(activity, self.now_ns);
            }
            wait.is_undecided = self.is_undecided(reason);
        }
        self.wait = Some(wait);
    }

    /// Returns how long a blocked thread keeps its phase. A thread that sleeps does not compute.
    fn wait_max_ns(&self, reason: BlockReason) -> u64 {
        let computes = matches!(self.activity, Activity::Computing | Activity::AfterUpdate);
        match reason == BlockReason::Sleep && computes && !self.is_in_call() {
            true => self.config.short_wait_max_ns,
            false => self.config.blocked_max_ns,
        }
    }

    /// Returns the activity of a thread that blocks outside of calls. A thread that announces when it gets data loads at
    /// no other time.
    fn activity_in_block(&self, reason: BlockReason) -> Activity {
        match (reason, self.activity) {
            (_, Activity::ReceivingBatch) => Activity::Loading,
            (_, activity) if !activity.is_part_of_step() && !self.is_training_thread => {
                Activity::Idle
            }
            (_, activity) if self.announces_data || !activity.is_part_of_step() => activity,
            (BlockReason::Request, _) => Activity::Idle,
            (BlockReason::Io | BlockReason::Poll, Activity::Idle) => Activity::Idle,
            (BlockReason::Io, activity) if self.is_launching() => activity,
            (BlockReason::Io | BlockReason::Poll, _) => Activity::Loading,
            (BlockReason::Futex, Activity::Computing | Activity::Backward)
                if !self.is_training_thread =>
            {
                Activity::Idle
            }
            (BlockReason::Futex, Activity::Updating) if !self.announces_updates => {
                Activity::Computing
            }
            (BlockReason::Futex, Activity::Updating | Activity::AfterUpdate)
                if self.awaits_data_after_update && !self.is_in_announced_update() =>
            {
                Activity::Loading
            }
            (_, activity) => activity,
        }
    }

    /// Whether the thread has launched and not synced since. It may then read the disk for data, or for a library whose
    /// kernels come next.
    fn is_launching(&self) -> bool {
        self.activity == Activity::Computing && self.launched_since_sync
    }

    /// Whether a wait in this activity is either for data or for something else: a wait on a futex for another thread, a
    /// read of the disk for a library.
    fn is_undecided(&self, reason: BlockReason) -> bool {
        let may_load = match reason {
            BlockReason::Io => self.is_launching(),
            BlockReason::Futex => matches!(
                self.activity,
                Activity::Computing | Activity::Updating | Activity::AfterUpdate
            ),
            _ => false,
        };
        may_load && !self.announces_data && !self.is_in_announced_update()
    }

    /// Ends a wait and moves the deadlines by its length.
    pub(super) fn end_wait(&mut self, event: ThreadEvent) {
        let Some(wait) = self.wait.take() else {
            return;
        };
        let waited_ns = self.now_ns - wait.since_ns;
        if self.is_in_call() {
            self.last_call_evidence_ns += waited_ns;
        } else if self.activity == Activity::Backward {
            self.end_backward_wait(waited_ns, event);
        } else if waited_ns >= self.config.short_wait_max_ns {
            self.end_long_wait(wait, event);
        } else if wait.activity.survives_short_waits() {
            self.activity = wait.activity;
            self.activity_until_ns = wait.activity_until_ns.saturating_add(waited_ns);
        } else {
            self.set_activity(self.activity, self.now_ns);
        }
    }

    /// Takes in what the thread has waited for; it still waits. Returns whether the event is of that kind.
    pub(super) fn attribute_wait(
        &mut self,
        event: ThreadEvent,
        closed: &mut impl Extend<PhaseInterval>,
    ) -> bool {
        match event {
            ThreadEvent::AwaitedCompile => self.attribute_wait_to_compile(closed),
            ThreadEvent::AwaitedCollective => self.attribute_wait_to_collective(closed),
            ThreadEvent::AwaitedData => self.attribute_wait_to_data(closed),
            _ => return false,
        }
        true
    }

    /// The wait so far was for a thread that was in a collective, so it was for peers; the rest may be for data. The
    /// backward pass of a thread that waits for it goes on meanwhile.
    fn attribute_wait_to_collective(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        let is_announced = self.activity == Activity::Loading && self.announces_data;
        let is_known = self.phase != WorkloadPhase::Unknown;
        let Some(wait) = self.wait.filter(|_| {
            is_known && !is_announced && !self.is_in_call() && self.activity != Activity::Backward
        }) else {
            return;
        };
        if matches!(self.activity, Activity::Loading | Activity::AfterUpdate) {
            self.begin_undecided_time();
        } else {
            let waited_ns = self.now_ns - wait.since_ns;
            self.activity_until_ns = self.activity_until_ns.saturating_add(waited_ns);
            self.undecided_since_ns = None;
            self.update_since_ns = self.update_since_ns.map(|_| self.now_ns);
        }
        self.awaits_data_after_update = false;
        self.wait = Some(Wait {
            since_ns: self.now_ns,
            until_ns: wait.until_ns,
            activity: self.activity,
            activity_until_ns: self.activity_until_ns,
            is_undecided: wait.is_undecided,
        });
        self.close(wait.since_ns, WorkloadPhase::NcclCollective, closed);
    }

    /// The wait so far was for a thread that loads data, so it was for a batch.
    fn attribute_wait_to_data(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        let Some(wait) = self.wait.filter(|wait| {
            wait.is_undecided && self.now_ns - wait.since_ns >= self.config.short_wait_max_ns
        }) else {
            return;
        };
        self.undecided_since_ns.get_or_insert(wait.since_ns);
        self.attribute_time_to_loading(closed);
        self.set_activity(Activity::Loading, self.now_ns);
        self.awaits_data_after_update |= self.announces_updates;
    }

    /// The wait so far was for a compilation, so it belongs to no phase. A wait for data does.
    fn attribute_wait_to_compile(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        let is_known = self.phase != WorkloadPhase::Unknown;
        let may_wait_for_compile = !self.is_in_call() && self.activity != Activity::Loading;
        let Some(wait) = self
            .wait
            .as_mut()
            .filter(|_| is_known && may_wait_for_compile)
        else {
            return;
        };
        let since_ns = wait.since_ns;
        let waited_ns = self.now_ns - since_ns;
        wait.since_ns = self.now_ns;
        wait.activity_until_ns = wait.activity_until_ns.saturating_add(waited_ns);
        self.activity_until_ns = self.activity_until_ns.saturating_add(waited_ns);
        self.undecided_since_ns = self.undecided_since_ns.map(|_| self.now_ns);
        self.update_since_ns = self.update_since_ns.map(|_| self.now_ns);
        self.close(since_ns, WorkloadPhase::Unknown, closed);
    }

    /// Ends the time in which the thread was runnable and did not run. Deadlines move by its length.
    pub(super) fn end_run_delay(&mut self) {
        if let Some(since_ns) = self.queued_since_ns.take() {
            let queued_ns = self.now_ns - since_ns;
            self.last_call_evidence_ns += queued_ns;
            self.activity_until_ns = self.activity_until_ns.saturating_add(queued_ns);
        }
    }

    fn end_long_wait(&mut self, wait: Wait, event: ThreadEvent) {
        if self.activity == Activity::Loading {
            let sees_batch = self.uses_gpu || (self.announces_data && self.sees_update_ends);
            let next = match self.is_training_thread && !sees_batch {
                true => Activity::ReceivingBatch,
                false => Activity::Loading,
            };
            self.set_activity(next, self.now_ns);
            return;
        }
        // A thread that only launches wakes up to launch, whether its launches are observed or not.
        let did_launch = wait.activity.phase() == WorkloadPhase::GpuCompute;
        let follows_launches = event == ThreadEvent::UnblockAfterLaunches;
        if self.activity == Activity::Idle && did_launch && follows_launches {
            self.set_activity(Activity::Computing, self.now_ns);
            return;
        }
        let waited_ns = self.now_ns - wait.since_ns;
        self.activity_until_ns = self.activity_until_ns.saturating_add(waited_ns);
        // A thread that announces its steps also announces the backward passes that it waits for.
        if wait.is_undecided && (!follows_launches || self.announces_updates) {
            self.update_since_ns = None;
            // Work before the wait that is too short to prepare a batch is not part of it.
            let since_ns = self.undecided_since_ns.filter(|since_ns| {
                wait.since_ns.saturating_sub(*since_ns) > self.config.short_wait_max_ns
            });
            self.undecided_since_ns = since_ns.or(Some(wait.since_ns));
        }
    }
}
