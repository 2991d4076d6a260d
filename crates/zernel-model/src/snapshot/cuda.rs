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
    /// Half width of the 95 % interval of `launches`.
    pub launches_error: u64,
    /// Copies between host and device; an estimate if copies were sampled.
    pub copies: u64,
    /// Half width of the 95 % interval of `copies`.
    pub copies_error: u64,
    /// Bytes copied.
    pub copied_bytes: u64,
    /// Copies by direction.
    #[serde(skip)]
    pub copies_by_direction: Vec<CopyCount>,
    /// Durations of launch calls.
    #[serde(skip)]
    pub launch_times: Option<SharedHistogram>,
    /// Durations of GPU waits by kind.
    #[serde(skip)]
    pub wait_times: Vec<WaitTimes>,
}

/// Copies in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyCount {
    /// `h2d`, `d2h`, `d2d` or `unified`.
    pub direction: &'static str,
    /// Copies.
    pub calls: u64,
    /// Bytes copied.
    pub bytes: u64,
}

/// Durations of one kind of GPU wait.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitTimes {
    /// `stream`, `event`, `context` or `copy`.
    pub kind: &'static str,
    /// The durations.
    pub times: SharedHistogram,
}
