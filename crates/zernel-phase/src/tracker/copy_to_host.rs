//! Copies to the host, which may wait for the GPU.

use super::{PhaseInterval, PhaseTracker};

impl PhaseTracker {
    /// When the copy to the host began that the thread is in.
    pub(super) fn copy_to_host_since_ns(&self) -> Option<u64> {
        self.sync_since_ns.filter(|_| self.copies_to_host)
    }

    /// The length of the copy will show whether it waits for the GPU.
    pub(super) fn enter_copy_to_host(&mut self) {
        if self.collective_since_ns.is_some() {
            return;
        }
        self.end_sync_without_leave();
        self.sync_since_ns = Some(self.now_ns);
        self.last_call_evidence_ns = self.now_ns;
        self.copies_to_host = true;
    }

    /// A long copy was a sync. The next sync waits for a collective that was queued before, too.
    pub(super) fn leave_copy_to_host(&mut self, closed: &mut impl Extend<PhaseInterval>) {
        let Some(since_ns) = self.copy_to_host_since_ns() else {
            return;
        };
        let (now_ns, collective_queued) = (self.now_ns, self.collective_queued);
        self.sync_since_ns = None;
        if now_ns - since_ns < self.config.short_wait_max_ns {
            return;
        }
        if self.phase != self.sync_phase() {
            self.close(since_ns, self.sync_phase(), closed);
        }
        self.now_ns = since_ns;
        self.enter_sync();
        self.now_ns = now_ns;
        self.leave_sync();
        self.collective_queued = collective_queued;
    }
}
