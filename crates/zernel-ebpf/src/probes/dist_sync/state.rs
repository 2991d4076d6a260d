//! Waits of a process for other ranks.

use zernel_model::snapshot::PeerWaitSnapshot;
use zernel_phase::mirrors;

use crate::observer::ObservedProcess;
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{DurationKind, ProbeState};

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        /// Waits of a process for other ranks. The durations of these waits are in the histograms of the process.
        #[derive(Default)]
        pub struct PeerWaits = "dist_sync_process" {
            /// When a thread of the process last began a backward pass, in nanoseconds of CLOCK_MONOTONIC.
            backward_since_ns: u64,
            /// When the training thread of the process last came back from a backward pass, in nanoseconds of
            /// CLOCK_MONOTONIC.
            backward_until_ns: u64,
            /// Number of reductions of gradients through the CPU since the last backward pass.
            cpu_reductions: u64,
            /// Nanoseconds in which threads that run backward passes waited for peers. The training thread of the process
            /// waits for these threads.
            helper_wait_ns: u64,
            /// Time that threads of the process were blocked in collectives, as the kernel sums it up.
            peer_blocks: u64,
        }
    }
    constants {
        pub(super) u8 = "dist_sync_role", "SYNC_" {
            AWAIT_PEERS = 0,
            AWAIT_GRADIENTS = 1,
            REDUCE_ON_CPU = 2,
        }
    }
}

impl ProbeState for PeerWaits {
    type Snapshot = PeerWaitSnapshot;

    fn snapshot(&self, process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> PeerWaitSnapshot {
        PeerWaitSnapshot {
            peer_wait_seconds: process.total_ns(DurationKind::DistSync) / 1e9,
            wait_times: process.shared_duration_histogram(DurationKind::DistSync),
        }
    }
}
