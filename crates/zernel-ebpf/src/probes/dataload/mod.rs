//! Waits for data.

pub(super) mod layout;
pub(crate) mod metrics;
mod state;

pub use state::DataloadCauses;

use super::ProbedFunction;

/// No function is probed: the scheduler's tracepoints show waits for data.
pub(super) const SYMBOLS: &[ProbedFunction] = &[];
