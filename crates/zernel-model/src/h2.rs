//! Log-linear (H2) buckets: where a value goes in a histogram, and which values a bucket holds.
//!
//! Every power of two is divided into [`PER_POWER`] buckets of equal width. Values below twice that number have a bucket
//! each. All histograms of this project use these buckets; some first divide the value by a unit, or leave out the largest
//! buckets.

/// Binary logarithm of [`PER_POWER`].
pub const GROUPING: u32 = 4;
/// Buckets per power of two.
pub const PER_POWER: usize = 1 << GROUPING;
/// First value whose bucket holds more than one value.
pub const FIRST_SHARED: u64 = 2 * PER_POWER as u64;
/// Number of buckets for all values of `u64`.
pub const BUCKETS: usize = index(u64::MAX) + 1;

/// Returns the index of the bucket of a value.
#[must_use]
#[inline]
pub const fn index(value: u64) -> usize {
    match value < FIRST_SHARED {
        true => value as usize,
        false => shared_index(value),
    }
}

/// Returns the index of the bucket of a value of at least [`FIRST_SHARED`].
#[must_use]
#[inline]
pub const fn shared_index(value: u64) -> usize {
    // `value >> shift` keeps the top five bits. The leading one bit counts as one more power of two.
    let shift = (value | 1).ilog2() - GROUPING;
    shift as usize * PER_POWER + (value >> shift) as usize
}

/// The values of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketRange {
    /// The smallest value of the bucket.
    pub first: u64,
    /// Number of values in the bucket.
    pub width: u64,
}

impl BucketRange {
    /// Returns the values of the bucket with this index.
    #[must_use]
    pub const fn of(index: usize) -> Self {
        if index < FIRST_SHARED as usize {
            return Self {
                first: index as u64,
                width: 1,
            };
        }
        let shift = index / PER_POWER - 1;
        Self {
            first: ((index % PER_POWER + PER_POWER) as u64) << shift,
            width: 1 << shift,
        }
    }

    /// Returns the middle, rounded down.
    #[must_use]
    pub const fn middle(self) -> u64 {
        self.first + self.width / 2
    }

    /// Returns the largest value.
    #[must_use]
    pub const fn last(self) -> u64 {
        self.first + (self.width - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another_without_a_gap() {
        assert_eq!(BucketRange::of(0), BucketRange { first: 0, width: 1 });
        for bucket in 0..BUCKETS - 1 {
            let (this, next) = (BucketRange::of(bucket), BucketRange::of(bucket + 1));
            assert_eq!(this.last() + 1, next.first);
        }
        assert_eq!(BucketRange::of(BUCKETS - 1).last(), u64::MAX);
    }

    #[test]
    fn the_values_of_a_bucket_have_its_index() {
        for bucket in 0..BUCKETS {
            let range = BucketRange::of(bucket);
            for value in [range.first, range.middle(), range.last()] {
                assert_eq!(index(value), bucket);
            }
        }
    }

    #[test]
    fn a_shared_bucket_is_at_most_a_sixteenth_of_its_values_wide() {
        for bucket in FIRST_SHARED as usize..BUCKETS {
            let range = BucketRange::of(bucket);
            assert!(range.width <= range.first / PER_POWER as u64);
        }
    }
}
