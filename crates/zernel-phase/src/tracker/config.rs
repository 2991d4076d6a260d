//! The time limits of the event rule.

use serde::{Deserialize, Serialize};

use crate::phase_detector::ConfigError;

/// Time limits of the event rule: how long a phase lasts without further evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrackerConfig {
    /// Limit for a GPU sync without leave event. Long, because a sync may spin.
    pub sync_max_ns: u64,
    /// Limit for a collective without leave event. Short, because the call only enqueues work.
    pub collective_max_ns: u64,
    /// Limit for a blocked thread, in any phase.
    pub blocked_max_ns: u64,
    /// Limit for data loading after its last event.
    pub loading_max_ns: u64,
    /// Limit for GPU compute after the last launch.
    pub launching_max_ns: u64,
    /// Limit for an optimizer step after its last marker.
    pub optimizer_max_ns: u64,
    /// Limit for an optimizer step inferred from the CPU burst after a sync.
    pub optimizer_burst_max_ns: u64,
    /// A launch within this time after a marker belongs to the optimizer step.
    pub optimizer_launch_max_ns: u64,
    /// A shorter wait does not end the current activity.
    pub short_wait_max_ns: u64,
}

impl Default for TrackerConfig {
    fn default() -> Self {
        Self {
            sync_max_ns: 60_000_000_000,
            collective_max_ns: 1_000_000_000,
            blocked_max_ns: Self::MAX_NS,
            loading_max_ns: 10_000_000_000,
            launching_max_ns: 20_000_000,
            optimizer_max_ns: 1_000_000_000,
            optimizer_burst_max_ns: 5_000_000,
            optimizer_launch_max_ns: 1_000_000,
            short_wait_max_ns: 1_000_000,
        }
    }
}

impl TrackerConfig {
    /// Largest allowed limit: one hour.
    pub const MAX_NS: u64 = 3_600_000_000_000;

    /// Returns an error if a limit is zero or above [`MAX_NS`](Self::MAX_NS).
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (field, ns) in [
            ("sync_max_ns", self.sync_max_ns),
            ("collective_max_ns", self.collective_max_ns),
            ("blocked_max_ns", self.blocked_max_ns),
            ("loading_max_ns", self.loading_max_ns),
            ("launching_max_ns", self.launching_max_ns),
            ("optimizer_max_ns", self.optimizer_max_ns),
            ("optimizer_burst_max_ns", self.optimizer_burst_max_ns),
            ("optimizer_launch_max_ns", self.optimizer_launch_max_ns),
            ("short_wait_max_ns", self.short_wait_max_ns),
        ] {
            if ns == 0 || ns > Self::MAX_NS {
                let allowed = format!("from 1 to {}", Self::MAX_NS);
                return Err(ConfigError::new(field, &ns, allowed));
            }
        }
        Ok(())
    }
}
