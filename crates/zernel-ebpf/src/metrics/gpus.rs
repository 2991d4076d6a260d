//! Families of the GPUs of the machine.

use std::fmt::Display;

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::gpu::GpuFacts;
use zernel_model::snapshot::Snapshot;

use super::{MetricFamily, families, write_family_head};

families! {
    GPU_INFO = Gauge "zernel_gpu_info" ["gpu_id", "UUID", "name"]
        "A GPU of this machine; always 1.";
    GPU_UTILIZATION = Gauge "zernel_gpu_utilization_ratio" ["gpu_id"]
        "Share of time in which a kernel ran on the GPU, as NVML reports it.";
    GPU_BUSY_SECONDS = Counter "zernel_gpu_busy_seconds_total" ["gpu_id"]
        "Time in which a kernel ran on the GPU since observing began: its utilization, read five times per second.";
    GPU_MEMORY_TOTAL_BYTES = Gauge "zernel_gpu_device_memory_total_bytes" ["gpu_id"]
        "Memory of the GPU, as NVML reports it.";
    GPU_MEMORY_USED_BYTES = Gauge "zernel_gpu_device_memory_used_bytes" ["gpu_id"]
        "Memory of the GPU in use by all processes, as NVML reports it.";
}

/// Reads one figure of a GPU; `None` if the driver does not report that figure.
type GpuFigure = fn(&GpuFacts) -> Option<f64>;

pub(super) fn expose(out: &mut Exposition, snapshot: &Snapshot) {
    write_family_head(out, &GPU_INFO);
    for gpu in &snapshot.gpus {
        let labels: [(&str, &dyn Display); 3] = [
            ("gpu_id", &gpu.index),
            ("UUID", &gpu.uuid),
            ("name", &gpu.name),
        ];
        out.write_sample(GPU_INFO.name, "", &labels, 1);
    }
    let figures: [(MetricFamily, GpuFigure); 4] = [
        (GPU_UTILIZATION, |gpu| {
            Some(f64::from(gpu.utilization?) / 100.0)
        }),
        (GPU_BUSY_SECONDS, |gpu| {
            gpu.utilization.map(|_| gpu.busy_ns as f64 / 1e9)
        }),
        (GPU_MEMORY_TOTAL_BYTES, |gpu| Some(gpu.memory_total? as f64)),
        (GPU_MEMORY_USED_BYTES, |gpu| Some(gpu.memory_used? as f64)),
    ];
    for (family, figure) in figures {
        write_family_head(out, &family);
        for gpu in &snapshot.gpus {
            if let Some(value) = figure(gpu) {
                out.write_sample(family.name, "", &[("gpu_id", &gpu.index)], value);
            }
        }
    }
}
