//! Latency histograms: log-linear buckets with exact totals.
//!
//! A bucket spans 1/16 of a power of two, so a quantile is at most 6.25 % above the true value; count, sum, minimum and
//! maximum are exact. A worker fills a `SharedHistogram` in shared memory as it runs; a report contains a
//! [`Histogram`].

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};
use zernel_model::log_linear_buckets::{self, BucketRange};

/// The largest value that has a bucket of its own range: 18 minutes, in nanoseconds. All larger values share the last
/// bucket.
const LARGEST_BUCKETED_NS: u64 = (1 << 40) - 1;
const BUCKET_COUNT: usize = bucket_of(LARGEST_BUCKETED_NS) + 1;

const fn bucket_of(ns: u64) -> usize {
    log_linear_buckets::bucket_index(if ns > LARGEST_BUCKETED_NS {
        LARGEST_BUCKETED_NS
    } else {
        ns
    })
}

/// A histogram in shared memory. One worker writes it; any process may read it meanwhile.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SharedHistogram {
    count: AtomicU64,
    sum_ns: AtomicU64,
    /// The smallest recorded value plus one. 0 means that no value was recorded, because the memory starts zeroed.
    min_plus_one: AtomicU64,
    max_ns: AtomicU64,
    buckets: [AtomicU32; BUCKET_COUNT],
}

impl SharedHistogram {
    /// Adds one value to the histogram. Only the worker that owns the histogram may call this. Fork safe.
    pub(crate) fn record(&self, ns: u64) {
        add_to_counter(&self.count, 1);
        add_to_counter(&self.sum_ns, ns);
        let min = self.min_plus_one.load(Relaxed);
        if min == 0 || ns < min - 1 {
            self.min_plus_one.store(ns.saturating_add(1), Relaxed);
        }
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
        let bucket = &self.buckets[bucket_of(ns)];
        bucket.store(bucket.load(Relaxed).saturating_add(1), Relaxed);
    }

    /// Copies the values that were recorded so far.
    pub(crate) fn snapshot(&self) -> Histogram {
        let filled = |(index, count): (usize, &AtomicU32)| {
            let count = u64::from(count.load(Relaxed));
            (count > 0).then(|| Bucket {
                up_to_ns: BucketRange::from_bucket_index(index).last_value(),
                count,
            })
        };
        Histogram {
            count: self.count.load(Relaxed),
            sum_ns: self.sum_ns.load(Relaxed),
            min_ns: self.min_plus_one.load(Relaxed).saturating_sub(1),
            max_ns: self.max_ns.load(Relaxed),
            buckets: self.buckets.iter().enumerate().filter_map(filled).collect(),
        }
    }
}

fn add_to_counter(total: &AtomicU64, value: u64) {
    total.store(total.load(Relaxed).saturating_add(value), Relaxed);
}

/// Latencies in nanoseconds. Quantiles are at most 6.25 % too large; everything else is exact.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Histogram {
    /// Number of recorded values.
    pub count: u64,
    /// Sum of the recorded values, in nanoseconds.
    pub sum_ns: u64,
    /// The smallest recorded value; 0 if there is none.
    pub min_ns: u64,
    /// The largest recorded value; 0 if there is none.
    pub max_ns: u64,
    /// The buckets that hold at least one value, smallest bound first.
    pub buckets: Vec<Bucket>,
}

/// One bucket of a [`Histogram`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// The largest value that falls into this bucket, in nanoseconds.
    pub up_to_ns: u64,
    /// Number of values in this bucket.
    pub count: u64,
}

impl Histogram {
    /// The value below which the share `quantile` (0 to 1) of all values lies; `None` without values.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<u64> {
        let total: u64 = self.buckets.iter().map(|bucket| bucket.count).sum();
        let rank = ((quantile.clamp(0.0, 1.0) * total as f64).ceil() as u64).max(1);
        let mut seen = 0;
        self.buckets.iter().find_map(|bucket| {
            seen += bucket.count;
            (seen >= rank).then(|| bucket.up_to_ns.clamp(self.min_ns, self.max_ns))
        })
    }

    /// The values recorded since `earlier`, a snapshot of the same histogram. The smallest and the largest value of the
    /// result are bounds of buckets, unless `earlier` is empty.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        if earlier.count == 0 {
            return self.clone();
        }
        let count_before = |up_to_ns: u64| {
            let same = earlier
                .buckets
                .iter()
                .find(|bucket| bucket.up_to_ns == up_to_ns);
            same.map_or(0, |bucket| bucket.count)
        };
        let rest = self.buckets.iter().map(|bucket| Bucket {
            up_to_ns: bucket.up_to_ns,
            count: bucket.count.saturating_sub(count_before(bucket.up_to_ns)),
        });
        Self::from_buckets(
            rest.filter(|bucket| bucket.count > 0).collect(),
            self.sum_ns.saturating_sub(earlier.sum_ns),
            self.max_ns,
        )
    }

    /// Returns a histogram with the values of both histograms.
    #[must_use]
    pub fn merged(&self, other: &Self) -> Self {
        if other.count == 0 {
            return self.clone();
        }
        if self.count == 0 {
            return other.clone();
        }
        let mut buckets = self.buckets.clone();
        for bucket in &other.buckets {
            match buckets.binary_search_by_key(&bucket.up_to_ns, |own| own.up_to_ns) {
                Ok(index) => buckets[index].count += bucket.count,
                Err(index) => buckets.insert(index, *bucket),
            }
        }
        Self {
            count: self.count + other.count,
            sum_ns: self.sum_ns.saturating_add(other.sum_ns),
            min_ns: self.min_ns.min(other.min_ns),
            max_ns: self.max_ns.max(other.max_ns),
            buckets,
        }
    }

    fn from_buckets(buckets: Vec<Bucket>, sum_ns: u64, largest_ns: u64) -> Self {
        Self {
            count: buckets.iter().map(|bucket| bucket.count).sum(),
            sum_ns,
            min_ns: buckets
                .first()
                .map_or(0, |bucket| bucket.up_to_ns.min(largest_ns)),
            max_ns: buckets
                .last()
                .map_or(0, |bucket| bucket.up_to_ns.min(largest_ns)),
            buckets,
        }
    }

    /// The mean of the values; `None` without values.
    #[must_use]
    pub fn mean_ns(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram_of(values: impl IntoIterator<Item = u64>) -> Histogram {
        let shared = SharedHistogram {
            count: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            min_plus_one: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            buckets: std::array::from_fn(|_| AtomicU32::new(0)),
        };
        values.into_iter().for_each(|value| shared.record(value));
        shared.snapshot()
    }

    #[test]
    fn bucket_width_is_at_most_a_sixteenth_of_value() {
        for value in (0..4096)
            .chain((12..40).flat_map(|power| [(1 << power) - 1, 1 << power, (1 << power) + 1]))
        {
            let bound = BucketRange::from_bucket_index(bucket_of(value)).last_value();
            assert!(
                bound >= value && bound - value <= value / 16,
                "{value} fell into a bucket up to {bound}"
            );
        }
        assert_eq!(bucket_of(u64::MAX), BUCKET_COUNT - 1);
    }

    #[test]
    fn histogram_totals_are_exact_and_quantiles_close() {
        let histogram = histogram_of(1..=1000);
        assert_eq!((histogram.count, histogram.sum_ns), (1000, 500_500));
        assert_eq!((histogram.min_ns, histogram.max_ns), (1, 1000));
        assert!((500..=531).contains(&histogram.quantile(0.5).unwrap()));
        assert_eq!(histogram.quantile(1.0), Some(1000));
        assert_eq!(histogram.mean_ns(), Some(500));
    }

    #[test]
    fn value_beyond_last_bucket_counts_in_sum_and_max() {
        let histogram = histogram_of([1 << 50]);
        assert_eq!((histogram.sum_ns, histogram.max_ns), (1 << 50, 1 << 50));
    }

    #[test]
    fn histogram_since_and_merged_are_inverse() {
        let (early, all) = (histogram_of(1..=10), histogram_of(1..=100));
        let late = all.since(&early);
        assert_eq!((late.count, late.sum_ns), (90, 4995));
        assert_eq!(late.max_ns, 100);
        let both = early.merged(&late);
        assert_eq!((both.count, both.sum_ns), (all.count, all.sum_ns));
        assert_eq!(both.buckets, all.buckets);
        assert_eq!(histogram_of([]).merged(&all), all);
        assert_eq!(all.since(&histogram_of([])), all);
    }

    #[test]
    fn empty_histogram_has_no_quantile_or_mean() {
        assert_eq!(histogram_of([]).quantile(0.5), None);
        assert_eq!(histogram_of([]).mean_ns(), None);
    }
}
