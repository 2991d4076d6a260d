//! The report on a run as data.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::thread::CpuSet;
use serde::Serialize;

use super::parts::RankTimes;
use super::process::ProcessReport;
use super::verdict::{self, Inconclusive, Slowest, Verdict};

/// Name of the software GPU.
const SIMULATED: &str = "Zernel Software GPU";

/// What was observed of the processes of a run.
#[derive(Debug, Clone, Default)]
pub struct Observation {
    /// The processes.
    pub processes: Vec<ProcessReport>,
    /// Time that a probed call costs its thread.
    pub call_cost_seconds: f64,
    /// How probes were attached.
    pub rung: String,
    /// Whether the daemon observed.
    pub by_daemon: bool,
    /// The functions that the processes called and that were sampled at some time.
    pub sampled: BTreeSet<String>,
    /// What makes the numbers incomplete, one sentence each.
    pub problems: Vec<String>,
}

/// How the command exited, and the CPU time that it and its children used.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ended {
    /// Exit code, if it exited by itself.
    pub code: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// CPU time in user mode.
    pub user_seconds: f64,
    /// CPU time in the kernel.
    pub system_seconds: f64,
}

impl Ended {
    /// The exit code that a shell would report.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        let code = self.code.or(self.signal.map(|signal| 128 + signal));
        code.map_or(1, |code| code as u8)
    }
}

/// The report on a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub(crate) command: Vec<String>,
    /// When the run began.
    pub(crate) began_unix_seconds: u64,
    pub(crate) wall_seconds: f64,
    /// `None`: `zernel attach` observed it, and it may still run.
    pub(crate) ended: Option<Ended>,
    /// Why nothing was observed.
    pub(crate) not_observed: Option<String>,
    /// Training processes, by rank.
    pub(crate) ranks: Vec<ProcessReport>,
    /// Number of processes that load data for them.
    pub(crate) loaders: usize,
    /// Number of other observed processes: they called CUDA or NCCL, but did not train.
    pub(crate) others: usize,
    pub(crate) verdict: Verdict,
    pub(crate) slowest: Option<Slowest>,
    pub(crate) observing: Option<ObservationReport>,
    /// What makes the numbers incomplete, one sentence each.
    pub(crate) problems: Vec<String>,
}

/// How the run was observed, and the overhead.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub(crate) struct ObservationReport {
    pub(crate) rung: String,
    /// Whether the daemon observed it.
    pub(crate) by_daemon: bool,
    pub(crate) call_cost_seconds: f64,
    /// Overhead over all threads.
    pub(crate) cost_seconds: f64,
    /// Overhead of the most affected rank, as a share of its wall time.
    pub(crate) cost_share: f64,
    /// Sampled functions.
    pub(crate) sampled: Vec<String>,
}

impl Report {
    /// The report on a run of `command`, from what was observed, or why nothing was.
    #[must_use]
    pub fn new(
        command: Vec<String>,
        wall: Duration,
        ended: Option<Ended>,
        outcome: Result<Observation, String>,
    ) -> Self {
        let (observation, not_observed) = match outcome {
            Ok(observation) => (Some(observation), None),
            Err(reason) => (None, Some(reason)),
        };
        let observing = observation.as_ref().map(ObservationReport::new);
        let (processes, problems) = observation
            .map(|observation| (observation.processes, observation.problems))
            .unwrap_or_default();
        let loaders = processes.iter().filter(|process| process.is_loader).count();
        let all = processes.len();
        let mut ranks: Vec<ProcessReport> = processes
            .iter()
            .filter(|process| process.is_rank())
            .cloned()
            .collect();
        ranks.sort_by_key(|process| (process.rank.is_none(), process.rank, process.pid));
        let times: Vec<RankTimes> = ranks
            .iter()
            .map(|rank| rank_times(rank, &ranks, &processes))
            .collect();
        let verdict = match not_observed {
            Some(_) => Verdict::CannotTell(Inconclusive::NotObserved),
            None => verdict::judge(&times),
        };
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let began = since_epoch.unwrap_or_default().saturating_sub(wall);
        Self {
            command,
            began_unix_seconds: began.as_secs(),
            wall_seconds: wall.as_secs_f64(),
            ended,
            not_observed,
            loaders,
            others: all - loaders - ranks.len(),
            verdict,
            slowest: verdict::slowest(&times),
            ranks,
            observing,
            problems,
        }
    }
}

impl Report {
    /// Names of the GPUs in use, with their number.
    pub(crate) fn gpus(&self) -> Option<String> {
        let mut names: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (number, name) in self.ranks.iter().flat_map(|rank| &rank.gpus) {
            names.entry(name.as_deref()?).or_default().insert(number);
        }
        let each = names.iter().map(|(name, numbers)| {
            let label = if *name == SIMULATED {
                " (simulated)"
            } else {
                ""
            };
            match numbers.len() {
                1 => format!("{name}{label}"),
                count => format!("{count} × {name}{label}"),
            }
        });
        let text = each.collect::<Vec<_>>().join(", ");
        (!text.is_empty()).then_some(text)
    }
}

impl ObservationReport {
    fn new(observation: &Observation) -> Self {
        let ranks = observation
            .processes
            .iter()
            .filter(|process| process.is_rank());
        let costs = observation
            .processes
            .iter()
            .map(|process| process.cost_seconds);
        Self {
            rung: observation.rung.clone(),
            by_daemon: observation.by_daemon,
            call_cost_seconds: observation.call_cost_seconds,
            cost_seconds: costs.fold(0.0, |sum, cost| sum + cost),
            cost_share: ranks.map(ProcessReport::cost_share).fold(0.0, f64::max),
            sampled: observation.sampled.iter().cloned().collect(),
        }
    }
}

/// The measured times of a rank that the verdict uses.
fn rank_times(
    rank: &ProcessReport,
    ranks: &[ProcessReport],
    processes: &[ProcessReport],
) -> RankTimes {
    let times = rank.training_times();
    let collectives = rank.collectives.iter();
    // Collectives that one wait covers overlap, so at most one counts per wait.
    let until_sync = collectives.map(|collective| {
        let waits = times.gpu_waits.min(collective.calls as f64);
        waits * collective.until_sync_mean_seconds.unwrap_or(0.0)
    });
    RankTimes {
        wall: times.wall_seconds,
        communication: times.communication_seconds(),
        gpu_waits: times.gpu_wait_seconds,
        peer_waits: times.peer_wait_seconds,
        until_sync: until_sync.fold(0.0, f64::max),
        launching: times.launch_seconds,
        launches: times.launches,
        unknown: times.phases.unknown,
        data_waits: times.data_waits.total(),
        data_prepare: times.data_waits.prepare,
        data_fetch: times.data_waits.fetch,
        data_sched: times.data_waits.sched,
        cpu: times.calling_cpu_seconds,
        run_delay: times.calling_run_delay_seconds,
        gpu_busy: times.gpu_busy_seconds,
        loader_busy: loader_busy(rank, processes),
        loaders_fill_cpus: loader_count(rank, processes) >= cpu_count(rank, ranks),
    }
}

/// Shortest lifetime of a loader that counts, as a share of its rank's time.
const MIN_LOADER_LIFETIME: f64 = 0.2;

/// Busy share of the busiest loader of a rank. `None`: it has no loaders.
fn loader_busy(rank: &ProcessReport, processes: &[ProcessReport]) -> Option<f64> {
    let own = processes.iter().filter(|process| {
        let is_short =
            process.times.wall_seconds < MIN_LOADER_LIFETIME * rank.training_times().wall_seconds;
        process.loads_for == Some(rank.pid) && !is_short
    });
    let shares =
        own.map(|loader| loader.loading_seconds() / loader.times.wall_seconds.max(f64::EPSILON));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Times;

    fn lived(pid: u32, wall_seconds: f64) -> ProcessReport {
        let times = Times {
            wall_seconds,
            ..Times::default()
        };
        ProcessReport {
            pid,
            times,
            ..ProcessReport::default()
        }
    }

    fn may_use(cpus: std::ops::Range<usize>) -> ProcessReport {
        let mut rank = lived(1, 10.0);
        cpus.for_each(|cpu| rank.cpus.set(cpu));
        rank
    }

    #[test]
    fn consecutive_loaders_count_as_one() {
        let rank = lived(1, 10.0);
        let loader = |loads_for, wall_seconds| ProcessReport {
            is_loader: true,
            loads_for: Some(loads_for),
            ..lived(7, wall_seconds)
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

    #[test]
    fn ranks_share_cpus_evenly() {
        let of_first = |ranks: &[ProcessReport]| cpu_count(&ranks[0], ranks);
        assert_eq!(of_first(&[may_use(0..8)]), 8.0);
        assert_eq!(of_first(&[may_use(0..8), may_use(0..8)]), 4.0);
        assert_eq!(of_first(&[may_use(0..4), may_use(4..8)]), 4.0);
        assert_eq!(of_first(&[may_use(0..0), may_use(0..8)]), f64::INFINITY);
    }
}
