//! The time limits of the event rule.

use serde::{Deserialize, Serialize};

use crate::phase_detector::ConfigError;

/// How long a phase is believed without further evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrackerConfig {
    /// In a GPU sync that was entered and not left. Long, because a sync may spin.
    pub sync_max_ns: u64,
    /// In a collective that was entered and not left. Short, because it only hands work on.
    pub collective_max_ns: u64,
    /// Blocked, in whatever phase.
    pub blocked_max_ns: u64,
    /// Loading, after the last event that shows it.
    pub loading_max_ns: u64,
    /// Launching, after the last launch.
    pub launching_max_ns: u64,
    /// In an optimizer step, after its last marker.
    pub optimizer_max_ns: u64,
    /// In an optimizer step guessed from the CPU burst after a sync.
    pub optimizer_burst_max_ns: u64,
    /// A launch within this time after a marker belongs to the optimizer.
    pub optimizer_launch_max_ns: u64,
    /// A wait shorter than this interrupts an activity and does not end it.
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
    /// No phase is believed longer than an hour without evidence.
    pub const MAX_NS: u64 = 3_600_000_000_000;

    /// Refuses limits that would end every phase at once, or none.
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
