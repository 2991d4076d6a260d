//! Waits of a process for other ranks.

use zernel_model::snapshot::PeerSnapshot;

use crate::observer::ObservedProcess;
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{DurationKind, ProbeState};

/// Waits of a process for other ranks. Only their durations are known, and the process keeps all durations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerWaits;

impl ProbeState for PeerWaits {
    type Snapshot = PeerSnapshot;

    fn snapshot(&self, process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> PeerSnapshot {
        PeerSnapshot {
            peer_wait_seconds: process.total_ns(DurationKind::DistSync) / 1e9,
            wait_times: process.shared_duration(DurationKind::DistSync),
        }
    }
}
