//! What a thread does outside of calls.

use crate::task_state::WorkloadPhase;

/// The activity of a thread that is in no sync and no collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    Idle,
    Loading,
    /// Without a GPU: its block for data is over. Nothing shows when it has its batch.
    Receiving,
    /// It launched, copied or synced last.
    Computing,
    /// In a backward pass, which may run on another thread.
    Backward,
    /// In an optimizer step.
    Updating,
    /// It clears gradients.
    Zeroing,
}

impl Activity {
    pub(super) fn phase(self) -> WorkloadPhase {
        match self {
            Self::Idle => WorkloadPhase::Unknown,
            Self::Loading | Self::Receiving => WorkloadPhase::DataLoading,
            Self::Computing | Self::Backward => WorkloadPhase::GpuCompute,
            Self::Updating | Self::Zeroing => WorkloadPhase::OptimizerStep,
        }
    }

    /// Whether the activity continues after a short wait.
    pub(super) fn survives_short_waits(self) -> bool {
        !matches!(self, Self::Idle | Self::Loading)
    }

    /// Returns the activity after the deadline has passed without an event.
    pub(super) fn after_deadline(self) -> Self {
        match self {
            Self::Receiving | Self::Zeroing => Self::Computing,
            _ => Self::Idle,
        }
    }
}
