//! Times of the threads of a process, on and off CPUs.

use zernel_model::snapshot::SchedSnapshot;

use super::BlockedBy;
use crate::observer::ObservedProcess;
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{ProbeState, layout};

/// Times of the threads of a process, summed over threads. Time in a thread's current state is not included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scheduling {
    /// On a CPU.
    pub on_cpu_ns: u64,
    /// Runnable without a CPU.
    pub run_delay_ns: u64,
    /// On a CPU, of the threads that make probed calls. Other threads do not hold up steps.
    pub calling_on_cpu_ns: u64,
    /// Runnable without a CPU, of the same threads.
    pub calling_run_delay_ns: u64,
    /// How often a thread left its CPU.
    pub switches: u64,
    blocked_ns: [u64; BlockedBy::ALL.len()],
}

impl Scheduling {
    /// Time blocked for one reason.
    #[must_use]
    pub fn blocked_ns(&self, by: BlockedBy) -> u64 {
        self.blocked_ns[by as usize]
    }

    fn blocked_seconds(&self, by: BlockedBy) -> f64 {
        self.blocked_ns(by) as f64 / 1e9
    }
}

impl ProbeState for Scheduling {
    type Snapshot = SchedSnapshot;

    fn read(&mut self, record: &layout::Process) {
        let record = &record.sched;
        *self = Self {
            on_cpu_ns: record.on_cpu_ns,
            run_delay_ns: record.run_delay_ns,
            calling_on_cpu_ns: record.calling_on_cpu_ns,
            calling_run_delay_ns: record.calling_run_delay_ns,
            switches: record.switches,
            blocked_ns: record.blocked_ns,
        };
    }

    fn snapshot(&self, _process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> SchedSnapshot {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let fetching = BlockedBy::FETCHING.iter();
        let reasons = BlockedBy::ALL.iter();
        SchedSnapshot {
            cpu_seconds: seconds(self.on_cpu_ns),
            run_delay_seconds: seconds(self.run_delay_ns),
            calling_cpu_seconds: seconds(self.calling_on_cpu_ns),
            calling_run_delay_seconds: seconds(self.calling_run_delay_ns),
            fetch_seconds: fetching.map(|reason| self.blocked_seconds(*reason)).sum(),
            blocked_seconds: reasons
                .map(|reason| (reason.name(), self.blocked_seconds(*reason)))
                .collect(),
        }
    }
}
