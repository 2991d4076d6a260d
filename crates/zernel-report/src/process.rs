//! What was seen of one process, in plain numbers.

use std::collections::BTreeMap;

use rustix::thread::CpuSet;
use serde::Serialize;
use zernel_model::snapshot::{self, CollectiveTotals, DataWaits, Role};
use zernel_phase::task_state::WorkloadPhase;

use super::record::Sample;
use super::steps::StepReport;

/// A start that is shorter than this is not worth a word, in seconds.
const MIN_START_UP: f64 = 0.1;

/// A process of the command.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct ProcessReport {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) job: Option<String>,
    pub(crate) rank: Option<u32>,
    /// It loads data for another.
    pub(crate) is_loader: bool,
    /// The pid of the process that it loads data for.
    pub(crate) loads_for: Option<u32>,
    /// Whether it was observed from its first CUDA call on; `None`: it made none, and no other call is known to be
    /// its first.
    pub complete: Option<bool>,
    pub(crate) still_running: bool,
    /// How long it had run before its first call that is watched: imports, mostly. `None`: it was there before.
    pub(crate) before_first_call_seconds: Option<f64>,
    /// From its first event to its end.
    #[serde(flatten)]
    pub(crate) times: Times,
    /// From its first step after the warm-up to its last one.
    pub(crate) training: Option<Training>,
    pub(crate) steps: Option<StepReport>,
    pub(crate) collectives: Vec<CollectiveTotals>,
    pub(crate) launches: u64,
    /// By how much `launches` may be off, because they were sampled.
    pub(crate) launches_error: u64,
    pub(crate) copies: u64,
    /// By how much `copies` may be off, because they were sampled.
    pub(crate) copies_error: u64,
    pub(crate) copied_bytes: u64,
    /// Its GPUs by number, with their names where NVML tells them.
    pub(crate) gpus: BTreeMap<String, Option<String>>,
    /// The sum of the peaks of its devices.
    pub(crate) gpu_memory_peak_bytes: u64,
    /// What its threads paid for being observed.
    pub(crate) cost_seconds: f64,
    /// The CPUs that it may use; none, if that is not known.
    #[serde(skip)]
    pub(crate) cpus: CpuSet,
    /// How it went, to be drawn.
    #[serde(skip)]
    pub(crate) timeline: Vec<Sample>,
}

/// The part of a process's time in which it made steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(crate) struct Training {
    /// How long after its first event it began.
    pub(crate) begin_seconds: f64,
    #[serde(flatten)]
    pub(crate) times: Times,
}

/// Where time went, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(crate) struct Times {
    pub(crate) wall_seconds: f64,
    pub(crate) phases: Phases,
    pub(crate) data_waits: DataWaits,
    /// Waits for other ranks, through whatever library.
    pub(crate) peer_wait_seconds: f64,
    /// In calls that wait for the GPU, whatever it had to do.
    pub(crate) gpu_wait_seconds: f64,
    /// How many such calls there were.
    pub(crate) gpu_waits: f64,
    /// In calls that launch; an estimate, if they were sampled.
    pub(crate) launch_seconds: f64,
    /// How many such calls there were.
    #[serde(skip)]
    pub(crate) launches: f64,
    /// All threads on CPUs.
    pub(crate) cpu_seconds: f64,
    /// Threads could have run, and did not.
    pub(crate) run_delay_seconds: f64,
    /// The same two of the threads that make calls which are watched, and so hold up its steps.
    pub(crate) calling_cpu_seconds: f64,
    pub(crate) calling_run_delay_seconds: f64,
    /// Threads waited for disk, network or pages.
    pub(crate) fetch_seconds: f64,
    /// Its GPUs had something to do, for whomever, as NVML says.
    pub(crate) gpu_busy_seconds: Option<f64>,
}

/// Where the time of the thread that drives the steps went.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(crate) struct Phases {
    pub(crate) data_loading: f64,
    pub(crate) gpu_compute: f64,
    pub(crate) nccl_collective: f64,
    pub(crate) optimizer_step: f64,
    /// Nothing is known, or no thread drove steps.
    pub(crate) unknown: f64,
    /// By how much the phases exceed the wall time, because more than one thread drove steps.
    pub(crate) more_than_wall: f64,
}

impl ProcessReport {
    pub(crate) fn new(process: &snapshot::ProcessSnapshot) -> Self {
        Self {
            pid: process.pid,
            comm: process.comm().to_owned(),
            job: process.job().map(str::to_owned),
            rank: process.rank(),
            is_loader: process.role == Role::Loader,
            loads_for: process.loads_for,
            complete: (process.complete || calls_cuda(process)).then_some(process.complete),
            still_running: process.ended_seconds_ago.is_none(),
            before_first_call_seconds: None,
            times: Times::new(process),
            training: None,
            steps: None,
            collectives: process.nccl.collectives.clone(),
            launches: process.cuda.launches,
            launches_error: process.cuda.launches_error,
            copies: process.cuda.copies,
            copies_error: process.cuda.copies_error,
            copied_bytes: process.cuda.copied_bytes,
            gpus: (process.memory.memory.iter())
                .map(|memory| (memory.gpu_label(), memory.gpu.clone()))
                .collect(),
            gpu_memory_peak_bytes: process.memory.memory.iter().map(|m| m.peak_bytes).sum(),
            cost_seconds: process.cost.seconds,
            cpus: CpuSet::new(),
            timeline: Vec::new(),
        }
    }

    /// Without what was seen before.
    pub(crate) fn since(mut self, before: &Self) -> Self {
        let difference = |now: f64, before: f64| (now - before).max(0.0);
        self.complete = Some(false);
        self.times = self.times.combine(&before.times, difference);
        self.launches = self.launches.saturating_sub(before.launches);
        self.copies = self.copies.saturating_sub(before.copies);
        self.copied_bytes = self.copied_bytes.saturating_sub(before.copied_bytes);
        self.cost_seconds = difference(self.cost_seconds, before.cost_seconds);
        for collective in &mut self.collectives {
            let mut known = before.collectives.iter();
            if let Some(before) = known.find(|known| known.op == collective.op) {
                collective.calls = collective.calls.saturating_sub(before.calls);
                collective.bytes = collective.bytes.saturating_sub(before.bytes);
            }
        }
        self.collectives.retain(|collective| collective.calls > 0);
        self
    }

    /// The time that is judged: that of its steps, if it was seen to make any.
    pub(crate) fn training_times(&self) -> &Times {
        self.training
            .as_ref()
            .map_or(&self.times, |training| &training.times)
    }

    /// Whether it trains: it gave work to a GPU, met other ranks, waited for data or made steps.
    pub(crate) fn is_rank(&self) -> bool {
        let times = &self.times;
        let worked = self.launches > 0 || !self.collectives.is_empty();
        let waited = times.data_waits.total() + times.peer_wait_seconds > 0.0;
        let stepped = self.steps.is_some() || times.phases.total() > times.phases.unknown;
        !self.is_loader && (worked || waited || stepped)
    }

    /// Time in which it was at work as a loader: on CPUs, fetching, or about to.
    pub(crate) fn loading_seconds(&self) -> f64 {
        self.times.cpu_seconds + self.times.fetch_seconds + self.times.run_delay_seconds
    }

    /// How long it had run before its first call, if that is worth a word.
    pub(crate) fn start_up_seconds(&self) -> Option<f64> {
        self.before_first_call_seconds
            .filter(|seconds| *seconds >= MIN_START_UP)
    }

    /// The share of its time that it paid for being observed.
    pub(crate) fn cost_share(&self) -> f64 {
        match self.times.wall_seconds > 0.0 {
            true => self.cost_seconds / self.times.wall_seconds,
            false => 0.0,
        }
    }
}

fn calls_cuda(process: &snapshot::ProcessSnapshot) -> bool {
    process.calls.keys().any(|name| name.starts_with("cu"))
}

impl Times {
    /// In collectives: as the phases have it, or as waits show that come without phases.
    pub(crate) fn communication_seconds(&self) -> f64 {
        self.phases.nccl_collective.max(self.peer_wait_seconds)
    }

    pub(crate) fn new(process: &snapshot::ProcessSnapshot) -> Self {
        let wall_seconds = process.observed_seconds;
        Self {
            wall_seconds,
            phases: Phases::new(process, wall_seconds),
            data_waits: process.dataload.data_waits,
            peer_wait_seconds: process.peers.peer_wait_seconds,
            gpu_wait_seconds: process.cuda.gpu_wait_seconds,
            gpu_waits: process.cuda.gpu_waits as f64,
            launch_seconds: process.cuda.launch_seconds,
            launches: process.cuda.launches as f64,
            cpu_seconds: process.sched.cpu_seconds,
            run_delay_seconds: process.sched.run_delay_seconds,
            calling_cpu_seconds: process.sched.calling_cpu_seconds,
            calling_run_delay_seconds: process.sched.calling_run_delay_seconds,
            fetch_seconds: process.sched.fetch_seconds,
            gpu_busy_seconds: None,
        }
    }

    /// The same of two of them, number by number. Phases are made to add up to the wall time again.
    pub(crate) fn combine(&self, other: &Self, of: impl Fn(f64, f64) -> f64) -> Self {
        let phases = [&self.phases, &other.phases];
        let data = [&self.data_waits, &other.data_waits];
        let wall_seconds = of(self.wall_seconds, other.wall_seconds);
        let mut combined = Phases {
            data_loading: of(phases[0].data_loading, phases[1].data_loading),
            gpu_compute: of(phases[0].gpu_compute, phases[1].gpu_compute),
            nccl_collective: of(phases[0].nccl_collective, phases[1].nccl_collective),
            optimizer_step: of(phases[0].optimizer_step, phases[1].optimizer_step),
            unknown: 0.0,
            more_than_wall: 0.0,
        };
        combined.fill_unknown(wall_seconds);
        Self {
            wall_seconds,
            phases: combined,
            data_waits: DataWaits {
                prepare: of(data[0].prepare, data[1].prepare),
                fetch: of(data[0].fetch, data[1].fetch),
                sched: of(data[0].sched, data[1].sched),
                other: of(data[0].other, data[1].other),
            },
            peer_wait_seconds: of(self.peer_wait_seconds, other.peer_wait_seconds),
            gpu_wait_seconds: of(self.gpu_wait_seconds, other.gpu_wait_seconds),
            gpu_waits: of(self.gpu_waits, other.gpu_waits),
            launch_seconds: of(self.launch_seconds, other.launch_seconds),
            launches: of(self.launches, other.launches),
            cpu_seconds: of(self.cpu_seconds, other.cpu_seconds),
            run_delay_seconds: of(self.run_delay_seconds, other.run_delay_seconds),
            calling_cpu_seconds: of(self.calling_cpu_seconds, other.calling_cpu_seconds),
            calling_run_delay_seconds: of(
                self.calling_run_delay_seconds,
                other.calling_run_delay_seconds,
            ),
            fetch_seconds: of(self.fetch_seconds, other.fetch_seconds),
            gpu_busy_seconds: (self.gpu_busy_seconds.zip(other.gpu_busy_seconds))
                .map(|(own, others)| of(own, others)),
        }
    }
}

impl Phases {
    fn new(process: &snapshot::ProcessSnapshot, wall: f64) -> Self {
        let times = process.phases.phase_times.as_ref();
        let of = |phase| times.map_or(0.0, |times| times.phase_ns(phase) as f64 / 1e9);
        let mut phases = Self {
            data_loading: of(WorkloadPhase::DataLoading),
            gpu_compute: of(WorkloadPhase::GpuCompute),
            nccl_collective: of(WorkloadPhase::NcclCollective),
            optimizer_step: of(WorkloadPhase::OptimizerStep),
            unknown: of(WorkloadPhase::Unknown),
            more_than_wall: 0.0,
        };
        phases.fill_unknown(wall);
        phases
    }

    /// What no thread accounts for is unknown.
    fn fill_unknown(&mut self, wall: f64) {
        let difference = wall - self.total();
        self.unknown += difference.max(0.0);
        self.more_than_wall = (-difference).max(0.0);
    }

    pub(crate) fn total(&self) -> f64 {
        self.by_name().iter().map(|(_, seconds)| seconds).sum()
    }

    pub(crate) fn by_name(&self) -> [(&'static str, f64); 5] {
        [
            ("DataLoading", self.data_loading),
            ("GpuCompute", self.gpu_compute),
            ("NcclCollective", self.nccl_collective),
            ("OptimizerStep", self.optimizer_step),
            ("Unknown", self.unknown),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_to_the_wall_time() {
        let mut phases = Phases {
            gpu_compute: 3.0,
            unknown: 0.5,
            ..Phases::default()
        };
        phases.fill_unknown(5.0);
        assert_eq!((phases.total(), phases.unknown), (5.0, 2.0));
    }

    #[test]
    fn who_makes_no_cuda_call_has_no_first_one() {
        let seen = |complete, call: &str| {
            let calls = BTreeMap::from([(call.to_owned().into(), snapshot::Calls::default())]);
            ProcessReport::new(&snapshot::ProcessSnapshot {
                complete,
                calls,
                ..snapshot::ProcessSnapshot::default()
            })
        };
        assert_eq!(seen(true, "cuInit").complete, Some(true));
        assert_eq!(seen(false, "cuMemAlloc_v2").complete, Some(false));
        assert_eq!(seen(false, "ncclAllReduce").complete, None);
        // What was seen before does not count, so it is not all there was.
        for process in [seen(true, "cuInit"), seen(false, "ncclAllReduce")] {
            assert_eq!(process.clone().since(&process).complete, Some(false));
        }
    }

    #[test]
    fn what_two_threads_have_in_common_is_said() {
        let mut phases = Phases {
            gpu_compute: 7.0,
            ..Phases::default()
        };
        phases.fill_unknown(5.0);
        assert_eq!((phases.unknown, phases.more_than_wall), (0.0, 2.0));
    }

    #[test]
    fn a_part_of_the_time_has_phases_that_add_up_too() {
        let times = |wall_seconds, gpu_compute| {
            let mut phases = Phases {
                gpu_compute,
                ..Phases::default()
            };
            phases.fill_unknown(wall_seconds);
            Times {
                wall_seconds,
                phases,
                ..Times::default()
            }
        };
        let part = times(9.0, 6.0).combine(&times(4.0, 2.0), |to, from| to - from);
        assert_eq!(part, times(5.0, 4.0));
    }
}
