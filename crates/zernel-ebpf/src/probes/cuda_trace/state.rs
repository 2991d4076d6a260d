//! Launches, copies and GPU waits of a process.

use zernel_model::snapshot::{CudaSnapshot, GpuWaitTimes};

use crate::observer::ObservedProcess;
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{CallKind, CopyDirection, DurationKind, ProbeState};

const DIRECTIONS: [CopyDirection; 4] = [
    CopyDirection::HostToDevice,
    CopyDirection::DeviceToHost,
    CopyDirection::DeviceToDevice,
    CopyDirection::Unified,
];

const WAIT_KINDS: [(DurationKind, &str); 4] = [
    (DurationKind::StreamWait, "stream"),
    (DurationKind::EventWait, "event"),
    (DurationKind::ContextWait, "context"),
    (DurationKind::CopyWait, "copy"),
];

/// Launches, copies and GPU waits of a process. The counts and durations of these calls are kept like those of all
/// probed calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CudaCalls;

impl ProbeState for CudaCalls {
    type Snapshot = CudaSnapshot;

    fn snapshot(&self, process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> CudaSnapshot {
        let launches = process.count_calls(|what| what == CallKind::Launch);
        let copies = process.count_calls(|what| matches!(what, CallKind::Copy(_)));
        let per_step = process.launches_per_step();
        let counted_copies = DIRECTIONS.iter().map(|direction| {
            let counted = process.counted_calls_of(CallKind::Copy(*direction));
            (direction.name(), counted)
        });
        let wait_times = WAIT_KINDS.iter().filter_map(|(family, kind)| {
            let times = process.shared_duration_histogram(*family)?;
            Some(GpuWaitTimes { kind, times })
        });
        let wait_ns = |(family, _): &(DurationKind, _)| process.total_ns(*family);
        CudaSnapshot {
            gpu_wait_seconds: WAIT_KINDS.iter().map(wait_ns).sum::<f64>() / 1e9,
            gpu_waits: process.count_calls(|what| what == CallKind::Wait).calls,
            launch_seconds: process.total_ns(DurationKind::Launch) / 1e9,
            launches: launches.calls,
            launches_error: launches.error,
            launches_per_step: per_step.map(|interval| interval.mean),
            launches_per_step_error: per_step.and_then(|interval| interval.half_width),
            copies: copies.calls,
            copies_error: copies.error,
            copied_bytes: copies.bytes,
            counted_launches: process.counted_calls_of(CallKind::Launch),
            counted_copies: counted_copies
                .filter(|(_, counted)| counted.calls > 0)
                .collect(),
            launch_times: process.shared_duration_histogram(DurationKind::Launch),
            wait_times: wait_times.collect(),
        }
    }
}
