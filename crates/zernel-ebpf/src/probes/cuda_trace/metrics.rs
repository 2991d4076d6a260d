//! Families of launches, copies and GPU waits.

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::snapshot::CopyCount;

use crate::metrics::{MetricFamily, Scoped, families, head, series};

families! {
    LAUNCHES = Counter "zernel_cuda_launches_total" ["pid"]
        "Launches of kernels and graphs.";
    LAUNCHES_ERROR = Gauge "zernel_cuda_launches_error" ["pid"]
        "By how much zernel_cuda_launches_total may be off (95 %), because launches were sampled.";
    COPIES = Counter "zernel_cuda_copies_total" ["pid", "direction"]
        "Copies between host and device memory.";
    COPY_BYTES = Counter "zernel_cuda_copy_bytes_total" ["pid", "direction"]
        "Bytes copied.";
    WAITS = Histogram "zernel_cuda_wait_seconds" ["pid", "kind"]
        "Time in calls that wait for the GPU, by what they wait for.";
    FAILED = Counter "zernel_cuda_failed_calls_total" ["pid"]
        "CUDA and NCCL calls that returned an error.";
}

pub(crate) fn expose(out: &mut Exposition, scoped: &Scoped<'_>) {
    series(out, &LAUNCHES, scoped, |process, add| {
        if process.cuda.launches > 0 {
            add(&[], process.cuda.launches as f64);
        }
    });
    series(out, &LAUNCHES_ERROR, scoped, |process, add| {
        if process.cuda.launches > 0 {
            add(&[], process.cuda.launches_error as f64);
        }
    });
    let copies: [(MetricFamily, fn(&CopyCount) -> u64); 2] = [
        (COPIES, |count| count.calls),
        (COPY_BYTES, |count| count.bytes),
    ];
    for (family, value) in copies {
        series(out, &family, scoped, |process, add| {
            for count in &process.cuda.copies_by_direction {
                add(&[("direction", &count.direction)], value(count) as f64);
            }
        });
    }
    head(out, &WAITS);
    for process in &scoped.processes {
        for wait in &process.cuda.wait_times {
            let labels: [(_, &dyn std::fmt::Display); 2] =
                [("pid", &process.pid), ("kind", &wait.kind)];
            out.histogram(WAITS.name, &labels, &wait.times);
        }
    }
    series(out, &FAILED, scoped, |process, add| {
        if !process.calls.is_empty() {
            let failed: u64 = process.calls.values().map(|calls| calls.failed).sum();
            add(&[], failed as f64);
        }
    });
}
