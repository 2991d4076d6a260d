//! Waits for data.

pub(super) mod layout;
pub(crate) mod metrics;
mod state;

pub use state::DataloadCauses;

use super::Symbol;

/// Waits for data show in how threads block: no function is probed for them.
pub(super) const SYMBOLS: &[Symbol] = &[];
