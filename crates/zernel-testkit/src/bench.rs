//! Benchmarks that compare several ways to do the same thing in one run.

use std::fmt::{self, Display};
use std::time::Instant;

use criterion::{Criterion, Throughput};

/// Times routines and keeps the median time of each, to print ratios between them.
pub struct TimedComparison {
    criterion: Criterion,
    medians: Vec<(String, f64)>,
}

impl TimedComparison {
    /// Creates a comparison with the options of criterion's command line.
    #[must_use]
    pub fn from_args() -> Self {
        Self {
            criterion: Criterion::default().configure_from_args(),
            medians: Vec::new(),
        }
    }

    /// Times `routine`, which does `operations` operations in each call.
    pub fn measure_routine(&mut self, name: &str, operations: u64, mut routine: impl FnMut()) {
        let mut samples = Vec::new();
        let mut group = self.criterion.benchmark_group(name);
        group.throughput(Throughput::Elements(operations));
        group.bench_function("run", |bencher| {
            bencher.iter_custom(|calls| {
                let begin = Instant::now();
                for _ in 0..calls {
                    routine();
                }
                let elapsed = begin.elapsed();
                samples.push(elapsed.as_nanos() as f64 / (calls * operations) as f64);
                elapsed
            });
        });
        group.finish();
        samples.sort_by(f64::total_cmp);
        if let Some(median) = samples.get(samples.len() / 2) {
            self.medians.push((name.to_owned(), *median));
        }
    }

    /// Prints the ratio of the median times per operation of two routines; nothing if the command line excluded one of
    /// them.
    pub fn print_ratio(&self, name: &str, to: &str) {
        let median = |wanted| self.medians.iter().find(|(name, _)| name == wanted);
        if let (Some((_, this)), Some((_, that))) = (median(name), median(to)) {
            println!(
                "{name}: {this:.1} ns, {:.2} times that of {to} ({that:.1} ns)",
                this / that
            );
        }
    }
}

/// The times of several ways (arms) to do the same thing, measured in turns. Drift of the machine's speed affects
/// neighbouring turns alike, so differences between neighbours are visible even if they are far smaller than the drift.
pub struct AlternatingTurns<A> {
    arms: Vec<A>,
    /// Measured times in nanoseconds: one list per arm, one time per round.
    times: Vec<Vec<f64>>,
}

impl<A: Copy + PartialEq + Display> AlternatingTurns<A> {
    /// Measures all arms in every round, in one round forwards and in the next one backwards, so that steady
    /// drift favours none.
    pub fn measure_in_turns(arms: &[A], rounds: usize, mut measure: impl FnMut(A) -> f64) -> Self {
        let mut times = vec![Vec::new(); arms.len()];
        for round in 0..rounds {
            for turn in 0..arms.len() {
                let place = match round % 2 {
                    0 => turn,
                    _ => arms.len() - 1 - turn,
                };
                times[place].push(measure(arms[place]));
            }
        }
        Self {
            arms: arms.to_vec(),
            times,
        }
    }

    /// Prints the median time of an arm.
    pub fn print_median(&self, arm: A) {
        println!("{arm}: {:.1} ns", median(self.times_of_arm(arm).to_vec()));
    }

    /// Prints the difference between the times of two arms.
    pub fn print_difference(&self, arm: A, to: A) {
        println!("{arm}, less {to}: {}", self.difference_of_arms(arm, to));
    }

    fn difference_of_arms(&self, arm: A, to: A) -> TimeDifference {
        let pairs = self.times_of_arm(arm).iter().zip(self.times_of_arm(to));
        TimeDifference::of_paired_differences(
            &pairs.map(|(this, that)| this - that).collect::<Vec<_>>(),
        )
    }

    fn times_of_arm(&self, arm: A) -> &[f64] {
        let place = self.arms.iter().position(|other| *other == arm);
        place.map_or(&[], |place| &self.times[place])
    }
}

/// Number of bootstrap resamples for an interval.
const BOOTSTRAP_RESAMPLES: usize = 10_000;

/// The median of paired differences, and its 95 % bootstrap interval.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TimeDifference {
    median: f64,
    interval_low: f64,
    interval_high: f64,
    pairs: usize,
}

impl TimeDifference {
    fn of_paired_differences(differences: &[f64]) -> Self {
        let mut random = fastrand::Rng::with_seed(0);
        let mut draw = || {
            let drawn = differences
                .iter()
                .filter_map(|_| random.choice(differences));
            median(drawn.copied().collect())
        };
        let mut medians: Vec<f64> = (0..BOOTSTRAP_RESAMPLES).map(|_| draw()).collect();
        medians.sort_by(f64::total_cmp);
        Self {
            median: median(differences.to_vec()),
            interval_low: medians[BOOTSTRAP_RESAMPLES / 40],
            interval_high: medians[BOOTSTRAP_RESAMPLES - 1 - BOOTSTRAP_RESAMPLES / 40],
            pairs: differences.len(),
        }
    }
}

impl Display for TimeDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            median,
            interval_low: least,
            interval_high: most,
            pairs,
        } = self;
        write!(
            f,
            "{median:+.1} ns (95 %: {least:+.1} to {most:+.1}, {pairs} pairs)"
        )
    }
}

/// The median; the mean of the two middle values for an even number, NaN for no value.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let upper = values.len() / 2;
    let lower = values.len().saturating_sub(1) / 2;
    match (values.get(lower), values.get(upper)) {
        (Some(lower), Some(upper)) => f64::midpoint(*lower, *upper),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_empty_lists() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn arms_are_measured_in_alternating_order() {
        let mut order = String::new();
        AlternatingTurns::measure_in_turns(&['a', 'b', 'c'], 3, |arm| {
            order.push(arm);
            0.0
        });
        assert_eq!(order, "abccbaabc");
    }

    #[test]
    fn difference_of_arms_is_found_under_drift() {
        let mut clock = 0.0;
        let turns = AlternatingTurns::measure_in_turns(&["bare", "probed"], 40, |arm| {
            clock += 10.0;
            clock + if arm == "probed" { 5.0 } else { 0.0 }
        });
        let difference = turns.difference_of_arms("probed", "bare");
        assert_eq!(difference.median, 5.0);
        assert!(difference.interval_low <= 5.0 && difference.interval_high >= 5.0);
        assert_eq!(difference.pairs, 40);
    }

    #[test]
    fn interval_of_equal_differences_is_a_point() {
        let difference = TimeDifference::of_paired_differences(&[7.0; 30]);
        assert_eq!(
            (difference.interval_low, difference.interval_high),
            (7.0, 7.0)
        );
    }
}
