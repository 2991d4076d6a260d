//! Families of launches, copies and GPU waits.

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::snapshot::{CountedCalls, CudaSnapshot};

use crate::metrics::{
    MetricFamily, ScopedSnapshot, families, write_family_head, write_family_of_processes,
};

families! {
    LAUNCHES = Counter "zernel_cuda_launches_total" ["pid"]
        "Launches of kernels and graphs that were counted: while launches are sampled, those in windows.";
    LAUNCHES_SECONDS = Counter "zernel_cuda_launches_counted_seconds_total" ["pid"]
        "Time in which launches were counted. The launch rate is the rate of zernel_cuda_launches_total divided by the rate of this.";
    LAUNCHES_PER_STEP = Gauge "zernel_cuda_launches_per_step" ["pid"]
        "Launches per step: an estimate from sampling windows if launches are sampled, else the mean of the latest 64 steps.";
    LAUNCHES_PER_STEP_ERROR = Gauge "zernel_cuda_launches_per_step_error" ["pid"]
        "Half width of the 95 % interval of zernel_cuda_launches_per_step. Missing until two windows have shown steps.";
    COPIES = Counter "zernel_cuda_copies_total" ["pid", "direction"]
        "Copies between host and device memory that were counted: while they are sampled, those in windows.";
    COPY_BYTES = Counter "zernel_cuda_copy_bytes_total" ["pid", "direction"]
        "Bytes of these copies.";
    COPIES_SECONDS = Counter "zernel_cuda_copies_counted_seconds_total" ["pid", "direction"]
        "Time in which copies were counted, for directions that were ever sampled.";
    WAITS = Histogram "zernel_cuda_wait_seconds" ["pid", "kind"]
        "Time in calls that wait for the GPU, by what they wait for.";
    FAILED = Counter "zernel_cuda_failed_calls_total" ["pid"]
        "CUDA and NCCL calls that returned an error.";
}

/// Reads one figure of counted calls; `None` if the figure does not exist.
type CountFigure = fn(&CountedCalls) -> Option<f64>;

pub(crate) fn expose(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    expose_launches(out, scoped);
    expose_copies(out, scoped);
    write_family_head(out, &WAITS);
    for process in &scoped.processes {
        for wait in &process.probes.cuda_trace.wait_times {
            let labels: [(_, &dyn std::fmt::Display); 2] =
                [("pid", &process.pid), ("kind", &wait.kind)];
            out.write_histogram(WAITS.name, &labels, &wait.times);
        }
    }
    write_family_of_processes(out, &FAILED, scoped, |process, add| {
        if !process.calls.is_empty() {
            let failed: u64 = process.calls.values().map(|calls| calls.failed).sum();
            add(&[], failed as f64);
        }
    });
}

/// Reads one figure of a process's CUDA calls; `None` if the process does not have that figure.
type CudaFigure = fn(&CudaSnapshot) -> Option<f64>;

fn expose_launches(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    let figures: [(MetricFamily, CudaFigure); 4] = [
        (LAUNCHES, |cuda| Some(cuda.counted_launches.calls as f64)),
        (LAUNCHES_SECONDS, |cuda| Some(cuda.counted_launches.seconds)),
        (LAUNCHES_PER_STEP, |cuda| cuda.launches_per_step),
        (LAUNCHES_PER_STEP_ERROR, |cuda| cuda.launches_per_step_error),
    ];
    for (family, figure) in figures {
        write_family_of_processes(out, &family, scoped, |process, add| {
            let cuda = &process.probes.cuda_trace;
            if let Some(value) = figure(cuda).filter(|_| cuda.counted_launches.calls > 0) {
                add(&[], value);
            }
        });
    }
}

fn expose_copies(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    let figures: [(MetricFamily, CountFigure); 3] = [
        (COPIES, |counted| Some(counted.calls as f64)),
        (COPY_BYTES, |counted| Some(counted.bytes as f64)),
        (COPIES_SECONDS, |counted| {
            counted.was_sampled.then_some(counted.seconds)
        }),
    ];
    for (family, figure) in figures {
        write_family_of_processes(out, &family, scoped, |process, add| {
            for (direction, counted) in &process.probes.cuda_trace.counted_copies {
                if let Some(value) = figure(counted) {
                    add(&[("direction", direction)], value);
                }
            }
        });
    }
}
