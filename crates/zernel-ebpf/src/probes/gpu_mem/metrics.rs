//! Families of GPU memory.

use std::fmt::Display;

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::gpu::ProcessGpuMemory;
use zernel_model::snapshot::{DeviceMemory, ProcessSnapshot, Scope};

use crate::metrics::{
    MetricFamily, ScopedSnapshot, families, write_family_head, write_family_of_processes,
};

families! {
    ALLOCATIONS = Counter "zernel_gpu_memory_allocations_total" ["pid", "gpu_id"]
        "Allocations of GPU memory that succeeded.";
    FREES = Counter "zernel_gpu_memory_frees_total" ["pid", "gpu_id"]
        "Allocations of GPU memory that were freed.";
    CALLER_BYTES = Gauge "zernel_gpu_memory_caller_bytes" ["pid", "gpu_id", "caller"]
        "GPU memory in use, by the library that allocated it from the driver.";
    UNEXPLAINED = Gauge "zernel_gpu_memory_unexplained_bytes" ["pid", "gpu_id"]
        "GPU memory of a process as NVML reports it, less the allocations that were observed: its CUDA context.";
}

/// A count of a device.
type DeviceCount = fn(&DeviceMemory) -> u64;

pub(crate) fn expose(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    let counters: [(MetricFamily, DeviceCount); 2] = [
        (ALLOCATIONS, |device| device.allocations),
        (FREES, |device| device.frees),
    ];
    for (family, value) in counters {
        write_family_of_processes(out, &family, scoped, |process, add| {
            for device in &process.probes.gpu_mem.memory {
                add(&[("gpu_id", &device.gpu_label())], value(device) as f64);
            }
        });
    }
    write_family_of_processes(out, &CALLER_BYTES, scoped, |process, add| {
        for memory in &process.probes.gpu_mem.memory_by_caller {
            let labels: [(_, &dyn Display); 2] =
                [("gpu_id", &memory.gpu_label()), ("caller", &memory.caller)];
            add(&labels, memory.bytes as f64);
        }
    });
    expose_unexplained(out, scoped);
}

fn expose_unexplained(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    write_family_head(out, &UNEXPLAINED);
    for used in &scoped.snapshot.gpu_processes {
        let mut processes = scoped.processes.iter();
        let known = processes.find(|process| process.pid == used.pid);
        let is_visible = known.is_some() || scoped.scope == Scope::All;
        let Some(bytes) = used.bytes.filter(|_| is_visible) else {
            continue;
        };
        let explained = known.map_or(0, |process| allocated_bytes(process, used));
        let labels: [(_, &dyn Display); 2] = [("pid", &used.pid), ("gpu_id", &used.index)];
        out.write_sample(
            UNEXPLAINED.name,
            "",
            &labels,
            bytes as f64 - explained as f64,
        );
    }
}

/// Bytes that a process was observed to hold on the GPU that NVML lists it for.
fn allocated_bytes(process: &ProcessSnapshot, used: &ProcessGpuMemory) -> u64 {
    let devices = process.probes.gpu_mem.memory.iter();
    let on_gpu = devices.filter(|device| device.gpu_id == Some(used.index));
    on_gpu.map(|device| device.bytes).sum()
}
