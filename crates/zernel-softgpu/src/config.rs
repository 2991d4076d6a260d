//! The environment variables that set up the simulated node.

use std::path::PathBuf;
use std::str::FromStr;

/// Variable for the directory of the node's state, which all processes that use the node share.
pub const DIRECTORY_VARIABLE: &str = "ZERNEL_SOFTGPU_DIR";
/// Variable for the number of simulated GPUs.
pub const DEVICES_VARIABLE: &str = "ZERNEL_SOFTGPU_DEVICES";
/// Variable for the memory of each GPU, in bytes.
pub const MEMORY_VARIABLE: &str = "ZERNEL_SOFTGPU_MEMORY";
/// Variable for the memory that each context takes for itself, in bytes: no call allocates it, but NVML shows it.
pub const CONTEXT_MEMORY_VARIABLE: &str = "ZERNEL_SOFTGPU_CONTEXT_MEMORY";
/// Variable for the speed of copies between host and device, in bytes per second.
pub const COPY_BANDWIDTH_VARIABLE: &str = "ZERNEL_SOFTGPU_COPY_BANDWIDTH";
/// Variable for the speed of copies and fills within device memory, in bytes per second.
pub const MEMORY_BANDWIDTH_VARIABLE: &str = "ZERNEL_SOFTGPU_MEMORY_BANDWIDTH";
/// Variable for the speed of collectives, in bytes per second.
pub const NCCL_BANDWIDTH_VARIABLE: &str = "ZERNEL_SOFTGPU_NCCL_BANDWIDTH";
/// Variable for the directory of the truth log. Without this variable no log is written.
pub const LOG_VARIABLE: &str = "ZERNEL_SOFTGPU_LOG";
/// Variable that is `1` if the truth log is to hold every single event besides the counts.
pub const LOG_EVENTS_VARIABLE: &str = "ZERNEL_SOFTGPU_LOG_EVENTS";

/// The path in `variable`, if it is set and not empty.
#[must_use]
pub fn path_from_variable(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Whether the environment variable is set, and neither empty nor `0`.
#[must_use]
pub fn is_variable_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
}

/// The number in the environment variable, or `default`. A value that is not a number causes a warning on stderr.
#[must_use]
pub fn number_from_variable<T: FromStr + Copy + std::fmt::Display>(
    variable: &str,
    default: T,
) -> T {
    let Ok(text) = std::env::var(variable) else {
        return default;
    };
    text.trim().parse().unwrap_or_else(|_| {
        eprintln!("softgpu: {variable}={text} is not a number, using {default}");
        default
    })
}
