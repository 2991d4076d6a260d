//! Compares timelines: time-weighted confusion matrix, F1, shares, boundaries and delays.

use serde::Serialize;

use crate::label::Category;
use crate::timeline::Timeline;

/// A category with at least this share of the time counts for the macro-F1.
const MIN_SHARE: f64 = 0.02;

/// How long the truth was one category while another was detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confusion<C: 'static> {
    /// Nanoseconds by truth, then by detected category, in the order of [`Category::ALL`].
    ns: Vec<Vec<u128>>,
    categories: &'static [C],
}

impl<C: Category> Default for Confusion<C> {
    fn default() -> Self {
        let number = C::ALL.len();
        Self {
            ns: vec![vec![0; number]; number],
            categories: C::ALL,
        }
    }
}

impl<C: Category> Confusion<C> {
    /// Adds the time that both timelines cover.
    pub fn add(&mut self, truth: &Timeline<C>, detected: &Timeline<C>) {
        let place = |category: C| C::ALL.iter().position(|it| *it == category);
        for (start_ns, end_ns, (truth, detected)) in truth.zip(detected).spans() {
            if let (Some(truth), Some(detected)) = (place(truth), place(detected)) {
                self.ns[truth][detected] += u128::from(end_ns - start_ns);
            }
        }
    }

    /// The score. `absent`: names of categories that are known not to occur.
    #[must_use]
    pub fn score(&self, absent: &[String]) -> Score {
        let total: u128 = self.ns.iter().flatten().sum();
        let categories = self.category_scores(total);
        let counted = categories.iter().filter(|it| it.truth_share >= MIN_SHARE);
        let counted: Vec<f64> = counted.map(|it| it.f1.unwrap_or(0.0)).collect();
        let unknown = C::UNKNOWN.name();
        let is_absent = |it: &&CategoryScore| {
            let is_listed = absent.iter().any(|name| name == it.name);
            it.name != unknown && (it.truth_share == 0.0 || is_listed)
        };
        let absent = categories.iter().filter(is_absent);
        let errors = categories
            .iter()
            .map(|it| (it.detected_share - it.truth_share).abs() * 100.0);
        let unknown = categories.iter().find(|it| it.name == unknown);
        let seconds = |row: &Vec<u128>| row.iter().map(|ns| *ns as f64 / 1e9).collect();
        Score {
            seconds: total as f64 / 1e9,
            macro_f1: (!counted.is_empty())
                .then(|| counted.iter().sum::<f64>() / counted.len() as f64),
            absent_share: absent.map(|it| it.detected_share).fold(0.0, f64::max),
            share_error_points: errors.fold(0.0, f64::max),
            unknown_share: unknown.map_or(0.0, |it| it.detected_share),
            matrix_seconds: self.ns.iter().map(seconds).collect(),
            categories,
        }
    }

    fn category_scores(&self, total: u128) -> Vec<CategoryScore> {
        let share = |ns: u128| ns as f64 / total.max(1) as f64;
        let numbers = 0..self.categories.len();
        let scores = numbers.map(|number| {
            let truth: u128 = self.ns[number].iter().sum();
            let detected: u128 = self.ns.iter().map(|row| row[number]).sum();
            let both = self.ns[number][number];
            let ratio = |whole: u128| (whole > 0).then(|| both as f64 / whole as f64);
            CategoryScore {
                name: self.categories[number].name(),
                truth_share: share(truth),
                detected_share: share(detected),
                precision: ratio(detected),
                recall: ratio(truth),
                f1: (truth + detected > 0).then(|| 2.0 * both as f64 / (truth + detected) as f64),
            }
        });
        scores.collect()
    }
}

/// How well a detector did, over all categories.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Time that was compared.
    pub seconds: f64,
    /// Mean F1 of the categories with at least 2 % of the time.
    pub macro_f1: Option<f64>,
    /// Largest share of the time that was given to a category that does not occur.
    pub absent_share: f64,
    /// Largest difference between detected and true share of a category, in percentage points.
    pub share_error_points: f64,
    /// Share of the time without evidence.
    pub unknown_share: f64,
    /// Each category.
    pub categories: Vec<CategoryScore>,
    /// Seconds by truth, then by detected category, in the order of `categories`.
    pub matrix_seconds: Vec<Vec<f64>>,
}

/// How well a detector did on one category.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CategoryScore {
    /// The category.
    pub name: &'static str,
    /// True share of the category in the time.
    pub truth_share: f64,
    /// Detected share of the category in the time.
    pub detected_share: f64,
    /// Share of the detected time that is right.
    pub precision: Option<f64>,
    /// Share of the true time that was detected.
    pub recall: Option<f64>,
    /// Harmonic mean of both.
    pub f1: Option<f64>,
}

/// Distances in time between true and detected changes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Distances {
    /// One for each true change; `None`: not detected.
    all: Vec<Option<u64>>,
}

/// A summary of [`Distances`]. Changes that were not detected count as infinitely far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DistanceSummary {
    /// Number of true changes.
    pub count: usize,
    /// Share of them that was not detected.
    pub missed_share: f64,
    /// Median in microseconds; `None`: most were not detected.
    pub median_us: Option<f64>,
    /// 99th percentile in microseconds.
    pub p99_us: Option<f64>,
}

impl Distances {
    /// Distances between each true change and the nearest detected change to the same category. A change further
    /// away than the true spans beside it is another one.
    pub fn add_boundaries<C: Category>(&mut self, truth: &Timeline<C>, detected: &Timeline<C>) {
        let spans: Vec<_> = truth.spans().collect();
        let detected: Vec<_> = detected.spans().collect();
        for pair in spans.windows(2) {
            let [(earliest_ns, at_ns, _), (_, latest_ns, category)] = [pair[0], pair[1]];
            let first = detected.partition_point(|span| span.0 < earliest_ns);
            let near = detected[first..]
                .iter()
                .take_while(|span| span.0 < latest_ns);
            let same = near.filter(|span| span.2 == category);
            self.all.push(same.map(|span| span.0.abs_diff(at_ns)).min());
        }
    }

    /// Times from the start of each true span until its category was reported; 0 if it was reported before.
    pub fn add_delays<C: Category>(&mut self, truth: &Timeline<C>, live: &Timeline<C>) {
        let live: Vec<_> = live.spans().collect();
        for (start_ns, end_ns, category) in truth.spans() {
            if category == C::UNKNOWN {
                continue;
            }
            let first = live.partition_point(|span| span.1 <= start_ns);
            let during = live[first..].iter().take_while(|span| span.0 < end_ns);
            let mut same = during.filter(|span| span.2 == category);
            self.all
                .push(same.next().map(|span| span.0.saturating_sub(start_ns)));
        }
    }

    /// Their summary.
    #[must_use]
    pub fn summary(&self) -> DistanceSummary {
        let mut sorted: Vec<u64> = self.all.iter().map(|it| it.unwrap_or(u64::MAX)).collect();
        sorted.sort_unstable();
        let quantile = |share: f64| {
            let place =
                ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
            let found = sorted.get(place).filter(|ns| **ns != u64::MAX);
            found.map(|ns| *ns as f64 / 1e3)
        };
        let missed = self.all.iter().filter(|it| it.is_none()).count();
        DistanceSummary {
            count: self.all.len(),
            missed_share: missed as f64 / self.all.len().max(1) as f64,
            median_us: quantile(0.5),
            p99_us: quantile(0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::PhaseCategory::{self, *};

    fn timeline(changes: &[(u64, PhaseCategory)]) -> Timeline<PhaseCategory> {
        Timeline::new(changes.to_vec(), 1000)
    }

    #[test]
    fn a_known_confusion_has_the_known_score() {
        let truth = timeline(&[(0, DataLoading), (200, GpuCompute), (990, NcclCollective)]);
        let detected = timeline(&[(0, DataLoading), (100, GpuCompute), (900, OptimizerStep)]);
        let mut confusion = Confusion::default();
        confusion.add(&truth, &detected);
        let score = confusion.score(&[]);
        assert_eq!(score.matrix_seconds[0][0], 100e-9);
        assert_eq!(score.matrix_seconds[0][1], 100e-9);
        assert_eq!(score.matrix_seconds[1][1], 700e-9);
        assert_eq!(score.matrix_seconds[1][3], 90e-9);
        let [data, gpu, nccl, optimizer, _] = &score.categories[..] else {
            panic!("five phases")
        };
        assert_eq!((data.precision, data.recall), (Some(1.0), Some(0.5)));
        assert_eq!(data.f1, Some(2.0 * 100.0 / 300.0));
        assert_eq!(gpu.f1, Some(2.0 * 700.0 / (790.0 + 800.0)));
        assert_eq!((nccl.recall, nccl.f1), (Some(0.0), Some(0.0)));
        assert_eq!(optimizer.recall, None);
        // The collective has 1 % of the time and does not count.
        let expected = (data.f1.unwrap() + gpu.f1.unwrap()) / 2.0;
        assert!((score.macro_f1.unwrap() - expected).abs() < 1e-12);
        assert_eq!(score.absent_share, 0.1);
        assert!((score.share_error_points - 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_phase_known_to_be_absent_is_false_even_if_labelled() {
        let truth = timeline(&[(0, GpuCompute), (999, OptimizerStep)]);
        let detected = timeline(&[(0, GpuCompute), (500, OptimizerStep)]);
        let mut confusion = Confusion::default();
        confusion.add(&truth, &detected);
        assert_eq!(confusion.score(&[]).absent_share, 0.0);
        let absent = ["OptimizerStep".to_owned()];
        assert_eq!(confusion.score(&absent).absent_share, 0.5);
    }

    #[test]
    fn nothing_compared_has_no_score() {
        let score = Confusion::<PhaseCategory>::default().score(&[]);
        assert_eq!((score.macro_f1, score.seconds), (None, 0.0));
    }

    #[test]
    fn boundaries_are_as_far_as_the_nearest_change_to_the_same_phase() {
        let truth = timeline(&[(0, DataLoading), (200, GpuCompute), (600, OptimizerStep)]);
        let detected = timeline(&[(0, DataLoading), (230, GpuCompute), (900, DataLoading)]);
        let mut distances = Distances::default();
        distances.add_boundaries(&truth, &detected);
        assert_eq!(distances.all, [Some(30), None]);
        assert_eq!(distances.summary().missed_share, 0.5);
        assert_eq!(distances.summary().median_us, None);
    }

    #[test]
    fn a_delay_ends_when_the_phase_is_reported() {
        let truth = timeline(&[(0, DataLoading), (200, GpuCompute), (600, OptimizerStep)]);
        let live = timeline(&[(0, GpuCompute), (50, DataLoading), (150, GpuCompute)]);
        let mut distances = Distances::default();
        distances.add_delays(&truth, &live);
        assert_eq!(distances.all, [Some(50), Some(0), None]);
    }
}
