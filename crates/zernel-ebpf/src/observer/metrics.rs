//! What was observed, as metrics.
//!
//! The families of [`AggregatedMetrics`] come first; [`FAMILIES`] lists what comes after them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use zernel_phase::shared::NO_GPU;
use zernel_phase::steps;
use zernel_phase::task_state::WorkloadPhase;

use super::Observer;
use super::callers::UNKNOWN;
use super::estimate::Interval;
use super::process::{CallCount, Counted, ObservedProcess, Seen};
use crate::aggregation::exposition::{Exposition, Kind, label_text};
use crate::aggregation::{AggregatedMetrics, GpuMemMetrics, LatencyHistogram};
use crate::gpu::GpuFacts;
use crate::identity::Identity;
use crate::probes::{BlockedBy, Counts, Direction, Family, Operation};

/// Whose processes are told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Everybody's.
    All,
    /// Those of the user with this id.
    User(u32),
}

/// The text formats of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextFormat {
    /// Prometheus text, durations as histograms.
    Prometheus,
    /// OpenMetrics.
    OpenMetrics,
    /// Prometheus text, durations as quantiles.
    Quantiles,
}

/// A family of metrics, as it is documented.
#[derive(Debug, Clone, Copy)]
pub struct Documented {
    /// Its name.
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// The labels of its series.
    pub labels: &'static [&'static str],
    /// What it says.
    pub help: &'static str,
}

macro_rules! families {
    ($($constant:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $constant: (&str, Kind, &str) = ($name, Kind::$kind, $help);)*

        /// Every family besides those of [`AggregatedMetrics`].
        pub const FAMILIES: &[Documented] = &[$(Documented {
            name: $name,
            kind: Kind::$kind.name(),
            labels: &[$($label),*],
            help: $help,
        }),*];
    };
}

families! {
    LAUNCHES = Counter "zernel_cuda_launches_total" ["pid"]
        "Launches of kernels and graphs that were counted: while launches are sampled, those in windows.";
    LAUNCHES_SECONDS = Counter "zernel_cuda_launches_counted_seconds_total" ["pid"]
        "Time in which launches were counted. The launch rate is the rate of zernel_cuda_launches_total divided by the rate of this.";
    LAUNCHES_PER_STEP = Gauge "zernel_cuda_launches_per_step" ["pid"]
        "Launches per step: an estimate from sampling windows if launches are sampled, else the mean of the last steps (64 at most).";
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
    NCCL_CALLS = Counter "zernel_nccl_calls_total" ["pid", "op"]
        "Collectives and messages handed to NCCL.";
    NCCL_BYTES = Counter "zernel_nccl_bytes_total" ["pid", "op"]
        "Bytes handed to NCCL, as its arguments count them.";
    NCCL_ENQUEUE = Histogram "zernel_nccl_enqueue_seconds" ["op"]
        "Time a NCCL call takes to hand its work to the GPU.";
    NCCL_UNTIL_SYNC = Histogram "zernel_nccl_until_sync_seconds" ["op"]
        "From a NCCL call to the end of the wait that shows its work done: not shorter than the work.";
    NCCL_SEQUENCE = Gauge "zernel_nccl_sequence" ["pid", "communicator", "rank"]
        "Collectives entered on a communicator.";
    ALLOCATIONS = Counter "zernel_gpu_memory_allocations_total" ["pid", "gpu_id"]
        "Successful allocations of GPU memory.";
    FREES = Counter "zernel_gpu_memory_frees_total" ["pid", "gpu_id"]
        "Allocations of GPU memory that were freed.";
    CALLER_BYTES = Gauge "zernel_gpu_memory_caller_bytes" ["pid", "gpu_id", "caller"]
        "GPU memory in use, by the library that asked the driver for it.";
    UNEXPLAINED = Gauge "zernel_gpu_memory_unexplained_bytes" ["pid", "gpu_id"]
        "What NVML says a process has in use beyond what it was seen to allocate: its context.";
    GPU_INFO = Gauge "zernel_gpu_info" ["gpu_id", "UUID", "name"]
        "A GPU of this machine; always 1.";
    GPU_UTILIZATION = Gauge "zernel_gpu_utilization_ratio" ["gpu_id"]
        "Share of the time in which something ran on the GPU, as NVML says.";
    GPU_TOTAL = Gauge "zernel_gpu_device_memory_total_bytes" ["gpu_id"]
        "Memory of the GPU, as NVML says.";
    GPU_USED = Gauge "zernel_gpu_device_memory_used_bytes" ["gpu_id"]
        "Memory of the GPU in use by anyone, as NVML says.";
    PROCESS_INFO = Gauge "zernel_process_info"
        ["pid", "comm", "job", "rank", "local_rank", "cgroup", "namespace", "pod", "container", "UUID", "role"]
        "Who an observed process is; always 1. Join on pid.";
    PHASE = Gauge "zernel_phase" ["pid", "phase"]
        "The phase that the thread is in that drives the steps of a process; always 1.";
    PHASE_SECONDS = Counter "zernel_phase_seconds_total" ["pid", "phase"]
        "Time that the thread that drives the steps of a process has spent in each phase.";
    STEPS = Counter "zernel_steps_total" ["pid"]
        "Steps of the training loop of a process, as far as something was seen to separate them.";
    STEP_SECONDS = Gauge "zernel_step_seconds" ["pid"]
        "The median of the last steps (64 at most).";
    CPU = Counter "zernel_cpu_seconds_total" ["pid"]
        "Time that the threads of a process have spent on CPUs.";
    RUN_DELAY = Counter "zernel_run_delay_seconds_total" ["pid"]
        "Time that the threads of a process could have run, and did not.";
    BLOCKED = Counter "zernel_blocked_seconds_total" ["pid", "reason"]
        "Time that the threads of a process were blocked, by what they waited for; of loaders, while they fetched.";
    DATALOAD_CAUSE = Counter "zernel_dataloader_wait_cause_seconds_total" ["pid", "cause"]
        "Waits for data, by what those who load it did meanwhile: prepare (on a CPU), fetch (disk, network), sched (could run, and did not), other.";
    COMPLETE = Gauge "zernel_process_complete" ["pid"]
        "1 if the process was observed from its first CUDA call on, else 0.";
    COST_RATIO = Gauge "zernel_observe_cost_ratio" ["pid"]
        "Share of its time that the busiest thread of a process pays for being observed.";
    COST_SECONDS = Counter "zernel_observe_cost_seconds_total" ["pid"]
        "Time that all threads of a process have paid for being observed.";
    CALL_COST = Gauge "zernel_observe_call_cost_seconds" ["threads"]
        "What an observed call costs its thread, as measured at the start with so many threads calling.";
    WINDOWS = Counter "zernel_observe_windows_total" []
        "Windows in which sampled functions were watched.";
    RUNG = Gauge "zernel_observe_rung" ["rung"]
        "The way functions are attached to; always 1.";
    SAMPLED = Gauge "zernel_observe_sampled" ["symbol"]
        "A function that is sampled now; always 1.";
    LOST = Counter "zernel_observe_lost_total" ["cause"]
        "What the kernel had no room for.";
    FILES = Gauge "zernel_observe_files" []
        "Library files that probes are attached to.";
    MISSED = Counter "zernel_observe_missed_by_events_total" []
        "Mappings of libraries that no event told of, and only a scan found.";
}

const DIRECTIONS: [Direction; 4] = [
    Direction::HostToDevice,
    Direction::DeviceToHost,
    Direction::DeviceToDevice,
    Direction::Unified,
];

pub(super) const WAIT_KINDS: [(Family, &str); 4] = [
    (Family::StreamWait, "stream"),
    (Family::EventWait, "event"),
    (Family::ContextWait, "context"),
    (Family::CopyWait, "copy"),
];

/// A process that is told of.
pub(super) struct Told<'a> {
    pub(super) process: &'a ObservedProcess,
    /// The GPU that it uses, if NVML says that it is one.
    only_gpu: Option<&'a GpuFacts>,
}

impl Told<'_> {
    /// NVML's number of the device that the process knows by `ordinal`; without NVML, that. Of a process with one
    /// device NVML knows better: `CUDA_VISIBLE_DEVICES` as we read it is that of its start.
    fn gpu_id(&self, ordinal: u32) -> u32 {
        let devices = &self.process.devices;
        let only = self.only_gpu.filter(|_| self.process.memory.len() == 1);
        let known = match &devices.devices[..] {
            [device] if ordinal == NO_GPU => Some(device.index),
            _ => devices.index(ordinal),
        };
        only.map(|gpu| gpu.index).or(known).unwrap_or(ordinal)
    }

    fn uuid(&self) -> &str {
        let first = self.process.memory.keys().next();
        let device = first.and_then(|ordinal| self.process.devices.devices.get(*ordinal as usize));
        match (device, self.only_gpu) {
            (Some(device), Some(only)) if device.index != only.index => &only.uuid,
            (Some(device), _) => &device.uuid,
            (None, only) => only.map_or("", |only| &only.uuid),
        }
    }

    pub(super) fn memory(&self) -> BTreeMap<u32, &GpuMemMetrics> {
        let memory = self.process.memory.iter();
        memory
            .map(|(ordinal, memory)| (self.gpu_id(*ordinal), &memory.total))
            .collect()
    }
}

impl Observer {
    pub(super) fn told(&self, whose: Whose) -> Vec<Told<'_>> {
        let mut used: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for memory in self.gpus.process_memory() {
            used.entry(memory.pid).or_default().insert(memory.index);
        }
        let only_gpu = |process: &ObservedProcess| {
            let only = used.get(&process.pid).filter(|gpus| gpus.len() == 1)?;
            self.gpu_facts.iter().find(|gpu| only.contains(&gpu.index))
        };
        self.latest_of_each_pid()
            .filter(|process| is_of(whose, process.identity.as_ref()))
            .map(|process| Told {
                process,
                only_gpu: only_gpu(process),
            })
            .collect()
    }

    /// A pid has several lives when it is used again, or when its program executes another; series are
    /// told apart by pid alone, so only the last of them is told.
    fn latest_of_each_pid(&self) -> impl Iterator<Item = &ObservedProcess> {
        let mut latest: BTreeMap<u32, &ObservedProcess> = BTreeMap::new();
        for process in self.processes() {
            let known = latest.entry(process.pid).or_insert(process);
            if known.first_ns < process.first_ns {
                *known = process;
            }
        }
        latest.into_values()
    }

    /// The numbers that every client of the aggregation knows.
    #[must_use]
    pub fn aggregated(&self, whose: Whose) -> AggregatedMetrics {
        self.aggregate(&self.told(whose), whose)
    }

    pub(super) fn aggregate(&self, told: &[Told<'_>], whose: Whose) -> AggregatedMetrics {
        let mut metrics = AggregatedMetrics::default();
        for told in told {
            let process = told.process;
            for (gpu, memory) in told.memory() {
                metrics
                    .gpu_memory
                    .insert(format!("{}:{gpu}", process.pid), memory.clone());
            }
            for (family, histogram) in process.durations() {
                let by_pid = match family {
                    Family::Launch => &mut metrics.cuda_latency,
                    Family::Dataload => &mut metrics.dataloader_wait,
                    Family::DistSync => &mut metrics.dist_sync,
                    _ => continue,
                };
                by_pid.insert(process.pid, histogram.clone());
            }
        }
        for operation in Operation::ALL {
            if let Some(histogram) = self.of_everyone(whose, Family::UntilSync(operation)) {
                let durations = &mut metrics.nccl_duration;
                durations.insert(operation.name().to_owned(), histogram);
            }
        }
        metrics.updated_now();
        metrics
    }

    /// All metrics as text.
    #[must_use]
    pub fn metrics(&self, whose: Whose, format: TextFormat) -> String {
        let told = self.told(whose);
        let aggregated = self.aggregate(&told, whose);
        let mut out = match format {
            TextFormat::Prometheus => Exposition::default(),
            TextFormat::OpenMetrics => Exposition::open_metrics(),
            TextFormat::Quantiles => return aggregated.to_prometheus_quantiles(),
        };
        aggregated.expose(&mut out);
        drop(aggregated);
        expose_calls(&mut out, &told);
        self.expose_collectives(&mut out, &told, whose);
        self.expose_memory(&mut out, &told, whose);
        expose_processes(&mut out, &told);
        if whose == Whose::All {
            self.expose_gpus(&mut out);
            self.expose_observer(&mut out);
        }
        let mut text = out.finish();
        if format == TextFormat::OpenMetrics {
            text.push_str("# EOF\n");
        }
        text
    }

    fn expose_collectives(&self, out: &mut Exposition, told: &[Told<'_>], whose: Whose) {
        let counters: [(Named, OfCalls); 2] = [
            (NCCL_CALLS, |count| count.calls),
            (NCCL_BYTES, |count| count.bytes),
        ];
        for (family, value) in counters {
            series(out, family, told, |told, add| {
                for operation in Operation::ALL {
                    let communication = Counts::Communication(operation);
                    let count = told.process.count(|what| what == communication);
                    if count.calls > 0 {
                        add(&[("op", &operation.name())], value(&count) as f64);
                    }
                }
            });
        }
        type OfOperation = fn(Operation) -> Family;
        let durations: [(Named, OfOperation); 2] = [
            (NCCL_ENQUEUE, Family::Enqueue),
            (NCCL_UNTIL_SYNC, Family::UntilSync),
        ];
        for ((name, kind, help), family) in durations {
            out.family(name, kind, help);
            for operation in Operation::ALL {
                if let Some(histogram) = self.of_everyone(whose, family(operation)) {
                    out.histogram(name, &[("op", &operation.name())], &histogram);
                }
            }
        }
        series(out, NCCL_SEQUENCE, told, |told, add| {
            let made = told.process.communicators.iter();
            for communicator in made.filter(|communicator| !communicator.is_being_made) {
                let hash = format!("{:016x}", communicator.hash);
                let rank = communicator
                    .rank
                    .map_or(String::new(), |rank| rank.to_string());
                add(
                    &[("communicator", &hash), ("rank", &rank)],
                    communicator.sequence as f64,
                );
            }
        });
    }

    /// How long something took all that were ever seen: what is told without a pid must not fall when one of them is
    /// forgotten.
    fn of_everyone(&self, whose: Whose, family: Family) -> Option<LatencyHistogram> {
        let seen = self.processes();
        let seen = seen.filter(|process| is_of(whose, process.identity.as_ref()));
        let past = self.past.iter().filter(|((user, of), _)| {
            let is_theirs = whose == Whose::All || user.map(Whose::User) == Some(whose);
            *of == family && is_theirs
        });
        let mut all = seen
            .filter_map(|process| process.duration(family))
            .chain(past.map(|(_, histogram)| histogram));
        let mut sum = all.next()?.clone();
        all.for_each(|histogram| sum.merge(histogram));
        Some(sum)
    }

    fn expose_memory(&self, out: &mut Exposition, told: &[Told<'_>], whose: Whose) {
        series(out, ALLOCATIONS, told, |told, add| {
            for (gpu, memory) in told.memory() {
                add(&[("gpu_id", &gpu)], memory.alloc_count as f64);
            }
        });
        series(out, FREES, told, |told, add| {
            for (gpu, memory) in told.memory() {
                add(&[("gpu_id", &gpu)], memory.free_count as f64);
            }
        });
        series(out, CALLER_BYTES, told, |told, add| {
            for ((gpu, caller), bytes) in by_caller(told) {
                add(&[("gpu_id", &gpu), ("caller", &caller)], bytes as f64);
            }
        });
        let (name, kind, help) = UNEXPLAINED;
        out.family(name, kind, help);
        for used in self.gpus.process_memory() {
            let known = told.iter().find(|told| told.process.pid == used.pid);
            let (Some(bytes), true) = (used.bytes, known.is_some() || whose == Whose::All) else {
                continue;
            };
            let explained = known
                .and_then(|told| told.memory().get(&used.index).map(|m| m.current_bytes))
                .unwrap_or(0);
            let labels: [(&str, &dyn Display); 2] = [("pid", &used.pid), ("gpu_id", &used.index)];
            out.sample(name, "", &labels, bytes as f64 - explained as f64);
        }
    }

    fn expose_gpus(&self, out: &mut Exposition) {
        let (name, kind, help) = GPU_INFO;
        out.family(name, kind, help);
        for gpu in &self.gpu_facts {
            let labels: [(&str, &dyn Display); 3] = [
                ("gpu_id", &gpu.index),
                ("UUID", &gpu.uuid),
                ("name", &gpu.name),
            ];
            out.sample(name, "", &labels, 1);
        }
        let gauges: [(Named, OfGpu); 3] = [
            (GPU_UTILIZATION, |gpu| {
                Some(f64::from(gpu.utilization?) / 100.0)
            }),
            (GPU_TOTAL, |gpu| Some(gpu.memory_total? as f64)),
            (GPU_USED, |gpu| Some(gpu.memory_used? as f64)),
        ];
        for ((name, kind, help), value) in gauges {
            out.family(name, kind, help);
            for gpu in &self.gpu_facts {
                if let Some(value) = value(gpu) {
                    out.sample(name, "", &[("gpu_id", &gpu.index)], value);
                }
            }
        }
    }

    fn expose_observer(&self, out: &mut Exposition) {
        let cost = self.cost();
        let (name, kind, help) = CALL_COST;
        out.family(name, kind, help);
        out.sample(name, "", &[("threads", &1)], cost.ns_per_call / 1e9);
        if cost.threads > 1 {
            let threads: [(&str, &dyn Display); 1] = [("threads", &cost.threads)];
            out.sample(name, "", &threads, cost.ns_per_call_contended / 1e9);
        }
        single(out, WINDOWS, &[], cost.windows as f64);
        single(out, RUNG, &[("rung", &self.rung().name())], 1.0);
        let (name, kind, help) = SAMPLED;
        out.family(name, kind, help);
        for symbol in self.sampled() {
            out.sample(name, "", &[("symbol", &symbol)], 1);
        }
        let (name, kind, help) = LOST;
        out.family(name, kind, help);
        for (cause, lost) in self.losses().by_cause() {
            out.sample(name, "", &[("cause", &cause)], lost);
        }
        let missed = self.missed_switches();
        out.sample(name, "", &[("cause", &"switches")], missed);
        let files = self.files.iter().filter(|file| file.is_watched()).count();
        single(out, FILES, &[], files as f64);
        single(out, MISSED, &[], self.discovery.missed_by_events() as f64);
    }
}

type Named = (&'static str, Kind, &'static str);
type OfGpu = fn(&GpuFacts) -> Option<f64>;
type OfCalls = fn(&CallCount) -> u64;
type OfCounted = fn(&Counted) -> Option<f64>;
type OfInterval = fn(Interval) -> Option<f64>;

fn single(out: &mut Exposition, family: Named, labels: &[(&str, &dyn Display)], value: f64) {
    let (name, kind, help) = family;
    out.family(name, kind, help);
    out.sample(name, "", labels, value);
}

/// A family with the series that `each` adds for every process, to whose labels the pid is put.
fn series(
    out: &mut Exposition,
    family: Named,
    told: &[Told<'_>],
    each: impl Fn(&Told<'_>, &mut dyn FnMut(&[(&str, &dyn Display)], f64)),
) {
    let (name, kind, help) = family;
    out.family(name, kind, help);
    for told in told {
        let pid = label_text(&[("pid", &told.process.pid)]);
        each(told, &mut |labels, value| {
            out.sample_with(name, "", &pid, labels, value);
        });
    }
}

fn expose_calls(out: &mut Exposition, told: &[Told<'_>]) {
    let launches: [(Named, OfCounted); 2] = [
        (LAUNCHES, |counted| Some(counted.calls as f64)),
        (LAUNCHES_SECONDS, |counted| Some(counted.seconds)),
    ];
    for (family, value) in launches {
        series(out, family, told, |told, add| {
            let counted = told.process.counted_of(Counts::Launch);
            if let Some(value) = value(&counted).filter(|_| counted.calls > 0) {
                add(&[], value);
            }
        });
    }
    let per_step: [(Named, OfInterval); 2] = [
        (LAUNCHES_PER_STEP, |interval| Some(interval.mean)),
        (LAUNCHES_PER_STEP_ERROR, |interval| interval.half_width),
    ];
    for (family, value) in per_step {
        series(out, family, told, |told, add| {
            if let Some(value) = told.process.launches_per_step().and_then(value) {
                add(&[], value);
            }
        });
    }
    let copies: [(Named, OfCounted); 3] = [
        (COPIES, |counted| Some(counted.calls as f64)),
        (COPY_BYTES, |counted| Some(counted.bytes as f64)),
        (COPIES_SECONDS, |counted| {
            counted.was_sampled.then_some(counted.seconds)
        }),
    ];
    for (family, value) in copies {
        series(out, family, told, |told, add| {
            for direction in DIRECTIONS {
                let counted = told.process.counted_of(Counts::Copy(direction));
                if let Some(value) = value(&counted).filter(|_| counted.calls > 0) {
                    add(&[("direction", &direction.name())], value);
                }
            }
        });
    }
    let (name, kind, help) = WAITS;
    out.family(name, kind, help);
    for told in told {
        for (family, wait) in WAIT_KINDS {
            if let Some(histogram) = told.process.duration(family) {
                out.histogram(
                    name,
                    &[("pid", &told.process.pid), ("kind", &wait)],
                    histogram,
                );
            }
        }
    }
    series(out, FAILED, told, |told, add| {
        let count = told.process.count(|_| true);
        if count.calls > 0 {
            add(&[], count.failed as f64);
        }
    });
}

fn expose_processes(out: &mut Exposition, told: &[Told<'_>]) {
    series(out, PROCESS_INFO, told, |told, add| {
        let text = |value: Option<&String>| value.cloned().unwrap_or_default();
        let number = |value: Option<u32>| value.map_or(String::new(), |value| value.to_string());
        let identity = told.process.identity.as_ref();
        let role = if told.process.is_loader {
            "loader"
        } else {
            "trainer"
        };
        add(
            &[
                ("comm", &text(identity.map(|identity| &identity.comm))),
                (
                    "job",
                    &text(identity.and_then(|identity| identity.job.as_ref())),
                ),
                ("rank", &number(identity.and_then(|identity| identity.rank))),
                (
                    "local_rank",
                    &number(identity.and_then(|identity| identity.local_rank)),
                ),
                ("cgroup", &text(identity.map(|identity| &identity.cgroup))),
                (
                    "namespace",
                    &text(identity.and_then(|identity| identity.namespace.as_ref())),
                ),
                (
                    "pod",
                    &text(identity.and_then(|identity| identity.pod.as_ref())),
                ),
                (
                    "container",
                    &text(identity.and_then(|identity| identity.container.as_ref())),
                ),
                ("UUID", &told.uuid()),
                ("role", &role),
            ],
            1.0,
        );
    });
    series(out, PHASE, told, |told, add| {
        if let Some(phases) = told.process.phases.as_ref() {
            add(&[("phase", &phases.current)], 1.0);
        }
    });
    series(out, PHASE_SECONDS, told, |told, add| {
        let Some(phases) = told.process.phases.as_ref() else {
            return;
        };
        for phase in WorkloadPhase::ALL {
            add(
                &[("phase", &phase)],
                phases.times.phase_ns(phase) as f64 / 1e9,
            );
        }
    });
    series(out, STEPS, told, |told, add| {
        if told.process.steps.count() > 0 {
            add(&[], told.process.steps.count() as f64);
        }
    });
    series(out, STEP_SECONDS, told, |told, add| {
        if let Some(ns) = steps::median_ns(told.process.steps.recent()) {
            add(&[], ns as f64 / 1e9);
        }
    });
    series(out, CPU, told, |told, add| {
        add(&[], told.process.scheduling.on_cpu_ns as f64 / 1e9);
    });
    series(out, RUN_DELAY, told, |told, add| {
        add(&[], told.process.scheduling.run_delay_ns as f64 / 1e9);
    });
    series(out, BLOCKED, told, |told, add| {
        // Most of the time, loaders wait for something to do; and there are many of them.
        let reasons: &[BlockedBy] = match told.process.is_loader {
            true => &BlockedBy::FETCHING,
            false => &BlockedBy::ALL,
        };
        for reason in reasons {
            let ns = told.process.scheduling.blocked_ns(*reason);
            if ns > 0 {
                add(&[("reason", &reason.name())], ns as f64 / 1e9);
            }
        }
    });
    series(out, DATALOAD_CAUSE, told, |told, add| {
        let causes = &told.process.dataload;
        if causes.total_ns() == 0 {
            return;
        }
        for (cause, ns) in [
            ("prepare", causes.prepare_ns),
            ("fetch", causes.fetch_ns),
            ("sched", causes.sched_ns),
            ("other", causes.other_ns),
        ] {
            add(&[("cause", &cause)], ns as f64 / 1e9);
        }
    });
    series(out, COMPLETE, told, |told, add| {
        if !told.process.is_loader {
            add(
                &[],
                f64::from(u8::from(told.process.seen == Seen::Complete)),
            );
        }
    });
    series(out, COST_RATIO, told, |told, add| {
        if !told.process.is_loader {
            add(&[], told.process.cost.busiest_thread);
        }
    });
    series(out, COST_SECONDS, told, |told, add| {
        if !told.process.is_loader {
            add(&[], told.process.cost.seconds);
        }
    });
}

/// Bytes in use by GPU and calling library.
pub(super) fn by_caller(told: &Told<'_>) -> BTreeMap<(u32, String), u64> {
    let mut bytes = BTreeMap::new();
    for (ordinal, memory) in &told.process.memory {
        for (address, caller) in &memory.by_caller {
            let name = told.process.callers.name(*address).to_owned();
            *bytes.entry((told.gpu_id(*ordinal), name)).or_default() += caller.current_bytes;
        }
    }
    bytes.retain(|(_, caller), bytes| *bytes > 0 || caller != UNKNOWN);
    bytes
}

pub(super) fn is_of(whose: Whose, identity: Option<&Identity>) -> bool {
    match whose {
        Whose::All => true,
        Whose::User(uid) => identity.is_some_and(|identity| identity.uid == uid),
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::gpu::VisibleDevices;
    use crate::probes::layout;

    fn gpu(index: u32) -> GpuFacts {
        GpuFacts {
            index,
            uuid: format!("GPU-{index}"),
            ..GpuFacts::default()
        }
    }

    /// A program may choose its GPU after its start, by which it is judged otherwise.
    #[test]
    fn nvml_knows_the_gpu_of_who_uses_one() {
        let gpus: Vec<GpuFacts> = (0..4).map(gpu).collect();
        let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
        process.devices = VisibleDevices::parse(None, &gpus);
        process.memory.insert(0, Default::default());
        fn told(process: &ObservedProcess, only_gpu: Option<&GpuFacts>) -> (u32, String) {
            let told = Told { process, only_gpu };
            (told.gpu_id(0), told.uuid().to_owned())
        }
        assert_eq!(told(&process, None), (0, "GPU-0".to_owned()));
        assert_eq!(told(&process, gpus.get(3)), (3, "GPU-3".to_owned()));
        process.memory.insert(1, Default::default());
        assert_eq!(told(&process, gpus.get(3)).0, 0);
        process.devices = VisibleDevices::parse(Some("2"), &gpus);
        let told = Told {
            process: &process,
            only_gpu: None,
        };
        assert_eq!(told.gpu_id(NO_GPU), 2);
    }
}
