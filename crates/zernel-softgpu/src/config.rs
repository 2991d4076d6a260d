//! The environment variables that set up the simulated node.

use std::path::PathBuf;
use std::str::FromStr;

/// Directory of the node's state, shared by the processes that use it.
pub const DIRECTORY_VARIABLE: &str = "ZERNEL_SOFTGPU_DIR";
/// Number of simulated GPUs.
pub const DEVICES_VARIABLE: &str = "ZERNEL_SOFTGPU_DEVICES";
/// Memory of each GPU in bytes.
pub const MEMORY_VARIABLE: &str = "ZERNEL_SOFTGPU_MEMORY";
/// Memory that a context takes for itself, in bytes: no call allocates it, but NVML shows it.
pub const CONTEXT_MEMORY_VARIABLE: &str = "ZERNEL_SOFTGPU_CONTEXT_MEMORY";
/// Host-device copies, bytes per second.
pub const COPY_BANDWIDTH_VARIABLE: &str = "ZERNEL_SOFTGPU_COPY_BANDWIDTH";
/// Copies and fills within device memory, bytes per second.
pub const MEMORY_BANDWIDTH_VARIABLE: &str = "ZERNEL_SOFTGPU_MEMORY_BANDWIDTH";
/// Collectives, bytes per second.
pub const NCCL_BANDWIDTH_VARIABLE: &str = "ZERNEL_SOFTGPU_NCCL_BANDWIDTH";
/// Directory for the truth log; none is written without it.
pub const LOG_VARIABLE: &str = "ZERNEL_SOFTGPU_LOG";
/// `1`: the truth log also holds every single event.
pub const LOG_EVENTS_VARIABLE: &str = "ZERNEL_SOFTGPU_LOG_EVENTS";

/// The path in `variable`, if it is set and not empty.
#[must_use]
pub fn path_from_variable(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Whether `variable` is set to something other than nothing and `0`.
#[must_use]
pub fn is_variable_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
}

/// The number in `variable`, or `default`. A value that is not a number gets a warning on stderr.
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
