//! The GPUs of this machine from NVIDIA's management library (NVML), and the mapping of a process's
//! CUDA device numbers to them.
//!
//! NVML comes with the driver and is loaded at run time. Without NVML no facts about GPUs are known, and
//! [`Gpus::unavailable_reason`] returns the reason. GPUs are identified by their UUID and by their NVML index, which
//! follows the order on the PCI bus. CUDA device numbers depend on the environment and the container of a process;
//! [`VisibleDevices`] translates them.

mod device_nodes;
mod sys;
mod visible_devices;

pub use visible_devices::{
    CudaDevice, DeviceAssumption, DeviceOrder, VisibleDevices, ordinal_to_index,
};
pub use zernel_model::gpu::{GpuFacts, MigFacts, MigInstance, ProcessGpuMemory};

use std::ffi::{OsStr, OsString};
use std::time::Duration;
use std::{env, fmt};

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

/// Environment variable with the path of another NVML library.
pub const NVML_LIBRARY_VARIABLE: &str = "ZERNEL_NVML_LIBRARY";

/// Name of the driver's NVML library.
const NVML_LIBRARY_NAME: &str = "libnvidia-ml.so.1";

/// The GPUs of this machine, as NVML reports them.
pub struct Gpus {
    nvml: Result<Nvml, NvmlUnavailable>,
}

/// The reason why NVML is unavailable. A machine without the driver is an expected state, not an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NvmlUnavailable {
    /// The library does not exist. The NVIDIA driver is probably not installed.
    LibraryNotFound(OsString),
    /// The library failed, with its reason: the driver is not loaded or does not match.
    LibraryFailed(String),
}

impl fmt::Display for NvmlUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LibraryNotFound(name) => write!(f, "{} is not installed", name.display()),
            Self::LibraryFailed(reason) => write!(f, "NVML failed: {reason}"),
        }
    }
}

impl Gpus {
    /// Loads the driver's NVML, or the library that [`NVML_LIBRARY_VARIABLE`] names.
    #[must_use]
    pub fn open() -> Self {
        let named = env::var_os(NVML_LIBRARY_VARIABLE).filter(|name| !name.is_empty());
        Self::open_library(named.as_deref().unwrap_or(OsStr::new(NVML_LIBRARY_NAME)))
    }

    /// Loads NVML from a library with this name or path.
    #[must_use]
    pub fn open_library(library: &OsStr) -> Self {
        let nvml = Nvml::builder()
            .lib_path(library)
            .init()
            // NVML is also asked for the number of GPUs, because a library may load and initialise without a driver.
            .and_then(|nvml| nvml.device_count().map(|_| nvml));
        Self {
            nvml: nvml.map_err(|error| match error {
                NvmlError::LibloadingError(_) => {
                    NvmlUnavailable::LibraryNotFound(library.to_owned())
                }
                error => NvmlUnavailable::LibraryFailed(error.to_string()),
            }),
        }
    }

    /// Returns the reason why NVML is unavailable; `None` if it works.
    #[must_use]
    pub fn unavailable_reason(&self) -> Option<&NvmlUnavailable> {
        self.nvml.as_ref().err()
    }

    /// Returns the version of the driver.
    #[must_use]
    pub fn driver_version(&self) -> Option<String> {
        self.nvml.as_ref().ok()?.sys_driver_version().ok()
    }

    /// Returns the number of GPUs, including GPUs that do not respond.
    #[must_use]
    pub fn gpu_count(&self) -> u32 {
        let nvml = self.nvml.as_ref().ok();
        nvml.and_then(|nvml| nvml.device_count().ok()).unwrap_or(0)
    }

    /// Returns the facts of all GPUs that respond, ordered by index. A GPU that has fallen off the
    /// bus is missing.
    #[must_use]
    pub fn read_facts(&self) -> Vec<GpuFacts> {
        let devices = self.devices();
        devices
            .filter_map(|(index, device)| facts_of_device(index, &device))
            .collect()
    }

    /// Reads the utilization of GPUs again, and adds it to their busy times for the time `since` the last reading. The
    /// driver answers from memory, so a call takes some 10 µs per GPU.
    pub fn refresh_utilization(&self, gpus: &mut [GpuFacts], since: Duration) {
        for (index, device) in self.devices() {
            if let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.index == index) {
                gpu.utilization = utilization_percent(&device);
                let busy = since * gpu.utilization.unwrap_or(0) / 100;
                gpu.busy_ns += u64::try_from(busy.as_nanos()).unwrap_or(0);
            }
        }
    }

    /// Returns the GPU memory of compute processes, as far as the driver (510 or newer) shows them
    /// to this process.
    #[must_use]
    pub fn process_memory(&self) -> Vec<ProcessGpuMemory> {
        let devices = self.devices();
        devices
            .flat_map(|(index, device)| {
                let processes = device.running_compute_processes();
                processes
                    .into_iter()
                    .flatten()
                    .map(move |process| process_memory_on(index, &process))
            })
            .collect()
    }

    fn devices(&self) -> impl Iterator<Item = (u32, Device<'_>)> {
        let nvml = self.nvml.as_ref().ok();
        (0..self.gpu_count())
            .filter_map(move |index| Some((index, nvml?.device_by_index(index).ok()?)))
    }
}

fn facts_of_device(index: u32, device: &Device<'_>) -> Option<GpuFacts> {
    let memory = device.memory_info().ok();
    let mig_enabled = device.mig_mode().is_ok_and(|mode| mode.current != 0);
    Some(GpuFacts {
        index,
        uuid: device.uuid().ok()?,
        name: device.name().unwrap_or_default(),
        minor: device.minor_number().ok(),
        memory_total: memory.as_ref().map(|memory| memory.total),
        memory_used: memory.as_ref().map(|memory| memory.used),
        utilization: utilization_percent(device),
        busy_ns: 0,
        mig_enabled,
        mig: match mig_enabled {
            true => mig_facts_of_device(device),
            false => Vec::new(),
        },
    })
}

fn utilization_percent(device: &Device<'_>) -> Option<u32> {
    Some(device.utilization_rates().ok()?.gpu.min(100))
}

fn mig_facts_of_device(device: &Device<'_>) -> Vec<MigFacts> {
    let slots = device.mig_device_count().unwrap_or(0);
    // Slots of MIG devices may be empty, also between others.
    let devices = (0..slots).filter_map(|slot| device.mig_device_by_index(slot).ok());
    devices
        .filter_map(|mig| {
            let memory = mig.memory_info().ok();
            Some(MigFacts {
                uuid: mig.uuid().ok()?,
                instance: sys::read_mig_instance(&mig),
                memory_total: memory.as_ref().map(|memory| memory.total),
                memory_used: memory.as_ref().map(|memory| memory.used),
            })
        })
        .collect()
}

fn process_memory_on(index: u32, process: &ProcessInfo) -> ProcessGpuMemory {
    let instances = process.gpu_instance_id.zip(process.compute_instance_id);
    ProcessGpuMemory {
        pid: process.pid,
        index,
        bytes: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
        instance: instances.map(|(gpu, compute)| MigInstance { gpu, compute }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_nvml_there_are_no_gpus_and_a_reason() {
        let name = OsStr::new("/no/such/libnvidia-ml.so.1");
        let gpus = Gpus::open_library(name);
        assert_eq!(
            gpus.unavailable_reason(),
            Some(&NvmlUnavailable::LibraryNotFound(name.to_owned()))
        );
        assert_eq!(
            gpus.unavailable_reason().unwrap().to_string(),
            "/no/such/libnvidia-ml.so.1 is not installed"
        );
        assert_eq!(gpus.driver_version(), None);
        assert!(gpus.read_facts().is_empty());
        assert!(gpus.process_memory().is_empty());
    }
}
