//! Detaches all probes on request.

use super::event_trace::CoverageChange;
use super::{Observer, attached_files, monotonic_ns};
use crate::probe_link::detach_links;

/// The sentence for users that states why all probes are detached.
pub(super) const PAUSED_REASON: &str =
    "all probes are detached on request; send SIGUSR2 to attach them";

impl Observer {
    /// Detaches all probes until [`Self::resume`]. Nothing is counted meanwhile.
    pub fn pause(&mut self) {
        detach_links(self.close_window());
        // Reads the step marks from before the suspension. If that fails, the next `read` reports the error.
        let _ = self.read_step_marks();
        let now_ns = monotonic_ns();
        for process in self.processes.running_processes.values_mut() {
            process.suspend_counting(&self.governor.sampled_symbols(), now_ns);
        }
        self.is_suspended = true;
        self.kernel.set_suspended(true);
        attached_files::pause_files(self.attachment.files.iter_mut());
        self.kernel.record_detach_time();
        self.kernel.trace_coverage(CoverageChange::Probes(false));
    }

    /// Attaches all probes again. For every running process, the record of what was observed starts anew.
    pub fn resume(&mut self) {
        if !std::mem::take(&mut self.is_suspended) {
            return;
        }
        attached_files::attach_each_file(self.attachment.files.iter_mut(), |file| {
            file.resume_probes(&self.kernel);
        });
        self.kernel.set_suspended(false);
        self.kernel.trace_coverage(CoverageChange::Probes(true));
        self.governor.restart_event_tracking(&self.kernel);
        let running: Vec<u32> = self.processes.running_processes.keys().copied().collect();
        for handle in running {
            self.resume_process(handle);
        }
    }

    /// Counts the calls of a process again. Its coverage starts anew.
    pub(super) fn resume_process(&mut self, handle: u32) {
        let Some(process) = self.processes.running_processes.get_mut(&handle) else {
            return;
        };
        if process.is_uncounted() || self.is_suspended {
            return;
        }
        let now_ns = monotonic_ns();
        process.resume_counting(now_ns);
        let counters = self.kernel.call_counters(handle);
        for symbol in self.governor.sampled_symbols() {
            let steps = &process.steps;
            process
                .call_counts
                .begin_sampling(symbol, &counters, now_ns, steps);
        }
    }

    /// Whether all probes are detached.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.is_suspended
    }
}
