//! The sign test, by which two schedulers are compared over several seeds.

use serde::{Deserialize, Serialize};

/// The largest p at which a difference counts: that of six wins in six pairs (1/64).
pub const LARGEST_P_VALUE: f64 = 0.016;

/// The result of comparing two schedulers: pairs of runs with the same seed.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct SignTest {
    /// Number of pairs in which the second scheduler is better.
    pub wins: u32,
    /// Number of pairs in which the second scheduler is worse.
    pub losses: u32,
    /// Number of pairs with equal figures, which do not count.
    pub ties: u32,
}

/// What a sign test shows about the second scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignTestOutcome {
    /// The second scheduler is better.
    Better,
    /// The second scheduler is worse.
    Worse,
    /// The test shows neither that the second scheduler is better nor that it is worse.
    Undecided,
}

impl SignTest {
    /// Compares pairs of figures (first scheduler, second scheduler) with the same seed.
    #[must_use]
    pub fn from_pairs(pairs: impl IntoIterator<Item = (f64, f64)>, higher_is_better: bool) -> Self {
        let mut test = Self::default();
        for (first, second) in pairs {
            let gain = if higher_is_better {
                second - first
            } else {
                first - second
            };
            match gain {
                gain if gain > 0.0 => test.wins += 1,
                gain if gain < 0.0 => test.losses += 1,
                _ => test.ties += 1,
            }
        }
        test
    }

    /// The probability that two equal schedulers differ at least this much in this direction.
    #[must_use]
    pub fn p_value(&self) -> f64 {
        let pairs = self.wins + self.losses;
        let larger_count = self.wins.max(self.losses);
        let tail_sum: f64 = (larger_count..=pairs)
            .map(|count| binomial_coefficient(pairs, count))
            .sum();
        tail_sum / 2_f64.powi(i32::try_from(pairs).unwrap_or(i32::MAX))
    }

    /// What the test shows by the rule that is fixed before the runs.
    #[must_use]
    pub fn outcome(&self) -> SignTestOutcome {
        match self.p_value() <= LARGEST_P_VALUE {
            true if self.wins > self.losses => SignTestOutcome::Better,
            true => SignTestOutcome::Worse,
            false => SignTestOutcome::Undecided,
        }
    }
}

fn binomial_coefficient(trials: u32, successes: u32) -> f64 {
    (0..successes).fold(1.0, |product, index| {
        product * f64::from(trials - index) / f64::from(index + 1)
    })
}

/// The median: the middle value, or the mean of the middle two values for an even number.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length.is_multiple_of(2) => {
            Some(f64::midpoint(sorted[middle - 1], sorted[middle]))
        }
        _ => Some(sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sign_test_of_counts(wins: u32, losses: u32) -> SignTest {
        SignTest {
            wins,
            losses,
            ties: 0,
        }
    }

    #[test]
    fn sign_test_needs_six_wins_of_six() {
        assert!((sign_test_of_counts(6, 0).p_value() - 1.0 / 64.0).abs() < 1e-12);
        assert_eq!(sign_test_of_counts(6, 0).outcome(), SignTestOutcome::Better);
        assert_eq!(sign_test_of_counts(0, 6).outcome(), SignTestOutcome::Worse);
        assert_eq!(
            sign_test_of_counts(5, 0).outcome(),
            SignTestOutcome::Undecided
        );
        assert_eq!(
            sign_test_of_counts(6, 1).outcome(),
            SignTestOutcome::Undecided
        );
        assert_eq!(
            sign_test_of_counts(0, 0).outcome(),
            SignTestOutcome::Undecided
        );
        assert!((sign_test_of_counts(9, 1).p_value() - 11.0 / 1024.0).abs() < 1e-12);
        assert_eq!(sign_test_of_counts(9, 1).outcome(), SignTestOutcome::Better);
    }

    #[test]
    fn sign_test_respects_higher_is_better() {
        let pairs = [(1.0, 2.0), (2.0, 2.0), (3.0, 1.0), (1.0, 5.0)];
        let higher = SignTest::from_pairs(pairs, true);
        assert_eq!((higher.wins, higher.losses, higher.ties), (2, 1, 1));
        let lower = SignTest::from_pairs(pairs, false);
        assert_eq!((lower.wins, lower.losses), (1, 2));
    }

    #[test]
    fn median_of_odd_even_and_empty_lists() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
