//! The threads of a process on and off CPUs.

use serde::{Deserialize, Serialize};

/// The threads of a process on and off CPUs, summed over threads.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedSnapshot {
    /// Time on CPUs.
    pub cpu_seconds: f64,
    /// Time runnable without a CPU.
    pub run_delay_seconds: f64,
    /// Time on CPUs of the threads that make probed calls.
    pub calling_cpu_seconds: f64,
    /// Time runnable without a CPU of the threads that make probed calls.
    pub calling_run_delay_seconds: f64,
    /// Time blocked on disk, network or page faults.
    pub fetch_seconds: f64,
    /// Time blocked, by reason.
    #[serde(skip)]
    pub blocked_seconds: Vec<(&'static str, f64)>,
}
