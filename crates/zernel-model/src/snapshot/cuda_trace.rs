//! Launches, copies and GPU waits of a process.

use serde::{Deserialize, Serialize};

use super::SharedHistogram;

/// Launches, copies and GPU waits of a process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CudaSnapshot {
    /// Time in calls that wait for the GPU.
    pub gpu_wait_seconds: f64,
    /// Number of these calls.
    pub gpu_waits: u64,
    /// Time in launch calls; an estimate if launches were sampled.
    pub launch_seconds: f64,
    /// Kernel and graph launches; an estimate if launches were sampled.
    pub launches: u64,
    /// Half width of the 95 % interval of `launches`; `None` if launches were sampled in fewer than two windows.
    pub launches_error: Option<u64>,
    /// Launches per step: an estimate if launches were sampled, else the mean of the latest steps.
    pub launches_per_step: Option<f64>,
    /// Half width of the 95 % interval of `launches_per_step`; `None` until two windows have shown steps.
    pub launches_per_step_error: Option<f64>,
    /// Copies between host and device; an estimate if copies were sampled.
    pub copies: u64,
    /// Half width of the 95 % interval of `copies`; `None` if copies were sampled in fewer than two windows.
    pub copies_error: Option<u64>,
    /// Bytes copied.
    pub copied_bytes: u64,
    /// Launches that were counted.
    #[serde(skip)]
    pub counted_launches: CountedCalls,
    /// Copies that were counted, by direction: `h2d`, `d2h`, `d2d` or `unified`.
    #[serde(skip)]
    pub counted_copies: Vec<(&'static str, CountedCalls)>,
    /// Durations of launch calls.
    #[serde(skip)]
    pub launch_times: Option<SharedHistogram>,
    /// Durations of GPU waits by kind.
    #[serde(skip)]
    pub wait_times: Vec<GpuWaitTimes>,
}

/// Calls that were counted: all of them, or those in sampling windows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CountedCalls {
    /// Number of calls.
    pub calls: u64,
    /// Bytes of these calls.
    pub bytes: u64,
    /// Time in which calls were counted.
    pub seconds: f64,
    /// Whether calls are or were sampled.
    pub was_sampled: bool,
}

/// Durations of one kind of GPU wait.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuWaitTimes {
    /// `stream`, `event`, `context` or `copy`.
    pub kind: &'static str,
    /// The durations.
    pub times: SharedHistogram,
}
