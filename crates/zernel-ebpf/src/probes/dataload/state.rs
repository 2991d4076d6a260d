//! Waits of a process for data, by cause.

use zernel_model::snapshot::{DataWaits, DataloadSnapshot};

use super::layout::{FETCHES, PREPARES, QUEUES, WORKS};
use crate::observer::ObservedProcess;
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{DurationKind, ProbeState, layout};

/// Waits of a process for data, by what the loaders did meanwhile: its loader processes, or if it has none, its own
/// threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DataloadCauses {
    /// Loaders ran on CPUs.
    pub prepare_ns: u64,
    /// Loaders waited for disk, network or a page.
    pub fetch_ns: u64,
    /// Loaders were runnable without a CPU.
    pub sched_ns: u64,
    /// Loaders did none of these.
    pub other_ns: u64,
}

impl DataloadCauses {
    /// Time of all causes.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.prepare_ns + self.fetch_ns + self.sched_ns + self.other_ns
    }
}

impl ProbeState for DataloadCauses {
    type Snapshot = DataloadSnapshot;

    fn read(&mut self, record: &layout::Process) {
        let waited_ns = record.dataload.waited_ns;
        *self = Self {
            prepare_ns: waited_ns[PREPARES],
            fetch_ns: waited_ns[FETCHES],
            sched_ns: waited_ns[QUEUES],
            other_ns: waited_ns[WORKS],
        };
    }

    fn snapshot(&self, process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> DataloadSnapshot {
        let seconds = |ns: u64| ns as f64 / 1e9;
        DataloadSnapshot {
            data_waits: DataWaits {
                prepare: seconds(self.prepare_ns),
                fetch: seconds(self.fetch_ns),
                sched: seconds(self.sched_ns),
                other: seconds(self.other_ns),
            },
            wait_times: process.shared_duration(DurationKind::Dataload),
        }
    }
}
