//! The GPUs of a machine, as their driver describes them.

use serde::{Deserialize, Serialize};

/// One GPU. A field is `None` if the GPU's driver does not report that fact.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct GpuFacts {
    /// NVML index: the order on the PCI bus.
    pub index: u32,
    /// UUID: `GPU-` and hexadecimal digits.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Number in the name of the GPU's device node, such as 0 in `/dev/nvidia0`.
    pub minor: Option<u32>,
    /// Bytes of memory.
    pub memory_total: Option<u64>,
    /// Bytes of memory in use by any process.
    pub memory_used: Option<u64>,
    /// Percentage of the driver's last sampling period, a fraction of a second, in which a kernel ran; `None` for a
    /// partitioned GPU.
    pub utilization: Option<u32>,
    /// Time in which a kernel ran since observing began, in nanoseconds: the sum of all readings of `utilization`.
    pub busy_ns: u64,
    /// Whether the GPU is partitioned (multi-instance GPU).
    pub mig_enabled: bool,
    /// The MIG partitions of the GPU, in NVML's order.
    pub mig: Vec<MigFacts>,
}

/// One MIG partition of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct MigFacts {
    /// UUID: `MIG-` and hexadecimal digits.
    pub uuid: String,
    /// Its instances.
    pub instance: Option<MigInstance>,
    /// Bytes of memory.
    pub memory_total: Option<u64>,
    /// Bytes of memory in use.
    pub memory_used: Option<u64>,
}

/// The instances that make up a partition of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MigInstance {
    /// GPU instance: memory and multiprocessors.
    pub gpu: u32,
    /// Compute instance within it.
    pub compute: u32,
}

/// Memory of one process on one GPU, as NVML reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProcessGpuMemory {
    /// The process.
    pub pid: u32,
    /// NVML index of the GPU.
    pub index: u32,
    /// Bytes in use, including the driver's own context.
    pub bytes: Option<u64>,
    /// The MIG partition, if the GPU is partitioned.
    pub instance: Option<MigInstance>,
}
