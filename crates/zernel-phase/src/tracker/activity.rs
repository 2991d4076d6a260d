//! What a thread does outside of calls.

use super::config::TrackerConfig;
use crate::task_state::WorkloadPhase;

/// The activity of a thread that is in no sync and no collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    Idle,
    Loading,
    /// Without a GPU, and without ends of announced batches: its block for data is over. No event shows when the thread has
    /// its batch.
    ReceivingBatch,
    /// It launched, copied or synced last.
    Computing,
    /// In a backward pass, which may run on another thread.
    Backward,
    /// In an optimizer step.
    Updating,
    /// Work that is no part of a step: it writes a checkpoint.
    OtherWork,
    Compiling,
    /// Its optimizer step is over. It may wait for its next batch.
    AfterUpdate,
}

impl Activity {
    pub(super) fn phase(self) -> WorkloadPhase {
        match self {
            Self::Idle | Self::OtherWork | Self::Compiling => WorkloadPhase::Unknown,
            Self::Loading | Self::ReceivingBatch => WorkloadPhase::DataLoading,
            Self::Computing | Self::Backward | Self::AfterUpdate => WorkloadPhase::GpuCompute,
            Self::Updating => WorkloadPhase::OptimizerStep,
        }
    }

    /// Returns how long the activity lasts without an event that shows it.
    pub(super) fn max_ns(self, config: &TrackerConfig) -> u64 {
        match self {
            Self::Idle => u64::MAX,
            Self::Loading => config.loading_max_ns,
            Self::ReceivingBatch => config.short_wait_max_ns,
            Self::Computing | Self::OtherWork | Self::AfterUpdate => config.launching_max_ns,
            Self::Backward | Self::Compiling => config.sync_max_ns,
            Self::Updating => config.optimizer_max_ns,
        }
    }

    pub(super) fn is_part_of_step(self) -> bool {
        !matches!(self, Self::OtherWork | Self::Compiling)
    }

    /// Whether the activity continues after a short wait.
    pub(super) fn survives_short_waits(self) -> bool {
        self != Self::Loading
    }

    /// Returns the activity after the deadline has passed without an event.
    pub(super) fn after_deadline(self) -> Self {
        match self {
            Self::ReceivingBatch => Self::Computing,
            _ => Self::Idle,
        }
    }
}
