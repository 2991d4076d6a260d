//! The statistics of `--ab`: pairs of blocks of time, one with the scheduler and one without, in random order.
//!
//! The figure of a pair is the geometric mean over all training processes of steps per second with the scheduler divided
//! by steps per second without it. The logarithms of the pairs give a mean and its 95 % interval by Student's t. Whether
//! the scheduler is worse is decided by a sign test, which needs no assumption about the noise.

use std::collections::BTreeMap;
use std::fmt;

use zernel_lab::compare::statistics::{SignTest, SignTestOutcome};
use zernel_model::snapshot::Snapshot;

/// Identifies a process even if its pid is reused: pid and start time.
type ProcessKey = (u32, u64);

/// Steps per second of each training process.
pub(super) type StepRates = BTreeMap<ProcessKey, f64>;

/// How many steps each training process has made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepCounts {
    taken_ns: u64,
    processes: BTreeMap<ProcessKey, StepCount>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StepCount {
    steps: u64,
    /// Increases when steps were lost, or when the count began again.
    interruption_count: u64,
}

impl StepCounts {
    /// Reads the step counts of a snapshot that arrived at `now_ns` of the monotonic clock.
    pub(super) fn from_snapshot(snapshot: &Snapshot, now_ns: u64) -> Self {
        let trainers = snapshot.observed.iter();
        let trainers = trainers.filter(|process| process.is_trainer());
        let counts = trainers.map(|process| {
            let count = StepCount {
                steps: process.steps.count,
                interruption_count: process.steps.gaps + u64::from(process.steps.restarts),
            };
            ((process.pid, process.start_ns), count)
        });
        Self {
            taken_ns: now_ns.saturating_sub((snapshot.age_seconds * 1e9) as u64),
            processes: counts.collect(),
        }
    }

    /// Whether no training process runs.
    pub(super) fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }

    /// Steps per second until `later`, of the processes that made steps and whose count was not interrupted.
    pub(super) fn step_rates_until(&self, later: &Self) -> StepRates {
        let seconds = later.taken_ns.saturating_sub(self.taken_ns) as f64 / 1e9;
        let rates = self.processes.iter().filter_map(|(key, first)| {
            let last = later.processes.get(key)?;
            let steps = last.steps.saturating_sub(first.steps);
            let is_counted = steps > 0 && seconds > 0.0;
            let is_whole = last.interruption_count == first.interruption_count;
            (is_counted && is_whole).then(|| (*key, steps as f64 / seconds))
        });
        rates.collect()
    }
}

/// Completed pairs.
#[derive(Debug, Clone, Default)]
pub(super) struct PairedBlocks {
    /// Logarithms of the figures.
    log_ratios: Vec<f64>,
    /// Pairs whose blocks did not count the steps of the same processes, or of any.
    pub(super) discarded_pairs: u32,
}

impl PairedBlocks {
    /// Adds a pair of blocks. Both blocks must have the same processes.
    pub(super) fn add_pair(&mut self, with: &StepRates, without: &StepRates) {
        if with.is_empty() || !with.keys().eq(without.keys()) {
            self.discarded_pairs += 1;
            return;
        }
        let ratios = with.values().zip(without.values());
        let sum: f64 = ratios.map(|(with, without)| (with / without).ln()).sum();
        self.log_ratios.push(sum / with.len() as f64);
    }

    /// Whether the scheduler is better or worse: a sign test over the pairs, the rule of `zernel lab compare`. Six losses
    /// of six decide, or 11 of 13.
    pub(super) fn sign_test_outcome(&self) -> SignTestOutcome {
        let pairs = self.log_ratios.iter().map(|logarithm| (0.0, *logarithm));
        SignTest::from_pairs(pairs, true).outcome()
    }

    /// The ratio of steps per second, with its 95 % interval. Returns `None` with less than two pairs.
    pub(super) fn mean_ratio(&self) -> Option<RatioEstimate> {
        let count = self.log_ratios.len();
        if count < 2 {
            return None;
        }
        let mean = self.log_ratios.iter().sum::<f64>() / count as f64;
        let squares = self.log_ratios.iter().map(|log| (log - mean).powi(2));
        let variance = squares.sum::<f64>() / (count - 1) as f64;
        let half_width = student_t_percentile(count - 1) * (variance / count as f64).sqrt();
        Some(RatioEstimate {
            ratio: mean.exp(),
            interval_low: (mean - half_width).exp(),
            interval_high: (mean + half_width).exp(),
            pairs: count,
        })
    }
}

/// A ratio with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RatioEstimate {
    pub(super) ratio: f64,
    pub(super) interval_low: f64,
    pub(super) interval_high: f64,
    pub(super) pairs: usize,
}

impl fmt::Display for RatioEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ratio,
            interval_low,
            interval_high,
            pairs,
        } = self;
        write!(
            f,
            "steps/s with the scheduler: {ratio:.3} times those without it (95 % interval \
             {interval_low:.3} to {interval_high:.3}, {pairs} pairs)"
        )
    }
}

/// The 97.5th percentile of Student's t distribution. Between the tabulated degrees of freedom the larger value is
/// taken.
fn student_t_percentile(degrees: usize) -> f64 {
    const PERCENTILES_BY_DEGREES: [(usize, f64); 16] = [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (6, 2.447),
        (7, 2.365),
        (8, 2.306),
        (9, 2.262),
        (10, 2.228),
        (12, 2.179),
        (15, 2.131),
        (20, 2.086),
        (30, 2.042),
        (60, 2.000),
        (120, 1.980),
    ];
    let known = PERCENTILES_BY_DEGREES
        .iter()
        .rev()
        .find(|(known, _)| *known <= degrees);
    known.map_or(f64::INFINITY, |(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn step_rates(values: &[(u32, f64)]) -> StepRates {
        let rates = values.iter().map(|(pid, rate)| ((*pid, 1), *rate));
        rates.collect()
    }

    /// The step counts of a snapshot that is half a second old.
    fn step_counts(now_ns: u64, steps: u64, gaps: u64) -> StepCounts {
        let snapshot = json!({"age_seconds": 0.5, "observed": [
            {"pid": 7, "start_ns": 1, "role": "trainer", "steps": {"count": steps, "gaps": gaps}},
            {"pid": 8, "start_ns": 1, "role": "loader", "steps": {"count": steps}},
        ]});
        StepCounts::from_snapshot(&serde_json::from_value(snapshot).unwrap(), now_ns)
    }

    #[test]
    fn rates_are_of_trainers_that_were_counted_throughout() {
        let first = step_counts(1_000_000_000, 100, 0);
        assert_eq!(first.taken_ns, 500_000_000);
        let rates = first.step_rates_until(&step_counts(3_000_000_000, 150, 0));
        assert_eq!(rates, BTreeMap::from([((7, 1), 25.0)]));
        for later in [
            step_counts(3_000_000_000, 150, 1),
            step_counts(3_000_000_000, 100, 0),
            step_counts(1_000_000_000, 150, 0),
        ] {
            assert!(first.step_rates_until(&later).is_empty(), "{later:?}");
        }
    }

    #[test]
    fn the_ratio_is_a_geometric_mean_with_an_interval() {
        let mut blocks = PairedBlocks::default();
        assert_eq!(blocks.mean_ratio(), None);
        for factor in [2.0, 2.0, 0.5, 2.0] {
            blocks.add_pair(&step_rates(&[(1, factor)]), &step_rates(&[(1, 1.0)]));
        }
        let estimate = blocks.mean_ratio().unwrap();
        // Logarithms to base 2: mean 0.5, standard deviation 1, standard error 0.5, t = 3.182.
        assert!((estimate.ratio - 2_f64.powf(0.5)).abs() < 1e-9);
        assert!((estimate.interval_low - 2_f64.powf(0.5 - 1.591)).abs() < 1e-9);
        assert!((estimate.interval_high - 2_f64.powf(0.5 + 1.591)).abs() < 1e-9);
        assert_eq!((estimate.pairs, blocks.discarded_pairs), (4, 0));
    }

    #[test]
    fn every_process_has_equal_weight_in_the_ratio() {
        let mut blocks = PairedBlocks::default();
        for _ in 0..2 {
            let with = step_rates(&[(1, 200.0), (2, 1.0)]);
            blocks.add_pair(&with, &step_rates(&[(1, 100.0), (2, 2.0)]));
        }
        assert!((blocks.mean_ratio().unwrap().ratio - 1.0).abs() < 1e-9);
    }

    #[test]
    fn blocks_with_other_processes_are_discarded() {
        let mut blocks = PairedBlocks::default();
        blocks.add_pair(&step_rates(&[(1, 1.0)]), &step_rates(&[(2, 1.0)]));
        blocks.add_pair(&step_rates(&[(1, 1.0)]), &step_rates(&[(1, 1.0), (2, 1.0)]));
        blocks.add_pair(&step_rates(&[]), &step_rates(&[]));
        assert_eq!((blocks.discarded_pairs, blocks.mean_ratio()), (3, None));
    }

    #[test]
    fn six_losses_of_six_are_worse() {
        let mut blocks = PairedBlocks::default();
        for loss in 1..=6 {
            assert_eq!(
                blocks.sign_test_outcome(),
                SignTestOutcome::Undecided,
                "{loss}"
            );
            blocks.add_pair(&step_rates(&[(1, 0.99)]), &step_rates(&[(1, 1.0)]));
        }
        assert_eq!(blocks.sign_test_outcome(), SignTestOutcome::Worse);
        // 2 wins in 12 pairs show nothing, 2 wins in 13 pairs show that the scheduler is worse.
        for _ in 0..2 {
            blocks.add_pair(&step_rates(&[(1, 1.1)]), &step_rates(&[(1, 1.0)]));
        }
        assert_eq!(blocks.sign_test_outcome(), SignTestOutcome::Undecided);
        for _ in 0..5 {
            blocks.add_pair(&step_rates(&[(1, 0.9)]), &step_rates(&[(1, 1.0)]));
        }
        assert_eq!(blocks.sign_test_outcome(), SignTestOutcome::Worse);
    }

    #[test]
    fn student_t_percentiles_are_never_too_small() {
        assert_eq!(student_t_percentile(0), f64::INFINITY);
        assert_eq!(student_t_percentile(11), 2.228);
        assert_eq!(student_t_percentile(1000), 1.980);
    }
}
