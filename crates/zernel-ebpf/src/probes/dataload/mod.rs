//! Waits for data.

pub(crate) mod metrics;
mod state;

pub use state::DataWaitCauses;
#[cfg(test)]
pub(super) use state::MIRRORS;

use super::ProbedFunction;

/// No function is probed: the scheduler's tracepoints show waits for data.
pub(super) const SYMBOLS: &[ProbedFunction] = &[];
