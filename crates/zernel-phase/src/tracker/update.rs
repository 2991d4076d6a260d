//! The optimizer step: where it begins and ends.

use super::activity::Activity;
use super::{PhaseInterval, PhaseTracker};
use crate::task_state::WorkloadPhase;

impl PhaseTracker {
    /// A thread that announces its optimizer steps passes markers inside of them. After a backward pass it updates in a
    /// step that it announced before: the pass was part of a closure.
    pub(super) fn pass_marker(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        let follows_backward =
            self.activity == Activity::Backward || self.update_since_ns.is_some();
        self.last_marker_ns = self.now_ns;
        if !self.announces_updates || follows_backward {
            self.announce(Activity::Updating, closed);
            return;
        }
        self.end_sync_without_leave();
        self.end_collective_without_leave();
        self.is_training_thread = true;
    }

    /// A backward pass follows a forward pass. Without a batch in between, that began after the last marker of the
    /// optimizer step, or with the step itself: then the step runs a closure.
    pub(super) fn begin_backward(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if self.phase == WorkloadPhase::OptimizerStep && self.announces_updates {
            let since_ns = self.last_marker_ns.max(self.start_ns);
            self.close(since_ns, WorkloadPhase::GpuCompute, closed);
        }
        // Another thread launches, but this one syncs.
        self.collective_queued = false;
        self.launched_since_sync = true;
        self.announce(Activity::Backward, closed);
    }

    /// Gradients are cleared at the end of an optimizer step. Elsewhere it takes little time, and nothing shows its end.
    pub(super) fn zero_gradients(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        match self.activity == Activity::Updating {
            true => self.announce(Activity::Updating, closed),
            false => self.announce(Activity::Computing, closed),
        }
    }

    pub(super) fn launches_for_optimizer(&self) -> bool {
        let since_marker_ns = self.now_ns - self.last_marker_ns;
        self.activity == Activity::Updating
            && (self.announces_updates || since_marker_ns < self.config.optimizer_launch_max_ns)
    }
}
