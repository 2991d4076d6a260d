//! The counts of a sampled function, in windows and outside.

use zerocopy::FromZeros;

use super::call_counts::CallCount;
use crate::observer::estimate::{CallEstimator, ConfidenceInterval, WindowTotals};
use crate::probes::layout;

/// Weight of the last window in the recent call rate of a function: the rate is an average over about three windows.
const LAST_WINDOW_WEIGHT: f64 = 0.3;

/// The calls of a function, or of all functions of one kind, that is or was sampled.
#[derive(Debug, Clone, Copy)]
pub(super) struct SampledCalls {
    pub(super) is_sampled: bool,
    /// The counter at the last read.
    last_counter: layout::Counter,
    /// Counted while not sampled.
    exact_calls: layout::Counter,
    /// Calls and bytes that were counted in total, in windows and outside.
    pub(super) counted_calls: layout::Counter,
    /// Time in which `counted` was counted.
    pub(super) counted_seconds: f64,
    /// The counter when the last window opened.
    counter_at_window_opening: layout::Counter,
    pub(super) estimator: CallEstimator,
    /// Calls and bytes that were counted in windows, to compute the bytes per call.
    counter_in_windows: layout::Counter,
    /// Calls per second in the last windows; `None` if there was no window since sampling began.
    pub(super) recent_rate: Option<f64>,
}

/// Time and steps of a process between two reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct ElapsedWork {
    pub(super) elapsed_seconds: f64,
    pub(super) elapsed_steps: f64,
    pub(super) is_in_window: bool,
}

impl SampledCalls {
    /// Creates the counts of a function that was not sampled so far: all its counted calls are exact.
    pub(super) fn new(
        estimator: CallEstimator,
        counter: layout::Counter,
        counted_seconds: f64,
    ) -> Self {
        Self {
            is_sampled: false,
            last_counter: counter,
            exact_calls: counter,
            counted_calls: counter,
            counted_seconds,
            counter_at_window_opening: counter,
            estimator,
            counter_in_windows: FromZeros::new_zeroed(),
            recent_rate: None,
        }
    }

    /// Begins to sample the function, at a moment when this share of the current step is over.
    pub(super) fn begin_sampling(&mut self, step_progress: f64) {
        if !self.is_sampled {
            self.is_sampled = true;
            self.recent_rate = None;
            self.estimator.begin_sampling(step_progress);
        }
    }

    /// Adds the calls since the last read. `is_exact`: the process calls no sampled function of this kind.
    pub(super) fn add_calls(
        &mut self,
        counter: layout::Counter,
        elapsed: ElapsedWork,
        is_exact: bool,
    ) {
        let more = counter_difference(counter, self.last_counter);
        self.last_counter = counter;
        if self.is_sampled {
            self.estimator
                .add_elapsed_work(elapsed.elapsed_seconds, elapsed.elapsed_steps);
        } else {
            add_counter(&mut self.exact_calls, more);
        }
        if self.is_sampled && elapsed.is_in_window {
            add_counter(&mut self.counter_in_windows, more);
        }
        if !self.is_sampled || elapsed.is_in_window || is_exact {
            add_counter(&mut self.counted_calls, more);
            self.counted_seconds += elapsed.elapsed_seconds;
        }
    }

    pub(super) fn open_window(&mut self) {
        self.counter_at_window_opening = self.last_counter;
    }

    /// Calls since the window opened.
    pub(super) fn calls_in_window(&self) -> u64 {
        counter_difference(self.last_counter, self.counter_at_window_opening).calls
    }

    pub(super) fn close_window(&mut self, window: &WindowTotals) {
        if !self.is_sampled || window.window_seconds <= 0.0 {
            return;
        }
        let calls = self.calls_in_window();
        self.estimator.add_window(calls, window);
        let rate = calls as f64 / window.window_seconds;
        let before = self.recent_rate.unwrap_or(rate);
        self.recent_rate = Some((1.0 - LAST_WINDOW_WEIGHT) * before + LAST_WINDOW_WEIGHT * rate);
    }

    /// Returns the number of all calls: those counted exactly, and an estimate of those that probes missed.
    pub(super) fn count_with_estimate(
        &self,
        launches_per_step: Option<ConfidenceInterval>,
    ) -> CallCount {
        let estimate = self.estimator.estimate_calls(launches_per_step);
        let calls = estimate.calls.max(self.counter_in_windows.calls as f64);
        let bytes_per_call =
            self.counter_in_windows.bytes as f64 / self.counter_in_windows.calls.max(1) as f64;
        CallCount {
            calls: self.exact_calls.calls + calls.round() as u64,
            failed_calls: self.last_counter.failed_calls,
            bytes: self.exact_calls.bytes + (calls * bytes_per_call).round() as u64,
            error: estimate.half_width.map(|half| half.round() as u64),
        }
    }
}

fn counter_difference(counter: layout::Counter, before: layout::Counter) -> layout::Counter {
    layout::Counter {
        calls: counter.calls.saturating_sub(before.calls),
        failed_calls: counter.failed_calls.saturating_sub(before.failed_calls),
        bytes: counter.bytes.saturating_sub(before.bytes),
    }
}

pub(super) fn add_counter(sum: &mut layout::Counter, more: layout::Counter) {
    sum.calls += more.calls;
    sum.failed_calls += more.failed_calls;
    sum.bytes += more.bytes;
}
