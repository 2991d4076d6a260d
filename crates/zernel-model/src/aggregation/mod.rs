//! Aggregated metrics: the data behind `/metrics` and the WebSocket snapshot.
//!
//! Durations are kept as histograms, by pid or by name of the collective. This module does not depend on how the
//! recorded values are measured.

pub mod exposition;
mod histogram;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::{SystemTime, UNIX_EPOCH};

use exposition::{Exposition, FamilyKind};
pub use histogram::LatencyHistogram;
use serde::Serialize;
use serde_json::{Value, json};

/// GPU memory of one process on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct GpuMemMetrics {
    /// Bytes in use.
    pub current_bytes: u64,
    /// Peak of the bytes in use.
    pub peak_bytes: u64,
    /// Number of times the memory in use grew.
    pub alloc_count: u64,
    /// Number of times the memory in use shrank.
    pub free_count: u64,
}

/// All values recorded so far, by process and operation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct AggregatedMetrics {
    /// GPU memory by `"{pid}:{gpu_id}"`.
    pub gpu_memory: BTreeMap<String, GpuMemMetrics>,
    /// Duration of CUDA launch calls, by pid.
    pub cuda_latency: BTreeMap<u32, LatencyHistogram>,
    /// Duration of collectives, by operation.
    pub nccl_duration: BTreeMap<String, LatencyHistogram>,
    /// Time that trainers wait for their next batch, by pid.
    pub dataloader_wait: BTreeMap<u32, LatencyHistogram>,
    /// Time that processes wait for their peers, by pid.
    pub dist_sync: BTreeMap<u32, LatencyHistogram>,
    /// Time of the last record, in milliseconds since 1970.
    pub last_update_ms: u64,
}

impl AggregatedMetrics {
    /// Records the memory in use by `pid` on `gpu_id`, and its peak.
    ///
    /// The stored peak never falls and is never below the memory in use.
    pub fn record_gpu_mem(&mut self, pid: u32, gpu_id: u32, used: u64, peak: u64) {
        let memory = self
            .gpu_memory
            .entry(format!("{pid}:{gpu_id}"))
            .or_default();
        memory.alloc_count += u64::from(used > memory.current_bytes);
        memory.free_count += u64::from(used < memory.current_bytes);
        memory.current_bytes = used;
        memory.peak_bytes = memory.peak_bytes.max(peak).max(used);
        self.set_last_update();
    }

    /// Records the duration of a CUDA launch call.
    pub fn record_cuda_latency(&mut self, pid: u32, ns: u64) {
        self.cuda_latency.entry(pid).or_default().record(ns);
        self.set_last_update();
    }

    /// Records the duration of a collective.
    pub fn record_nccl(&mut self, op: &str, ns: u64) {
        match self.nccl_duration.get_mut(op) {
            Some(histogram) => histogram.record(ns),
            None => self
                .nccl_duration
                .entry(op.to_owned())
                .or_default()
                .record(ns),
        }
        self.set_last_update();
    }

    /// Records a wait of `pid` for its next batch.
    pub fn record_dataloader_wait(&mut self, pid: u32, ns: u64) {
        self.dataloader_wait.entry(pid).or_default().record(ns);
        self.set_last_update();
    }

    /// Records a wait of `pid` for its peers.
    pub fn record_dist_sync(&mut self, pid: u32, ns: u64) {
        self.dist_sync.entry(pid).or_default().record(ns);
        self.set_last_update();
    }

    /// Removes the metrics of an exited process, because its pid may be reused.
    pub fn remove_process(&mut self, pid: u32) {
        let own = format!("{pid}:");
        self.gpu_memory.retain(|key, _| !key.starts_with(&own));
        for histograms in [
            &mut self.cuda_latency,
            &mut self.dataloader_wait,
            &mut self.dist_sync,
        ] {
            histograms.remove(&pid);
        }
    }

    /// Returns all metrics in Prometheus' text format, with durations as histograms.
    #[must_use]
    pub fn to_prometheus(&self) -> String {
        let mut out = Exposition::default();
        self.write_metrics(&mut out);
        out.into_text()
    }

    /// Appends all metrics to an exposition.
    pub fn write_metrics(&self, out: &mut Exposition) {
        self.write_memory_families(out);
        self.write_duration_families(out, write_histogram_family);
    }

    /// Returns all metrics. Durations are summaries with `quantile="0.5"` and `"0.99"`, not histograms with
    /// buckets. A family cannot be histogram and summary at once.
    #[must_use]
    pub fn to_prometheus_quantiles(&self) -> String {
        let mut out = Exposition::default();
        self.write_memory_families(&mut out);
        self.write_duration_families(&mut out, write_summary_family);
        out.into_text()
    }

    /// Returns the snapshot for WebSocket clients. Scalars merge all processes and are null without
    /// records; `processes` and `nccl` have the details.
    #[must_use]
    pub fn to_ws_snapshot(&self) -> Value {
        let memory: Vec<_> = self
            .gpu_memory
            .iter()
            .map(|(key, memory)| {
                json!({
                    "key": key,
                    "current_bytes": memory.current_bytes,
                    "peak_bytes": memory.peak_bytes,
                })
            })
            .collect();
        let launches = merge_histograms(self.cuda_latency.values());
        let waits = merge_histograms(self.dataloader_wait.values());
        let all_reduces = merge_histograms(
            self.nccl_duration
                .iter()
                .filter_map(|(op, histogram)| is_all_reduce(op).then_some(histogram)),
        );
        let quantile = |histogram: &LatencyHistogram, share, unit_ns: f64| {
            (histogram.count > 0).then(|| histogram.quantile_ns(share) as f64 / unit_ns)
        };
        const NS_PER_US: f64 = 1e3;
        const NS_PER_MS: f64 = 1e6;
        json!({
            "gpu_utilization": memory,
            "cuda_latency_p50_us": quantile(&launches, 0.5, NS_PER_US),
            "cuda_latency_p99_us": quantile(&launches, 0.99, NS_PER_US),
            "nccl_allreduce_p50_ms": quantile(&all_reduces, 0.5, NS_PER_MS),
            "nccl_allreduce_p99_ms": quantile(&all_reduces, 0.99, NS_PER_MS),
            "dataloader_wait_p50_ms": quantile(&waits, 0.5, NS_PER_MS),
            "last_update_ms": self.last_update_ms,
            "nccl": self.nccl_duration,
            "processes": self.histograms_by_pid(),
        })
    }

    /// Returns the histograms of each pid.
    fn histograms_by_pid(&self) -> BTreeMap<u32, BTreeMap<&'static str, &LatencyHistogram>> {
        let mut processes: BTreeMap<u32, BTreeMap<_, _>> = BTreeMap::new();
        for (name, histograms) in [
            ("cuda_latency", &self.cuda_latency),
            ("dataloader_wait", &self.dataloader_wait),
            ("dist_sync", &self.dist_sync),
        ] {
            for (pid, histogram) in histograms {
                processes.entry(*pid).or_default().insert(name, histogram);
            }
        }
        processes
    }

    fn write_memory_families(&self, out: &mut Exposition) {
        self.write_memory_family(
            out,
            "zernel_gpu_memory_used_bytes",
            "GPU memory a process has in use.",
            |memory| memory.current_bytes,
        );
        self.write_memory_family(
            out,
            "zernel_gpu_memory_peak_bytes",
            "The most GPU memory a process ever had in use.",
            |memory| memory.peak_bytes,
        );
    }

    fn write_memory_family(
        &self,
        out: &mut Exposition,
        name: &str,
        help: &str,
        value: fn(&GpuMemMetrics) -> u64,
    ) {
        out.write_family_head(name, FamilyKind::Gauge, help);
        for (key, memory) in &self.gpu_memory {
            let (pid, gpu_id) = key.split_once(':').unwrap_or((key, ""));
            let labels: [(_, &dyn Display); 2] = [("pid", &pid), ("gpu_id", &gpu_id)];
            out.write_sample(name, "", &labels, value(memory));
        }
    }

    fn write_duration_families(&self, out: &mut Exposition, expose: WriteDurationFamily) {
        expose(
            out,
            "zernel_cuda_launch_latency_seconds",
            "Time a CUDA launch call takes on the CPU.",
            "pid",
            &with_label_values(&self.cuda_latency),
        );
        expose(
            out,
            "zernel_nccl_collective_duration_seconds",
            "Time a NCCL collective takes.",
            "op",
            &with_label_values(&self.nccl_duration),
        );
        expose(
            out,
            "zernel_dataloader_wait_seconds",
            "Time a trainer waits for its next batch.",
            "pid",
            &with_label_values(&self.dataloader_wait),
        );
        expose(
            out,
            "zernel_dist_sync_seconds",
            "Time a process waits for its peers.",
            "pid",
            &with_label_values(&self.dist_sync),
        );
    }

    fn set_last_update(&mut self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.last_update_ms = now.map_or(0, |now| now.as_millis() as u64);
    }
}

/// A function that writes one family of durations: name, help, label name, and a histogram per
/// label value.
type WriteDurationFamily =
    fn(&mut Exposition, &str, &str, &str, &[(&dyn Display, &LatencyHistogram)]);

fn with_label_values<K: Display>(
    histograms: &BTreeMap<K, LatencyHistogram>,
) -> Vec<(&dyn Display, &LatencyHistogram)> {
    let pairs = histograms.iter();
    pairs
        .map(|(key, histogram)| (key as &dyn Display, histogram))
        .collect()
}

fn write_histogram_family(
    out: &mut Exposition,
    name: &str,
    help: &str,
    label: &str,
    histograms: &[(&dyn Display, &LatencyHistogram)],
) {
    out.write_family_head(name, FamilyKind::Histogram, help);
    for (key, histogram) in histograms {
        out.write_histogram(name, &[(label, key)], histogram);
    }
}

fn write_summary_family(
    out: &mut Exposition,
    name: &str,
    help: &str,
    label: &str,
    histograms: &[(&dyn Display, &LatencyHistogram)],
) {
    out.write_family_head(name, FamilyKind::Summary, help);
    for (key, histogram) in histograms {
        out.write_summary(name, &[(label, key)], histogram);
    }
}

fn merge_histograms<'a>(
    histograms: impl IntoIterator<Item = &'a LatencyHistogram>,
) -> LatencyHistogram {
    let mut all = LatencyHistogram::default();
    for histogram in histograms {
        all.merge(histogram);
    }
    all
}

/// Whether `op` is an all-reduce, with or without NCCL's prefix, in any case.
fn is_all_reduce(op: &str) -> bool {
    let op = op.to_ascii_lowercase();
    op.strip_prefix("nccl").unwrap_or(&op) == "allreduce"
}

#[cfg(test)]
mod tests;
