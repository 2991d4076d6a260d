//! Compares schedulers: runs every scenario under every scheduler with every seed, one boot for each run.
//!
//! Runs with the same seed are paired. The rule is fixed before the runs: a scheduler is better or worse than the first
//! one when the sign test over the seeds says so with p ≤ 0.016, which six seeds of six give.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::assertion::Verdict;
use crate::scenario::Scenario;
use crate::scenario::plan::SchedulerChoice;
use crate::scenario_run::{RunResult, ScenarioRun};

pub mod baseline;
mod metric;
mod plot;
mod row;
pub mod statistics;
mod table;

pub use metric::Metric;
pub use row::SchedulerRow;

/// The rule by which one scheduler is called better than another.
pub const COMPARISON_RULE: &str =
    "better or worse than the first scheduler: sign test over the seeds, p <= 0.016 (6 of 6 seeds)";

/// What to compare: scenarios, schedulers and seeds.
#[derive(Debug, Clone)]
pub struct SchedulerComparison {
    /// The scenarios that every scheduler runs.
    pub scenarios: Vec<Scenario>,
    /// The schedulers. Each of them is compared with the first.
    pub schedulers: Vec<SchedulerChoice>,
    /// Number of seeds; the seeds are 1 to this number.
    pub seed_count: u64,
    /// Number of virtual machines that run at once.
    pub parallel_boots: usize,
}

/// The progress of a comparison.
#[derive(Debug, Clone)]
pub struct ComparisonProgress<'a> {
    /// Number of runs that are done.
    pub finished_runs: usize,
    /// Number of all runs.
    pub total_runs: usize,
    /// The result of the run that was done last.
    pub last_result: &'a RunResult,
    /// Remaining time, estimated from the runs that were booted.
    pub time_left: Option<Duration>,
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComparisonReport {
    /// The rule by which schedulers are called better or worse.
    pub rule: String,
    /// One result for each scenario.
    pub scenarios: Vec<ScenarioReport>,
}

/// The result of one scenario under all schedulers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScenarioReport {
    /// The name of the scenario.
    pub name: String,
    /// What the scenario shows.
    pub about: String,
    /// The figure by which the schedulers are compared.
    pub metric: Metric,
    /// One row for each scheduler, in the order of the command line.
    pub rows: Vec<SchedulerRow>,
}

/// One run of the comparison: the indices of its scenario and its scheduler, and its seed.
type RunKey = (usize, usize, u64);

impl SchedulerComparison {
    /// Runs every scenario under every scheduler with every seed. The function `configure_run` may change each run
    /// before it starts, and `on_progress` is called after each run.
    ///
    /// Returns `None` if `interrupt` was set.
    pub fn run(
        &self,
        interrupt: &Arc<AtomicBool>,
        configure_run: impl Fn(ScenarioRun) -> ScenarioRun + Sync,
        mut on_progress: impl FnMut(&ComparisonProgress<'_>),
    ) -> Option<ComparisonReport> {
        let run_keys = self.run_keys();
        let next_index = AtomicUsize::new(0);
        let (sender, receiver) = mpsc::channel();
        let mut results = BTreeMap::new();
        thread::scope(|scope| {
            for _ in 0..self.parallel_boots.clamp(1, run_keys.len().max(1)) {
                let (sender, run_keys, next_index, configure_run) =
                    (sender.clone(), &run_keys, &next_index, &configure_run);
                scope.spawn(move || {
                    while let Some(run_key) =
                        run_keys.get(next_index.fetch_add(1, Ordering::Relaxed))
                    {
                        let run = configure_run(self.scenario_run(*run_key))
                            .interrupted_by(Arc::clone(interrupt));
                        let begin = Instant::now();
                        let result = run.run();
                        // The send fails only if the comparison was interrupted.
                        let _ = sender.send((*run_key, result, begin.elapsed()));
                        if interrupt.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            let mut boot_durations = Vec::new();
            for (run_key, result, duration) in &receiver {
                if duration > Duration::from_secs(2) {
                    boot_durations.push(duration);
                }
                let finished_runs = results.len() + 1;
                on_progress(&ComparisonProgress {
                    finished_runs,
                    total_runs: run_keys.len(),
                    last_result: &result,
                    time_left: self.time_left(&boot_durations, run_keys.len() - finished_runs),
                });
                results.insert(run_key, result);
            }
        });
        let is_complete = results.len() == run_keys.len() && !interrupt.load(Ordering::Relaxed);
        is_complete.then(|| self.build_report(&results))
    }

    /// All runs in the order in which they start: all schedulers with the first seed come before the second seed.
    fn run_keys(&self) -> Vec<RunKey> {
        let mut run_keys = Vec::new();
        for scenario in 0..self.scenarios.len() {
            for seed in 1..=self.seed_count {
                run_keys.extend(
                    (0..self.schedulers.len()).map(|scheduler| (scenario, scheduler, seed)),
                );
            }
        }
        run_keys
    }

    fn scenario_run(&self, (scenario, scheduler, seed): RunKey) -> ScenarioRun {
        let (scenario, scheduler) = (&self.scenarios[scenario], &self.schedulers[scheduler]);
        ScenarioRun::new(scenario.clone(), scheduler.clone()).seed(seed)
    }

    fn time_left(&self, boot_durations: &[Duration], runs_left: usize) -> Option<Duration> {
        let count = u32::try_from(boot_durations.len())
            .ok()
            .filter(|count| *count > 0)?;
        let mean_boot_time = boot_durations.iter().sum::<Duration>() / count;
        let rounds_left = u32::try_from(runs_left.div_ceil(self.parallel_boots.max(1))).ok()?;
        Some(mean_boot_time * rounds_left)
    }

    fn build_report(&self, results: &BTreeMap<RunKey, RunResult>) -> ComparisonReport {
        let scenario_report = |(index, scenario): (usize, &Scenario)| {
            let metric = Metric::compared_in_scenario(scenario);
            let runs_of_scheduler = |scheduler: usize| -> Vec<&RunResult> {
                let seeds = 1..=self.seed_count;
                seeds
                    .filter_map(|seed| results.get(&(index, scheduler, seed)))
                    .collect()
            };
            let runs_of_first_scheduler = runs_of_scheduler(0);
            let row = |scheduler: usize| {
                SchedulerRow::from_runs(
                    scenario,
                    &metric,
                    &runs_of_scheduler(scheduler),
                    &runs_of_first_scheduler,
                )
            };
            ScenarioReport {
                name: scenario.name.clone(),
                about: scenario.about.clone(),
                rows: (0..self.schedulers.len()).map(row).collect(),
                metric,
            }
        };
        ComparisonReport {
            rule: COMPARISON_RULE.to_owned(),
            scenarios: self
                .scenarios
                .iter()
                .enumerate()
                .map(scenario_report)
                .collect(),
        }
    }
}

impl ComparisonReport {
    /// The worst verdict of all runs of the comparison.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let rows = self.scenarios.iter().flat_map(|scenario| &scenario.rows);
        rows.map(|row| row.verdict).max().unwrap_or(Verdict::Pass)
    }
}

impl ScenarioReport {
    /// An SVG plot of a scenario: one line per scheduler, one dot per seed.
    #[must_use]
    pub fn to_svg(&self) -> String {
        plot::render_svg(self)
    }
}

#[cfg(test)]
mod tests;
