//! The state of the driver in this process: initialised once, with the devices that the process may see.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use zernel_softgpu::device::{self, Device};
use zernel_softgpu::memory::AddressSpace;
use zernel_softgpu::node::Node;
use zernel_softgpu::process;
use zernel_softgpu::virtual_memory::VirtualMemory;

use crate::status::{CudaError, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, OPERATING_SYSTEM};

/// All address ranges that this process got from the driver.
pub(crate) static ADDRESS_SPACE: AddressSpace = AddressSpace::new();
/// The addresses that this process has reserved, and the memory that is mapped there.
pub(crate) static VIRTUAL_MEMORY: VirtualMemory = VirtualMemory::new();

static DRIVER: OnceLock<Driver> = OnceLock::new();
/// Whether this process was forked from a process that had initialised the driver. As with the real driver, a forked
/// process cannot use the driver.
static IS_FORKED_CHILD: AtomicBool = AtomicBool::new(false);

/// The initialised driver of this process.
#[derive(Debug)]
pub(crate) struct Driver {
    node: Arc<Node>,
    devices: Vec<Arc<Device>>,
}

extern "C" fn mark_as_forked_child() {
    IS_FORKED_CHILD.store(true, Relaxed);
}

extern "C" fn leave_node() {
    if let Some(driver) = DRIVER.get() {
        driver.node.leave();
    }
}

/// The initialised driver. Returns an error if `cuInit` was not called, or in a forked child.
pub(crate) fn initialised_driver() -> Result<&'static Driver, CudaError> {
    if IS_FORKED_CHILD.load(Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    DRIVER.get().ok_or(NOT_INITIALIZED)
}

/// `cuInit`: initialises the driver once per process.
pub(crate) fn initialise_driver() -> Result<(), CudaError> {
    static INITIALISE_LOCK: Mutex<()> = Mutex::new(());
    if IS_FORKED_CHILD.load(Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    let _turn = INITIALISE_LOCK
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if DRIVER.get().is_none() {
        let driver = Driver::new()?;
        process::after_fork_in_child(mark_as_forked_child);
        process::at_exit(leave_node);
        let _ = DRIVER.set(driver);
    }
    Ok(())
}

impl Driver {
    fn new() -> Result<Self, CudaError> {
        let node = Node::open().map_err(|error| report_node_error(&error))?;
        // The process registers first of all: while a process uses the node, the node's hardware does not change.
        let membership = Arc::new(
            node.register_process()
                .map_err(|error| report_node_error(&error))?,
        );
        let visible = visible_devices(
            std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(),
            node.device_count(),
        );
        if visible.is_empty() {
            return Err(NO_DEVICE);
        }
        let device = |index| Arc::new(Device::new(index, Arc::clone(&membership)));
        Ok(Self {
            devices: visible.into_iter().map(device).collect(),
            node,
        })
    }

    /// Number of devices that this process sees.
    pub(crate) fn device_count(&self) -> usize {
        self.devices.len()
    }

    /// The device with this CUDA ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Result<&Arc<Device>, CudaError> {
        let index = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        self.devices.get(index).ok_or(INVALID_DEVICE)
    }

    /// The CUDA ordinal of `device` in this process.
    pub(crate) fn ordinal_of(&self, device: &Device) -> i32 {
        let position = self
            .devices
            .iter()
            .position(|other| other.index() == device.index());
        position.map_or(-1, |position| position as i32)
    }
}

fn report_node_error(error: &std::io::Error) -> CudaError {
    eprintln!("softgpu: cannot use the simulated node's state: {error}");
    OPERATING_SYSTEM
}

/// The node's devices that `CUDA_VISIBLE_DEVICES` names, in its order: by number, or by UUID or the beginning of one,
/// up to the first entry that names no device.
fn visible_devices(setting: Option<&str>, devices: usize) -> Vec<usize> {
    let Some(setting) = setting else {
        return (0..devices).collect();
    };
    let find = |name: &str| -> Option<usize> {
        if name.starts_with("GPU-") {
            return (0..devices).find(|index| device::uuid_text(*index).starts_with(name));
        }
        name.parse().ok().filter(|index| *index < devices)
    };
    setting
        .split(',')
        .map_while(|name| find(name.trim()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_visible_devices_is_parsed_as_by_real_driver() {
        assert_eq!(visible_devices(None, 3), [0, 1, 2]);
        assert_eq!(visible_devices(Some("2,0"), 3), [2, 0]);
        assert_eq!(visible_devices(Some("1,7,0"), 3), [1]);
        assert_eq!(visible_devices(Some(""), 3), [] as [usize; 0]);
        assert_eq!(visible_devices(Some(&device::uuid_text(1)), 3), [1]);
    }
}
