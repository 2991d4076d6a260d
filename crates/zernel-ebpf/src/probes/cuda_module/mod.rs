//! Loads of GPU code.

pub(crate) mod metrics;
mod state;

#[cfg(test)]
pub(super) use state::MIRRORS;
pub use state::ModuleLoads;

use super::{Probe, ProbedFunction};
use zernel_elf::LibraryKind::Cuda;

pub(super) const SYMBOLS: &[ProbedFunction] = &[ProbedFunction::new(
    Cuda,
    Probe::CudaModule,
    0,
    &["cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"],
)];
