//! What was counted in windows, and what that says of the time between them.

/// Calls of a sampled function: those of the windows, and what they say of the time between them.
///
/// Between two windows the rate is taken to go from that of the one to that of the other. How far
/// neighbours lie apart tells how far that may be off; not how far all of them do, because a program that has
/// come to rest is no less known for it. A program is also slower while it is watched, by no more than what the
/// probes cost it: that is doubt, too.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    windows: u64,
    /// In the last window, since sampling began the last time.
    last: Option<Rate>,
    calls: f64,
    bytes: f64,
    /// How many more calls there may be because windows slow the program down.
    doubt: f64,
    /// Of all spans between windows: half of the squared difference of their rates, times the squared seconds.
    spread: f64,
    /// The squared seconds of these spans, and of all.
    squares_between: f64,
    squares: f64,
    recent_rate: f64,
}

/// What happened in a second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Rate {
    calls: f64,
    bytes: f64,
    doubt: f64,
}

impl Rate {
    fn midpoint(self, other: Self) -> Self {
        Self {
            calls: f64::midpoint(self.calls, other.calls),
            bytes: f64::midpoint(self.bytes, other.bytes),
            doubt: f64::midpoint(self.doubt, other.doubt),
        }
    }
}

/// What a window saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Window {
    pub(crate) calls: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    /// The share of it that the probes may have cost whom it watched.
    pub(crate) slowed: f64,
}

impl Window {
    fn rate(&self) -> Rate {
        let calls = self.calls as f64 / self.seconds;
        let slowed = self.slowed.clamp(0.0, MOST_SLOWED);
        Rate {
            calls,
            bytes: self.bytes as f64 / self.seconds,
            doubt: calls * slowed / (1.0 - slowed),
        }
    }
}

/// Above this, it is not known by how much probes slow a program down.
const MOST_SLOWED: f64 = 0.5;

impl Estimate {
    /// Takes in a window that ends the last `span_s` seconds.
    pub(crate) fn add(&mut self, window: Window, span_s: f64) {
        if window.seconds <= 0.0 || span_s <= 0.0 {
            return;
        }
        let rate = window.rate();
        let unseen_s = (span_s - window.seconds).max(0.0);
        // What was counted is certain.
        self.calls += window.calls as f64;
        self.bytes += window.bytes as f64;
        self.take(self.last.unwrap_or(rate).midpoint(rate), unseen_s);
        if let Some(last) = self.last {
            let difference = rate.calls - last.calls;
            self.spread += 0.5 * (difference * unseen_s).powi(2);
            self.squares_between += unseen_s.powi(2);
        }
        // The last few windows count most.
        self.recent_rate = match self.windows {
            0 => rate.calls,
            _ => 0.7 * self.recent_rate + 0.3 * rate.calls,
        };
        self.last = Some(rate);
        self.windows += 1;
    }

    /// Sampling ends, and no window was in the last `span_s` seconds: they are taken to be like the last one.
    pub(crate) fn end(&mut self, span_s: f64) {
        let last = self.last.take().unwrap_or_default();
        self.take(last, span_s);
    }

    fn take(&mut self, rate: Rate, span_s: f64) {
        self.calls += rate.calls * span_s;
        self.bytes += rate.bytes * span_s;
        self.doubt += rate.doubt * span_s;
        self.squares += span_s.powi(2);
    }

    /// Calls per second in the last few windows.
    pub(crate) fn recent_rate(&self) -> f64 {
        self.recent_rate
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
        if self.windows < 2 || self.squares_between <= 0.0 {
            return self.calls();
        }
        // Differences of neighbours are not independent of each other.
        let windows = self.windows as f64;
        let freedom = 2.0 * (windows - 1.0).powi(2) / (3.0 * windows - 4.0);
        // Spans that no two windows enclose are known as badly as the others.
        let deviation = (self.spread * self.squares / self.squares_between).sqrt();
        // Student's t for 95 %, to within 3 %.
        let t = 1.96 + 2.5 / freedom + 8.0 / freedom.powi(3);
        (t * deviation + self.doubt).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(calls: u64) -> Window {
        Window {
            calls,
            bytes: 10 * calls,
            seconds: 0.05,
            slowed: 0.0,
        }
    }

    #[test]
    fn a_steady_rate_is_told_without_error() {
        let mut estimate = Estimate::default();
        for _ in 0..10 {
            estimate.add(window(500), 1.0);
        }
        estimate.end(1.0);
        assert_eq!(estimate.calls(), 110_000);
        assert_eq!(estimate.bytes(), 1_100_000);
        assert_eq!(estimate.error(), 0);
    }

    #[test]
    fn one_window_proves_nothing() {
        let mut estimate = Estimate::default();
        estimate.add(window(500), 1.0);
        assert_eq!(estimate.error(), estimate.calls());
    }

    #[test]
    fn the_stated_error_holds_nineteen_times_out_of_twenty() {
        for windows in [4, 20, 100] {
            let mut random = fastrand::Rng::with_seed(7);
            let mut held = 0;
            for _ in 0..1000 {
                let mut estimate = Estimate::default();
                let mut truth = 0.0;
                for _ in 0..windows {
                    // A second of twenty stretches of 50 ms, of which one is seen.
                    let stretches: Vec<u64> = (0..20).map(|_| random.u64(0..1000)).collect();
                    truth += stretches.iter().sum::<u64>() as f64;
                    estimate.add(window(stretches[random.usize(0..20)]), 1.0);
                }
                held +=
                    u32::from((estimate.calls() as f64 - truth).abs() <= estimate.error() as f64);
            }
            assert!(
                (930..=985).contains(&held),
                "{windows} windows: {held} of 1000"
            );
        }
    }

    #[test]
    fn rest_is_no_doubt() {
        let mut estimate = Estimate::default();
        (0..10).for_each(|_| estimate.add(window(500), 1.0));
        estimate.add(window(0), 1.0);
        let (calls, error) = (estimate.calls(), estimate.error());
        assert_eq!(calls, 104_750, "it came to rest somewhere in the last span");
        (0..10).for_each(|_| estimate.add(window(0), 1.0));
        assert_eq!(estimate.calls(), calls);
        assert!(estimate.error() <= error);
    }

    #[test]
    fn being_watched_slows_down() {
        let mut estimate = Estimate::default();
        for _ in 0..10 {
            let slowed = 0.2;
            estimate.add(
                Window {
                    slowed,
                    ..window(400)
                },
                1.0,
            );
        }
        // 8000 a second were seen, 10,000 would be if probes cost all that they may: but not in the windows.
        assert_eq!((estimate.calls(), estimate.error()), (80_000, 19_000));
    }

    #[test]
    fn what_was_counted_is_in_it() {
        let mut estimate = Estimate::default();
        (0..3).for_each(|_| estimate.add(window(0), 1.0));
        let before = estimate.calls();
        estimate.add(window(500), 0.05);
        assert_eq!(estimate.calls(), before + 500);
        // Sampled again after a while: the last time says nothing of this one.
        estimate.end(0.0);
        let (before, error) = (estimate.calls(), estimate.error());
        estimate.add(window(1000), 0.1);
        assert_eq!((estimate.calls(), estimate.error()), (before + 2000, error));
    }

    #[test]
    fn an_empty_window_is_passed_over() {
        let mut estimate = Estimate::default();
        let seconds = 0.0;
        estimate.add(
            Window {
                seconds,
                ..window(5)
            },
            1.0,
        );
        assert_eq!(estimate, Estimate::default());
    }
}
