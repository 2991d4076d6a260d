//! What a process does with `PyTorch`.

use serde::{Deserialize, Serialize};

/// What a process does with `PyTorch`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TorchSnapshot {
    /// Time in which `PyTorch` compiled a model, summed over threads, with the compilation that is under way.
    pub compile_seconds: f64,
    /// Calls of layers of models; an estimate if they were sampled.
    pub layer_calls: u64,
    /// Parts of its loop that the process announced by name, such as batches.
    pub announcements: u64,
    /// Whether functions that show a training loop or its layers have no probes in any file that the process maps. If it
    /// uses `PyTorch`, the calls above are unknown then.
    pub lacks_probes: bool,
}
