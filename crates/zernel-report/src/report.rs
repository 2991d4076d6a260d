//! The report on a run as data.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::process::ProcessReport;
use super::times::RankTimes;
use super::verdict::{self, Inconclusive, SlowestRank, Verdict};

/// Name of the software GPU.
const SOFTWARE_GPU_NAME: &str = "Zernel Software GPU";

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
pub struct CommandExit {
    /// Exit code, if it exited by itself.
    pub code: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// CPU time in user mode.
    pub user_seconds: f64,
    /// CPU time in the kernel.
    pub system_seconds: f64,
}

impl CommandExit {
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
    pub(crate) ended: Option<CommandExit>,
    /// For a job that was attached to: seconds until the first call of a rank was observed.
    pub(crate) observing_began_seconds: Option<f64>,
    /// Why nothing was observed.
    pub(crate) not_observed: Option<String>,
    /// Training processes, by rank.
    pub(crate) ranks: Vec<ProcessReport>,
    /// Number of processes that load data for them.
    pub(crate) loaders: usize,
    /// Number of other observed processes, which did not train.
    pub(crate) others: usize,
    pub(crate) verdict: Verdict,
    pub(crate) slowest: Option<SlowestRank>,
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
        ended: Option<CommandExit>,
        outcome: Result<Observation, String>,
    ) -> Self {
        let (observation, not_observed) = match outcome {
            Ok(observation) => (Some(observation), None),
            Err(reason) => (None, Some(reason)),
        };
        let observing = observation.as_ref().map(ObservationReport::new);
        let (mut processes, mut problems) = observation
            .map(|observation| (observation.processes, observation.problems))
            .unwrap_or_default();
        problems.extend(forget_busy_time_of_shared_gpus(&mut processes));
        let loaders = processes.iter().filter(|process| process.is_loader).count();
        let all = processes.len();
        let mut ranks: Vec<ProcessReport> = ProcessReport::find_ranks(&processes)
            .into_iter()
            .cloned()
            .collect();
        ranks.sort_by_key(|process| (process.rank.is_none(), process.rank, process.pid));
        let unobserved = ranks.iter().filter(|rank| rank.lacks_torch_probes);
        problems.extend(unobserved.map(|rank| {
            format!(
                "pid {} maps PyTorch, but not all functions that show training steps, batches and layers have probes, so \
                 these were not observed; zernel observe --ledger prints why",
                rank.pid
            )
        }));
        let times: Vec<RankTimes> = ranks
            .iter()
            .map(|rank| RankTimes::new(rank, &ranks, &processes))
            .collect();
        let verdict = match not_observed {
            Some(_) => Verdict::CannotTell(Inconclusive::NotObserved),
            None => verdict::judge_ranks(&times),
        };
        let longest = ranks.iter().map(|rank| rank.times.wall_seconds);
        let longest = longest.reduce(f64::max).filter(|_| ended.is_none());
        let observing_began_seconds =
            longest.map(|seconds| (wall.as_secs_f64() - seconds).max(0.0));
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let began = since_epoch.unwrap_or_default().saturating_sub(wall);
        Self {
            command,
            began_unix_seconds: began.as_secs(),
            wall_seconds: wall.as_secs_f64(),
            ended,
            observing_began_seconds,
            not_observed,
            loaders,
            others: all - loaders - ranks.len(),
            verdict,
            slowest: verdict::find_slowest_rank(&times),
            ranks,
            observing,
            problems,
        }
    }
}

/// Of the processes of a run, forgets how busy the GPUs were that processes outside of the run used too. Returns a sentence
/// for each.
fn forget_busy_time_of_shared_gpus(processes: &mut [ProcessReport]) -> Vec<String> {
    let own_pids: BTreeSet<u32> = processes.iter().map(|process| process.pid).collect();
    let shared = processes.iter_mut().filter_map(|process| {
        let other = process.forget_busy_time_of_shared_gpus(&own_pids)?;
        Some(format!(
            "pid {other}, which is not known to be part of the job, used the GPU of pid {} too, so it is unknown for which of them the \
             GPU was busy",
            process.pid
        ))
    });
    shared.collect()
}

impl Report {
    /// Names of the GPUs in use, with their number.
    pub(crate) fn gpus(&self) -> Option<String> {
        let mut names: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (number, name) in self.ranks.iter().flat_map(|rank| &rank.gpus) {
            names.entry(name.as_deref()?).or_default().insert(number);
        }
        let each = names.iter().map(|(name, numbers)| {
            let label = if *name == SOFTWARE_GPU_NAME {
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
        let ranks = ProcessReport::find_ranks(&observation.processes).into_iter();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::times::ProcessTimes;

    /// A GPU that another job keeps busy says nothing about this one.
    #[test]
    fn the_busy_time_of_a_shared_gpu_is_unknown() {
        let rank = |pid, gpu_users: &[u32]| ProcessReport {
            pid,
            gpu_users: gpu_users.iter().copied().collect(),
            times: ProcessTimes {
                gpu_busy_seconds: Some(9.0),
                ..ProcessTimes::default()
            },
            ..ProcessReport::default()
        };
        let mut job = [rank(7, &[7, 8]), rank(8, &[7, 8])];
        assert!(forget_busy_time_of_shared_gpus(&mut job).is_empty());
        let mut beside = [rank(7, &[7, 99]), rank(8, &[8])];
        let problems = forget_busy_time_of_shared_gpus(&mut beside);
        assert!(
            matches!(&problems[..], [text] if text.starts_with("pid 99")),
            "{problems:?}"
        );
        let busy = beside.map(|rank| rank.times.gpu_busy_seconds);
        assert_eq!(busy, [None, Some(9.0)]);
    }
}
