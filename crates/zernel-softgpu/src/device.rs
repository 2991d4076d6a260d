//! A simulated device: its name, its speed, and its part of the node's state.

use std::sync::{Arc, OnceLock};

use crate::clock::transfer_time_ns;
use crate::config;
use crate::node::NodeMembership;

/// The name of every simulated device.
pub const DEVICE_NAME: &str = "Zernel Software GPU";
/// The CUDA version of the simulated driver: 12.9.
pub const CUDA_VERSION: i32 = 12090;
/// The version of the simulated driver.
pub const DRIVER_VERSION: &str = "999.12.9";
/// Compute capability of every simulated device, major and minor.
pub const COMPUTE_CAPABILITY: (i32, i32) = (9, 0);
/// Number of multiprocessors of a simulated device.
pub const MULTIPROCESSOR_COUNT: i32 = 132;
/// Clock of the multiprocessors in MHz.
pub const SM_CLOCK_MHZ: u32 = 1_500;
/// Clock of the memory in MHz.
pub const MEMORY_CLOCK_MHZ: u32 = 2_600;

/// PCI bus number of the device with this index. Its domain and its slot are 0.
#[must_use]
pub fn pci_bus(index: usize) -> u32 {
    index as u32 + 1
}

/// PCI address of the device with this index, as CUDA spells it.
#[must_use]
pub fn pci_bus_id(index: usize) -> String {
    format!("0000:{:02X}:00.0", pci_bus(index))
}

/// UUID of the device with this index; the same on every node.
#[must_use]
pub fn uuid_of_device(index: usize) -> [u8; 16] {
    let mut uuid = *b"zernel-softgpu\0\0";
    uuid[15] = index as u8;
    uuid
}

/// UUID of the device with this index, as NVML spells it.
#[must_use]
pub fn uuid_text(index: usize) -> String {
    let hex: String = uuid_of_device(index)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    format!("GPU-{}", parts.join("-"))
}

/// Speeds of a device's copies, in bytes per second.
#[derive(Debug, Clone, Copy)]
pub struct Bandwidth {
    /// Speed of copies between host and device, in bytes per second.
    pub host_copy_bytes_per_second: u64,
    /// Speed of copies and fills within device memory, in bytes per second.
    pub device_copy_bytes_per_second: u64,
}

impl Bandwidth {
    fn from_environment() -> Self {
        Self {
            host_copy_bytes_per_second: config::number_from_variable(
                config::COPY_BANDWIDTH_VARIABLE,
                16_000_000_000,
            ),
            device_copy_bytes_per_second: config::number_from_variable(
                config::MEMORY_BANDWIDTH_VARIABLE,
                1_000_000_000_000,
            ),
        }
    }
}

/// Speed of collectives in bytes per second, from the environment.
#[must_use]
pub fn nccl_bandwidth() -> u64 {
    static NCCL_BANDWIDTH: OnceLock<u64> = OnceLock::new();
    *NCCL_BANDWIDTH.get_or_init(|| {
        config::number_from_variable(config::NCCL_BANDWIDTH_VARIABLE, 20_000_000_000)
    })
}

/// A simulated device, as one process uses it.
#[derive(Debug)]
pub struct Device {
    index: usize,
    membership: Arc<NodeMembership>,
    bandwidth: Bandwidth,
}

impl Device {
    /// The device with this index on the node.
    #[must_use]
    pub fn new(index: usize, membership: Arc<NodeMembership>) -> Self {
        Self {
            index,
            membership,
            bandwidth: Bandwidth::from_environment(),
        }
    }

    /// Index of the device on the node, which is also its NVML index.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Size of the device's memory in bytes.
    #[must_use]
    pub fn total_memory(&self) -> u64 {
        self.membership.node().memory_per_device()
    }

    /// Bytes of the device's memory that no process has reserved.
    #[must_use]
    pub fn free_memory(&self) -> u64 {
        let used = self.membership.node().memory_in_use(self.index);
        self.total_memory().saturating_sub(used)
    }

    /// Reserves memory of the device for this process; false if there is not enough.
    #[must_use]
    pub fn reserve_memory(&self, bytes: u64) -> bool {
        self.membership.reserve_memory(self.index, bytes)
    }

    /// Releases memory of the device that this process had reserved.
    pub fn release_memory(&self, bytes: u64) {
        self.membership.release_memory(self.index, bytes);
    }

    /// Counts a context that this process has created on the device.
    pub fn count_created_context(&self) {
        self.membership.count_created_context(self.index);
    }

    /// Counts a context of this process that was destroyed.
    pub fn count_destroyed_context(&self) {
        self.membership.count_destroyed_context(self.index);
    }

    /// Records that the device works for this process from `start` to `end`.
    pub fn record_busy_time(&self, start: u64, end: u64) {
        self.membership.record_busy_time(self.index, start, end);
    }

    /// Duration of a copy of `bytes` between host and device, in nanoseconds.
    #[must_use]
    pub fn copy_time_ns(&self, bytes: u64) -> u64 {
        transfer_time_ns(bytes, self.bandwidth.host_copy_bytes_per_second)
    }

    /// Duration of reading or writing `bytes` of device memory, in nanoseconds.
    #[must_use]
    pub fn device_memory_time_ns(&self, bytes: u64) -> u64 {
        transfer_time_ns(bytes, self.bandwidth.device_copy_bytes_per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_bus_ids_and_uuids_have_real_format() {
        assert_eq!(pci_bus_id(9), "0000:0A:00.0");
        assert_eq!(uuid_text(1), "GPU-7a65726e-656c-2d73-6f66-746770750001");
    }
}
