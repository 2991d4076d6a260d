//! Log-linear (H2) buckets: where a value goes in a histogram, and which values a bucket holds.
//!
//! Every power of two is divided into [`BUCKETS_PER_POWER_OF_TWO`] buckets of equal width. Values below twice that number have a bucket
//! each. All histograms of this project use these buckets; some first divide the value by a unit, or leave out the largest
//! buckets.

/// Binary logarithm of [`BUCKETS_PER_POWER_OF_TWO`].
pub const LOG2_BUCKETS_PER_POWER_OF_TWO: u32 = 4;
/// Buckets per power of two.
pub const BUCKETS_PER_POWER_OF_TWO: usize = 1 << LOG2_BUCKETS_PER_POWER_OF_TWO;
/// First value whose bucket holds more than one value.
pub const FIRST_VALUE_IN_MULTI_VALUE_BUCKET: u64 = 2 * BUCKETS_PER_POWER_OF_TWO as u64;
/// Number of buckets for all values of `u64`.
pub const BUCKET_COUNT: usize = bucket_index(u64::MAX) + 1;

/// Returns the index of the bucket of a value.
#[must_use]
#[inline]
pub const fn bucket_index(value: u64) -> usize {
    match value < FIRST_VALUE_IN_MULTI_VALUE_BUCKET {
        true => value as usize,
        false => multi_value_bucket_index(value),
    }
}

/// Returns the index of the bucket of a value of at least [`FIRST_VALUE_IN_MULTI_VALUE_BUCKET`].
#[must_use]
#[inline]
pub const fn multi_value_bucket_index(value: u64) -> usize {
    // `value >> shift` keeps the top five bits. The leading one bit of these five counts as one more power of two.
    let shift = (value | 1).ilog2() - LOG2_BUCKETS_PER_POWER_OF_TWO;
    shift as usize * BUCKETS_PER_POWER_OF_TWO + (value >> shift) as usize
}

/// The values of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketRange {
    /// The smallest value of the bucket.
    pub first_value: u64,
    /// Number of values in the bucket.
    pub value_count: u64,
}

impl BucketRange {
    /// Returns the values of the bucket with this index.
    #[must_use]
    pub const fn from_bucket_index(index: usize) -> Self {
        if index < FIRST_VALUE_IN_MULTI_VALUE_BUCKET as usize {
            return Self {
                first_value: index as u64,
                value_count: 1,
            };
        }
        let shift = index / BUCKETS_PER_POWER_OF_TWO - 1;
        Self {
            first_value: ((index % BUCKETS_PER_POWER_OF_TWO + BUCKETS_PER_POWER_OF_TWO) as u64)
                << shift,
            value_count: 1 << shift,
        }
    }

    /// Returns the middle of the bucket's values, rounded down.
    #[must_use]
    pub const fn middle_value(self) -> u64 {
        self.first_value + self.value_count / 2
    }

    /// Returns the largest value.
    #[must_use]
    pub const fn last_value(self) -> u64 {
        self.first_value + (self.value_count - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another_without_a_gap() {
        assert_eq!(
            BucketRange::from_bucket_index(0),
            BucketRange {
                first_value: 0,
                value_count: 1
            }
        );
        for bucket in 0..BUCKET_COUNT - 1 {
            let (this, next) = (
                BucketRange::from_bucket_index(bucket),
                BucketRange::from_bucket_index(bucket + 1),
            );
            assert_eq!(this.last_value() + 1, next.first_value);
        }
        assert_eq!(
            BucketRange::from_bucket_index(BUCKET_COUNT - 1).last_value(),
            u64::MAX
        );
    }

    #[test]
    fn the_values_of_a_bucket_have_its_index() {
        for bucket in 0..BUCKET_COUNT {
            let range = BucketRange::from_bucket_index(bucket);
            for value in [range.first_value, range.middle_value(), range.last_value()] {
                assert_eq!(bucket_index(value), bucket);
            }
        }
    }

    #[test]
    fn a_shared_bucket_is_at_most_a_sixteenth_of_its_values_wide() {
        for bucket in FIRST_VALUE_IN_MULTI_VALUE_BUCKET as usize..BUCKET_COUNT {
            let range = BucketRange::from_bucket_index(bucket);
            assert!(range.value_count <= range.first_value / BUCKETS_PER_POWER_OF_TWO as u64);
        }
    }
}
