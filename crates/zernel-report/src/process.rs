//! Totals of one observed process.

use std::collections::BTreeMap;

use rustix::thread::CpuSet;
use serde::Serialize;
use zernel_model::snapshot::{self, CollectiveTotals, DataWaits, Role};
use zernel_phase::task_state::WorkloadPhase;

use super::record::Sample;
use super::steps::StepReport;

/// Shortest start-up that the report shows, in seconds.
const MIN_START_UP: f64 = 0.1;

/// The report on one process of the command.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct ProcessReport {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) job: Option<String>,
    pub(crate) rank: Option<u32>,
    /// Whether it loads data for another process.
    pub(crate) is_loader: bool,
    /// Pid of the process that it loads data for.
    pub(crate) loads_for: Option<u32>,
    /// Whether it was observed from its first CUDA call on. `None`: it made no CUDA call.
    pub complete: Option<bool>,
    pub(crate) still_running: bool,
    /// From its start to its first probed call: mostly imports. `None`: unknown.
    pub(crate) before_first_call_seconds: Option<f64>,
    /// From its first probed call to its end.
    #[serde(flatten)]
    pub(crate) times: Times,
    /// From its first step after the warm-up to its last step.
    pub(crate) training: Option<Training>,
    pub(crate) steps: Option<StepReport>,
    pub(crate) collectives: Vec<CollectiveTotals>,
    pub(crate) launches: u64,
    /// By how much `launches` may be off, because they were sampled.
    pub(crate) launches_error: u64,
    pub(crate) launches_per_step: Option<f64>,
    /// Half width of the 95 % interval of `launches_per_step`.
    pub(crate) launches_per_step_error: Option<f64>,
    pub(crate) copies: u64,
    /// Standard error of `copies`. 0 if they were counted, not sampled.
    pub(crate) copies_error: u64,
    pub(crate) copied_bytes: u64,
    /// Names of its GPUs by index, as NVML reports them.
    pub(crate) gpus: BTreeMap<String, Option<String>>,
    /// Sum of the peaks of its GPUs.
    pub(crate) gpu_memory_peak_bytes: u64,
    /// Overhead of observing, over all its threads.
    pub(crate) cost_seconds: f64,
    /// CPUs in its affinity mask. Empty: unknown.
    #[serde(skip)]
    pub(crate) cpus: CpuSet,
    /// Samples for the charts.
    #[serde(skip)]
    pub(crate) timeline: Vec<Sample>,
}

/// The time from a process's first step after the warm-up to its last step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(crate) struct Training {
    /// When it begins, after the first probed call.
    pub(crate) begin_seconds: f64,
    #[serde(flatten)]
    pub(crate) times: Times,
}

/// Times of a process, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(crate) struct Times {
    pub(crate) wall_seconds: f64,
    pub(crate) phases: Phases,
    pub(crate) data_waits: DataWaits,
    /// Waits for other ranks, in any library.
    pub(crate) peer_wait_seconds: f64,
    /// In calls that wait for the GPU.
    pub(crate) gpu_wait_seconds: f64,
    /// Number of those calls.
    pub(crate) gpu_waits: f64,
    /// In launch calls. An estimate if they were sampled.
    pub(crate) launch_seconds: f64,
    /// Number of launches.
    #[serde(skip)]
    pub(crate) launches: f64,
    /// CPU time of all threads.
    pub(crate) cpu_seconds: f64,
    /// Time in which threads were runnable without a CPU.
    pub(crate) run_delay_seconds: f64,
    /// CPU time of the threads that make probed calls: the training threads.
    pub(crate) calling_cpu_seconds: f64,
    /// Time in which those threads were runnable without a CPU.
    pub(crate) calling_run_delay_seconds: f64,
    /// Time in which threads waited for disk, network or pages.
    pub(crate) fetch_seconds: f64,
    /// Time in which its GPUs were busy, for any process. `None`: NVML reports no utilization.
    pub(crate) gpu_busy_seconds: Option<f64>,
}

/// Seconds of the training thread in each phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(crate) struct Phases {
    pub(crate) data_loading: f64,
    pub(crate) gpu_compute: f64,
    pub(crate) nccl_collective: f64,
    pub(crate) optimizer_step: f64,
    /// No evidence, or no training thread.
    pub(crate) unknown: f64,
    /// Time beyond the wall time, because there were several training threads.
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
            collectives: process.probes.nccl.collectives.clone(),
            launches: process.probes.cuda_trace.launches,
            launches_error: process.probes.cuda_trace.launches_error,
            launches_per_step: process.probes.cuda_trace.launches_per_step,
            launches_per_step_error: process.probes.cuda_trace.launches_per_step_error,
            copies: process.probes.cuda_trace.copies,
            copies_error: process.probes.cuda_trace.copies_error,
            copied_bytes: process.probes.cuda_trace.copied_bytes,
            gpus: (process.probes.gpu_mem.memory.iter())
                .map(|memory| (memory.gpu_label(), memory.gpu.clone()))
                .collect(),
            gpu_memory_peak_bytes: process
                .probes
                .gpu_mem
                .memory
                .iter()
                .map(|m| m.peak_bytes)
                .sum(),
            cost_seconds: process.cost.seconds,
            cpus: CpuSet::new(),
            timeline: Vec::new(),
        }
    }

    /// Subtracts what was observed before.
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

    /// The times that the verdict uses: those of the training, or of the whole process if it has no steps.
    pub(crate) fn training_times(&self) -> &Times {
        self.training
            .as_ref()
            .map_or(&self.times, |training| &training.times)
    }

    /// Whether it trains: it launched kernels, called collectives, waited for data or made steps.
    pub(crate) fn is_rank(&self) -> bool {
        let times = &self.times;
        let worked = self.launches > 0 || !self.collectives.is_empty();
        let waited = times.data_waits.total() + times.peer_wait_seconds > 0.0;
        let stepped = self.steps.is_some() || times.phases.total() > times.phases.unknown;
        !self.is_loader && (worked || waited || stepped)
    }

    /// Time in which it worked as a loader: on CPUs, fetching, or runnable without a CPU.
    pub(crate) fn loading_seconds(&self) -> f64 {
        self.times.cpu_seconds + self.times.fetch_seconds + self.times.run_delay_seconds
    }

    /// Time from its start to its first probed call, if that is not negligible.
    pub(crate) fn start_up_seconds(&self) -> Option<f64> {
        self.before_first_call_seconds
            .filter(|seconds| *seconds >= MIN_START_UP)
    }

    /// Overhead of observing as a share of its wall time.
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
    /// Time in collectives: the phase, or the waits for peers if those are longer.
    pub(crate) fn communication_seconds(&self) -> f64 {
        self.phases.nccl_collective.max(self.peer_wait_seconds)
    }

    pub(crate) fn new(process: &snapshot::ProcessSnapshot) -> Self {
        let wall_seconds = process.observed_seconds;
        Self {
            wall_seconds,
            phases: Phases::new(process, wall_seconds),
            data_waits: process.probes.dataload.data_waits,
            peer_wait_seconds: process.probes.dist_sync.peer_wait_seconds,
            gpu_wait_seconds: process.probes.cuda_trace.gpu_wait_seconds,
            gpu_waits: process.probes.cuda_trace.gpu_waits as f64,
            launch_seconds: process.probes.cuda_trace.launch_seconds,
            launches: process.probes.cuda_trace.launches as f64,
            cpu_seconds: process.probes.sched.cpu_seconds,
            run_delay_seconds: process.probes.sched.run_delay_seconds,
            calling_cpu_seconds: process.probes.sched.calling_cpu_seconds,
            calling_run_delay_seconds: process.probes.sched.calling_run_delay_seconds,
            fetch_seconds: process.probes.sched.fetch_seconds,
            gpu_busy_seconds: None,
        }
    }

    /// Combines two of them number by number with `combine_one`. The phases add up to the wall time again.
    pub(crate) fn combine(&self, other: &Self, combine_one: impl Fn(f64, f64) -> f64) -> Self {
        let phases = [&self.phases, &other.phases];
        let data = [&self.data_waits, &other.data_waits];
        let wall_seconds = combine_one(self.wall_seconds, other.wall_seconds);
        let mut combined = Phases {
            data_loading: combine_one(phases[0].data_loading, phases[1].data_loading),
            gpu_compute: combine_one(phases[0].gpu_compute, phases[1].gpu_compute),
            nccl_collective: combine_one(phases[0].nccl_collective, phases[1].nccl_collective),
            optimizer_step: combine_one(phases[0].optimizer_step, phases[1].optimizer_step),
            unknown: 0.0,
            more_than_wall: 0.0,
        };
        combined.fill_unknown(wall_seconds);
        Self {
            wall_seconds,
            phases: combined,
            data_waits: DataWaits {
                prepare: combine_one(data[0].prepare, data[1].prepare),
                fetch: combine_one(data[0].fetch, data[1].fetch),
                sched: combine_one(data[0].sched, data[1].sched),
                other: combine_one(data[0].other, data[1].other),
            },
            peer_wait_seconds: combine_one(self.peer_wait_seconds, other.peer_wait_seconds),
            gpu_wait_seconds: combine_one(self.gpu_wait_seconds, other.gpu_wait_seconds),
            gpu_waits: combine_one(self.gpu_waits, other.gpu_waits),
            launch_seconds: combine_one(self.launch_seconds, other.launch_seconds),
            launches: combine_one(self.launches, other.launches),
            cpu_seconds: combine_one(self.cpu_seconds, other.cpu_seconds),
            run_delay_seconds: combine_one(self.run_delay_seconds, other.run_delay_seconds),
            calling_cpu_seconds: combine_one(self.calling_cpu_seconds, other.calling_cpu_seconds),
            calling_run_delay_seconds: combine_one(
                self.calling_run_delay_seconds,
                other.calling_run_delay_seconds,
            ),
            fetch_seconds: combine_one(self.fetch_seconds, other.fetch_seconds),
            gpu_busy_seconds: (self.gpu_busy_seconds.zip(other.gpu_busy_seconds))
                .map(|(own, others)| combine_one(own, others)),
        }
    }
}

impl Phases {
    fn new(process: &snapshot::ProcessSnapshot, wall: f64) -> Self {
        let times = process.phases.phase_times.as_ref();
        let seconds_in = |phase| times.map_or(0.0, |times| times.phase_ns(phase) as f64 / 1e9);
        let mut phases = Self {
            data_loading: seconds_in(WorkloadPhase::DataLoading),
            gpu_compute: seconds_in(WorkloadPhase::GpuCompute),
            nccl_collective: seconds_in(WorkloadPhase::NcclCollective),
            optimizer_step: seconds_in(WorkloadPhase::OptimizerStep),
            unknown: seconds_in(WorkloadPhase::Unknown),
            more_than_wall: 0.0,
        };
        phases.fill_unknown(wall);
        phases
    }

    /// Counts the rest of the wall time as unknown.
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
    fn completeness_is_unknown_without_cuda_calls() {
        let process = |complete, call: &str| {
            let calls = BTreeMap::from([(call.to_owned().into(), snapshot::Calls::default())]);
            ProcessReport::new(&snapshot::ProcessSnapshot {
                complete,
                calls,
                ..snapshot::ProcessSnapshot::default()
            })
        };
        assert_eq!(process(true, "cuInit").complete, Some(true));
        assert_eq!(process(false, "cuMemAlloc_v2").complete, Some(false));
        assert_eq!(process(false, "ncclAllReduce").complete, None);
        // Its first calls are subtracted, so the rest is incomplete.
        for before in [process(true, "cuInit"), process(false, "ncclAllReduce")] {
            assert_eq!(before.clone().since(&before).complete, Some(false));
        }
    }

    #[test]
    fn phases_of_several_threads_exceed_the_wall_time() {
        let mut phases = Phases {
            gpu_compute: 7.0,
            ..Phases::default()
        };
        phases.fill_unknown(5.0);
        assert_eq!((phases.unknown, phases.more_than_wall), (0.0, 2.0));
    }

    #[test]
    fn combined_phases_add_up_to_the_wall_time() {
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
