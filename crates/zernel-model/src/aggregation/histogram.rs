//! A histogram of durations in constant memory.

use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::log_linear_buckets::{self, BucketRange};

/// Histogram of durations in nanoseconds, over the whole range of `u64`.
///
/// Count, sum, minimum and maximum are exact. Quantiles have a relative error of at most
/// [`MAX_QUANTILE_ERROR`](Self::MAX_QUANTILE_ERROR) at any time.
///
/// The buckets are log-linear (H2): below 32 ns each value has its own bucket, above, each power of
/// two has 16. Only the buckets between minimum and maximum take memory: at most 8 KiB, usually
/// less than 1 KiB.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LatencyHistogram {
    /// Number of recorded durations.
    pub count: u64,
    /// Sum of the durations; saturates.
    pub sum_ns: u64,
    /// Minimum; 0 without durations.
    pub min_ns: u64,
    /// Maximum; 0 without durations.
    pub max_ns: u64,
    /// First duration that [`record`](Self::record) counts on its fast path: between minimum and
    /// maximum, in a bucket of several values. 0 without durations.
    fast_path_first_ns: u64,
    /// Number of duration values on the fast path.
    fast_path_value_count: u64,
    /// Index of the first allocated bucket.
    first_bucket_index: usize,
    buckets: Vec<u64>,
}

impl LatencyHistogram {
    /// Largest relative error of a quantile: half a bucket.
    pub const MAX_QUANTILE_ERROR: f64 = 0.5 / log_linear_buckets::BUCKETS_PER_POWER_OF_TWO as f64;

    /// Records one duration.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        // One comparison decides whether only the bucket, count and sum change.
        if ns.wrapping_sub(self.fast_path_first_ns) >= self.fast_path_value_count {
            return self.record_in_new_bucket(ns);
        }
        let bucket =
            log_linear_buckets::multi_value_bucket_index(ns).wrapping_sub(self.first_bucket_index);
        let Some(in_bucket) = self.buckets.get_mut(bucket) else {
            return self.record_in_new_bucket(ns);
        };
        *in_bucket += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.checked_add(ns).unwrap_or_else(saturated_sum_ns);
    }

    /// Records a duration that is a new minimum or maximum, or has a bucket of its own.
    #[cold]
    fn record_in_new_bucket(&mut self, ns: u64) {
        *self.bucket_mut(log_linear_buckets::bucket_index(ns)) += 1;
        self.add_sum_and_extremes(ns, ns, ns);
        self.count += 1;
    }

    /// Returns the count of a bucket, and allocates the bucket if needed.
    #[cold]
    fn bucket_mut(&mut self, bucket: usize) -> &mut u64 {
        if self.buckets.is_empty() {
            self.first_bucket_index = bucket;
        }
        if bucket < self.first_bucket_index {
            let missing = std::iter::repeat_n(0, self.first_bucket_index - bucket);
            self.buckets.splice(0..0, missing);
            self.first_bucket_index = bucket;
        }
        let length = (bucket + 1 - self.first_bucket_index).max(self.buckets.len());
        self.buckets.resize(length, 0);
        &mut self.buckets[bucket - self.first_bucket_index]
    }

    /// Adds `count` durations of about `ns` to a bucket. [`Self::add_sum_and_extremes`] must add their sum,
    /// minimum and maximum.
    pub fn record_bucket_counts(&mut self, ns: u64, count: u64) {
        self.count += count;
        *self.bucket_mut(log_linear_buckets::bucket_index(ns)) += count;
    }

    /// Adds the sum, minimum and maximum of durations that [`Self::record_bucket_counts`] counted.
    pub fn add_sum_and_extremes(&mut self, sum_ns: u64, min_ns: u64, max_ns: u64) {
        self.sum_ns = self.sum_ns.saturating_add(sum_ns);
        self.min_ns = match self.fast_path_first_ns {
            0 => min_ns,
            _ => self.min_ns.min(min_ns),
        };
        self.max_ns = self.max_ns.max(max_ns);
        self.fast_path_first_ns = self
            .min_ns
            .max(log_linear_buckets::FIRST_VALUE_IN_MULTI_VALUE_BUCKET);
        self.fast_path_value_count = match self.max_ns.checked_sub(self.fast_path_first_ns) {
            Some(distance) => distance + 1,
            None => 0,
        };
    }

    /// Adds all durations of `other`.
    pub fn merge(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        self.add_sum_and_extremes(other.sum_ns, other.min_ns, other.max_ns);
        self.count += other.count;
        // The buckets of both ends are allocated first, so that memory is allocated at most once per end.
        let last = other.first_bucket_index + other.buckets.len() - 1;
        self.bucket_mut(other.first_bucket_index);
        self.bucket_mut(last);
        let shared = &mut self.buckets[other.first_bucket_index - self.first_bucket_index..];
        for (ours, theirs) in shared.iter_mut().zip(&other.buckets) {
            *ours += theirs;
        }
    }

    /// Returns the median; 0 without durations.
    #[must_use]
    pub fn p50_ns(&self) -> u64 {
        self.quantile_ns(0.5)
    }

    /// Returns the 99th percentile; 0 without durations.
    #[must_use]
    pub fn p99_ns(&self) -> u64 {
        self.quantile_ns(0.99)
    }

    /// Returns the quantile at `share`, by nearest rank; 0 without durations.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let rank = ((share * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut below = 0;
        for (offset, count) in self.buckets.iter().enumerate() {
            below += count;
            if below >= rank {
                return BucketRange::from_bucket_index(self.first_bucket_index + offset)
                    .middle_value()
                    .clamp(self.min_ns, self.max_ns);
            }
        }
        0
    }

    /// Returns the mean; 0 without durations.
    #[must_use]
    pub fn mean_ns(&self) -> f64 {
        match self.count {
            0 => 0.0,
            count => self.sum_ns as f64 / count as f64,
        }
    }

    /// Returns the number of durations below 2 to the power of each of `powers`, which must ascend and be above 4.
    /// The counts are exact, because these powers of two are edges of buckets.
    pub(crate) fn counts_below_powers_of_two<const N: usize>(&self, powers: [u32; N]) -> [u64; N] {
        let mut below = 0;
        let mut next = 0;
        powers.map(|power| {
            let edge = log_linear_buckets::bucket_index(1 << power)
                .saturating_sub(self.first_bucket_index);
            let edge = edge.min(self.buckets.len());
            below += self.buckets[next..edge].iter().sum::<u64>();
            next = edge;
            below
        })
    }
}

/// Returns the saturated sum. A separate cold function keeps this case off the fast path.
#[cold]
fn saturated_sum_ns() -> u64 {
    u64::MAX
}

impl Serialize for LatencyHistogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("LatencyHistogram", 6)?;
        fields.serialize_field("count", &self.count)?;
        fields.serialize_field("sum_ns", &self.sum_ns)?;
        fields.serialize_field("min_ns", &self.min_ns)?;
        fields.serialize_field("max_ns", &self.max_ns)?;
        fields.serialize_field("p50_ns", &self.p50_ns())?;
        fields.serialize_field("p99_ns", &self.p99_ns())?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_largest_histogram_takes_at_most_8_kib() {
        let size =
            size_of::<LatencyHistogram>() + log_linear_buckets::BUCKET_COUNT * size_of::<u64>();
        assert!(size <= 8 * 1024, "{size} bytes");
    }

    #[test]
    fn an_empty_histogram_serialises_to_zeros() {
        let json = serde_json::to_string(&LatencyHistogram::default()).unwrap();
        assert_eq!(
            json,
            r#"{"count":0,"sum_ns":0,"min_ns":0,"max_ns":0,"p50_ns":0,"p99_ns":0}"#
        );
        assert_eq!(LatencyHistogram::default().mean_ns(), 0.0);
    }

    #[test]
    fn one_value_is_every_quantile_exactly() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(123_456_789_012);
        assert_eq!(histogram.p50_ns(), 123_456_789_012);
        assert_eq!(histogram.p99_ns(), 123_456_789_012);
        assert_eq!(histogram.mean_ns(), 123_456_789_012.0);
    }

    #[test]
    fn the_mean_keeps_its_fraction() {
        let mut histogram = LatencyHistogram::default();
        [1, 2].into_iter().for_each(|ns| histogram.record(ns));
        assert_eq!(histogram.mean_ns(), 1.5);
    }

    #[test]
    fn one_outlier_of_100_values_does_not_change_the_99th_percentile() {
        let mut histogram = LatencyHistogram::default();
        for ns in (1..=99).map(|_| 10).chain([1_000_000]) {
            histogram.record(ns);
        }
        assert_eq!((histogram.p50_ns(), histogram.p99_ns()), (10, 10));
        histogram.record(1_000_000);
        assert!(histogram.p99_ns() > 900_000);
    }

    #[test]
    fn a_sum_that_overflows_saturates() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(u64::MAX);
        histogram.record(u64::MAX);
        assert_eq!((histogram.count, histogram.sum_ns), (2, u64::MAX));
    }

    /// Durations of every magnitude.
    fn any_durations() -> impl Strategy<Value = Vec<u64>> {
        let duration = (0_u32..64, any::<u64>()).prop_map(|(bits, ns)| ns >> bits);
        prop::collection::vec(duration, 1..300)
    }

    proptest! {
        #[test]
        fn quantiles_are_within_the_stated_error(mut durations in any_durations(), share in 0.0_f64..=1.0) {
            let mut histogram = LatencyHistogram::default();
            durations.iter().for_each(|ns| histogram.record(*ns));
            durations.sort_unstable();
            let rank = ((share * durations.len() as f64).ceil() as usize).max(1);
            let exact = durations[rank - 1];
            let error = histogram.quantile_ns(share).abs_diff(exact) as f64;
            prop_assert!(error <= exact as f64 * LatencyHistogram::MAX_QUANTILE_ERROR);
            prop_assert_eq!(histogram.min_ns, durations[0]);
            prop_assert_eq!(histogram.max_ns, *durations.last().unwrap());
        }

        #[test]
        fn merging_equals_recording_both(left in any_durations(), right in any_durations()) {
            let record_all = |durations: &[u64]| {
                let mut histogram = LatencyHistogram::default();
                durations.iter().for_each(|ns| histogram.record(*ns));
                histogram
            };
            let mut merged = record_all(&left);
            merged.merge(&record_all(&right));
            prop_assert_eq!(&merged, &record_all(&[left, right].concat()));
            let mut empty = LatencyHistogram::default();
            empty.merge(&merged);
            empty.merge(&LatencyHistogram::default());
            prop_assert_eq!(empty, merged);
        }

        #[test]
        fn counts_below_powers_of_two_are_exact(durations in any_durations()) {
            let mut histogram = LatencyHistogram::default();
            durations.iter().for_each(|ns| histogram.record(*ns));
            let powers = [5, 10, 31, 63];
            let exact = powers.map(|power| durations.iter().filter(|ns| **ns < 1 << power).count() as u64);
            prop_assert_eq!(histogram.counts_below_powers_of_two(powers), exact);
        }
    }
}
