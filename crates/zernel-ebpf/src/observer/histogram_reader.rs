//! Reads duration histograms from the kernel, as increments.

use zernel_model::aggregation::LatencyHistogram;
use zernel_model::log_linear_buckets;

use crate::probes::layout::{BUCKETS, H2_GROUPING, H2_UNIT_SHIFT as UNIT_SHIFT, Histogram};

// The kernel's buckets are those of userspace, for durations in units of 16 ns and up to 266 s.
const _: () = assert!(H2_GROUPING == log_linear_buckets::LOG2_BUCKETS_PER_POWER_OF_TWO);

/// Reads one histogram of the kernel again and again, and adds the difference to a total. The kernel's bucket
/// counters have 32 bits and may wrap.
///
/// The reader stores only the range of buckets that are in use.
#[derive(Debug, Default)]
pub(crate) struct HistogramReader {
    first_stored_bucket: usize,
    buckets: Vec<u32>,
    sum_ns: u64,
}

impl HistogramReader {
    /// Adds the durations that the kernel recorded since the last call to `total`, and returns how many these are.
    pub(crate) fn add_new_durations(
        &mut self,
        now: &Histogram,
        total: &mut LatencyHistogram,
    ) -> u64 {
        self.extend_to_used_buckets(&now.buckets);
        let mut added = 0;
        for (offset, before) in self.buckets.iter_mut().enumerate() {
            let bucket = self.first_stored_bucket + offset;
            let count = u64::from(now.buckets[bucket].wrapping_sub(*before));
            if count > 0 {
                total.record_bucket_counts(bucket_middle(bucket).min(now.max_ns), count);
                added += count;
            }
            *before = now.buckets[bucket];
        }
        if added > 0 {
            let sum_ns = now.sum_ns.wrapping_sub(self.sum_ns);
            total.add_sum_and_extremes(sum_ns, !now.min_inverted, now.max_ns);
            self.sum_ns = now.sum_ns;
        }
        added
    }

    /// Extends the stored range to every bucket in use.
    fn extend_to_used_buckets(&mut self, buckets: &[u32; BUCKETS]) {
        let used = |count: &u32| *count != 0;
        let (Some(first), Some(last)) = (
            buckets.iter().position(used),
            buckets.iter().rposition(used),
        ) else {
            return;
        };
        if self.buckets.is_empty() {
            self.first_stored_bucket = first;
        }
        if first < self.first_stored_bucket {
            let missing = std::iter::repeat_n(0, self.first_stored_bucket - first);
            self.buckets.splice(0..0, missing);
            self.first_stored_bucket = first;
        }
        let length = (last + 1 - self.first_stored_bucket).max(self.buckets.len());
        self.buckets.resize(length, 0);
    }
}

/// The middle of a bucket in nanoseconds; `u64::MAX` for the last bucket, which has no end.
fn bucket_middle(bucket: usize) -> u64 {
    if bucket == BUCKETS - 1 {
        return u64::MAX;
    }
    let units = log_linear_buckets::BucketRange::from_bucket_index(bucket);
    (units.first_value << UNIT_SHIFT) + (units.value_count << UNIT_SHIFT) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bucket of a duration, as `zernel_h2_bucket` computes it.
    fn bucket_of(ns: u64) -> usize {
        log_linear_buckets::bucket_index(ns >> UNIT_SHIFT).min(BUCKETS - 1)
    }

    #[test]
    fn the_middle_of_a_bucket_is_in_it() {
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(bucket_middle(bucket)), bucket);
        }
    }

    #[test]
    fn a_middle_is_within_the_stated_error_from_256_ns_to_266_s() {
        for power in 8..38 {
            for part in 0..1000 {
                let ns = (1_u64 << power) + ((1_u64 << power) / 1000 * part);
                if ns >= 266_000_000_000 {
                    continue; // in the last bucket, which has no end
                }
                let error = bucket_middle(bucket_of(ns)).abs_diff(ns) as f64 / ns as f64;
                assert!(
                    error <= LatencyHistogram::MAX_QUANTILE_ERROR,
                    "{error} at {ns} ns"
                );
            }
        }
    }

    #[test]
    fn counters_that_wrap_are_taken_over_right() {
        let mut kernel = Histogram {
            sum_ns: 1000,
            max_ns: 1000,
            min_inverted: !1000,
            buckets: [0; BUCKETS],
        };
        let bucket = bucket_of(1000);
        kernel.buckets[bucket] = u32::MAX;
        let mut reader = HistogramReader::default();
        let mut total = LatencyHistogram::default();
        reader.add_new_durations(&kernel, &mut total);
        kernel.buckets[bucket] = 4;
        kernel.sum_ns += 5000;
        assert_eq!(reader.add_new_durations(&kernel, &mut total), 5);
        assert_eq!(total.count, u64::from(u32::MAX) + 5);
        assert_eq!(total.sum_ns, 6000);
        assert_eq!((total.min_ns, total.max_ns), (1000, 1000));
    }
}
