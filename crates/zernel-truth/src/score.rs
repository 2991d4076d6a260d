//! Compares timelines: time-weighted confusion matrix, F1, shares, boundaries and delays.

use serde::Serialize;

use crate::label::TimeCategory;
use crate::timeline::Timeline;

/// A category with at least this share of the time counts for the macro-F1.
const MIN_SHARE_FOR_MACRO_F1: f64 = 0.02;

/// How long the truth was one category while another was detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfusionMatrix<C: 'static> {
    /// Nanoseconds by truth, then by detected category, in the order of [`TimeCategory::ALL`].
    nanoseconds: Vec<Vec<u128>>,
    categories: &'static [C],
}

impl<C: TimeCategory> Default for ConfusionMatrix<C> {
    fn default() -> Self {
        let category_count = C::ALL.len();
        Self {
            nanoseconds: vec![vec![0; category_count]; category_count],
            categories: C::ALL,
        }
    }
}

impl<C: TimeCategory> ConfusionMatrix<C> {
    /// Adds the time that both timelines cover.
    pub fn add_timelines(&mut self, truth: &Timeline<C>, detected: &Timeline<C>) {
        let index = |category: C| C::ALL.iter().position(|known| *known == category);
        for (start_ns, end_ns, (truth, detected)) in truth.zip(detected).spans() {
            if let (Some(truth), Some(detected)) = (index(truth), index(detected)) {
                self.nanoseconds[truth][detected] += u128::from(end_ns - start_ns);
            }
        }
    }

    /// The score. `absent`: names of categories that are known not to occur.
    #[must_use]
    pub fn compute_score(&self, absent: &[String]) -> DetectionScore {
        let total_ns: u128 = self.nanoseconds.iter().flatten().sum();
        let categories = self.category_scores(total_ns);
        let scored_categories = categories
            .iter()
            .filter(|category| category.truth_share >= MIN_SHARE_FOR_MACRO_F1);
        let scored_f1: Vec<f64> = scored_categories
            .map(|category| category.f1.unwrap_or(0.0))
            .collect();
        let unknown = C::UNKNOWN.name();
        let is_absent = |category: &&CategoryScore| {
            let is_listed = absent.iter().any(|name| name == category.name);
            category.name != unknown && (category.truth_share == 0.0 || is_listed)
        };
        let absent = categories.iter().filter(is_absent);
        let share_errors = categories
            .iter()
            .map(|category| (category.detected_share - category.truth_share).abs() * 100.0);
        let unknown = categories.iter().find(|category| category.name == unknown);
        let seconds = |row: &Vec<u128>| row.iter().map(|ns| *ns as f64 / 1e9).collect();
        DetectionScore {
            seconds: total_ns as f64 / 1e9,
            macro_f1: (!scored_f1.is_empty())
                .then(|| scored_f1.iter().sum::<f64>() / scored_f1.len() as f64),
            absent_share: absent
                .map(|category| category.detected_share)
                .fold(0.0, f64::max),
            share_error_points: share_errors.fold(0.0, f64::max),
            unknown_share: unknown.map_or(0.0, |category| category.detected_share),
            matrix_seconds: self.nanoseconds.iter().map(seconds).collect(),
            categories,
        }
    }

    fn category_scores(&self, total_ns: u128) -> Vec<CategoryScore> {
        let share = |ns: u128| ns as f64 / total_ns.max(1) as f64;
        let indices = 0..self.categories.len();
        let scores = indices.map(|index| {
            let truth_ns: u128 = self.nanoseconds[index].iter().sum();
            let detected_ns: u128 = self.nanoseconds.iter().map(|row| row[index]).sum();
            let correct_ns = self.nanoseconds[index][index];
            let ratio = |whole: u128| (whole > 0).then(|| correct_ns as f64 / whole as f64);
            CategoryScore {
                name: self.categories[index].name(),
                truth_share: share(truth_ns),
                detected_share: share(detected_ns),
                precision: ratio(detected_ns),
                recall: ratio(truth_ns),
                f1: (truth_ns + detected_ns > 0)
                    .then(|| 2.0 * correct_ns as f64 / (truth_ns + detected_ns) as f64),
            }
        });
        scores.collect()
    }
}

/// How well a detector did, over all categories.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DetectionScore {
    /// Time that was compared.
    pub seconds: f64,
    /// Mean F1 of the categories with at least 2 % of the time.
    pub macro_f1: Option<f64>,
    /// Largest share of the time that was given to a category that does not occur.
    pub absent_share: f64,
    /// Largest difference between detected and true share of a category, in percentage points.
    pub share_error_points: f64,
    /// Share of the time for which the detector had no evidence.
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
pub struct ChangeDistances {
    /// Distance in nanoseconds for each true change; `None` if the change was not detected.
    distances_ns: Vec<Option<u64>>,
}

/// A summary of [`ChangeDistances`]. Changes that were not detected count as infinitely far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DistanceSummary {
    /// Number of true changes.
    pub count: usize,
    /// Share of the true changes that were not detected.
    pub missed_share: f64,
    /// Median in microseconds; `None`: most were not detected.
    pub median_us: Option<f64>,
    /// 99th percentile in microseconds.
    pub p99_us: Option<f64>,
}

impl ChangeDistances {
    /// Distances between each true change and the nearest detected change to the same category. A detected change
    /// that is further away than the true spans beside the true change counts as another change.
    pub fn add_boundary_distances<C: TimeCategory>(
        &mut self,
        truth: &Timeline<C>,
        detected: &Timeline<C>,
    ) {
        let spans: Vec<_> = truth.spans().collect();
        let detected: Vec<_> = detected.spans().collect();
        for pair in spans.windows(2) {
            let [(earliest_ns, at_ns, _), (_, latest_ns, category)] = [pair[0], pair[1]];
            let first_index = detected.partition_point(|span| span.0 < earliest_ns);
            let nearby_spans = detected[first_index..]
                .iter()
                .take_while(|span| span.0 < latest_ns);
            let same_category = nearby_spans.filter(|span| span.2 == category);
            self.distances_ns
                .push(same_category.map(|span| span.0.abs_diff(at_ns)).min());
        }
    }

    /// Times from the start of each true span until its category was reported; 0 if it was reported before.
    pub fn add_report_delays<C: TimeCategory>(&mut self, truth: &Timeline<C>, live: &Timeline<C>) {
        let live: Vec<_> = live.spans().collect();
        for (start_ns, end_ns, category) in truth.spans() {
            if category == C::UNKNOWN {
                continue;
            }
            let first_index = live.partition_point(|span| span.1 <= start_ns);
            let spans_during = live[first_index..]
                .iter()
                .take_while(|span| span.0 < end_ns);
            let mut same_category = spans_during.filter(|span| span.2 == category);
            self.distances_ns.push(
                same_category
                    .next()
                    .map(|span| span.0.saturating_sub(start_ns)),
            );
        }
    }

    /// Their summary.
    #[must_use]
    pub fn summarize(&self) -> DistanceSummary {
        let mut sorted: Vec<u64> = self
            .distances_ns
            .iter()
            .map(|distance| distance.unwrap_or(u64::MAX))
            .collect();
        sorted.sort_unstable();
        let quantile = |share: f64| {
            let index =
                ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
            let value_ns = sorted.get(index).filter(|ns| **ns != u64::MAX);
            value_ns.map(|ns| *ns as f64 / 1e3)
        };
        let missed = self
            .distances_ns
            .iter()
            .filter(|distance| distance.is_none())
            .count();
        DistanceSummary {
            count: self.distances_ns.len(),
            missed_share: missed as f64 / self.distances_ns.len().max(1) as f64,
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
    fn a_known_confusion_matrix_has_the_known_score() {
        let truth = timeline(&[(0, DataLoading), (200, GpuCompute), (990, NcclCollective)]);
        let detected = timeline(&[(0, DataLoading), (100, GpuCompute), (900, OptimizerStep)]);
        let mut confusion = ConfusionMatrix::default();
        confusion.add_timelines(&truth, &detected);
        let score = confusion.compute_score(&[]);
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
        let mut confusion = ConfusionMatrix::default();
        confusion.add_timelines(&truth, &detected);
        assert_eq!(confusion.compute_score(&[]).absent_share, 0.0);
        let absent = ["OptimizerStep".to_owned()];
        assert_eq!(confusion.compute_score(&absent).absent_share, 0.5);
    }

    #[test]
    fn an_empty_comparison_has_no_score() {
        let score = ConfusionMatrix::<PhaseCategory>::default().compute_score(&[]);
        assert_eq!((score.macro_f1, score.seconds), (None, 0.0));
    }

    #[test]
    fn boundaries_are_as_far_as_the_nearest_change_to_the_same_phase() {
        let truth = timeline(&[(0, DataLoading), (200, GpuCompute), (600, OptimizerStep)]);
        let detected = timeline(&[(0, DataLoading), (230, GpuCompute), (900, DataLoading)]);
        let mut distances = ChangeDistances::default();
        distances.add_boundary_distances(&truth, &detected);
        assert_eq!(distances.distances_ns, [Some(30), None]);
        assert_eq!(distances.summarize().missed_share, 0.5);
        assert_eq!(distances.summarize().median_us, None);
    }

    #[test]
    fn a_delay_ends_when_the_phase_is_reported() {
        let truth = timeline(&[(0, DataLoading), (200, GpuCompute), (600, OptimizerStep)]);
        let live = timeline(&[(0, GpuCompute), (50, DataLoading), (150, GpuCompute)]);
        let mut distances = ChangeDistances::default();
        distances.add_report_delays(&truth, &live);
        assert_eq!(distances.distances_ns, [Some(50), Some(0), None]);
    }
}
