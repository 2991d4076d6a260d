//! The figures of a run: what was measured in the virtual machine.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use zernel_workload::Histogram;

use crate::cpu_time_account::CpuTimeAccount;

/// All figures of one run, in the form in which the virtual machine prints them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RunFigures {
    /// Length of the measurement.
    pub window_ns: u64,
    /// What became of the scheduler in the run.
    pub scheduler: SchedulerFigures,
    /// The figures of each group, in the scenario's order.
    pub groups: Vec<GroupFigures>,
    /// The longest time, in nanoseconds, for which a thread of the observer was seen runnable and not running; `None`
    /// without an observer.
    #[serde(default)]
    pub observer_longest_wait_ns: Option<u64>,
    /// Where the CPU time of the run went; `None` if it could not be read.
    pub account: Option<CpuTimeFigures>,
    /// What went wrong in the guest, such as a step that the kernel refused.
    pub problems: Vec<String>,
}

/// How the time of all CPUs was used, in CPUs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CpuTimeFigures {
    /// Number of CPUs of the virtual machine, which all other figures must add up to.
    pub cpus: usize,
    /// CPUs that each group and the observer used.
    pub groups: Vec<(String, f64)>,
    /// CPUs that kernel threads used.
    pub kernel: f64,
    /// CPUs that other processes used: the measuring program, and the scheduler's program.
    pub other: f64,
    /// CPUs that were idle.
    pub idle: f64,
    /// CPUs that were switched off, in proportion to the time.
    pub offline: f64,
    /// Whether all parts add up to the number of CPUs.
    pub adds_up: bool,
    /// CPUs that missed ticks, with the time in seconds: the emulator did not execute these CPUs.
    pub stuck: Vec<(usize, f64)>,
}

impl CpuTimeFigures {
    /// The sum of all parts, in CPUs.
    #[must_use]
    pub fn sum_cpus(&self) -> f64 {
        let groups: f64 = self.groups.iter().map(|(_, cpus)| cpus).sum();
        groups + self.kernel + self.other + self.idle + self.offline
    }
}

impl fmt::Display for CpuTimeFigures {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names_and_cpus: Vec<(&str, f64)> = Vec::new();
        // A group that was moved has one entry for each of its cgroups.
        for (name, cpus) in &self.groups {
            match names_and_cpus.iter_mut().find(|(known, _)| known == name) {
                Some((_, sum)) => *sum += cpus,
                None => names_and_cpus.push((name, *cpus)),
            }
        }
        names_and_cpus.push(("kernel threads", self.kernel));
        names_and_cpus.push(("other", self.other));
        names_and_cpus.push(("idle", self.idle));
        if self.offline > 0.0 {
            names_and_cpus.push(("offline", self.offline));
        }
        let texts: Vec<String> = names_and_cpus
            .iter()
            .map(|(name, cpus)| format!("{name} {cpus:.3}"))
            .collect();
        let (texts, sum) = (texts.join(" + "), self.sum_cpus());
        write!(formatter, "{texts} = {sum:.3} of {} CPUs", self.cpus)?;
        match self.adds_up {
            true => Ok(()),
            false => formatter.write_str(": does not add up"),
        }
    }
}

impl From<CpuTimeAccount> for CpuTimeFigures {
    fn from(account: CpuTimeAccount) -> Self {
        Self {
            cpus: account.cpu_count,
            kernel: account.kernel_cpus,
            other: account.other_processes_cpus,
            idle: account.idle_cpus,
            offline: account.offline_cpus,
            adds_up: account.adds_up(),
            stuck: account
                .stuck_cpus
                .iter()
                .map(|(cpu, missed)| (*cpu, missed.as_secs_f64()))
                .collect(),
            groups: account.cgroups,
        }
    }
}

/// Whether the scheduler under test was loaded in a run, and what its program printed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SchedulerFigures {
    /// Whether the run was to use a sched_ext scheduler.
    pub expected: bool,
    /// The name of the sched_ext scheduler that was loaded; empty if none was loaded.
    pub loaded: String,
    /// Whether the scheduler was still loaded at the end of the measurement.
    pub at_end: bool,
    /// The last lines that the scheduler's program printed.
    pub output: String,
}

/// The figures of one group during the measurement.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct GroupFigures {
    /// The name of the group.
    pub name: String,
    /// Number of workers of the group.
    pub workers: usize,
    /// CPU time of the group's workers, their threads and the processes that they forked, in nanoseconds.
    pub cpu_ns: u64,
    /// Time that tasks of the group waited for a CPU, in nanoseconds. Tasks that had exited at the end do not count.
    pub run_delay_ns: u64,
    /// Rounds that the workers of the group did.
    pub rounds: u64,
    /// The longest time, in nanoseconds, for which one task of the group was seen runnable and not running.
    pub longest_wait_ns: u64,
    /// The longest time between two rounds of a worker that was not blocked, in nanoseconds. Rounds during the warm-up
    /// count too.
    pub largest_gap_ns: u64,
    /// Number of workers that never ran.
    pub never_ran: usize,
    /// The workers that ended before they should, and how.
    pub ended_early: Vec<String>,
    /// The settings of workers that the kernel refused.
    pub refused_settings: Vec<String>,
    /// The CPUs on which the group's workers were seen.
    pub cpus_used: BTreeSet<usize>,
    /// Wake-up latencies of the group's workers.
    pub wake_latency: Histogram,
    /// Durations of training steps, or times from request to answer, in nanoseconds.
    pub steps_ns: Vec<u64>,
    /// Times from a trainer's first copy of a step until the GPU is done, of all trainers, in nanoseconds.
    #[serde(default)]
    pub gpu_phases_ns: Vec<u64>,
}

impl RunFigures {
    /// The figures of the group with this name.
    #[must_use]
    pub fn find_group(&self, name: &str) -> Option<&GroupFigures> {
        self.groups.iter().find(|group| group.name == name)
    }

    /// CPUs that these groups used on average.
    #[must_use]
    pub fn cpus_used_by_groups(&self, names: &[String]) -> f64 {
        let used = names.iter().filter_map(|name| self.find_group(name));
        let cpu_ns: u64 = used.map(|group| group.cpu_ns).sum();
        cpu_ns as f64 / self.window_ns.max(1) as f64
    }
}

impl GroupFigures {
    /// Steps of the group per second, or rounds if the group has no steps.
    #[must_use]
    pub fn rate_per_second(&self, window_ns: u64) -> f64 {
        let count = match self.steps_ns.is_empty() {
            true => self.rounds,
            false => self.steps_ns.len() as u64,
        };
        count as f64 / (window_ns.max(1) as f64 / 1e9)
    }
}

/// The smallest value that at least the share `quantile` of all values does not exceed.
#[must_use]
pub fn exact_quantile(values: &[u64], quantile: f64) -> Option<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (quantile.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_account_sums_groups_of_one_name() {
        let account = CpuTimeFigures {
            cpus: 4,
            groups: [("a", 1.0), ("b", 0.5), ("a", 0.25)]
                .map(|(name, cpus)| (name.to_owned(), cpus))
                .into(),
            idle: 2.25,
            adds_up: true,
            ..CpuTimeFigures::default()
        };
        assert_eq!(
            account.to_string(),
            "a 1.250 + b 0.500 + kernel threads 0.000 + other 0.000 + idle 2.250 = 4.000 of 4 CPUs"
        );
    }

    #[test]
    fn exact_quantile_returns_a_sample() {
        let values: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(exact_quantile(&values, 0.5), Some(50));
        assert_eq!(exact_quantile(&values, 0.99), Some(99));
        assert_eq!(exact_quantile(&values, 1.0), Some(100));
        assert_eq!(exact_quantile(&values, 0.0), Some(1));
        assert_eq!(exact_quantile(&[], 0.5), None);
    }
}
