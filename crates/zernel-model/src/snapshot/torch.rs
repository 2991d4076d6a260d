//! What a process compiles.

use serde::{Deserialize, Serialize};

/// What a process compiles.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TorchSnapshot {
    /// Time in which `PyTorch` compiled a model, summed over threads, with the compilation that is under way.
    pub compile_seconds: f64,
}
