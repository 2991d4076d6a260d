//! The optimizer step: where it begins and ends.

use super::activity::Activity;
use super::{PhaseInterval, PhaseTracker, ThreadEvent};
use crate::task_state::WorkloadPhase;

impl PhaseTracker {
    /// A thread that announces its optimizer steps passes markers inside of them. After a backward pass it updates in a
    /// step that it announced before: the pass was part of a closure.
    pub(super) fn handle_optimizer_marker(&mut self, closed: &mut impl Extend<PhaseInterval>) {
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

    /// The forward pass of a closure is over. It began after the last marker of the optimizer step, or with the step
    /// itself.
    fn attribute_time_to_forward(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if self.phase == WorkloadPhase::OptimizerStep && self.announces_updates {
            let since_ns = self.last_marker_ns.max(self.start_ns);
            self.close(since_ns, WorkloadPhase::GpuCompute, closed);
        }
    }

    /// Whether the optimizer step has run no backward pass since its begin or its last marker.
    fn lacks_backward(&self) -> bool {
        self.last_marker_ns >= self.start_ns
    }

    /// A backward pass follows a forward pass.
    pub(super) fn begin_backward(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        self.attribute_time_to_forward(closed);
        // Another thread launches, but this one syncs.
        self.collective_queued = false;
        self.launched_since_sync = true;
        self.announce(Activity::Backward, closed);
    }

    /// What the thread did since its backward pass was the optimizer's: clipping gradients, say.
    pub(super) fn attribute_time_to_update(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if let Some(since_ns) = self.update_since_ns.filter(|_| !self.is_in_call()) {
            self.close(since_ns, WorkloadPhase::OptimizerStep, closed);
        }
    }

    /// A wait in a backward pass that another thread runs is over. If the pass was part of a closure, the optimizer goes on
    /// after it. Waits inside of the pass, as for a lock, see no launches.
    pub(super) fn end_backward_wait(&mut self, waited_ns: u64, event: ThreadEvent) {
        self.activity_until_ns = self.activity_until_ns.saturating_add(waited_ns);
        self.undecided_since_ns = None;
        self.update_since_ns = Some(self.now_ns);
        if self.in_update && event == ThreadEvent::UnblockAfterLaunches {
            self.set_activity(Activity::Updating, self.now_ns);
        }
    }

    /// The thread updates the model.
    pub(super) fn begin_update(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        self.announces_updates = true;
        self.in_update = self.sees_update_ends;
        self.last_marker_ns = self.now_ns;
        self.announce(Activity::Updating, closed);
    }

    /// The thread clears gradients. That is part of the update, if its end will be seen. Inside of a step it is a
    /// closure that clears them, before its forward pass or between that and the backward pass. Between preparing a batch and
    /// copying it, clearing them does not end the preparation. If ends are not seen, gradients are cleared at the end of an
    /// optimizer step, or before a forward pass: then it takes little time.
    pub(super) fn zero_gradients(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        if self.may_hold_batch() {
            return;
        }
        match (self.sees_update_ends, self.in_update) {
            (true, false) => self.begin_update(closed),
            (false, false) if self.activity == Activity::Updating => {
                self.announce(Activity::Updating, closed);
            }
            (_, in_update) => {
                if in_update && self.lacks_backward() {
                    self.attribute_time_to_forward(closed);
                }
                self.announce(Activity::Computing, closed);
            }
        }
    }

    /// An optimizer step, or the clearing of gradients, is over.
    pub(super) fn end_update(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        self.sees_update_ends = true;
        self.in_update = false;
        if self.may_hold_batch() {
            return;
        }
        self.attribute_time_to_update(closed);
        self.announce(Activity::AfterUpdate, closed);
        self.begin_undecided_time();
        self.update_end_ns = Some(self.now_ns);
    }

    /// Whether the sync that the thread is in began right after the optimizer step. The thread may have launched in
    /// between, to bound a weight, say.
    pub(super) fn sync_follows_update(&self) -> bool {
        let times = self.sync_since_ns.zip(self.update_end_ns);
        self.activity == Activity::Computing
            && times
                .is_some_and(|(sync_ns, end_ns)| sync_ns - end_ns < self.config.short_wait_max_ns)
    }

    /// The optimizer step is over. If the thread copies next, it prepared a batch until then: a thread that announces its
    /// batches does so elsewhere.
    pub(super) fn begin_undecided_time(&mut self) {
        self.set_activity(Activity::AfterUpdate, self.now_ns);
        self.undecided_since_ns = (!self.announces_data).then_some(self.now_ns);
    }

    /// A sync right after the optimizer step reads the loss. Before a later one the thread may have launched, whether that
    /// was observed or not.
    pub(super) fn note_sync_after_update(&mut self) {
        if self.may_hold_batch() {
            self.set_activity(Activity::Computing, self.now_ns);
        }
    }

    /// Whether the undecided time is long enough to prepare a batch.
    pub(super) fn may_have_loaded(&self) -> bool {
        let undecided_ns = self
            .undecided_since_ns
            .map(|since_ns| self.now_ns - since_ns);
        undecided_ns.is_some_and(|undecided_ns| undecided_ns >= self.config.short_wait_max_ns)
    }

    /// Whether the thread may have prepared a batch since its optimizer step, which it has not copied yet.
    fn may_hold_batch(&self) -> bool {
        self.activity == Activity::AfterUpdate && self.may_have_loaded()
    }

    /// Whether the optimizer works, and its end will be seen. A wait for the GPU does not end that.
    pub(super) fn is_in_announced_update(&self) -> bool {
        self.in_update && self.activity == Activity::Updating
    }

    pub(super) fn launches_for_optimizer(&self) -> bool {
        let since_marker_ns = self.now_ns - self.last_marker_ns;
        self.activity == Activity::Updating
            && (self.announces_updates || since_marker_ns < self.config.optimizer_launch_max_ns)
    }
}
