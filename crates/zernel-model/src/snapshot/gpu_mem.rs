//! GPU memory of a process.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::aggregation::GpuMemMetrics;

/// Label of a GPU whose index is not known.
const UNKNOWN_GPU: &str = "unknown";

/// GPU memory of a process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MemorySnapshot {
    /// Mean utilization of the GPUs that the process has memory on, by any process, as NVML reports it.
    pub gpu_utilization: Option<f64>,
    /// Mean time in which the GPUs that the process has memory on were busy since observing began, by any process.
    pub gpu_busy_seconds: Option<f64>,
    /// Pids of all processes that NVML lists for these GPUs. Empty if NVML does not list this process.
    pub gpu_users: Vec<u32>,
    /// Memory by GPU.
    pub memory: Vec<DeviceMemory>,
    /// Memory in use by GPU and calling library.
    pub memory_by_caller: Vec<CallerMemory>,
    /// UUID of the first GPU that the process uses; empty if unknown.
    #[serde(skip)]
    pub uuid: String,
}

/// Memory of a process on one GPU.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceMemory {
    /// NVML index of the GPU, or `"unknown"`.
    #[serde(with = "gpu_index")]
    pub gpu_id: Option<u32>,
    /// Product name of the GPU.
    pub gpu: Option<String>,
    /// Bytes in use.
    pub bytes: u64,
    /// The most bytes that the process had in use on the GPU.
    pub peak_bytes: u64,
    /// Allocations that succeeded.
    pub allocations: u64,
    /// Allocations that were freed.
    pub frees: u64,
}

/// Memory that one library of a process allocated on one GPU.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CallerMemory {
    /// NVML index of the GPU, or `"unknown"`.
    #[serde(with = "gpu_index")]
    pub gpu_id: Option<u32>,
    /// Name of the library without its version.
    pub caller: String,
    /// Bytes in use.
    pub bytes: u64,
}

impl DeviceMemory {
    /// Value of the label `gpu_id`.
    #[must_use]
    pub fn gpu_label(&self) -> String {
        gpu_label(self.gpu_id)
    }

    /// The memory figures in the form of the aggregated metrics.
    #[must_use]
    pub fn to_gpu_mem_metrics(&self) -> GpuMemMetrics {
        GpuMemMetrics {
            current_bytes: self.bytes,
            peak_bytes: self.peak_bytes,
            alloc_count: self.allocations,
            free_count: self.frees,
        }
    }
}

impl CallerMemory {
    /// Value of the label `gpu_id`.
    #[must_use]
    pub fn gpu_label(&self) -> String {
        gpu_label(self.gpu_id)
    }
}

fn gpu_label(index: Option<u32>) -> String {
    index.map_or_else(|| UNKNOWN_GPU.to_owned(), |index| index.to_string())
}

/// A GPU index on the wire: a number, or `"unknown"`.
mod gpu_index {
    use super::{Deserialize, Deserializer, Serializer, UNKNOWN_GPU};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum GpuIndexOnWire {
        Index(u32),
        Other(serde::de::IgnoredAny),
    }

    pub(super) fn serialize<S: Serializer>(
        index: &Option<u32>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match index {
            Some(index) => serializer.serialize_u32(*index),
            None => serializer.serialize_str(UNKNOWN_GPU),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<u32>, D::Error> {
        Ok(match GpuIndexOnWire::deserialize(deserializer)? {
            GpuIndexOnWire::Index(index) => Some(index),
            GpuIndexOnWire::Other(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_gpu_is_unknown_on_the_wire() {
        for (gpu_id, json) in [(Some(3), "3"), (None, "\"unknown\"")] {
            let memory = DeviceMemory {
                gpu_id,
                ..DeviceMemory::default()
            };
            let text = serde_json::to_string(&memory).unwrap();
            assert!(text.contains(&format!("\"gpu_id\":{json},")), "{text}");
            assert_eq!(serde_json::from_str::<DeviceMemory>(&text).unwrap(), memory);
        }
    }
}
