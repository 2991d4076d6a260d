//! What was counted in windows, and what that says of the time between them.

use zernel_phase::steps::Done;

/// Calls of a sampled function: those of the windows, and what they say of the time between them.
///
/// Where a process makes steps, these tell: all of them are counted, and the windows know what a step calls
/// (`PerStep`).
///
/// Elsewhere, the rate between two windows is taken to go from that of the one to that of the other. How far
/// neighbours lie apart tells how far that may be off; not how far all of them do, because a program that has
/// come to rest is no less known for it. A program is also slower while it is watched, by no more than what the
/// probes cost it: that is doubt, too.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    windows: u64,
    /// In the last window, since sampling began the last time.
    last: Option<Rate>,
    by_steps: PerStep,
    /// All that follows but the last is of the time in which no steps are known.
    timed_windows: u64,
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

/// The same for the time in which a process made steps.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct PerStep {
    /// Of windows, the last of which count most: their calls, bytes and launches, and squares and products of
    /// these.
    windows: f64,
    seen_calls: f64,
    seen_bytes: f64,
    launched: f64,
    calls_squared: f64,
    calls_by_launched: f64,
    launched_squared: f64,
    /// The launches of a step at the end of the last span.
    per_step: Option<f64>,
    /// The most calls that were ever seen in a second.
    greatest_rate: f64,
    /// More steps than there were have been taken for seen: where windows begin and end is not known to the launch.
    owed: f64,
    /// Before any window: how it was when all was counted.
    presumed: Option<Share>,
    /// In all.
    calls: f64,
    bytes: f64,
    error: f64,
}

/// Calls and bytes for each launch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Share {
    calls: f64,
    bytes: f64,
}

/// Calls and bytes in a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CallRate {
    pub(crate) calls: f64,
    pub(crate) bytes: f64,
}

/// What was counted in a second, before a function is sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Before {
    pub(crate) rate: CallRate,
    /// All launches, if they were counted.
    pub(crate) launches: Option<f64>,
}

/// What a process did in a span that a window ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Steps {
    /// From the last window to the end of this one.
    pub(crate) done: Done,
    /// Of these, the steps that were in the window.
    pub(crate) seen: f64,
    /// How many launches a step has now.
    pub(crate) per_step: f64,
    /// By what share that may be off.
    pub(crate) relative_error: f64,
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
    /// All launches. Some may be of no step.
    pub(crate) launched: u64,
    /// Whether it was in a training loop.
    pub(crate) has_steps: bool,
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

/// What a window counts when another has come after it.
const FADING: f64 = 0.85;
/// In a shorter window, a few calls are no rate.
const SHORT_S: f64 = 0.01;
/// Above this, it is not known by how much probes slow a program down.
const MOST_SLOWED: f64 = 0.5;

impl Estimate {
    /// Sampling begins, of a function of which this was counted, if it was called.
    pub(crate) fn begin(&mut self, before: Option<Before>) {
        self.last = before.map(|before| Rate {
            calls: before.rate.calls,
            bytes: before.rate.bytes,
            doubt: 0.0,
        });
        self.by_steps.presumed = before.and_then(|before| {
            let launches = before.launches.filter(|launches| *launches > 0.0)?;
            Some(Share {
                calls: before.rate.calls / launches,
                bytes: before.rate.bytes / launches,
            })
        });
    }

    /// Takes in a window that ends the last `span_s` seconds, and the steps that were made in them, if they are
    /// known.
    pub(crate) fn add(&mut self, window: Window, span_s: f64, steps: Option<Steps>) {
        if window.seconds <= 0.0 || span_s <= 0.0 {
            return;
        }
        let rate = window.rate();
        let unseen_s = (span_s - window.seconds).max(0.0);
        // Of a process that has just begun, or ends, less than a window is seen.
        let dense = window.calls as f64 / window.seconds.max(SHORT_S);
        self.by_steps.greatest_rate = self.by_steps.greatest_rate.max(dense);
        if window.has_steps {
            self.by_steps.see(&window);
        }
        match steps.filter(|_| self.by_steps.share().is_some()) {
            Some(steps) => self.by_steps.add(&window, &steps, rate),
            None => self.add_by_time(&window, rate, unseen_s),
        }
        // The last few windows count most.
        self.recent_rate = match self.windows {
            0 => rate.calls,
            _ => 0.7 * self.recent_rate + 0.3 * rate.calls,
        };
        self.last = Some(rate);
        self.windows += 1;
    }

    fn add_by_time(&mut self, window: &Window, rate: Rate, unseen_s: f64) {
        self.timed_windows += 1;
        // What was counted is certain.
        self.calls += window.calls as f64;
        self.bytes += window.bytes as f64;
        self.take(self.last.unwrap_or(rate).midpoint(rate), unseen_s);
        if let Some(last) = self.last {
            let difference = rate.calls - last.calls;
            self.spread += 0.5 * (difference * unseen_s).powi(2);
            self.squares_between += unseen_s.powi(2);
        }
    }

    /// Sampling ends, and no window was in the last `span_s` seconds: they are taken to be like the last one, or
    /// their steps like all others.
    pub(crate) fn end(&mut self, span_s: f64, steps: Option<Steps>) {
        let last = self.last.take().unwrap_or_default();
        match steps.filter(|_| self.by_steps.share().is_some()) {
            Some(mut steps) => {
                // The last window was before.
                steps.done.is_strange = false;
                self.by_steps.take(&steps, last);
            }
            None => self.take(last, span_s),
        }
    }

    fn take(&mut self, rate: Rate, span_s: f64) {
        self.calls += rate.calls * span_s;
        self.bytes += rate.bytes * span_s;
        self.doubt += rate.doubt * span_s;
        self.squares += span_s.powi(2);
    }

    /// How many windows there were.
    pub(crate) fn windows(&self) -> u64 {
        self.windows
    }

    /// Calls per second in the last few windows.
    pub(crate) fn recent_rate(&self) -> f64 {
        self.recent_rate
    }

    /// Calls while the function was sampled.
    #[must_use]
    pub fn calls(&self) -> u64 {
        (self.calls + self.by_steps.calls).round() as u64
    }

    /// Bytes they were about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.bytes + self.by_steps.bytes).round() as u64
    }

    /// How far [`Self::calls`] may be off, 19 times out of 20; as much as it is, when there are too
    /// few windows to tell.
    #[must_use]
    pub fn error(&self) -> u64 {
        (self.error_by_time() + self.by_steps.error()).round() as u64
    }

    /// How much of it is of the time in which no steps are known.
    pub(crate) fn timed_error(&self) -> u64 {
        self.error_by_time().round() as u64
    }

    fn error_by_time(&self) -> f64 {
        if self.timed_windows < 2 || self.squares_between <= 0.0 {
            return self.calls;
        }
        // Differences of neighbours are not independent of each other.
        let windows = self.timed_windows as f64;
        let freedom = 2.0 * (windows - 1.0).powi(2) / (3.0 * windows - 4.0);
        // Spans that no two windows enclose are known as badly as the others.
        let deviation = (self.spread * self.squares / self.squares_between).sqrt();
        student(freedom) * deviation + self.doubt
    }
}

impl PerStep {
    /// Takes in how many calls came with how many launches.
    fn see(&mut self, window: &Window) {
        for sum in [
            &mut self.windows,
            &mut self.seen_calls,
            &mut self.seen_bytes,
            &mut self.launched,
            &mut self.calls_squared,
            &mut self.calls_by_launched,
            &mut self.launched_squared,
        ] {
            *sum *= FADING;
        }
        let (calls, launched) = (window.calls as f64, window.launched as f64);
        self.windows += 1.0;
        self.seen_calls += calls;
        self.seen_bytes += window.bytes as f64;
        self.launched += launched;
        self.calls_squared += calls * calls;
        self.calls_by_launched += calls * launched;
        self.launched_squared += launched * launched;
        if launched > 0.0 {
            self.presumed = None;
        }
    }

    fn add(&mut self, window: &Window, steps: &Steps, rate: Rate) {
        // What was counted is certain.
        self.calls += window.calls as f64;
        self.bytes += window.bytes as f64;
        let mut steps = *steps;
        if steps.done.is_strange {
            let seen_ns = (window.seconds * 1e9) as u64;
            steps.done.strange_ns = steps.done.strange_ns.saturating_sub(seen_ns);
        }
        self.take(&steps, rate);
    }

    /// Takes in the steps that were not seen. What one launches may have changed at any of them. In time in which
    /// something else was done, calls may have come as densely as in the window, if that was still so then; else
    /// nobody knows.
    fn take(&mut self, steps: &Steps, rate: Rate) {
        let left = steps.done.steps - steps.seen + self.owed;
        self.owed = left.min(0.0);
        let unseen = left.max(0.0);
        let before = self.per_step.replace(steps.per_step);
        let before = before.unwrap_or(steps.per_step);
        let launches = unseen * f64::midpoint(before, steps.per_step);
        let share = self.share().unwrap_or_default();
        let calls = launches * share.calls;
        let change = (before - steps.per_step).abs() / (before + steps.per_step);
        let relative_error = steps.relative_error + self.relative_error() + change;
        let strange_s = steps.done.strange_ns as f64 / 1e9;
        let (strange_rate, strange_error) = match steps.done.is_strange {
            true => (rate.calls, rate.calls),
            false => (0.5 * rate.calls, self.greatest_rate.max(1.5 * rate.calls)),
        };
        self.calls += calls + strange_rate * strange_s;
        self.bytes += launches * share.bytes;
        self.error += calls * relative_error.min(1.0) + strange_error * strange_s;
    }

    /// How many calls a launch stands for, if that is known.
    fn share(&self) -> Option<Share> {
        match self.launched > 0.0 {
            true => Some(Share {
                calls: self.seen_calls / self.launched,
                bytes: self.seen_bytes / self.launched,
            }),
            false => self.presumed,
        }
    }

    /// By what share the calls may be off beside the launches, as windows differ.
    fn relative_error(&self) -> f64 {
        // They are the launches.
        if self.share().is_some_and(|share| share.calls == 1.0) {
            return 0.0;
        }
        if self.seen_calls <= 0.0 || self.launched <= 0.0 || self.windows < 1.5 {
            return 1.0;
        }
        let share = self.seen_calls / self.launched;
        let residue = self.calls_squared - 2.0 * share * self.calls_by_launched
            + share * share * self.launched_squared;
        let freedom = self.windows - 1.0;
        let deviation = (residue.max(0.0) * self.windows / freedom).sqrt();
        student(freedom) * deviation / self.seen_calls
    }

    /// How far its calls may be off. Where the first span begins and the last one ends is not known to the launch.
    fn error(&self) -> f64 {
        match self.per_step.zip(self.share()) {
            Some((per_step, share)) => self.error + per_step * share.calls,
            None => 0.0,
        }
    }
}

/// Student's t for 95 %, to within 3 %.
pub(super) fn student(freedom: f64) -> f64 {
    1.96 + 2.5 / freedom + 8.0 / freedom.powi(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(calls: u64) -> Window {
        Window {
            calls,
            bytes: 10 * calls,
            launched: calls,
            has_steps: true,
            seconds: 0.05,
            slowed: 0.0,
        }
    }

    #[test]
    fn a_steady_rate_is_told_without_error() {
        let mut estimate = Estimate::default();
        for _ in 0..10 {
            estimate.add(window(500), 1.0, None);
        }
        estimate.end(1.0, None);
        assert_eq!(estimate.calls(), 110_000);
        assert_eq!(estimate.bytes(), 1_100_000);
        assert_eq!(estimate.error(), 0);
    }

    #[test]
    fn one_window_proves_nothing() {
        let mut estimate = Estimate::default();
        estimate.add(window(500), 1.0, None);
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
                    estimate.add(window(stretches[random.usize(0..20)]), 1.0, None);
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
        (0..10).for_each(|_| estimate.add(window(500), 1.0, None));
        estimate.add(window(0), 1.0, None);
        let (calls, error) = (estimate.calls(), estimate.error());
        assert_eq!(calls, 104_750, "it came to rest somewhere in the last span");
        (0..10).for_each(|_| estimate.add(window(0), 1.0, None));
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
                None,
            );
        }
        // 8000 a second were seen, 10,000 would be if probes cost all that they may: but not in the windows.
        assert_eq!((estimate.calls(), estimate.error()), (80_000, 19_000));
    }

    #[test]
    fn what_was_counted_is_in_it() {
        let mut estimate = Estimate::default();
        (0..3).for_each(|_| estimate.add(window(0), 1.0, None));
        let before = estimate.calls();
        estimate.add(window(500), 0.05, None);
        assert_eq!(estimate.calls(), before + 500);
        // Sampled again after a while: the last time says nothing of this one.
        estimate.end(0.0, None);
        let (before, error) = (estimate.calls(), estimate.error());
        estimate.add(window(1000), 0.1, None);
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
            None,
        );
        assert_eq!(estimate, Estimate::default());
    }

    /// A window with so many steps of 100 calls, after so many that it did not see.
    fn steps(seen: f64, unseen: f64) -> (Window, Option<Steps>) {
        let steps = Steps {
            done: Done {
                steps: seen + unseen,
                strange_ns: 0,
                is_strange: false,
            },
            seen,
            per_step: 100.0,
            relative_error: 0.01,
        };
        (window((100.0 * seen) as u64), Some(steps))
    }

    #[test]
    fn steps_tell_what_windows_of_any_length_do_not() {
        let mut estimate = Estimate::default();
        for seen in [0.5, 3.0, 1.0, 2.5] {
            let (window, steps) = steps(seen, 100.0 - seen);
            estimate.add(window, 1.0, steps);
        }
        let (_, last) = steps(0.0, 50.0);
        estimate.end(0.5, last);
        assert_eq!(estimate.calls(), 45_000);
        assert_eq!(estimate.bytes(), 450_000);
        // One in a hundred of what was not seen, and a step.
        assert_eq!(estimate.error(), 443 + 100);
    }

    #[test]
    fn before_any_window_it_is_as_it_was() {
        for (calls, error) in [(4000.0, 100 + 100), (1000.0, 2500 + 25)] {
            let mut estimate = Estimate::default();
            let bytes = 10.0 * calls;
            estimate.begin(Some(Before {
                rate: CallRate { calls, bytes },
                launches: Some(4000.0),
            }));
            let (_, steps) = steps(0.0, 100.0);
            estimate.end(1.0, steps);
            let expected = (100.0 * 100.0 * calls / 4000.0) as u64;
            let told = (estimate.calls(), estimate.bytes(), estimate.error());
            assert_eq!(told, (expected, 10 * expected, error));
        }
    }

    #[test]
    fn what_is_called_where_no_steps_are_made_says_nothing_of_steps() {
        let mut estimate = Estimate::default();
        let loading = Window {
            launched: 50,
            has_steps: false,
            ..window(2000)
        };
        (0..6).for_each(|_| estimate.add(loading, 1.0, None));
        let before = estimate.calls();
        let (watched, steps) = steps(10.0, 90.0);
        let watched = Window {
            calls: 100,
            ..watched
        };
        estimate.add(watched, 1.0, steps);
        assert_eq!(estimate.calls() - before, 1000);
    }

    #[test]
    fn what_no_launch_came_with_is_not_well_known() {
        let mut estimate = Estimate::default();
        let (calls, bytes) = (3000.0, 0.0);
        estimate.begin(Some(Before {
            rate: CallRate { calls, bytes },
            launches: Some(1000.0),
        }));
        for _ in 0..4 {
            let (watched, steps) = steps(0.0, 100.0);
            let watched = Window {
                launched: 0,
                calls: 10,
                ..watched
            };
            estimate.add(watched, 1.0, steps);
        }
        assert!(2 * estimate.error() > estimate.calls(), "{estimate:?}");
    }

    #[test]
    fn what_a_step_does_may_have_changed_anywhere_between_two_windows() {
        let mut estimate = Estimate::default();
        for per_step in [[100.0; 20], [200.0; 20]].concat() {
            let steps = Steps {
                per_step,
                ..steps(1.0, 99.0).1.expect("some")
            };
            estimate.add(window(per_step as u64), 1.0, Some(steps));
        }
        // In the first 20 spans, in the last 19, and in the one in between half of the way.
        let expected = 20 * 10_000 + 19 * 20_000 + 200 + 99 * 150;
        assert_eq!(estimate.calls(), expected);
        let of_unseen = 99.0 * (20.0 + 19.0 * 2.0 + 1.5);
        let expected = of_unseen + 99.0 * 50.0 + 200.0;
        assert!((estimate.error() as f64 - expected).abs() < 1.0);
    }

    #[test]
    fn what_is_called_now_and_then_is_less_known() {
        let mut estimate = Estimate::default();
        let add = |estimate: &mut Estimate, calls| {
            let (watched, steps) = steps(2.0, 98.0);
            let watched = Window { calls, ..watched };
            estimate.add(watched, 1.0, steps);
        };
        add(&mut estimate, 30);
        assert_eq!((estimate.calls(), estimate.error()), (1500, 1470 + 15));
        for calls in [10, 30, 10, 30, 10, 30] {
            add(&mut estimate, calls);
        }
        assert!((7000..8500).contains(&estimate.calls()), "{estimate:?}");
        let share = estimate.error() as f64 / estimate.calls() as f64;
        assert!((0.3..1.0).contains(&share), "{share}");
    }

    #[test]
    fn what_is_done_beside_steps_is_doubt() {
        let mut estimate = Estimate::default();
        let (window, mut steps) = steps(2.0, 98.0);
        estimate.add(window, 1.0, steps);
        let (calls, error) = (estimate.calls(), estimate.error());
        if let Some(steps) = &mut steps {
            steps.done.strange_ns = 500_000_000;
        }
        // At 4000 a second.
        estimate.add(window, 1.5, steps);
        assert_eq!(estimate.calls() - calls, calls + 1000);
        assert_eq!(estimate.error() - error, 98 + 3000);
    }

    /// A window that is in an evaluation is no part of the time that it stands for.
    #[test]
    fn what_was_seen_beside_steps_is_not_counted_twice() {
        let mut estimate = Estimate::default();
        let (window, mut steps) = steps(0.5, 99.5);
        estimate.add(window, 1.0, steps);
        let calls = estimate.calls();
        if let Some(steps) = &mut steps {
            steps.done.strange_ns = 150_000_000;
            steps.done.is_strange = true;
            steps.seen = 0.0;
        }
        // Three windows of 50 calls, of which it is one.
        estimate.add(window, 1.2, steps);
        assert_eq!(estimate.calls() - calls, 10_000 + 150);
    }

    /// An evaluation calls more than training does, as a window in another one has shown.
    #[test]
    fn what_no_window_has_seen_beside_steps_may_be_as_dense_as_anything() {
        let mut estimate = Estimate::default();
        estimate.add(window(2000), 1.0, None);
        let (watched, mut steps) = steps(2.0, 98.0);
        estimate.add(watched, 1.0, steps);
        let (calls, error) = (estimate.calls(), estimate.error());
        if let Some(steps) = &mut steps {
            steps.done.strange_ns = 1_000_000_000;
            steps.done.is_strange = true;
        }
        estimate.end(2.0, steps);
        let most = estimate.calls() - calls + estimate.error() - error;
        assert!(most >= 40_000, "{estimate:?}");
    }

    #[test]
    fn a_step_that_was_seen_twice_is_not_counted_twice() {
        let mut estimate = Estimate::default();
        for (seen, unseen) in [(4.0, -0.5), (4.0, 0.5)] {
            let (window, steps) = steps(seen, unseen);
            estimate.add(window, 0.05, steps);
        }
        assert_eq!(estimate.calls(), 800);
    }
}
