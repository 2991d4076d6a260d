//! The exported functions.

use std::ffi::c_char;
use std::time::{SystemTime, UNIX_EPOCH};

use zernel_softgpu::abi::{Out, Text};
use zernel_softgpu::device as facts;
use zernel_softgpu::exports;
use zernel_softgpu::node::{Node, ProcessUse};

use crate::node::{device, handle, initialise, node, shut_down};
use crate::status::{NvmlError, Outcome, description};
use crate::types::{
    Memory, MemoryV2, PciInfo, ProcessInfo, ProcessSample, Utilization, text_array,
};

/// Milliwatts of an idle device, and what full load adds.
const IDLE_POWER: u32 = 70_000;
const LOAD_POWER: u32 = 630_000;
/// Degrees Celsius of an idle device, and what full load adds.
const IDLE_TEMPERATURE: u32 = 30;
const LOAD_TEMPERATURE: u32 = 40;

fn text(place: &Out<c_char>, value: &str, capacity: u32) -> Outcome {
    match place.set_text(value, capacity as usize)? {
        true => Ok(()),
        false => Err(NvmlError::InsufficientSize),
    }
}

/// Share of the last half second in which the device was busy for any process, 0 to 1.
fn load(node: &Node, index: usize) -> f64 {
    let processes = node.processes(index);
    processes
        .iter()
        .map(|process| process.utilization)
        .sum::<f64>()
        .min(1.0)
}

fn percent(share: f64) -> u32 {
    (share * 100.0).round() as u32
}

/// Bytes in use and all bytes.
fn memory(node: &Node, index: usize) -> (u64, u64) {
    (node.memory_in_use(index).min(node.memory()), node.memory())
}

fn device_by(wanted: impl Fn(usize) -> bool) -> Result<u64, NvmlError> {
    let found = (0..node()?.devices()).find(|index| wanted(*index));
    found.map(handle).ok_or(NvmlError::NotFound)
}

/// Stores a list as NVML does: with no room for all of it, only how many there are.
fn list<T>(values: Vec<T>, count: &Out<u32>, places: &Out<T>) -> Outcome {
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

fn process_info(process: &ProcessUse) -> ProcessInfo {
    ProcessInfo {
        pid: process.pid,
        used_memory: process.bytes,
        gpu_instance: u32::MAX,
        compute_instance: u32::MAX,
    }
}

fn process_sample(process: &ProcessUse, time: u64) -> ProcessSample {
    ProcessSample {
        pid: process.pid,
        time,
        multiprocessors: percent(process.utilization),
        memory: 0,
        encoder: 0,
        decoder: 0,
    }
}

fn clock(kind: i32) -> Result<u32, NvmlError> {
    match kind {
        // Graphics, multiprocessors, memory, video.
        0 | 1 | 3 => Ok(facts::SM_CLOCK_MHZ),
        2 => Ok(facts::MEMORY_CLOCK_MHZ),
        _ => Err(NvmlError::InvalidArgument),
    }
}

exports! { "nvml" =>
    fn nvmlInit_v2(_call) -> Outcome {
        initialise()
    }

    fn nvmlInit(_call) -> Outcome {
        initialise()
    }

    fn nvmlInitWithFlags(_call, _flags: u32) -> Outcome {
        initialise()
    }

    fn nvmlShutdown(_call) -> Outcome {
        shut_down()
    }

    fn nvmlErrorString(_call, code: i32) -> *const c_char {
        description(code).as_ptr()
    }

    fn nvmlSystemGetDriverVersion(_call, version: Out<c_char>, capacity: u32) -> Outcome {
        node()?;
        text(&version, facts::DRIVER_VERSION, capacity)
    }

    fn nvmlSystemGetNVMLVersion(_call, version: Out<c_char>, capacity: u32) -> Outcome {
        text(&version, concat!("12.", "999.12.9"), capacity)
    }

    fn nvmlSystemGetCudaDriverVersion(_call, version: Out<i32>) -> Outcome {
        Ok(version.set(facts::CUDA_VERSION)?)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(_call, version: Out<i32>) -> Outcome {
        Ok(version.set(facts::CUDA_VERSION)?)
    }

    fn nvmlSystemGetProcessName(_call, pid: u32, name: Out<c_char>, capacity: u32) -> Outcome {
        node()?;
        let path = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(|_| NvmlError::NotFound)?;
        text(&name, &path.to_string_lossy(), capacity)
    }

    fn nvmlDeviceGetCount_v2(_call, count: Out<u32>) -> Outcome {
        Ok(count.set(node()?.devices() as u32)?)
    }

    fn nvmlDeviceGetCount(_call, count: Out<u32>) -> Outcome {
        Ok(count.set(node()?.devices() as u32)?)
    }

    fn nvmlDeviceGetHandleByIndex_v2(_call, index: u32, found: Out<u64>) -> Outcome {
        device(handle(index as usize))?;
        Ok(found.set(handle(index as usize))?)
    }

    fn nvmlDeviceGetHandleByIndex(_call, index: u32, found: Out<u64>) -> Outcome {
        device(handle(index as usize))?;
        Ok(found.set(handle(index as usize))?)
    }

    fn nvmlDeviceGetHandleByUUID(_call, uuid: Text, found: Out<u64>) -> Outcome {
        let uuid = uuid.get()?;
        Ok(found.set(device_by(|index| facts::uuid_text(index) == uuid)?)?)
    }

    /// With four or eight digits of domain.
    fn nvmlDeviceGetHandleByPciBusId_v2(_call, bus_id: Text, found: Out<u64>) -> Outcome {
        let bus_id = bus_id.get()?.to_uppercase();
        let is_it = |index| {
            let known = facts::pci_bus_id(index);
            bus_id == known || bus_id == format!("0000{known}")
        };
        Ok(found.set(device_by(is_it)?)?)
    }

    fn nvmlDeviceGetName(_call, device_handle: u64, name: Out<c_char>, capacity: u32) -> Outcome {
        device(device_handle)?;
        text(&name, facts::NAME, capacity)
    }

    fn nvmlDeviceGetUUID(_call, device_handle: u64, uuid: Out<c_char>, capacity: u32) -> Outcome {
        let (_, index) = device(device_handle)?;
        text(&uuid, &facts::uuid_text(index), capacity)
    }

    fn nvmlDeviceGetIndex(_call, device_handle: u64, place: Out<u32>) -> Outcome {
        let (_, index) = device(device_handle)?;
        Ok(place.set(index as u32)?)
    }

    fn nvmlDeviceGetMinorNumber(_call, device_handle: u64, place: Out<u32>) -> Outcome {
        let (_, index) = device(device_handle)?;
        Ok(place.set(index as u32)?)
    }

    fn nvmlDeviceGetPciInfo_v3(_call, device_handle: u64, info: Out<PciInfo>) -> Outcome {
        let (_, index) = device(device_handle)?;
        let bus_id = facts::pci_bus_id(index);
        Ok(info.set(PciInfo {
            legacy_bus_id: text_array(&bus_id),
            domain: 0,
            bus: facts::pci_bus(index),
            device: 0,
            // No vendor has these.
            device_id: 0xffff_ffff,
            subsystem_id: 0xffff_ffff,
            bus_id: text_array(&format!("0000{bus_id}")),
        })?)
    }

    fn nvmlDeviceGetMemoryInfo(_call, device_handle: u64, info: Out<Memory>) -> Outcome {
        let (node, index) = device(device_handle)?;
        let (used, total) = memory(&node, index);
        Ok(info.set(Memory {
            total,
            free: total - used,
            used,
        })?)
    }

    fn nvmlDeviceGetMemoryInfo_v2(_call, device_handle: u64, info: Out<MemoryV2>) -> Outcome {
        const VERSION: u32 = size_of::<MemoryV2>() as u32 | 2 << 24;
        let (node, index) = device(device_handle)?;
        if info.get()?.version != VERSION {
            return Err(NvmlError::VersionMismatch);
        }
        let (used, total) = memory(&node, index);
        Ok(info.set(MemoryV2 {
            version: VERSION,
            total,
            reserved: 0,
            free: total - used,
            used,
        })?)
    }

    fn nvmlDeviceGetUtilizationRates(
        _call, device_handle: u64, rates: Out<Utilization>,
    ) -> Outcome {
        let (node, index) = device(device_handle)?;
        Ok(rates.set(Utilization {
            gpu: percent(load(&node, index)),
            memory: 0,
        })?)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        _call, device_handle: u64, count: Out<u32>, infos: Out<ProcessInfo>,
    ) -> Outcome {
        let (node, index) = device(device_handle)?;
        list(node.processes(index).iter().map(process_info).collect(), &count, &infos)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        _call, device_handle: u64, count: Out<u32>, infos: Out<ProcessInfo>,
    ) -> Outcome {
        let (node, index) = device(device_handle)?;
        list(node.processes(index).iter().map(process_info).collect(), &count, &infos)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        _call, device_handle: u64, count: Out<u32>, infos: Out<ProcessInfo>,
    ) -> Outcome {
        device(device_handle)?;
        list(Vec::new(), &count, &infos)
    }

    /// One sample per process: the last half second.
    fn nvmlDeviceGetProcessUtilization(
        _call, device_handle: u64, samples: Out<ProcessSample>, count: Out<u32>, last_seen: u64,
    ) -> Outcome {
        let (node, index) = device(device_handle)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64);
        let processes = match last_seen < now {
            true => node.processes(index),
            false => Vec::new(),
        };
        let values: Vec<_> = processes.iter().map(|process| process_sample(process, now)).collect();
        if values.is_empty() {
            return Err(NvmlError::NotFound);
        }
        list(values, &count, &samples)
    }

    /// Grows with the load.
    fn nvmlDeviceGetPowerUsage(_call, device_handle: u64, milliwatts: Out<u32>) -> Outcome {
        let (node, index) = device(device_handle)?;
        let above_idle = load(&node, index) * f64::from(LOAD_POWER);
        Ok(milliwatts.set(IDLE_POWER + above_idle as u32)?)
    }

    fn nvmlDeviceGetEnforcedPowerLimit(_call, device_handle: u64, milliwatts: Out<u32>) -> Outcome {
        device(device_handle)?;
        Ok(milliwatts.set(IDLE_POWER + LOAD_POWER)?)
    }

    /// Grows with the load.
    fn nvmlDeviceGetTemperature(
        _call, device_handle: u64, sensor: i32, degrees: Out<u32>,
    ) -> Outcome {
        let (node, index) = device(device_handle)?;
        if sensor != 0 {
            return Err(NvmlError::InvalidArgument);
        }
        let above_idle = load(&node, index) * f64::from(LOAD_TEMPERATURE);
        Ok(degrees.set(IDLE_TEMPERATURE + above_idle as u32)?)
    }

    fn nvmlDeviceGetClockInfo(
        _call, device_handle: u64, kind: i32, megahertz: Out<u32>,
    ) -> Outcome {
        device(device_handle)?;
        Ok(megahertz.set(clock(kind)?)?)
    }

    fn nvmlDeviceGetMaxClockInfo(
        _call, device_handle: u64, kind: i32, megahertz: Out<u32>,
    ) -> Outcome {
        device(device_handle)?;
        Ok(megahertz.set(clock(kind)?)?)
    }

    fn nvmlDeviceGetCudaComputeCapability(
        _call, device_handle: u64, major: Out<i32>, minor: Out<i32>,
    ) -> Outcome {
        device(device_handle)?;
        major.set(facts::COMPUTE_CAPABILITY.0)?;
        Ok(minor.set(facts::COMPUTE_CAPABILITY.1)?)
    }

    fn nvmlDeviceGetMigMode(_call, device_handle: u64, _current: u64, _pending: u64) -> Outcome {
        device(device_handle)?;
        Err(NvmlError::NotSupported)
    }

    fn nvmlDeviceIsMigDeviceHandle(_call, device_handle: u64, is_mig: Out<u32>) -> Outcome {
        device(device_handle)?;
        Ok(is_mig.set(0)?)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(
        _call, device_handle: u64, _millijoules: u64,
    ) -> Outcome {
        device(device_handle)?;
        Err(NvmlError::NotSupported)
    }
}
