//! What was seen of one process, in plain numbers.

use serde::Serialize;
use zernel_ebpf::observer::{self, ObservedProcess};
use zernel_ebpf::probes::{BlockedBy, Counts, Family, Operation};
use zernel_phase::task_state::WorkloadPhase;

/// A process of the command.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub(super) struct Seen {
    pub(super) pid: u32,
    pub(super) comm: String,
    pub(super) job: Option<String>,
    pub(super) rank: Option<u32>,
    /// It loads data for another.
    pub(super) is_loader: bool,
    /// The pid of the process that it loads data for.
    pub(super) loads_for: Option<u32>,
    /// It was observed from its first CUDA call on.
    pub(super) complete: bool,
    pub(super) still_running: bool,
    /// From its first event to its end.
    pub(super) wall_seconds: f64,
    pub(super) phases: Phases,
    pub(super) data_waits: DataWaits,
    /// Waits for other ranks, through whatever library.
    pub(super) peer_wait_seconds: f64,
    /// In calls that wait for the GPU, whatever it had to do.
    pub(super) gpu_wait_seconds: f64,
    /// How many such calls there were.
    pub(super) gpu_waits: u64,
    /// In calls that launch; an estimate, if they were sampled.
    pub(super) launch_seconds: f64,
    pub(super) collectives: Vec<Collective>,
    pub(super) launches: u64,
    /// By how much `launches` may be off, because they were sampled.
    pub(super) launches_error: u64,
    pub(super) copies: u64,
    pub(super) copied_bytes: u64,
    /// The sum of the peaks of its devices.
    pub(super) gpu_memory_peak_bytes: u64,
    /// Time of all its threads on CPUs.
    pub(super) cpu_seconds: f64,
    /// Time in which its threads could have run, and did not.
    pub(super) run_delay_seconds: f64,
    /// Time in which its threads waited for disk, network or pages.
    pub(super) fetch_seconds: f64,
    /// What its threads paid for being observed.
    pub(super) cost_seconds: f64,
}

/// Where the time of the thread that drives the steps went.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(super) struct Phases {
    pub(super) data_loading: f64,
    pub(super) gpu_compute: f64,
    pub(super) nccl_collective: f64,
    pub(super) optimizer_step: f64,
    /// Nothing is known, or no thread drove steps.
    pub(super) unknown: f64,
    /// By how much the phases exceed the wall time, because more than one thread drove steps.
    pub(super) more_than_wall: f64,
}

/// Waits for data, by what those who load it did meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub(super) struct DataWaits {
    pub(super) prepare: f64,
    pub(super) fetch: f64,
    pub(super) sched: f64,
    pub(super) other: f64,
}

/// All collectives of a kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Collective {
    pub(super) op: &'static str,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    /// From the call to the end of the wait that shows it done.
    pub(super) until_sync_median_seconds: Option<f64>,
    /// The same, on average.
    pub(super) until_sync_mean_seconds: Option<f64>,
}

impl Seen {
    pub(super) fn new(process: &ObservedProcess) -> Self {
        let identity = process.identity.as_ref();
        let end_ns = process.ended_ns.unwrap_or_else(monotonic_ns);
        let wall_seconds = seconds(end_ns.saturating_sub(process.first_ns));
        let launches = process.count(|what| what == Counts::Launch);
        let copies = process.count(|what| matches!(what, Counts::Copy(_)));
        let causes = &process.dataload;
        Self {
            pid: process.pid,
            comm: identity.map_or(String::new(), |identity| identity.comm.clone()),
            job: identity.and_then(|identity| identity.job.clone()),
            rank: identity.and_then(|identity| identity.rank),
            is_loader: process.is_loader,
            loads_for: process.loads_for,
            complete: process.seen == observer::Seen::Complete,
            still_running: process.ended_ns.is_none(),
            wall_seconds,
            phases: Phases::new(process, wall_seconds),
            data_waits: DataWaits {
                prepare: seconds(causes.prepare_ns),
                fetch: seconds(causes.fetch_ns),
                sched: seconds(causes.sched_ns),
                other: seconds(causes.other_ns),
            },
            peer_wait_seconds: total(process, Family::DistSync),
            gpu_wait_seconds: GPU_WAITS.map(|family| total(process, family)).iter().sum(),
            gpu_waits: process.count(|what| what == Counts::Wait).calls,
            launch_seconds: launch_seconds(process, launches.calls),
            collectives: collectives(process),
            launches: launches.calls,
            launches_error: launches.error,
            copies: copies.calls,
            copied_bytes: copies.bytes,
            gpu_memory_peak_bytes: process.memory.values().map(|m| m.total.peak_bytes).sum(),
            cpu_seconds: seconds(process.scheduling.on_cpu_ns),
            run_delay_seconds: seconds(process.scheduling.run_delay_ns),
            fetch_seconds: FETCHES
                .map(|by| seconds(process.scheduling.blocked_ns(by)))
                .iter()
                .sum(),
            cost_seconds: process.cost.seconds,
        }
    }

    /// Whether it trains: it gave work to a GPU, met other ranks, waited for data or made steps.
    pub(super) fn is_rank(&self) -> bool {
        let worked = self.launches > 0 || !self.collectives.is_empty();
        let waited = self.data_waits.total() + self.peer_wait_seconds > 0.0;
        let stepped = self.phases.total() > self.phases.unknown;
        !self.is_loader && (worked || waited || stepped)
    }

    /// Time in which it was at work as a loader: on CPUs, fetching, or about to.
    pub(super) fn loading_seconds(&self) -> f64 {
        self.cpu_seconds + self.fetch_seconds + self.run_delay_seconds
    }

    /// The share of its time that it paid for being observed.
    pub(super) fn cost_share(&self) -> f64 {
        match self.wall_seconds > 0.0 {
            true => self.cost_seconds / self.wall_seconds,
            false => 0.0,
        }
    }
}

impl Phases {
    fn new(process: &ObservedProcess, wall: f64) -> Self {
        let times = process.phases.as_ref().map(|phases| &phases.times);
        let of = |phase| times.map_or(0.0, |times| seconds(times.phase_ns(phase)));
        let mut phases = Self {
            data_loading: of(WorkloadPhase::DataLoading),
            gpu_compute: of(WorkloadPhase::GpuCompute),
            nccl_collective: of(WorkloadPhase::NcclCollective),
            optimizer_step: of(WorkloadPhase::OptimizerStep),
            unknown: of(WorkloadPhase::Unknown),
            more_than_wall: 0.0,
        };
        phases.fill(wall);
        phases
    }

    /// What no thread accounts for is unknown.
    fn fill(&mut self, wall: f64) {
        let difference = wall - self.total();
        self.unknown += difference.max(0.0);
        self.more_than_wall = (-difference).max(0.0);
    }

    pub(super) fn total(&self) -> f64 {
        self.by_name().iter().map(|(_, seconds)| seconds).sum()
    }

    pub(super) fn by_name(&self) -> [(&'static str, f64); 5] {
        [
            ("DataLoading", self.data_loading),
            ("GpuCompute", self.gpu_compute),
            ("NcclCollective", self.nccl_collective),
            ("OptimizerStep", self.optimizer_step),
            ("Unknown", self.unknown),
        ]
    }
}

impl DataWaits {
    pub(super) fn by_name(&self) -> [(&'static str, f64); 4] {
        [
            ("prepare", self.prepare),
            ("fetch", self.fetch),
            ("sched", self.sched),
            ("other", self.other),
        ]
    }

    pub(super) fn total(&self) -> f64 {
        self.by_name().iter().map(|(_, seconds)| seconds).sum()
    }
}

/// Calls that return when the GPU has done something.
const GPU_WAITS: [Family; 4] = [
    Family::StreamWait,
    Family::EventWait,
    Family::ContextWait,
    Family::CopyWait,
];

/// What a loader is blocked by while it fetches.
const FETCHES: [BlockedBy; 3] = [BlockedBy::Io, BlockedBy::Network, BlockedBy::PageFault];

fn total(process: &ObservedProcess, family: Family) -> f64 {
    let durations = process.duration(family);
    durations.map_or(0.0, |durations| seconds(durations.sum_ns))
}

/// If launches were sampled, those that were seen stand for all.
fn launch_seconds(process: &ObservedProcess, launches: u64) -> f64 {
    let timed = process
        .duration(Family::Launch)
        .map_or(0, |times| times.count);
    let scale = launches.max(timed) as f64 / timed.max(1) as f64;
    scale * total(process, Family::Launch)
}

fn collectives(process: &ObservedProcess) -> Vec<Collective> {
    let mut collectives = Vec::new();
    for operation in Operation::ALL {
        let count = process.count(|what| what == Counts::Communication(operation));
        if count.calls == 0 {
            continue;
        }
        let until_sync = process.duration(Family::UntilSync(operation));
        collectives.push(Collective {
            op: operation.name(),
            calls: count.calls,
            bytes: count.bytes,
            until_sync_median_seconds: until_sync.map(|times| seconds(times.p50_ns())),
            until_sync_mean_seconds: until_sync
                .map(|times| seconds(times.sum_ns) / times.count.max(1) as f64),
        });
    }
    collectives
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// The clock of the probes.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
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
        phases.fill(5.0);
        assert_eq!((phases.total(), phases.unknown), (5.0, 2.0));
        assert_eq!(phases.more_than_wall, 0.0);
    }

    #[test]
    fn what_two_threads_have_in_common_is_said() {
        let mut phases = Phases {
            gpu_compute: 7.0,
            ..Phases::default()
        };
        phases.fill(5.0);
        assert_eq!((phases.unknown, phases.more_than_wall), (0.0, 2.0));
    }
}
