//! Waits of a process for its next batch.

use serde::{Deserialize, Serialize};

use super::SharedHistogram;

/// Waits of a process for its next batch.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DataloadSnapshot {
    /// Seconds by cause.
    pub data_waits: DataWaits,
    /// Durations of the waits.
    #[serde(skip)]
    pub wait_times: Option<SharedHistogram>,
}

/// Seconds of waits for data, by what the loaders did meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DataWaits {
    /// Loaders ran on CPUs.
    pub prepare: f64,
    /// Loaders waited for disk or network.
    pub fetch: f64,
    /// Loaders were runnable and got no CPU.
    pub sched: f64,
    /// None of these.
    pub other: f64,
}

impl DataWaits {
    /// Seconds by the name of the cause.
    #[must_use]
    pub fn by_name(&self) -> [(&'static str, f64); 4] {
        [
            ("prepare", self.prepare),
            ("fetch", self.fetch),
            ("sched", self.sched),
            ("other", self.other),
        ]
    }

    /// Seconds of all causes.
    #[must_use]
    pub fn total_seconds(&self) -> f64 {
        self.by_name().iter().map(|(_, seconds)| seconds).sum()
    }
}
