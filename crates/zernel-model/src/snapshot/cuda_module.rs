//! Loads of GPU code by a process.

use serde::{Deserialize, Serialize};

/// Loads of GPU code by a process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ModuleSnapshot {
    /// How often it loaded GPU code.
    pub module_loads: u64,
}
