//! Waits of a process for data, and the work of loaders that explains these waits.

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
        pub struct DataWaitCauses = "dataload_process" {
            /// Nanoseconds of waits for data by the kind of work that loaders did; the last element: loaders did no
            /// work.
            waited_ns: [u64; WORK_KINDS + 1],
            /// Work of the process's own threads by kind, encoded as in `bpf/work.h`.
            own_work: [u64; WORK_KINDS],
            /// Work of the threads of the process's loaders by kind, encoded as in `bpf/work.h`.
            loader_work: [u64; WORK_KINDS],
            /// Pid of a child that ended a wait for data and is not observed yet, or 0.
            helper: u64,
        }
    }
    constants {
        usize = "zernel_work_kind", "ZERNEL_" {
            WORK_PREPARE = 0,
            WORK_FETCH = 1,
            WORK_QUEUED = 2,
            WORK_KINDS = 3,
        }
    }
}

impl DataWaitCauses {
    /// Nanoseconds of waits in which loaders ran on CPUs.
    #[must_use]
    pub fn prepare_ns(&self) -> u64 {
        self.waited_ns[WORK_PREPARE]
    }

    /// Nanoseconds of waits in which loaders waited for disk, network or a page.
    #[must_use]
    pub fn fetch_ns(&self) -> u64 {
        self.waited_ns[WORK_FETCH]
    }

    /// Nanoseconds of waits in which loaders were runnable without a CPU.
    #[must_use]
    pub fn sched_ns(&self) -> u64 {
        self.waited_ns[WORK_QUEUED]
    }

    /// Nanoseconds of waits in which loaders neither ran, nor waited for disk, network, a page or a CPU.
    #[must_use]
    pub fn other_ns(&self) -> u64 {
        self.waited_ns[WORK_KINDS]
    }

    /// Waits of all causes.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.waited_ns.iter().sum()
    }
}

impl ProbeState for DataWaitCauses {
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
