//! Counts of lost and late events.

use serde::{Deserialize, Serialize};

/// Counts of lost and late events: the quality of a tracker's input. Counts saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TrackerFaults {
    /// Calls that ended without their leave event.
    pub lost_leave_events: u32,
    /// Leave events without an enter event.
    pub lost_enter_events: u32,
    /// Events with a timestamp before an event already applied.
    pub late_events: u32,
    /// Phases that ended at their deadline.
    pub expired_phases: u32,
}

pub(super) fn count_fault(fault: &mut u32, happened: bool) {
    *fault = fault.saturating_add(happened.into());
}
