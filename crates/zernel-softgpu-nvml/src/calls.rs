//! The functions that the software NVML exports.

use std::ffi::c_char;
use std::time::{SystemTime, UNIX_EPOCH};

use zernel_softgpu::abi_arguments::{OutArgument, TextArgument};
use zernel_softgpu::device as facts;
use zernel_softgpu::exports;
use zernel_softgpu::node::{DeviceUseOfProcess, Node};

use crate::node::{
    handle_of_device, initialise_library, node_and_device_index, open_node, shut_down,
};
use crate::status::{NvmlError, Outcome, error_description};
use crate::types::{
    Memory, MemoryV2, PciInfo, ProcessInfo, ProcessSample, Utilization, text_array,
};

/// Power of an idle device in milliwatts, and the power that full load adds.
const IDLE_POWER_MILLIWATTS: u32 = 70_000;
const FULL_LOAD_POWER_MILLIWATTS: u32 = 630_000;
/// Temperature of an idle device in degrees Celsius, and the degrees that full load adds.
const IDLE_TEMPERATURE_CELSIUS: u32 = 30;
const FULL_LOAD_TEMPERATURE_CELSIUS: u32 = 40;

fn store_text(place: &OutArgument<c_char>, value: &str, capacity: u32) -> Outcome {
    match place.set_text(value, capacity as usize)? {
        true => Ok(()),
        false => Err(NvmlError::InsufficientSize),
    }
}

/// The share (0 to 1) of the last half second in which the device was busy for any process.
fn device_load(node: &Node, index: usize) -> f64 {
    let processes = node.processes_using(index);
    processes
        .iter()
        .map(|process| process.utilization)
        .sum::<f64>()
        .min(1.0)
}

fn share_to_percent(share: f64) -> u32 {
    (share * 100.0).round() as u32
}

/// The bytes of a device's memory that are in use, and all of its bytes.
fn used_and_total_memory(node: &Node, index: usize) -> (u64, u64) {
    (
        node.memory_in_use(index).min(node.memory_per_device()),
        node.memory_per_device(),
    )
}

fn find_device_handle(wanted: impl Fn(usize) -> bool) -> Result<u64, NvmlError> {
    let found = (0..open_node()?.device_count()).find(|index| wanted(*index));
    found.map(handle_of_device).ok_or(NvmlError::NotFound)
}

/// Stores a list as NVML does: if the caller's array is too small, only the number of entries is stored.
fn store_list<T>(values: Vec<T>, count: &OutArgument<u32>, places: &OutArgument<T>) -> Outcome {
    let room = count.get()? as usize;
    count.set(values.len() as u32)?;
    if values.len() > room {
        return Err(NvmlError::InsufficientSize);
    }
    for (index, value) in values.into_iter().enumerate() {
        places.set_at(index, value)?;
    }
    Ok(())
}

fn process_info(process: &DeviceUseOfProcess) -> ProcessInfo {
    ProcessInfo {
        pid: process.pid,
        used_memory: process.bytes,
        gpu_instance: u32::MAX,
        compute_instance: u32::MAX,
    }
}

fn process_sample(process: &DeviceUseOfProcess, time: u64) -> ProcessSample {
    ProcessSample {
        pid: process.pid,
        time,
        multiprocessors: share_to_percent(process.utilization),
        memory: 0,
        encoder: 0,
        decoder: 0,
    }
}

fn clock_mhz(kind: i32) -> Result<u32, NvmlError> {
    match kind {
        // The kinds of clocks: graphics, multiprocessors, memory, video.
        0 | 1 | 3 => Ok(facts::SM_CLOCK_MHZ),
        2 => Ok(facts::MEMORY_CLOCK_MHZ),
        _ => Err(NvmlError::InvalidArgument),
    }
}

exports! { "nvml" =>
    fn nvmlInit_v2(_call) -> Outcome {
        initialise_library()
    }

    fn nvmlInit(_call) -> Outcome {
        initialise_library()
    }

    fn nvmlInitWithFlags(_call, _flags: u32) -> Outcome {
        initialise_library()
    }

    fn nvmlShutdown(_call) -> Outcome {
        shut_down()
    }

    fn nvmlErrorString(_call, code: i32) -> *const c_char {
        error_description(code).as_ptr()
    }

    fn nvmlSystemGetDriverVersion(_call, version: OutArgument<c_char>, capacity: u32) -> Outcome {
        open_node()?;
        store_text(&version, facts::DRIVER_VERSION, capacity)
    }

    fn nvmlSystemGetNVMLVersion(_call, version: OutArgument<c_char>, capacity: u32) -> Outcome {
        store_text(&version, concat!("12.", "999.12.9"), capacity)
    }

    fn nvmlSystemGetCudaDriverVersion(_call, version: OutArgument<i32>) -> Outcome {
        Ok(version.set(facts::CUDA_VERSION)?)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(_call, version: OutArgument<i32>) -> Outcome {
        Ok(version.set(facts::CUDA_VERSION)?)
    }

    fn nvmlSystemGetProcessName(_call, pid: u32, name: OutArgument<c_char>, capacity: u32) -> Outcome {
        open_node()?;
        let path = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(|_| NvmlError::NotFound)?;
        store_text(&name, &path.to_string_lossy(), capacity)
    }

    fn nvmlDeviceGetCount_v2(_call, count: OutArgument<u32>) -> Outcome {
        Ok(count.set(open_node()?.device_count() as u32)?)
    }

    fn nvmlDeviceGetCount(_call, count: OutArgument<u32>) -> Outcome {
        Ok(count.set(open_node()?.device_count() as u32)?)
    }

    fn nvmlDeviceGetHandleByIndex_v2(_call, index: u32, found: OutArgument<u64>) -> Outcome {
        node_and_device_index(handle_of_device(index as usize))?;
        Ok(found.set(handle_of_device(index as usize))?)
    }

    fn nvmlDeviceGetHandleByIndex(_call, index: u32, found: OutArgument<u64>) -> Outcome {
        node_and_device_index(handle_of_device(index as usize))?;
        Ok(found.set(handle_of_device(index as usize))?)
    }

    fn nvmlDeviceGetHandleByUUID(_call, uuid: TextArgument, found: OutArgument<u64>) -> Outcome {
        let uuid = uuid.get()?;
        Ok(found.set(find_device_handle(|index| facts::uuid_text(index) == uuid)?)?)
    }

    /// The domain in a PCI bus id has four or eight digits.
    fn nvmlDeviceGetHandleByPciBusId_v2(_call, bus_id: TextArgument, found: OutArgument<u64>) -> Outcome {
        let bus_id = bus_id.get()?.to_uppercase();
        let is_it = |index| {
            let known = facts::pci_bus_id(index);
            bus_id == known || bus_id == format!("0000{known}")
        };
        Ok(found.set(find_device_handle(is_it)?)?)
    }

    fn nvmlDeviceGetName(_call, device_handle: u64, name: OutArgument<c_char>, capacity: u32) -> Outcome {
        node_and_device_index(device_handle)?;
        store_text(&name, facts::DEVICE_NAME, capacity)
    }

    fn nvmlDeviceGetUUID(_call, device_handle: u64, uuid: OutArgument<c_char>, capacity: u32) -> Outcome {
        let (_, index) = node_and_device_index(device_handle)?;
        store_text(&uuid, &facts::uuid_text(index), capacity)
    }

    fn nvmlDeviceGetIndex(_call, device_handle: u64, place: OutArgument<u32>) -> Outcome {
        let (_, index) = node_and_device_index(device_handle)?;
        Ok(place.set(index as u32)?)
    }

    fn nvmlDeviceGetMinorNumber(_call, device_handle: u64, place: OutArgument<u32>) -> Outcome {
        let (_, index) = node_and_device_index(device_handle)?;
        Ok(place.set(index as u32)?)
    }

    fn nvmlDeviceGetPciInfo_v3(_call, device_handle: u64, info: OutArgument<PciInfo>) -> Outcome {
        let (_, index) = node_and_device_index(device_handle)?;
        let bus_id = facts::pci_bus_id(index);
        Ok(info.set(PciInfo {
            legacy_bus_id: text_array(&bus_id),
            domain: 0,
            bus: facts::pci_bus(index),
            device: 0,
            // The PCI ids of a device that no vendor makes.
            device_id: 0xffff_ffff,
            subsystem_id: 0xffff_ffff,
            bus_id: text_array(&format!("0000{bus_id}")),
        })?)
    }

    fn nvmlDeviceGetMemoryInfo(_call, device_handle: u64, info: OutArgument<Memory>) -> Outcome {
        let (node, index) = node_and_device_index(device_handle)?;
        let (used, total) = used_and_total_memory(&node, index);
        Ok(info.set(Memory {
            total,
            free: total - used,
            used,
        })?)
    }

    fn nvmlDeviceGetMemoryInfo_v2(_call, device_handle: u64, info: OutArgument<MemoryV2>) -> Outcome {
        const MEMORY_V2_VERSION: u32 = size_of::<MemoryV2>() as u32 | 2 << 24;
        let (node, index) = node_and_device_index(device_handle)?;
        if info.get()?.version != MEMORY_V2_VERSION {
            return Err(NvmlError::VersionMismatch);
        }
        let (used, total) = used_and_total_memory(&node, index);
        Ok(info.set(MemoryV2 {
            version: MEMORY_V2_VERSION,
            total,
            reserved: 0,
            free: total - used,
            used,
        })?)
    }

    fn nvmlDeviceGetUtilizationRates(
        _call, device_handle: u64, rates: OutArgument<Utilization>,
    ) -> Outcome {
        let (node, index) = node_and_device_index(device_handle)?;
        Ok(rates.set(Utilization {
            gpu: share_to_percent(device_load(&node, index)),
            memory: 0,
        })?)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        _call, device_handle: u64, count: OutArgument<u32>, infos: OutArgument<ProcessInfo>,
    ) -> Outcome {
        let (node, index) = node_and_device_index(device_handle)?;
        store_list(node.processes_using(index).iter().map(process_info).collect(), &count, &infos)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        _call, device_handle: u64, count: OutArgument<u32>, infos: OutArgument<ProcessInfo>,
    ) -> Outcome {
        let (node, index) = node_and_device_index(device_handle)?;
        store_list(node.processes_using(index).iter().map(process_info).collect(), &count, &infos)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        _call, device_handle: u64, count: OutArgument<u32>, infos: OutArgument<ProcessInfo>,
    ) -> Outcome {
        node_and_device_index(device_handle)?;
        store_list(Vec::new(), &count, &infos)
    }

    /// Returns one sample per process, for the last half second.
    fn nvmlDeviceGetProcessUtilization(
        _call, device_handle: u64, samples: OutArgument<ProcessSample>, count: OutArgument<u32>, last_seen: u64,
    ) -> Outcome {
        let (node, index) = node_and_device_index(device_handle)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64);
        let processes = match last_seen < now {
            true => node.processes_using(index),
            false => Vec::new(),
        };
        let values: Vec<_> = processes.iter().map(|process| process_sample(process, now)).collect();
        if values.is_empty() {
            return Err(NvmlError::NotFound);
        }
        store_list(values, &count, &samples)
    }

    /// The power grows with the device's load.
    fn nvmlDeviceGetPowerUsage(_call, device_handle: u64, milliwatts: OutArgument<u32>) -> Outcome {
        let (node, index) = node_and_device_index(device_handle)?;
        let above_idle = device_load(&node, index) * f64::from(FULL_LOAD_POWER_MILLIWATTS);
        Ok(milliwatts.set(IDLE_POWER_MILLIWATTS + above_idle as u32)?)
    }

    fn nvmlDeviceGetEnforcedPowerLimit(_call, device_handle: u64, milliwatts: OutArgument<u32>) -> Outcome {
        node_and_device_index(device_handle)?;
        Ok(milliwatts.set(IDLE_POWER_MILLIWATTS + FULL_LOAD_POWER_MILLIWATTS)?)
    }

    /// The temperature grows with the device's load.
    fn nvmlDeviceGetTemperature(
        _call, device_handle: u64, sensor: i32, degrees: OutArgument<u32>,
    ) -> Outcome {
        let (node, index) = node_and_device_index(device_handle)?;
        if sensor != 0 {
            return Err(NvmlError::InvalidArgument);
        }
        let above_idle = device_load(&node, index) * f64::from(FULL_LOAD_TEMPERATURE_CELSIUS);
        Ok(degrees.set(IDLE_TEMPERATURE_CELSIUS + above_idle as u32)?)
    }

    fn nvmlDeviceGetClockInfo(
        _call, device_handle: u64, kind: i32, megahertz: OutArgument<u32>,
    ) -> Outcome {
        node_and_device_index(device_handle)?;
        Ok(megahertz.set(clock_mhz(kind)?)?)
    }

    fn nvmlDeviceGetMaxClockInfo(
        _call, device_handle: u64, kind: i32, megahertz: OutArgument<u32>,
    ) -> Outcome {
        node_and_device_index(device_handle)?;
        Ok(megahertz.set(clock_mhz(kind)?)?)
    }

    fn nvmlDeviceGetCudaComputeCapability(
        _call, device_handle: u64, major: OutArgument<i32>, minor: OutArgument<i32>,
    ) -> Outcome {
        node_and_device_index(device_handle)?;
        major.set(facts::COMPUTE_CAPABILITY.0)?;
        Ok(minor.set(facts::COMPUTE_CAPABILITY.1)?)
    }

    fn nvmlDeviceGetMigMode(_call, device_handle: u64, _current: u64, _pending: u64) -> Outcome {
        node_and_device_index(device_handle)?;
        Err(NvmlError::NotSupported)
    }

    fn nvmlDeviceIsMigDeviceHandle(_call, device_handle: u64, is_mig: OutArgument<u32>) -> Outcome {
        node_and_device_index(device_handle)?;
        Ok(is_mig.set(0)?)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(
        _call, device_handle: u64, _millijoules: u64,
    ) -> Outcome {
        node_and_device_index(device_handle)?;
        Err(NvmlError::NotSupported)
    }
}
