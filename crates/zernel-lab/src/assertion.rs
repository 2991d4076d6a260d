//! Assertions about a scenario's run, and the verdicts on them.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use zernel_workload::SchedPolicy;

use crate::scenario::Scenario;
use crate::scenario::figures::{CpuTimeFigures, GroupFigures, RunFigures, exact_quantile};

mod idle_time;

use idle_time::judge_idle_time;

/// The longest time that a runnable task may wait when a scenario does not say. A fair scheduler with
/// twice as many tasks as CPUs lets each wait for some milliseconds.
const DEFAULT_MAX_RUNNABLE_WAIT_MS: u64 = 250;
/// Number of samples that must lie beyond a quantile before the quantile is judged.
const MIN_SAMPLES_BEYOND_QUANTILE: f64 = 2.0;

/// What must hold in a run of a scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Assertion {
    /// No task waits longer than this time, neither runnable without a CPU nor between two rounds of a worker. Replaces
    /// the default of 250 ms.
    Starvation {
        /// The longest wait that passes, in milliseconds.
        at_most_ms: u64,
    },
    /// Groups get CPU time in the proportions of `shares`.
    Fairness {
        /// The ideal share of each group, in any unit.
        shares: BTreeMap<String, f64>,
        /// The largest deviation of a group's share from its ideal share that passes, in percent.
        within_percent: f64,
    },
    /// A group uses this number of CPUs on average.
    CpuTime {
        /// The name of the group.
        group: String,
        /// The ideal number of CPUs.
        cpus: f64,
        /// The largest deviation from the ideal number that passes, in percent.
        within_percent: f64,
    },
    /// A group uses at most this number of CPUs on average.
    CpuLimit {
        /// The name of the group.
        group: String,
        /// The largest number of CPUs that passes.
        at_most_cpus: f64,
    },
    /// The workers of a group run on certain CPUs only.
    Isolation {
        /// The name of the group.
        group: String,
        /// The CPUs on which the workers may run.
        cpus: Vec<usize>,
    },
    /// A quantile of a group's wake-up latencies has at most a certain value.
    Latency {
        /// The name of the group.
        group: String,
        /// The quantile of the wake-up latency that is judged, 0 to 1.
        quantile: f64,
        /// The largest latency that passes, in microseconds.
        at_most_us: u64,
    },
    /// A quantile of a group's step times is at most a given value.
    StepTime {
        /// The name of the group.
        group: String,
        /// The quantile of the step time that is judged, 0 to 1.
        quantile: f64,
        /// The largest step time that passes, in microseconds.
        at_most_us: u64,
    },
    /// A group does at least a certain number of steps per second, or of rounds if it has no steps.
    Throughput {
        /// The name of the group.
        group: String,
        /// The smallest number per second that passes.
        at_least_per_s: f64,
    },
}

impl Assertion {
    /// The names of the groups that the assertion is about.
    #[must_use]
    pub fn named_groups(&self) -> Vec<&str> {
        match self {
            Self::Starvation { .. } => Vec::new(),
            Self::Fairness { shares, .. } => shares.keys().map(String::as_str).collect(),
            Self::CpuTime { group, .. }
            | Self::CpuLimit { group, .. }
            | Self::Isolation { group, .. }
            | Self::Latency { group, .. }
            | Self::StepTime { group, .. }
            | Self::Throughput { group, .. } => vec![group.as_str()],
        }
    }
}

/// The verdict on a run or on one assertion. Of several verdicts, the largest one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The assertion held.
    Pass,
    /// The assertion could not be tried on this machine.
    Skip,
    /// The run shows neither that the assertion held nor that it did not.
    Inconclusive,
    /// The assertion did not hold.
    Fail,
}

impl Verdict {
    /// The exit code of a program that reports this verdict. 2 is not used: it means wrong usage.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 1,
            Self::Inconclusive => 3,
            Self::Skip => 4,
        }
    }

    fn from_assertion_met(is_met: bool) -> Self {
        match is_met {
            true => Self::Pass,
            false => Self::Fail,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Pass => "pass",
            Self::Skip => "skip",
            Self::Inconclusive => "inconclusive",
            Self::Fail => "FAIL",
        })
    }
}

/// The verdict on one assertion, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Whether the assertion held.
    pub verdict: Verdict,
    /// What the assertion expects, and what was measured.
    pub text: String,
}

impl Finding {
    fn new(is_met: bool, text: String) -> Self {
        Self {
            verdict: Verdict::from_assertion_met(is_met),
            text,
        }
    }
}

/// The worst verdict of some findings; without findings, a pass.
#[must_use]
pub fn worst_verdict(findings: &[Finding]) -> Verdict {
    let verdicts = findings.iter().map(|finding| finding.verdict);
    verdicts.max().unwrap_or(Verdict::Pass)
}

/// Judges a run by the assertions that hold for every scenario, then by the scenario's own assertions.
#[must_use]
pub fn judge_run(
    scenario: &Scenario,
    figures: &RunFigures,
    kernel_warning: Option<&str>,
) -> Vec<Finding> {
    let mut findings = vec![
        judge_starvation(scenario, figures),
        judge_loaded_scheduler(figures),
        judge_kernel_warning(kernel_warning),
        judge_completion(figures),
    ];
    findings.extend(figures.account.as_ref().map(judge_cpu_time_account));
    findings.extend(judge_idle_time(scenario, figures));
    let own_assertions = scenario.assertions.iter();
    findings.extend(own_assertions.filter_map(|assertion| judge_assertion(assertion, figures)));
    let was_ejected_for_idling = kernel_warning.is_some() && has_idle_cpu(figures);
    if emulator_skipped_a_cpu(figures) && !was_ejected_for_idling {
        // If the emulator did not execute a CPU, the run shows nothing about the scheduler. That holds even if the
        // kernel ejected the scheduler because a task was stuck on that CPU.
        let failed_findings = findings
            .iter_mut()
            .filter(|finding| finding.verdict == Verdict::Fail);
        failed_findings.for_each(|finding| finding.verdict = Verdict::Inconclusive);
    }
    findings
}

fn judge_starvation(scenario: &Scenario, figures: &RunFigures) -> Finding {
    let scenario_limit_ms = scenario
        .assertions
        .iter()
        .find_map(|assertion| match assertion {
            Assertion::Starvation { at_most_ms } => Some(*at_most_ms),
            _ => None,
        });
    let limit_ms = scenario_limit_ms.unwrap_or(DEFAULT_MAX_RUNNABLE_WAIT_MS);
    let longest_wait_ns = |group: &GroupFigures| {
        let latest_wakeup_ns = group.wake_latency.quantile(1.0).unwrap_or(0);
        let wait_ns = group.longest_wait_ns.max(group.largest_gap_ns);
        wait_ns.max(latest_wakeup_ns)
    };
    // A SCHED_IDLE task runs only when no other task is runnable, which may be never.
    let may_starve = |group: &&GroupFigures| {
        let policy = scenario.find_group(&group.name).map(|group| &group.policy);
        policy == Some(&Some(SchedPolicy::Idle))
    };
    let judged_groups = figures.groups.iter().filter(|group| !may_starve(group));
    let never_ran: usize = judged_groups.clone().map(|group| group.never_ran).sum();
    let worst_group = judged_groups.max_by_key(|group| longest_wait_ns(group));
    let (name, wait_ms) = worst_group.map_or(("nobody", 0.0), |group| {
        (group.name.as_str(), longest_wait_ns(group) as f64 / 1e6)
    });
    let is_met = wait_ms <= limit_ms as f64 && never_ran == 0;
    let mut text =
        format!("starvation: longest wait {wait_ms:.1} ms (`{name}`), at most {limit_ms} ms");
    if never_ran > 0 {
        text += &format!("; {never_ran} workers never ran");
    }
    Finding::new(is_met, text)
}

/// Whether the emulator left a CPU out for some time, so that its tasks could not run.
fn emulator_skipped_a_cpu(figures: &RunFigures) -> bool {
    let account = figures.account.as_ref();
    account.is_some_and(|account| !account.stuck.is_empty())
}

/// Whether the CPUs were idle for as long as one CPU all the time. When the emulator leaves a CPU out, it executes the
/// other CPUs without a pause. When a scheduler forgets tasks, the other CPUs idle.
fn has_idle_cpu(figures: &RunFigures) -> bool {
    let account = figures.account.as_ref();
    account.is_some_and(|account| account.idle >= 1.0)
}

fn judge_loaded_scheduler(figures: &RunFigures) -> Finding {
    let scheduler = &figures.scheduler;
    let text = match (scheduler.expected, scheduler.at_end) {
        (false, _) => "scheduler: EEVDF".to_owned(),
        (true, true) => format!("scheduler: `{}` still loaded at the end", scheduler.loaded),
        (true, false) => format!(
            "scheduler: `{}` was not loaded any more at the end; it printed: {}",
            scheduler.loaded, scheduler.output
        ),
    };
    Finding::new(!scheduler.expected || scheduler.at_end, text)
}

/// Beginnings of kernel messages that a run must not cause: warnings and crashes.
const KERNEL_WARNING_TEXTS: [&str; 7] = [
    "WARNING:",
    "BUG:",
    "INFO: rcu",
    "INFO: task ",
    "watchdog: BUG",
    "Oops",
    "runtime error",
];

/// Functions that warn if the kernel itself is single-stepped, which only the emulator does: after cmpxchg16b, QEMU 7.2
/// sometimes leaves an invalid value in the flags register. No scheduler can set the trap flag of the kernel.
const EMULATOR_FAULT_TEXTS: [&str; 1] = [" exc_debug_kernel+"];

/// Whether a kernel message shows a fault of the emulator.
fn shows_emulator_fault(message: &str) -> bool {
    EMULATOR_FAULT_TEXTS
        .iter()
        .any(|text| message.contains(text))
}

fn judge_kernel_warning(kernel_warning: Option<&str>) -> Finding {
    match kernel_warning {
        None => Finding::new(true, "kernel: no warning".to_owned()),
        Some(line) if shows_emulator_fault(line) => Finding {
            verdict: Verdict::Inconclusive,
            text: format!("kernel: the emulator changed its flags: {line}"),
        },
        Some(line) => Finding::new(false, format!("kernel: {line}")),
    }
}

/// Reasons for which a scheduler ends without a fault: its program unloaded it, or a CPU came or went. After the latter
/// the program is expected to load the scheduler again, which is judged at the end of the run.
const ORDERLY_UNLOAD_REASONS: [&str; 2] = [
    "unregistered from user space",
    "unregistered from the main kernel",
];

/// The first kernel message on a console that is a warning, or the ejection of a scheduler. One that shows a fault of
/// the emulator counts only if there is no other.
#[must_use]
pub fn first_kernel_warning(console: &str) -> Option<String> {
    let mut warnings = console.lines().filter_map(kernel_warning_in_line);
    let first = warnings.next()?;
    match shows_emulator_fault(&first) {
        true => Some(
            warnings
                .find(|warning| !shows_emulator_fault(warning))
                .unwrap_or(first),
        ),
        false => Some(first),
    }
}

/// The message of a console line without its time, if it is a warning or the ejection of a scheduler.
pub(crate) fn kernel_warning_in_line(line: &str) -> Option<String> {
    let message = line.split_once("] ").map_or(line, |(_, rest)| rest);
    let is_ejection = message.starts_with("sched_ext:")
        && message.contains("disabled (")
        && !ORDERLY_UNLOAD_REASONS
            .iter()
            .any(|end| message.contains(end));
    let is_warning = is_ejection
        || KERNEL_WARNING_TEXTS
            .iter()
            .any(|warning| message.contains(warning));
    is_warning.then(|| message.to_owned())
}

fn judge_completion(figures: &RunFigures) -> Finding {
    let early_ends = figures.groups.iter().flat_map(|group| {
        let with_group_name = |text: &String| format!("`{}` {text}", group.name);
        group.ended_early.iter().map(with_group_name)
    });
    let mut problems: Vec<String> = early_ends.collect();
    problems.extend(figures.problems.iter().cloned());
    if !problems.is_empty() {
        return Finding::new(false, format!("completed: {}", problems.join("; ")));
    }
    let refused_settings = figures
        .groups
        .iter()
        .flat_map(|group| &group.refused_settings);
    match refused_settings.into_iter().next() {
        Some(setting) => Finding {
            verdict: Verdict::Inconclusive,
            text: format!("completed: the kernel refused {setting}"),
        },
        None => Finding::new(true, "completed: all workers and steps".to_owned()),
    }
}

/// Judges whether the figures of a run can be believed: all CPU time is accounted for, and the emulator executed every
/// CPU.
fn judge_cpu_time_account(account: &CpuTimeFigures) -> Finding {
    let (sum, cpus) = (account.sum_cpus(), account.cpus);
    let verdict = match account.adds_up && account.stuck.is_empty() {
        true => Verdict::Pass,
        false => Verdict::Inconclusive,
    };
    let mut text = format!("account: {sum:.3} of {cpus} CPUs");
    for (cpu, seconds) in &account.stuck {
        text += &format!("; CPU {cpu} missed {seconds:.2} s of ticks");
    }
    Finding { verdict, text }
}

/// Judges one assertion of a scenario. Returns `None` for an assertion on starvation, which is judged in every
/// scenario.
fn judge_assertion(assertion: &Assertion, figures: &RunFigures) -> Option<Finding> {
    let group_missing = |name: &str| Finding {
        verdict: Verdict::Inconclusive,
        text: format!("group `{name}` did not run"),
    };
    if let Some(name) = assertion
        .named_groups()
        .into_iter()
        .find(|name| figures.find_group(name).is_none())
    {
        return Some(group_missing(name));
    }
    match assertion {
        Assertion::Starvation { .. } => None,
        Assertion::Latency { .. } | Assertion::StepTime { .. } => {
            judge_quantile(assertion, figures)
        }
        _ => judge_cpu_time_or_throughput(assertion, figures),
    }
}

/// Judges assertions on CPU time, on the CPUs that a group may use, and on throughput.
fn judge_cpu_time_or_throughput(assertion: &Assertion, figures: &RunFigures) -> Option<Finding> {
    let used_by = |name: &String| figures.cpus_used_by_groups(std::slice::from_ref(name));
    let group = |name: &str| figures.find_group(name).cloned().unwrap_or_default();
    let (is_met, text) = match assertion {
        Assertion::Fairness {
            shares,
            within_percent,
        } => return Some(judge_fairness(shares, *within_percent, figures)),
        Assertion::CpuTime {
            group: name,
            cpus,
            within_percent,
        } => {
            let used_cpus = used_by(name);
            let text = format!(
                "cpu time: `{name}` used {used_cpus:.3} CPUs, {cpus} within {within_percent} %"
            );
            let is_met = (used_cpus / cpus - 1.0).abs() * 100.0 <= *within_percent;
            (is_met, text)
        }
        Assertion::CpuLimit {
            group: name,
            at_most_cpus,
        } => {
            let used_cpus = used_by(name);
            let text =
                format!("cpu limit: `{name}` used {used_cpus:.3} CPUs, at most {at_most_cpus}");
            (used_cpus <= *at_most_cpus, text)
        }
        Assertion::Isolation { group: name, cpus } => {
            let cpus_ran_on = group(name).cpus_used;
            let text =
                format!("isolation: `{name}` ran on CPUs {cpus_ran_on:?}, allowed are {cpus:?}");
            (cpus_ran_on.iter().all(|cpu| cpus.contains(cpu)), text)
        }
        Assertion::Throughput {
            group: name,
            at_least_per_s,
        } => {
            let rate = group(name).rate_per_second(figures.window_ns);
            let text =
                format!("throughput: `{name}` {rate:.1} per second, at least {at_least_per_s}");
            (rate >= *at_least_per_s, text)
        }
        _ => return None,
    };
    Some(Finding::new(is_met, text))
}

/// Judges quantiles of wake-up latency and step time.
fn judge_quantile(assertion: &Assertion, figures: &RunFigures) -> Option<Finding> {
    let group = |name: &str| figures.find_group(name).cloned().unwrap_or_default();
    match assertion {
        Assertion::Latency {
            group: name,
            quantile,
            at_most_us,
        } => {
            let latency = group(name).wake_latency;
            let (limit, value) = ((*quantile, *at_most_us), latency.quantile(*quantile));
            let samples = latency.count;
            Some(judge_quantile_of_samples(
                "wake-up latency",
                name,
                limit,
                value,
                samples,
            ))
        }
        Assertion::StepTime {
            group: name,
            quantile,
            at_most_us,
        } => {
            let steps = group(name).steps_ns;
            let (limit, value) = ((*quantile, *at_most_us), exact_quantile(&steps, *quantile));
            let samples = steps.len() as u64;
            Some(judge_quantile_of_samples(
                "step time",
                name,
                limit,
                value,
                samples,
            ))
        }
        _ => None,
    }
}

fn judge_fairness(
    shares: &BTreeMap<String, f64>,
    within_percent: f64,
    figures: &RunFigures,
) -> Finding {
    let group_cpu_ns =
        |name: &String| figures.find_group(name).map_or(0, |group| group.cpu_ns) as f64;
    let total_ns: f64 = shares.keys().map(group_cpu_ns).sum();
    let ideal_total: f64 = shares.values().sum();
    let deviation = |(name, ideal): (&String, &f64)| {
        let (share, ideal) = (group_cpu_ns(name) / total_ns.max(1.0), ideal / ideal_total);
        let percent = (share / ideal - 1.0) * 100.0;
        (
            percent,
            format!("`{name}` {share:.3} (ideal {ideal:.3}, {percent:+.1} %)"),
        )
    };
    let deviations: Vec<(f64, String)> = shares.iter().map(deviation).collect();
    let is_met = deviations
        .iter()
        .all(|(percent, _)| percent.abs() <= within_percent);
    let texts: Vec<&str> = deviations.iter().map(|(_, text)| text.as_str()).collect();
    Finding::new(
        is_met,
        format!("fairness within {within_percent} %: {}", texts.join(", ")),
    )
}

fn judge_quantile_of_samples(
    metric_name: &str,
    group: &str,
    (quantile, at_most_us): (f64, u64),
    value_ns: Option<u64>,
    samples: u64,
) -> Finding {
    let samples_beyond = samples as f64 * (1.0 - quantile);
    let value_us = value_ns.unwrap_or(0) as f64 / 1e3;
    let text = format!(
        "{metric_name}: `{group}` p{} {value_us:.1} µs of {samples}, at most {at_most_us} µs",
        quantile * 100.0
    );
    let verdict = match value_us <= at_most_us as f64 {
        // A few samples are enough to show that a quantile is too large. They are not enough to show that it is small.
        true if value_ns.is_none()
            || (quantile < 1.0 && samples_beyond < MIN_SAMPLES_BEYOND_QUANTILE) =>
        {
            Verdict::Inconclusive
        }
        is_met => Verdict::from_assertion_met(is_met),
    };
    Finding { verdict, text }
}

#[cfg(test)]
mod tests;
