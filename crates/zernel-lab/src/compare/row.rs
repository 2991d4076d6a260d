//! The figures of one scheduler in one scenario, over all seeds.

use serde::{Deserialize, Serialize};
use zernel_workload::Histogram;

use super::metric::Metric;
use super::statistics::{SignTest, median};
use crate::assertion::Verdict;
use crate::scenario::Scenario;
use crate::scenario::figures::{GroupFigures, RunFigures, exact_quantile};
use crate::scenario_run::RunResult;

/// The figures of one scheduler in one scenario, over all seeds. Quantiles are over the samples of all seeds together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SchedulerRow {
    /// The name of the scheduler.
    pub scheduler: String,
    /// The worst verdict over all seeds.
    pub verdict: Verdict,
    /// The first finding that is not a pass, as text.
    pub problem: Option<String>,
    /// The compared figure by seed; `None` where a run measured nothing.
    pub by_seed: Vec<Option<f64>>,
    /// The median of the compared figure over all seeds.
    pub median: Option<f64>,
    /// Steps per second, or rounds per second for a group without steps: the median over the seeds.
    pub rate: Option<f64>,
    /// Number of steps of all seeds.
    pub steps: usize,
    /// Median step time in milliseconds.
    pub step_p50_ms: Option<f64>,
    /// 99th percentile of the step time in milliseconds.
    pub step_p99_ms: Option<f64>,
    /// Median wake-up latency in microseconds.
    pub wake_p50_us: Option<f64>,
    /// 99th percentile of the wake-up latency in microseconds.
    pub wake_p99_us: Option<f64>,
    /// The largest wake-up latency in microseconds.
    pub wake_max_us: Option<f64>,
    /// CPU time of the group per step, in milliseconds.
    pub cpu_ms_per_step: Option<f64>,
    /// Number of CPUs that the groups of the key `noise` used on average.
    pub noise_cpus: Option<f64>,
    /// The longest wait of any task, in milliseconds.
    pub longest_wait_ms: Option<f64>,
    /// The comparison with the first scheduler, by the sign test.
    pub against_first: SignTest,
}

impl SchedulerRow {
    pub(super) fn from_runs(
        scenario: &Scenario,
        metric: &Metric,
        runs: &[&RunResult],
        runs_of_first_scheduler: &[&RunResult],
    ) -> Self {
        let value = |run: &&RunResult| {
            run.figures
                .as_ref()
                .and_then(|figures| metric.value_in_run(figures))
        };
        let figures: Vec<&RunFigures> =
            runs.iter().filter_map(|run| run.figures.as_ref()).collect();
        let groups: Vec<&GroupFigures> = figures
            .iter()
            .filter_map(|figures| figures.find_group(&metric.group))
            .collect();
        let steps: Vec<u64> = groups
            .iter()
            .flat_map(|group| group.steps_ns.iter().copied())
            .collect();
        let wakes = groups.iter().fold(Histogram::default(), |sum, group| {
            sum.merged(&group.wake_latency)
        });
        let ms = |ns: Option<u64>| ns.map(|ns| ns as f64 / 1e6);
        let us = |ns: Option<u64>| ns.map(|ns| ns as f64 / 1e3);
        let pairs = runs_of_first_scheduler
            .iter()
            .zip(runs)
            .filter_map(|(first, run)| Some((value(first)?, value(run)?)));
        let by_seed: Vec<Option<f64>> = runs.iter().map(value).collect();
        Self {
            scheduler: runs
                .first()
                .map_or_else(String::new, |run| run.scheduler.clone()),
            verdict: worst_verdict_of_runs(runs),
            problem: first_problem(runs),
            median: median(&by_seed.iter().flatten().copied().collect::<Vec<f64>>()),
            by_seed,
            rate: median_over_runs(&figures, |figures| {
                figures
                    .find_group(&metric.group)
                    .map(|group| group.rate_per_second(figures.window_ns))
            }),
            steps: steps.len(),
            step_p50_ms: ms(exact_quantile(&steps, 0.5)),
            step_p99_ms: ms(exact_quantile(&steps, 0.99)),
            wake_p50_us: us(wakes.quantile(0.5)),
            wake_p99_us: us(wakes.quantile(0.99)),
            wake_max_us: us(wakes.quantile(1.0)),
            cpu_ms_per_step: cpu_ms_per_step(&groups),
            noise_cpus: median_over_runs(&figures, |figures| {
                (!scenario.noise.is_empty()).then(|| figures.cpus_used_by_groups(&scenario.noise))
            }),
            longest_wait_ms: longest_wait_ms(&figures),
            against_first: SignTest::from_pairs(pairs, metric.higher_is_better()),
        }
    }
}

fn worst_verdict_of_runs(runs: &[&RunResult]) -> Verdict {
    let verdicts = runs.iter().map(|run| run.verdict());
    verdicts.max().unwrap_or(Verdict::Skip)
}

/// The text of a run's first finding that is not a pass.
fn first_problem(runs: &[&RunResult]) -> Option<String> {
    let mut findings = runs.iter().flat_map(|run| &run.findings);
    let problem = findings.find(|finding| finding.verdict != Verdict::Pass);
    problem.map(|finding| finding.text.clone())
}

fn median_over_runs(
    figures: &[&RunFigures],
    value: impl Fn(&RunFigures) -> Option<f64>,
) -> Option<f64> {
    let values: Vec<f64> = figures
        .iter()
        .filter_map(|figures| value(figures))
        .collect();
    median(&values)
}

fn cpu_ms_per_step(groups: &[&GroupFigures]) -> Option<f64> {
    let cpu_ns: u64 = groups.iter().map(|group| group.cpu_ns).sum();
    let steps: usize = groups.iter().map(|group| group.steps_ns.len()).sum();
    (steps > 0).then(|| cpu_ns as f64 / steps as f64 / 1e6)
}

fn longest_wait_ms(figures: &[&RunFigures]) -> Option<f64> {
    let groups = figures.iter().flat_map(|figures| &figures.groups);
    let longest = groups
        .map(|group| group.longest_wait_ns.max(group.largest_gap_ns))
        .max();
    longest.map(|ns| ns as f64 / 1e6)
}
