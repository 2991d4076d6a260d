//! Waits of a process for other ranks.

use serde::{Deserialize, Serialize};

use super::SharedHistogram;

/// Waits of a process for other ranks, through any library.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerWaitSnapshot {
    /// Seconds of all waits.
    pub peer_wait_seconds: f64,
    /// Durations of the waits.
    #[serde(skip)]
    pub wait_times: Option<SharedHistogram>,
}
