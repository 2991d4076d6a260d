//! What was counted in windows, and what that says of the time between them.

/// Calls of a sampled function: a rate, the time it is taken to hold for, and how far the rates of
/// the windows lie apart.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    windows: u64,
    mean_rate: f64,
    /// Sum of the squared differences from the mean.
    spread: f64,
    seconds: f64,
    calls: f64,
    bytes: f64,
    recent_rate: f64,
}

impl Estimate {
    /// Takes in a window of `window_s` seconds that stands for the last `span_s` seconds.
    pub(crate) fn add(&mut self, calls: u64, bytes: u64, window_s: f64, span_s: f64) {
        if window_s <= 0.0 || span_s <= 0.0 {
            return;
        }
        let rate = calls as f64 / window_s;
        self.windows += 1;
        // The last few windows count most.
        self.recent_rate = match self.windows {
            1 => rate,
            _ => 0.7 * self.recent_rate + 0.3 * rate,
        };
        let before = rate - self.mean_rate;
        self.mean_rate += before / self.windows as f64;
        self.spread += before * (rate - self.mean_rate);
        self.seconds += span_s;
        self.calls += rate * span_s;
        self.bytes += bytes as f64 / window_s * span_s;
    }

    /// Takes the rate to hold for another `span_s` seconds that no window was in.
    pub(crate) fn extend(&mut self, span_s: f64) {
        if self.calls > 0.0 {
            self.bytes += self.bytes / self.calls * self.recent_rate * span_s;
        }
        self.calls += self.recent_rate * span_s;
        self.seconds += span_s;
    }

    /// Calls per second in the last few windows.
    pub(crate) fn recent_rate(&self) -> f64 {
        self.recent_rate
    }

    /// How many windows there were.
    #[must_use]
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// Calls per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.mean_rate
    }

    /// Calls while the function was sampled.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.round() as u64
    }

    /// Bytes they were about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.round() as u64
    }

    /// How far [`Self::calls`] may be off, 19 times out of 20; as much as it is, when there are too
    /// few windows to tell.
    #[must_use]
    pub fn error(&self) -> u64 {
        if self.windows < 2 {
            return self.calls();
        }
        let freedom = (self.windows - 1) as f64;
        let deviation = (self.spread / freedom).sqrt();
        // Student's t for 95 %, to within 3 %.
        let t = 1.96 + 2.5 / freedom + 8.0 / freedom.powi(3);
        (t * deviation / (self.windows as f64).sqrt() * self.seconds).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_rate_is_told_without_error() {
        let mut estimate = Estimate::default();
        for _ in 0..10 {
            estimate.add(500, 5000, 0.05, 1.0);
        }
        assert_eq!(estimate.calls(), 100_000);
        assert_eq!(estimate.bytes(), 1_000_000);
        assert_eq!(estimate.error(), 0);
    }

    #[test]
    fn one_window_proves_nothing() {
        let mut estimate = Estimate::default();
        estimate.add(500, 0, 0.05, 1.0);
        assert_eq!(estimate.error(), estimate.calls());
    }

    #[test]
    fn the_stated_error_holds_nineteen_times_out_of_twenty() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut held = 0;
        for _ in 0..1000 {
            let mut estimate = Estimate::default();
            let mut truth = 0.0;
            for _ in 0..20 {
                // A second of twenty stretches of 50 ms, of which one is seen.
                let stretches: Vec<u64> = (0..20).map(|_| random.u64(0..1000)).collect();
                truth += stretches.iter().sum::<u64>() as f64;
                estimate.add(stretches[random.usize(0..20)], 0, 0.05, 1.0);
            }
            held += u32::from((estimate.calls() as f64 - truth).abs() <= estimate.error() as f64);
        }
        assert!((930..=985).contains(&held), "{held} of 1000");
    }

    #[test]
    fn an_empty_window_is_passed_over() {
        let mut estimate = Estimate::default();
        estimate.add(5, 5, 0.0, 1.0);
        assert_eq!(estimate, Estimate::default());
    }
}
