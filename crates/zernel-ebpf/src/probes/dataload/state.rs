//! Waits of a process for data, and the work that explains them.

use zernel_model::snapshot::{DataWaits, DataloadSnapshot};
use zernel_phase::mirrors;

use crate::observer::ObservedProcess;
use crate::probes::counter::seconds;
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{DurationKind, ProbeState};

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        /// Waits of a process for data, by what the loaders did meanwhile: its loader processes, or if it has none, its
        /// own threads.
        #[derive(Default)]
        pub struct DataloadCauses = "dataload_process" {
            /// Waits by the kind of work; the last: no work.
            waited_ns: [u64; WORKS + 1],
            /// Work of its own threads by kind, encoded as in `bpf/work.h`.
            own_work: [u64; WORKS],
            /// Work of the threads of its loaders, likewise.
            loader_work: [u64; WORKS],
        }
    }
    constants {
        usize = "zernel_work", "ZERNEL_" {
            PREPARES = 0,
            FETCHES = 1,
            QUEUES = 2,
            WORKS = 3,
        }
    }
}

impl DataloadCauses {
    /// Waits while loaders ran on CPUs.
    #[must_use]
    pub fn prepare_ns(&self) -> u64 {
        self.waited_ns[PREPARES]
    }

    /// Waits while loaders waited for disk, network or a page.
    #[must_use]
    pub fn fetch_ns(&self) -> u64 {
        self.waited_ns[FETCHES]
    }

    /// Waits while loaders were runnable without a CPU.
    #[must_use]
    pub fn sched_ns(&self) -> u64 {
        self.waited_ns[QUEUES]
    }

    /// Waits while loaders did none of these.
    #[must_use]
    pub fn other_ns(&self) -> u64 {
        self.waited_ns[WORKS]
    }

    /// Waits of all causes.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.waited_ns.iter().sum()
    }
}

impl ProbeState for DataloadCauses {
    type Snapshot = DataloadSnapshot;

    fn snapshot(&self, process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> DataloadSnapshot {
        DataloadSnapshot {
            data_waits: DataWaits {
                prepare: seconds(self.prepare_ns()),
                fetch: seconds(self.fetch_ns()),
                sched: seconds(self.sched_ns()),
                other: seconds(self.other_ns()),
            },
            wait_times: process.shared_duration_histogram(DurationKind::Dataload),
        }
    }
}
