//! Schedulers side by side: every scenario under every scheduler with every seed, one boot each.
//!
//! Runs are paired by seed. The rule is stated before the runs: a scheduler is better or worse than the first one
//! when the sign test over the seeds says so with p ≤ 0.016, which six seeds of six give.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::assertion::Verdict;
use crate::scenario::Scenario;
use crate::scenario::plan::Scheduler;
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
pub const RULE: &str =
    "better or worse than the first scheduler: sign test over the seeds, p <= 0.016 (6 of 6 seeds)";

/// What to compare.
#[derive(Debug, Clone)]
pub struct SchedulerComparison {
    /// The scenarios.
    pub scenarios: Vec<Scenario>,
    /// The schedulers. The others are compared with the first.
    pub schedulers: Vec<Scheduler>,
    /// Seeds 1 to this number.
    pub seeds: u64,
    /// Boots at once.
    pub jobs: usize,
}

/// How far a comparison is.
#[derive(Debug, Clone)]
pub struct ComparisonProgress<'a> {
    /// Runs that are done.
    pub done: usize,
    /// All runs.
    pub total: usize,
    /// The run that was done last.
    pub last: &'a RunResult,
    /// An estimate from the runs that were booted.
    pub time_left: Option<Duration>,
}

/// A comparison that is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComparisonReport {
    /// The rule by which schedulers are called better or worse.
    pub rule: String,
    /// One per scenario.
    pub scenarios: Vec<ScenarioReport>,
}

/// One scenario under all schedulers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScenarioReport {
    /// The scenario's name.
    pub name: String,
    /// What it shows.
    pub about: String,
    /// The figure that is compared.
    pub metric: Metric,
    /// One per scheduler, in the order of the command line.
    pub rows: Vec<SchedulerRow>,
}

/// Place of a run: scenario, scheduler, seed.
type Place = (usize, usize, u64);

impl SchedulerComparison {
    /// Runs everything. `prepare` changes each run, `watch` hears of each one that is done.
    ///
    /// Returns `None` if `interrupt` was set.
    pub fn run(
        &self,
        interrupt: &Arc<AtomicBool>,
        prepare: impl Fn(ScenarioRun) -> ScenarioRun + Sync,
        mut watch: impl FnMut(&ComparisonProgress<'_>),
    ) -> Option<ComparisonReport> {
        let places = self.places();
        let next = AtomicUsize::new(0);
        let (sender, receiver) = mpsc::channel();
        let mut results = BTreeMap::new();
        thread::scope(|scope| {
            for _ in 0..self.jobs.clamp(1, places.len().max(1)) {
                let (sender, places, next, prepare) = (sender.clone(), &places, &next, &prepare);
                scope.spawn(move || {
                    while let Some(place) = places.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let run = prepare(self.one(*place)).interrupted_by(Arc::clone(interrupt));
                        let begin = Instant::now();
                        let result = run.run();
                        // Fails if the comparison was interrupted.
                        let _ = sender.send((*place, result, begin.elapsed()));
                        if interrupt.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            let mut booted = Vec::new();
            for (place, result, took) in &receiver {
                if took > Duration::from_secs(2) {
                    booted.push(took);
                }
                let done = results.len() + 1;
                watch(&ComparisonProgress {
                    done,
                    total: places.len(),
                    last: &result,
                    time_left: self.time_left(&booted, places.len() - done),
                });
                results.insert(place, result);
            }
        });
        let complete = results.len() == places.len() && !interrupt.load(Ordering::Relaxed);
        complete.then(|| self.report(&results))
    }

    /// All runs, seed by seed, so that an early look at the cache covers every scheduler.
    fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        for scenario in 0..self.scenarios.len() {
            for seed in 1..=self.seeds {
                places.extend(
                    (0..self.schedulers.len()).map(|scheduler| (scenario, scheduler, seed)),
                );
            }
        }
        places
    }

    fn one(&self, (scenario, scheduler, seed): Place) -> ScenarioRun {
        let (scenario, scheduler) = (&self.scenarios[scenario], &self.schedulers[scheduler]);
        ScenarioRun::new(scenario.clone(), scheduler.clone()).seed(seed)
    }

    fn time_left(&self, booted: &[Duration], runs: usize) -> Option<Duration> {
        let count = u32::try_from(booted.len())
            .ok()
            .filter(|count| *count > 0)?;
        let mean = booted.iter().sum::<Duration>() / count;
        let rounds = u32::try_from(runs.div_ceil(self.jobs.max(1))).ok()?;
        Some(mean * rounds)
    }

    fn report(&self, results: &BTreeMap<Place, RunResult>) -> ComparisonReport {
        let scenario_report = |(index, scenario): (usize, &Scenario)| {
            let metric = Metric::of(scenario);
            let runs = |scheduler: usize| -> Vec<&RunResult> {
                let seeds = 1..=self.seeds;
                seeds
                    .filter_map(|seed| results.get(&(index, scheduler, seed)))
                    .collect()
            };
            let first = runs(0);
            let row =
                |scheduler: usize| SchedulerRow::new(scenario, &metric, &runs(scheduler), &first);
            ScenarioReport {
                name: scenario.name.clone(),
                about: scenario.about.clone(),
                rows: (0..self.schedulers.len()).map(row).collect(),
                metric,
            }
        };
        ComparisonReport {
            rule: RULE.to_owned(),
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
    /// The worst verdict of all runs.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let rows = self.scenarios.iter().flat_map(|scenario| &scenario.rows);
        rows.map(|row| row.verdict).max().unwrap_or(Verdict::Pass)
    }
}

impl ScenarioReport {
    /// A plot: one line per scheduler, one dot per seed.
    #[must_use]
    pub fn to_svg(&self) -> String {
        plot::svg(self)
    }
}

#[cfg(test)]
mod tests;
