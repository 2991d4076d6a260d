//! GPU memory: how much each process holds, by device and by calling library.

mod callers;
mod epochs;
mod layout;
pub(crate) mod metrics;
mod state;

pub use state::{GpuMemory, MemoryUse};
pub(crate) use state::{ProcessGpus, delete_entries, read_maps};

#[cfg(test)]
pub(super) use layout::MIRRORS;
use layout::{
    ALLOCATE, ALLOCATE_PITCHED, ALLOCATE_POOLED, CREATE, FREE, MAP, RELEASE, RETAIN, UNMAP,
};

use super::{Probe, ProbedFunction, SamplingGroup};
use zernel_elf::LibraryKind::Cuda;

const fn memory_function(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(Cuda, Probe::GpuMem, role, names)
}

/// A function that stores the address of new memory; its second argument is the size.
const fn allocates(names: &'static [&'static str]) -> ProbedFunction {
    memory_function(ALLOCATE, names)
        .kept_arguments([1, 2, 0, 0])
        .bytes_argument(2)
}

/// An allocation from a memory pool. A program may make an allocation from a pool for every tensor, so these
/// functions may be sampled.
const fn allocates_pooled(names: &'static [&'static str]) -> ProbedFunction {
    memory_function(ALLOCATE_POOLED, names)
        .kept_arguments([1, 2, 0, 0])
        .bytes_argument(2)
        .sampled_with(SamplingGroup::Pools)
}

/// A function that frees an address. The kernel stores the freed bytes as the fourth argument.
const fn frees(names: &'static [&'static str]) -> ProbedFunction {
    memory_function(FREE, names)
        .kept_arguments([1, 0, 0, 0])
        .bytes_argument(4)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    allocates(&["cuMemAlloc_v2"]),
    allocates_pooled(&["cuMemAllocAsync", "cuMemAllocAsync_ptsz"]),
    allocates_pooled(&["cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz"]),
    allocates(&["cuMemAllocManaged"]),
    memory_function(ALLOCATE_PITCHED, &["cuMemAllocPitch_v2"])
        .kept_arguments([1, 2, 4, 0])
        .bytes_argument(4),
    frees(&["cuMemFree_v2"]),
    frees(&["cuMemFreeAsync", "cuMemFreeAsync_ptsz"]).sampled_with(SamplingGroup::Pools),
    memory_function(CREATE, &["cuMemCreate"])
        .kept_arguments([1, 2, 3, 0])
        .bytes_argument(2),
    memory_function(RETAIN, &["cuMemRetainAllocationHandle"]).kept_arguments([1, 0, 0, 0]),
    memory_function(RELEASE, &["cuMemRelease"]).kept_arguments([1, 0, 0, 0]),
    memory_function(MAP, &["cuMemMap"])
        .kept_arguments([1, 2, 4, 0])
        .bytes_argument(2),
    memory_function(UNMAP, &["cuMemUnmap"])
        .kept_arguments([1, 2, 0, 0])
        .bytes_argument(2),
];
