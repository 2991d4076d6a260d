//! The times of a process: as recorded, the figures of a rank that the verdict uses, and their split into parts.
//!
//! A new figure needs a field in [`RankTimes`], and in [`ProcessTimes`] if it is a time that is not recorded yet. A part of its
//! own needs a variant of [`TimePart`] and its place in [`RankTimeParts::new`]. All of that is in this file.

use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use zernel_model::snapshot::{self, DataWaits};

use super::phases::PhaseSeconds;
use super::process::ProcessReport;
use super::steps::StepReport;

/// Shortest lifetime of a loader that counts, as a share of its rank's time.
const MIN_LOADER_LIFETIME_SHARE: f64 = 0.2;
/// Longest launch, in seconds, that does not wait for room in the GPU's queue.
const MAX_UNBLOCKED_LAUNCH_SECONDS: f64 = 50e-6;
/// Idle share up to which a GPU counts as never idle.
const MAX_IDLE_SHARE_OF_BUSY_GPU: f64 = 0.1;

/// Times of a process, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[serde(default)]
pub(crate) struct ProcessTimes {
    pub(crate) wall_seconds: f64,
    /// The part of the wall time in which its calls were not observed.
    pub(crate) not_observed_seconds: f64,
    pub(crate) phases: PhaseSeconds,
    pub(crate) data_waits: DataWaits,
    /// Waits for other ranks, in any library.
    pub(crate) peer_wait_seconds: f64,
    /// In compilations, summed over threads. The training thread is mostly in phase Unknown meanwhile.
    pub(crate) compile_seconds: f64,
    /// In calls that wait for the GPU.
    pub(crate) gpu_wait_seconds: f64,
    /// Number of those calls.
    #[serde(rename = "gpu_waits")]
    pub(crate) gpu_wait_calls: f64,
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
    /// Time in which its cgroup had used up its CPU limit, summed over CPUs.
    pub(crate) throttled_seconds: f64,
    /// Time in which its GPUs were busy, for any process. `None`: NVML reports no utilization.
    pub(crate) gpu_busy_seconds: Option<f64>,
}

impl ProcessTimes {
    /// Time in collectives: the phase, or the waits for peers if those are longer. Several threads of a process may wait at
    /// once, but the process waits no longer than the wall time.
    pub(crate) fn communication_seconds(&self) -> f64 {
        let seconds = self.phases.nccl_collective.max(self.peer_wait_seconds);
        seconds.min(self.wall_seconds)
    }

    /// Time in which the training thread compiled or waited for that. Other threads may compile beside it.
    pub(crate) fn awaited_compile_seconds(&self) -> f64 {
        self.compile_seconds.min(self.phases.unknown)
    }

    /// Waits for data, at most as long as the wall time.
    pub(crate) fn bounded_data_waits(&self) -> DataWaits {
        let waits = self.data_waits;
        let scale = (self.wall_seconds / waits.total_seconds().max(f64::EPSILON)).min(1.0);
        DataWaits {
            prepare: scale * waits.prepare,
            fetch: scale * waits.fetch,
            sched: scale * waits.sched,
            other: scale * waits.other,
        }
    }

    pub(crate) fn new(process: &snapshot::ProcessSnapshot) -> Self {
        let wall_seconds = process.observed_seconds;
        Self {
            wall_seconds,
            not_observed_seconds: process.not_observed_seconds,
            phases: PhaseSeconds::new(process, wall_seconds),
            data_waits: process.probes.dataload.data_waits,
            peer_wait_seconds: process.probes.dist_sync.peer_wait_seconds,
            compile_seconds: process.probes.torch.compile_seconds,
            gpu_wait_seconds: process.probes.cuda_trace.gpu_wait_seconds,
            gpu_wait_calls: process.probes.cuda_trace.gpu_waits as f64,
            launch_seconds: process.probes.cuda_trace.launch_seconds,
            launches: process.probes.cuda_trace.launches as f64,
            cpu_seconds: process.probes.sched.cpu_seconds,
            run_delay_seconds: process.probes.sched.run_delay_seconds,
            calling_cpu_seconds: process.probes.sched.calling_cpu_seconds,
            calling_run_delay_seconds: process.probes.sched.calling_run_delay_seconds,
            fetch_seconds: process.probes.sched.fetch_seconds,
            throttled_seconds: 0.0,
            gpu_busy_seconds: None,
        }
    }

    /// Combines two of them number by number with `combine_one`. After that the phases of the result add up to its wall time.
    pub(crate) fn combine_with(&self, other: &Self, combine_one: impl Fn(f64, f64) -> f64) -> Self {
        let data = [&self.data_waits, &other.data_waits];
        let wall_seconds = combine_one(self.wall_seconds, other.wall_seconds);
        Self {
            wall_seconds,
            not_observed_seconds: combine_one(
                self.not_observed_seconds,
                other.not_observed_seconds,
            ),
            phases: (self.phases).combine_with(&other.phases, wall_seconds, &combine_one),
            data_waits: DataWaits {
                prepare: combine_one(data[0].prepare, data[1].prepare),
                fetch: combine_one(data[0].fetch, data[1].fetch),
                sched: combine_one(data[0].sched, data[1].sched),
                other: combine_one(data[0].other, data[1].other),
            },
            peer_wait_seconds: combine_one(self.peer_wait_seconds, other.peer_wait_seconds),
            compile_seconds: combine_one(self.compile_seconds, other.compile_seconds),
            gpu_wait_seconds: combine_one(self.gpu_wait_seconds, other.gpu_wait_seconds),
            gpu_wait_calls: combine_one(self.gpu_wait_calls, other.gpu_wait_calls),
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
            throttled_seconds: combine_one(self.throttled_seconds, other.throttled_seconds),
            gpu_busy_seconds: (self.gpu_busy_seconds.zip(other.gpu_busy_seconds))
                .map(|(own, others)| combine_one(own, others)),
        }
    }
}

/// Measured times of one rank, in seconds. They may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct RankTimes {
    pub(crate) wall: f64,
    /// The part of `wall` in which its calls were not observed.
    pub(crate) not_observed: f64,
    /// Warm-up: the first steps of the rank, which are not part of `wall`.
    pub(crate) warm_up: f64,
    /// Whether it made too few steps after the warm-up to judge them.
    pub(crate) has_few_steps_after_warm_up: bool,
    /// The part of `wall` in which it compiled after the warm-up. It is unknown time, which no share counts.
    pub(crate) compile: f64,
    /// In phase NcclCollective, or in waits for peers if those are longer.
    pub(crate) communication: f64,
    /// Index of the first rank of its group. Ranks of one group may wait for each other in collectives.
    pub(crate) collective_group: usize,
    /// In calls that wait for the GPU.
    pub(crate) gpu_waits: f64,
    /// The part of `gpu_waits` in which only collectives were pending.
    pub(crate) peer_waits: f64,
    /// From the call of a collective to the end of the wait that covers it, without overlaps.
    pub(crate) until_sync: f64,
    /// Number of calls that wait for the GPU.
    pub(crate) gpu_wait_calls: f64,
    /// In launch calls.
    pub(crate) launching: f64,
    /// Number of launches.
    pub(crate) launches: f64,
    /// In phase Unknown.
    pub(crate) unknown: f64,
    /// In waits for data.
    pub(crate) data_waits: f64,
    /// The part of `data_waits` in which loaders ran on CPUs.
    pub(crate) data_prepare: f64,
    /// The part of `data_waits` in which loaders waited for disk or network.
    pub(crate) data_fetch: f64,
    /// The part of `data_waits` in which loaders were runnable without a CPU.
    pub(crate) data_cpu_delay: f64,
    /// Time in which training threads of the rank ran on CPUs.
    pub(crate) training_cpu: f64,
    /// Time in which its other threads ran on CPUs.
    pub(crate) other_cpu: f64,
    /// Time in which its training threads were runnable and had no CPU.
    pub(crate) run_delay: f64,
    /// Time in which its cgroup had used up its CPU limit, summed over CPUs.
    pub(crate) throttled: f64,
    /// Time in which its GPUs were busy. `None`: NVML reports no utilization.
    pub(crate) gpu_busy: Option<f64>,
    /// Whether nothing shows that it trains: no backward pass, no optimizer step, no reduction of gradients.
    pub(crate) only_infers: bool,
    /// Whether most bytes of its collectives gather or scatter shards, as those of a model that is split among ranks.
    pub(crate) mostly_moves_shards: bool,
    /// Whether it uses a GPU and has no loaders, and nothing shows machine learning.
    pub(crate) uses_gpu_without_ml: bool,
    /// Whether it maps `PyTorch`.
    pub(crate) maps_torch: bool,
    /// Whether it uses another framework than `PyTorch`.
    pub(crate) uses_framework_other_than_torch: bool,
    /// Share of the time in which its busiest loader worked. `None`: it has no loaders.
    pub(crate) max_loader_busy_share: Option<f64>,
    /// Number of its loaders.
    pub(crate) loaders: f64,
    /// Whether the rank has as many loaders as CPUs.
    pub(crate) loaders_fill_cpus: bool,
}

impl RankTimes {
    /// Wall time of the rank without compilations. All shares are shares of this time.
    pub(crate) fn wall_without_compiling(&self) -> f64 {
        self.wall - self.compile
    }

    /// Takes the figures of a rank from what was recorded of it, of all ranks and of all processes.
    pub(crate) fn new(
        rank: &ProcessReport,
        ranks: &[ProcessReport],
        processes: &[ProcessReport],
    ) -> Self {
        let times = rank.training_times();
        // Processes that send requests look like loaders.
        let (data_waits, loaders) = match rank.may_serve_requests() {
            true => (DataWaits::default(), 0.0),
            false => (times.bounded_data_waits(), loader_count(rank, processes)),
        };
        let steps = rank.steps.as_ref();
        let collectives = rank.collectives.iter();
        // Collectives that one wait covers overlap, so at most one counts per wait.
        let until_sync = collectives.map(|collective| {
            let waits = times.gpu_wait_calls.min(collective.calls as f64);
            waits * collective.until_sync_mean_seconds.unwrap_or(0.0)
        });
        Self {
            wall: times.wall_seconds,
            not_observed: times.not_observed_seconds.min(times.wall_seconds),
            warm_up: steps.map_or(0.0, |steps| steps.warm_up_seconds),
            has_few_steps_after_warm_up: steps.is_some_and(StepReport::has_few_steps_after_warm_up),
            compile: times.awaited_compile_seconds(),
            communication: times.communication_seconds(),
            collective_group: collective_group(rank, ranks),
            gpu_waits: times.gpu_wait_seconds,
            peer_waits: times.peer_wait_seconds,
            until_sync: until_sync.fold(0.0, f64::max),
            gpu_wait_calls: times.gpu_wait_calls,
            launching: times.launch_seconds,
            launches: times.launches,
            unknown: times.phases.unknown,
            data_waits: data_waits.total_seconds(),
            data_prepare: data_waits.prepare,
            data_fetch: data_waits.fetch,
            data_cpu_delay: data_waits.sched,
            training_cpu: times.calling_cpu_seconds,
            other_cpu: times.cpu_seconds - times.calling_cpu_seconds,
            run_delay: times.calling_run_delay_seconds,
            throttled: times.throttled_seconds,
            gpu_busy: times.gpu_busy_seconds,
            only_infers: rank.only_infers(),
            mostly_moves_shards: rank.mostly_moves_shards(),
            uses_gpu_without_ml: rank.uses_gpu_without_ml() && loaders == 0.0,
            maps_torch: rank.maps_torch(),
            uses_framework_other_than_torch: rank.uses_framework_other_than_torch(),
            max_loader_busy_share: busiest_loader_share(rank, processes)
                .filter(|_| !rank.may_serve_requests()),
            loaders,
            loaders_fill_cpus: loaders >= cpu_count(rank, ranks),
        }
    }
}

/// Index of the first rank with which a rank may call collectives: a rank of the same job that calls NCCL too, or that
/// does not either. A process that only evaluates waits for nobody, and nobody for it.
fn collective_group(rank: &ProcessReport, ranks: &[ProcessReport]) -> usize {
    let calls_nccl = |rank: &ProcessReport| !rank.collectives.is_empty();
    let is_peer =
        |other: &ProcessReport| other.job == rank.job && calls_nccl(other) == calls_nccl(rank);
    ranks.iter().position(is_peer).unwrap_or(0)
}

/// Busy share of the busiest loader of a rank. `None`: it has no loaders.
fn busiest_loader_share(rank: &ProcessReport, processes: &[ProcessReport]) -> Option<f64> {
    let own = processes.iter().filter(|process| {
        let is_short = process.times.wall_seconds
            < MIN_LOADER_LIFETIME_SHARE * rank.training_times().wall_seconds;
        process.loads_for == Some(rank.pid) && !is_short
    });
    let shares = own
        .map(|loader| loader.loader_work_seconds() / loader.times.wall_seconds.max(f64::EPSILON));
    shares.max_by(f64::total_cmp).map(|share| share.min(1.0))
}

/// Number of loaders that a rank has at a time. Some programs start new ones for every epoch.
fn loader_count(rank: &ProcessReport, processes: &[ProcessReport]) -> f64 {
    let wall = rank.training_times().wall_seconds.max(f64::EPSILON);
    let own = processes
        .iter()
        .filter(|process| process.loads_for == Some(rank.pid));
    let shares = own.map(|loader| (loader.times.wall_seconds / wall).min(1.0));
    shares.sum::<f64>().round()
}

/// Number of CPUs of a rank, if ranks share CPUs evenly. Infinite if its affinity mask is unknown.
fn cpu_count(rank: &ProcessReport, ranks: &[ProcessReport]) -> f64 {
    if rank.cpus.count() == 0 {
        return f64::INFINITY;
    }
    let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| rank.cpus.is_set(*cpu));
    let users = |cpu| ranks.iter().filter(|other| other.cpus.is_set(cpu)).count();
    cpus.map(|cpu| 1.0 / users(cpu).max(1) as f64).sum()
}

/// A part of a rank's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TimePart {
    /// Waiting for data while loaders ran on CPUs.
    Prepare,
    /// Waiting for data while loaders waited for disk or network.
    Fetch,
    /// Waiting for data while loaders did neither.
    OtherData,
    /// Runnable without a CPU: its training threads, or the loaders that it waited for.
    CpuDelay,
    /// Runnable without a CPU, because the cgroup had used up its CPU limit.
    Throttled,
    /// Waiting for peers.
    Communication,
    /// Waiting for the GPU.
    Gpu,
    /// Running on a CPU.
    Host,
    /// Waiting for an unknown cause while other threads of the process ran: one of them may hold a lock.
    OtherThreads,
}

impl TimePart {
    pub(crate) const ALL: [Self; 9] = [
        Self::Prepare,
        Self::Fetch,
        Self::OtherData,
        Self::CpuDelay,
        Self::Throttled,
        Self::Communication,
        Self::Gpu,
        Self::Host,
        Self::OtherThreads,
    ];
}

// The parts are indices, and the last one is listed.
const _: () = assert!(TimePart::OtherThreads as usize + 1 == TimePart::ALL.len());

/// The parts of a rank's time. Time in none of them is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct RankTimeParts {
    seconds: [f64; TimePart::ALL.len()],
    /// The loaders' share of [`TimePart::CpuDelay`].
    pub(crate) loader_cpu_delay: f64,
    /// Host work that counts as [`TimePart::Gpu`], because the rank waits for its GPU longer than the GPU is idle, or the
    /// GPU is almost never idle.
    pub(crate) host_work_ahead_of_gpu: f64,
    /// Busy share of its GPUs. `None`: NVML reports no utilization.
    pub(crate) gpu_busy_share: Option<f64>,
    /// Time in which its GPUs were busy. `None`: NVML reports no utilization.
    pub(crate) gpu_busy: Option<f64>,
    /// Time in which its GPUs were idle. `None`: NVML reports no utilization.
    pub(crate) gpu_idle: Option<f64>,
    /// Number of launches, and of calls that wait for the GPU.
    pub(crate) launches: f64,
    pub(crate) gpu_wait_calls: f64,
    /// Whether nothing shows that it trains.
    pub(crate) only_infers: bool,
    /// Whether most bytes of its collectives gather or scatter shards.
    pub(crate) mostly_moves_shards: bool,
    pub(crate) uses_framework_other_than_torch: bool,
    /// Warm-up: the first steps of the rank, which are not part of its time.
    pub(crate) warm_up: f64,
    /// Number of its loaders.
    pub(crate) loaders: f64,
    /// Whether the rank launched on a GPU or waited for one.
    pub(crate) uses_gpu: bool,
    /// Whether the rank has as many loaders as CPUs.
    pub(crate) loaders_fill_cpus: bool,
    /// Waits for the GPU in which collectives may have run.
    pub(crate) gpu_waits_with_collectives: f64,
}

/// The time of a rank that no part has taken yet.
struct RemainingSeconds(f64);

impl RemainingSeconds {
    fn take_at_most(&mut self, seconds: f64) -> f64 {
        // Unlike clamp(), this takes nothing if `seconds` is not a number.
        let taken = seconds.max(0.0).min(self.0);
        self.0 -= taken;
        taken
    }
}

impl RankTimeParts {
    /// Splits a rank's time. Waits come first, because a thread waits for one thing at a time. CPU delay and host work
    /// get what remains, up to what was measured.
    pub(crate) fn new(rank: &RankTimes) -> Self {
        // Of the time in which it was not observed, nothing is known.
        let mut remaining = RemainingSeconds((rank.wall - rank.not_observed).max(0.0));
        let mut parts = Self::without_part_seconds(rank);
        let prepare = remaining.take_at_most(rank.data_prepare);
        let fetch = remaining.take_at_most(rank.data_fetch);
        let loader_cpu_delay = remaining.take_at_most(rank.data_cpu_delay);
        let explained = rank.data_prepare + rank.data_fetch + rank.data_cpu_delay;
        let other = remaining.take_at_most(rank.data_waits - explained);
        let communication = remaining.take_at_most(rank.communication);
        let blocked_launches = rank.launching - MAX_UNBLOCKED_LAUNCH_SECONDS * rank.launches;
        let gpu = remaining
            .take_at_most((rank.gpu_waits - rank.peer_waits).max(0.0) + blocked_launches.max(0.0));
        let delay = remaining.take_at_most(rank.run_delay);
        let uses_gpu = rank.launches > 0.0 || rank.gpu_waits > 0.0;
        // Without a GPU almost all time is in phase Unknown, although the CPU time is known.
        let unknown = if uses_gpu { rank.unknown } else { rank.compile };
        // A thread may spin while it waits. A wait above has taken that time already.
        let host = remaining.take_at_most((remaining.0 - unknown).min(rank.training_cpu));
        let other_threads = remaining.take_at_most((remaining.0 - unknown).min(rank.other_cpu));
        // A rank that waits for its GPU longer than the GPU is idle is limited by the GPU: it works ahead of it. A
        // rank with a GPU that is never idle is bound by the GPU too, even if it waits elsewhere or not at all.
        let wall = rank.wall_without_compiling();
        let gpu_idle = rank.gpu_busy.map(|busy| (wall - busy).max(0.0));
        let is_ahead =
            gpu_idle.is_some_and(|idle| idle <= gpu.max(MAX_IDLE_SHARE_OF_BUSY_GPU * wall));
        let (host, other_threads, host_work_ahead_of_gpu) = match is_ahead {
            true => (0.0, 0.0, host + other_threads),
            false => (host, other_threads, 0.0),
        };
        let gpu = gpu + host_work_ahead_of_gpu;
        // The limit of a cgroup makes its threads wait in the run queue.
        let throttled = (loader_cpu_delay + delay).min(rank.throttled.max(0.0));
        for (part, seconds) in [
            (TimePart::Prepare, prepare),
            (TimePart::Fetch, fetch),
            (TimePart::OtherData, other),
            (TimePart::CpuDelay, loader_cpu_delay + delay - throttled),
            (TimePart::Throttled, throttled),
            (TimePart::Communication, communication),
            (TimePart::Gpu, gpu),
            (TimePart::Host, host),
            (TimePart::OtherThreads, other_threads),
        ] {
            parts.seconds[part as usize] = seconds;
        }
        parts.loader_cpu_delay = loader_cpu_delay;
        parts.host_work_ahead_of_gpu = host_work_ahead_of_gpu;
        parts.gpu_busy_share = rank.gpu_busy.map(|busy| busy / wall.max(f64::EPSILON));
        parts.gpu_busy = rank.gpu_busy;
        parts.gpu_idle = gpu_idle;
        parts.uses_gpu = uses_gpu;
        parts.gpu_waits_with_collectives = (rank.until_sync - communication).clamp(0.0, gpu);
        parts
    }

    /// The facts about a rank that are no parts of its time.
    fn without_part_seconds(rank: &RankTimes) -> Self {
        Self {
            launches: rank.launches,
            gpu_wait_calls: rank.gpu_wait_calls,
            only_infers: rank.only_infers,
            mostly_moves_shards: rank.mostly_moves_shards,
            uses_framework_other_than_torch: rank.uses_framework_other_than_torch,
            warm_up: rank.warm_up,
            loaders: rank.loaders,
            loaders_fill_cpus: rank.loaders_fill_cpus,
            ..Self::default()
        }
    }

    /// Seconds in a part.
    pub(crate) fn seconds_in(&self, part: TimePart) -> f64 {
        self.seconds[part as usize]
    }

    pub(crate) fn total_seconds(&self) -> f64 {
        self.seconds.iter().sum()
    }

    /// Moves time from [`TimePart::Communication`] to another part.
    pub(crate) fn reassign_communication(&mut self, part: TimePart, seconds: f64) {
        let taken = seconds.clamp(0.0, self.seconds_in(TimePart::Communication));
        self.seconds[TimePart::Communication as usize] -= taken;
        self.seconds[part as usize] += taken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loader_that_lived(pid: u32, wall_seconds: f64) -> ProcessReport {
        let times = ProcessTimes {
            wall_seconds,
            ..ProcessTimes::default()
        };
        ProcessReport {
            pid,
            times,
            ..ProcessReport::default()
        }
    }

    fn rank_with_cpus(cpus: std::ops::Range<usize>) -> ProcessReport {
        let mut rank = loader_that_lived(1, 10.0);
        cpus.for_each(|cpu| rank.cpus.set(cpu));
        rank
    }

    #[test]
    fn consecutive_loaders_count_as_one() {
        let rank = loader_that_lived(1, 10.0);
        let loader = |loads_for, wall_seconds| ProcessReport {
            is_loader: true,
            loads_for: Some(loads_for),
            ..loader_that_lived(7, wall_seconds)
        };
        let count = |walls: &[f64]| {
            let own = walls.iter().map(|wall| loader(1, *wall));
            let others = loader(2, 10.0);
            loader_count(&rank, &own.chain([others]).collect::<Vec<_>>())
        };
        assert_eq!(count(&[]), 0.0);
        assert_eq!(count(&[9.6, 9.7]), 2.0);
        // Loaders that started before the first step live longer than the training.
        assert_eq!(count(&[13.0, 13.0]), 2.0);
        assert_eq!(count(&[4.8, 4.8, 4.9, 4.9]), 2.0);
    }

    /// A server waits for requests of processes that it forked.
    #[test]
    fn waits_of_a_server_are_no_waits_for_data() {
        let mut server = loader_that_lived(1, 10.0);
        server.launches = 1000;
        server.frameworks = Some(vec!["PyTorch".to_owned()]);
        server.times.data_waits.prepare = 6.0;
        let client = ProcessReport {
            is_loader: true,
            loads_for: Some(1),
            ..loader_that_lived(7, 10.0)
        };
        let times = |announcements| {
            let ranks = [ProcessReport {
                announcements: Some(announcements),
                ..server.clone()
            }];
            let processes = [ranks[0].clone(), client.clone()];
            let times = RankTimes::new(&ranks[0], &ranks, &processes);
            (times.data_waits, times.loaders, times.max_loader_busy_share)
        };
        assert_eq!(times(0), (0.0, 0.0, None));
        assert_eq!(times(100), (6.0, 1.0, Some(0.0)));
    }

    #[test]
    fn ranks_share_cpus_evenly() {
        let of_first = |ranks: &[ProcessReport]| cpu_count(&ranks[0], ranks);
        assert_eq!(of_first(&[rank_with_cpus(0..8)]), 8.0);
        assert_eq!(of_first(&[rank_with_cpus(0..8), rank_with_cpus(0..8)]), 4.0);
        assert_eq!(of_first(&[rank_with_cpus(0..4), rank_with_cpus(4..8)]), 4.0);
        assert_eq!(
            of_first(&[rank_with_cpus(0..0), rank_with_cpus(0..8)]),
            f64::INFINITY
        );
    }

    #[test]
    fn a_time_that_is_not_a_number_counts_as_none() {
        let parts = RankTimeParts::new(&RankTimes {
            wall: 10.0,
            data_waits: f64::NAN,
            gpu_waits: 4.0,
            ..RankTimes::default()
        });
        assert_eq!(parts.seconds_in(TimePart::Gpu), 4.0);
        assert_eq!(parts.total_seconds(), 4.0);
    }
}
