//! Structures of NVML, as `nvml.h` lays them out.

use std::ffi::c_char;

/// `nvmlPciInfo_t`.
#[repr(C)]
pub(crate) struct PciInfo {
    pub(crate) legacy_bus_id: [c_char; 16],
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
    pub(crate) device_id: u32,
    pub(crate) subsystem_id: u32,
    pub(crate) bus_id: [c_char; 32],
}

/// `nvmlMemory_t`.
#[repr(C)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryV2 {
    pub(crate) version: u32,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlUtilization_t`; the values are percentages.
#[repr(C)]
pub(crate) struct Utilization {
    pub(crate) gpu: u32,
    pub(crate) memory: u32,
}

/// `nvmlProcessInfo_t`. All bits of the instance numbers are set on a device without MIG.
#[repr(C)]
pub(crate) struct ProcessInfo {
    pub(crate) pid: u32,
    pub(crate) used_memory: u64,
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
}

/// `nvmlProcessUtilizationSample_t`; the utilizations are percentages.
#[repr(C)]
pub(crate) struct ProcessSample {
    pub(crate) pid: u32,
    /// Wall-clock time of the sample, in microseconds.
    pub(crate) time: u64,
    pub(crate) multiprocessors: u32,
    pub(crate) memory: u32,
    pub(crate) encoder: u32,
    pub(crate) decoder: u32,
}

/// `text` as a zero-terminated array of C characters.
pub(crate) fn text_array<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (place, byte) in array.iter_mut().zip(text.bytes().take(N - 1)) {
        *place = byte.cast_signed();
    }
    array
}
