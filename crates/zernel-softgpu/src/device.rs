//! A simulated device: its name, its speed, and its part of the node's state.

use std::sync::{Arc, OnceLock};

use crate::clock::transfer_time;
use crate::config;
use crate::node::NodeMembership;

/// The name of every simulated device.
pub const DEVICE_NAME: &str = "Zernel Software GPU";
/// The CUDA version of the simulated driver: 12.9.
pub const CUDA_VERSION: i32 = 12090;
/// The version of the simulated driver.
pub const DRIVER_VERSION: &str = "999.12.9";
/// Compute capability.
pub const COMPUTE_CAPABILITY: (i32, i32) = (9, 0);
/// Multiprocessors.
pub const MULTIPROCESSOR_COUNT: i32 = 132;
/// Clock of the multiprocessors, MHz.
pub const SM_CLOCK_MHZ: u32 = 1_500;
/// Clock of the memory, MHz.
pub const MEMORY_CLOCK_MHZ: u32 = 2_600;

/// PCI bus number of device `index`; the domain is 0, and so is the slot.
#[must_use]
pub fn pci_bus(index: usize) -> u32 {
    index as u32 + 1
}

/// PCI address of device `index`, as CUDA spells it.
#[must_use]
pub fn pci_bus_id(index: usize) -> String {
    format!("0000:{:02X}:00.0", pci_bus(index))
}

/// UUID of device `index`; the same on every node.
#[must_use]
pub fn uuid_of_device(index: usize) -> [u8; 16] {
    let mut uuid = *b"zernel-softgpu\0\0";
    uuid[15] = index as u8;
    uuid
}

/// UUID of device `index`, as NVML spells it.
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

/// Speeds in bytes per second.
#[derive(Debug, Clone, Copy)]
pub struct Bandwidth {
    /// Between host and device.
    pub copy: u64,
    /// Within device memory.
    pub memory: u64,
}

impl Bandwidth {
    fn from_environment() -> Self {
        Self {
            copy: config::number_from_variable(config::COPY_BANDWIDTH_VARIABLE, 16_000_000_000),
            memory: config::number_from_variable(
                config::MEMORY_BANDWIDTH_VARIABLE,
                1_000_000_000_000,
            ),
        }
    }
}

/// Bytes per second of a collective.
#[must_use]
pub fn nccl_bandwidth() -> u64 {
    static NCCL_BANDWIDTH: OnceLock<u64> = OnceLock::new();
    *NCCL_BANDWIDTH.get_or_init(|| {
        config::number_from_variable(config::NCCL_BANDWIDTH_VARIABLE, 20_000_000_000)
    })
}

/// A device as one process uses it.
#[derive(Debug)]
pub struct Device {
    index: usize,
    membership: Arc<NodeMembership>,
    bandwidth: Bandwidth,
}

impl Device {
    /// Device `index` of the node.
    #[must_use]
    pub fn new(index: usize, membership: Arc<NodeMembership>) -> Self {
        Self {
            index,
            membership,
            bandwidth: Bandwidth::from_environment(),
        }
    }

    /// Number of the device on the node, which is its NVML index.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// All of its memory in bytes.
    #[must_use]
    pub fn total_memory(&self) -> u64 {
        self.membership.node().memory_per_device()
    }

    /// Its free memory in bytes.
    #[must_use]
    pub fn free_memory(&self) -> u64 {
        let used = self.membership.node().memory_in_use(self.index);
        self.total_memory().saturating_sub(used)
    }

    /// Takes memory; false if there is not enough.
    #[must_use]
    pub fn reserve_memory(&self, bytes: u64) -> bool {
        self.membership.reserve_memory(self.index, bytes)
    }

    /// Gives memory back.
    pub fn release_memory(&self, bytes: u64) {
        self.membership.release_memory(self.index, bytes);
    }

    /// Counts that a context of this process was created.
    pub fn count_created_context(&self) {
        self.membership.count_created_context(self.index);
    }

    /// Counts that a context of this process was destroyed.
    pub fn count_destroyed_context(&self) {
        self.membership.count_destroyed_context(self.index);
    }

    /// Records that the device works from `start` to `end`.
    pub fn record_busy_time(&self, start: u64, end: u64) {
        self.membership.record_busy_time(self.index, start, end);
    }

    /// How long a copy between host and device takes.
    #[must_use]
    pub fn copy_time(&self, bytes: u64) -> u64 {
        transfer_time(bytes, self.bandwidth.copy)
    }

    /// How long reading or writing device memory takes.
    #[must_use]
    pub fn device_memory_time(&self, bytes: u64) -> u64 {
        transfer_time(bytes, self.bandwidth.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spelled_as_the_real_ones() {
        assert_eq!(pci_bus_id(9), "0000:0A:00.0");
        assert_eq!(uuid_text(1), "GPU-7a65726e-656c-2d73-6f66-746770750001");
    }
}
