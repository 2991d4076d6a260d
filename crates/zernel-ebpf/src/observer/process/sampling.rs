//! The sampled functions of one process: their counts, and the estimates from its windows.

use std::time::Duration;

use zernel_phase::steps::{Step, WindowStep};
use zerocopy::FromZeros;

use super::sampled_functions::{Elapsed, SampledFunctions, add, difference};
use super::{CallCount, ObservedProcess};
use crate::observer::estimate::{Interval, SampledCalls, WindowTotals};
use crate::observer::governor::LONGEST_WINDOW;
use crate::observer::monotonic_ns;
use crate::probes::{CallKind, SYMBOLS, layout};
use zernel_model::snapshot::CountedCalls;

/// Window length in median steps. It holds at least three whole steps, wherever it opens.
const MEDIAN_STEP_FACTOR: f64 = 4.2;
/// Window length in steps of the ninth decile. Such a step lies whole in the window for 0.4 / 1.4 = 0.29 of all
/// openings. If no window is that long, calls are estimated by time.
const LONG_STEP_FACTOR: f64 = 1.4;
/// Largest relative error of launches per step that counts as precise: within 5 %.
const PRECISE_ERROR: f64 = 0.05;

/// Time and steps of a process up to the last read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    at_ns: u64,
    /// Series of steps: how often the detector has started to count anew.
    series: u32,
    /// Steps in that series.
    steps: u64,
    /// Since when that series is estimated.
    series_from_ns: u64,
    /// Whether there was a window since.
    had_window: bool,
    /// Seconds in which permanent probes were attached.
    attached_seconds: f64,
    is_paused: bool,
    is_in_window: bool,
}

impl Progress {
    pub(super) fn start(at_ns: u64) -> Self {
        Self {
            at_ns,
            series_from_ns: at_ns,
            ..Self::default()
        }
    }
}

/// Whether all functions of a kind are also estimated together: their sum is more precise than each function.
fn is_summed(kind: CallKind) -> bool {
    matches!(kind, CallKind::Launch | CallKind::Copy(_))
}

impl ObservedProcess {
    /// Adds the calls and steps up to `now_ns` to the estimates, which rely on it being called before any change.
    pub(in crate::observer) fn advance(&mut self, now_ns: u64) {
        let passed_ns = match self.progress.is_paused {
            true => 0,
            false => now_ns.saturating_sub(self.progress.at_ns),
        };
        let elapsed = Elapsed {
            seconds: passed_ns as f64 / 1e9,
            steps: self.new_steps(),
            is_in_window: self.progress.is_in_window,
        };
        self.progress.at_ns = self.progress.at_ns.max(now_ns);
        self.progress.attached_seconds += elapsed.seconds;
        let counters = &self.counters;
        for (symbol, functions) in &mut self.sampling {
            let counter = counters.get(symbol).copied();
            functions.advance(counter.unwrap_or(functions.last), elapsed, false);
        }
        let kinds = self.sampled_kinds.iter().map(|(kind, _)| *kind);
        let kinds: Vec<_> = kinds
            .map(|kind| (self.kind_counter(kind), !self.calls_sampled(kind)))
            .collect();
        for ((_, functions), (counter, is_exact)) in self.sampled_kinds.iter_mut().zip(kinds) {
            functions.advance(counter, elapsed, is_exact);
        }
    }

    /// Steps since the last read. When the detector counts steps anew, from another boundary, estimates begin anew too.
    fn new_steps(&mut self) -> u64 {
        let (series, steps) = (self.steps.restarts(), self.steps.count());
        let before = (self.progress.series, self.progress.steps);
        (self.progress.series, self.progress.steps) = (series, steps);
        if before.0 == series {
            return match before.1 {
                // Steps are counted from the first one on, but only once it is clear what separates them.
                0 => self.steps_after(self.progress.series_from_ns),
                before => steps.saturating_sub(before),
            };
        }
        let launches_per_step = self.launches_per_step.interval();
        let kinds = self.sampled_kinds.iter_mut().map(|(_, kind)| kind);
        for functions in self.sampling.values_mut().chain(kinds) {
            functions.calls.begin_series(launches_per_step);
        }
        self.launches_per_step = Default::default();
        // A series without a window has no estimate, so its time belongs to the new series.
        if std::mem::take(&mut self.progress.had_window) {
            self.progress.series_from_ns = self.progress.at_ns;
        }
        self.steps_after(self.progress.series_from_ns)
    }

    /// Steps that ended after a recent time.
    fn steps_after(&self, at_ns: u64) -> u64 {
        let recent = self.steps.recent();
        if recent.front().is_none_or(|first| first.begin_ns > at_ns) {
            return self.steps.count();
        }
        recent.iter().filter(|step| step.end_ns > at_ns).count() as u64
    }

    /// The sum of all functions of a kind.
    fn kind_counter(&self, kind: CallKind) -> layout::Counter {
        let mut sum = layout::Counter::new_zeroed();
        let counters = self.counters.iter();
        for (_, counter) in counters.filter(|(symbol, _)| SYMBOLS[**symbol].kind == kind) {
            add(&mut sum, *counter);
        }
        sum
    }

    /// Whether the process has called a function of this kind that is or was sampled.
    pub(super) fn calls_sampled(&self, kind: CallKind) -> bool {
        let mut called = self.sampling.keys();
        called.any(|symbol| SYMBOLS[*symbol].kind == kind && self.counters.contains_key(symbol))
    }

    /// The estimate of all functions of a kind, if the process calls some that are sampled.
    pub(super) fn sampled_kind(&self, kind: CallKind) -> Option<&SampledFunctions> {
        let mut kinds = self.sampled_kinds.iter();
        let (_, functions) = kinds.find(|(known, _)| *known == kind)?;
        self.calls_sampled(kind).then_some(functions)
    }

    /// Calls of every function that was called, by name.
    pub fn calls(&self) -> impl Iterator<Item = (&'static str, CallCount)> {
        self.counted()
            .map(|(symbol, count)| (SYMBOLS[symbol].name(), count))
    }

    /// Calls and bytes of all functions whose kind meets the condition.
    #[must_use]
    pub fn count(&self, what: impl Fn(CallKind) -> bool) -> CallCount {
        let mut sum = CallCount::default();
        let mut add = |count: CallCount| {
            sum.calls += count.calls;
            sum.failed += count.failed;
            sum.bytes += count.bytes;
            // Errors add up, because all estimates come from the same windows.
            sum.error += count.error;
        };
        let is_summed = |kind: CallKind| self.sampled_kind(kind).is_some();
        let of_kind = self
            .counted()
            .map(|(symbol, count)| (SYMBOLS[symbol].kind, count))
            .filter(|(kind, _)| what(*kind) && !is_summed(*kind));
        of_kind.for_each(|(_, count)| add(count));
        for (kind, functions) in &self.sampled_kinds {
            if what(*kind) && is_summed(*kind) {
                add(functions.count(self.usable_launches_per_step()));
            }
        }
        sum
    }

    pub(super) fn counted(&self) -> impl Iterator<Item = (usize, CallCount)> {
        let counters = self.counters.iter();
        counters
            .map(|(symbol, counter)| (*symbol, self.call_count(*symbol, counter)))
            .filter(|(_, count)| count.calls > 0)
    }

    fn call_count(&self, symbol: usize, counter: &layout::Counter) -> CallCount {
        match self.sampling.get(&symbol) {
            Some(functions) => functions.count(self.usable_launches_per_step()),
            None => CallCount {
                calls: counter.calls,
                failed: counter.failed,
                bytes: counter.bytes,
                error: 0,
            },
        }
    }

    /// Counted calls of a kind. Unlike an estimate, this never falls.
    pub(crate) fn counted_of(&self, kind: CallKind) -> CountedCalls {
        let known = self.sampled_kinds.iter().find(|(known, _)| *known == kind);
        let (counter, seconds) = match known {
            Some((_, functions)) => (functions.counted, functions.counted_seconds),
            None => (self.kind_counter(kind), self.progress.attached_seconds),
        };
        CountedCalls {
            calls: counter.calls,
            bytes: counter.bytes,
            seconds,
            was_sampled: known.is_some(),
        }
    }

    /// Samples a function from now on; all its calls so far are exact.
    pub(in crate::observer) fn begin_sampling(
        &mut self,
        symbol: usize,
        counters: &layout::Counters,
    ) {
        self.set_counters(counters);
        let now_ns = monotonic_ns();
        self.advance(now_ns);
        self.progress.series_from_ns = now_ns;
        let kind = SYMBOLS[symbol].kind;
        if kind == CallKind::Launch && !self.has_sampled_launches() {
            self.add_window_before_sampling(now_ns);
        }
        let seconds = self.progress.attached_seconds;
        let functions = self.sampling.entry(symbol).or_insert_with(|| {
            SampledFunctions::new(SampledCalls::default(), counters.functions[symbol], seconds)
        });
        functions.begin();
        if is_summed(kind) {
            self.sampled_kind_mut(kind).begin();
        }
    }

    fn sampled_kind_mut(&mut self, kind: CallKind) -> &mut SampledFunctions {
        let known = self.sampled_kinds.iter().position(|(of, _)| *of == kind);
        let place = known.unwrap_or_else(|| {
            let calls = match kind {
                CallKind::Launch => SampledCalls::of_all_launches(),
                _ => SampledCalls::default(),
            };
            let counter = self.kind_counter(kind);
            let seconds = self.progress.attached_seconds;
            let functions = SampledFunctions::new(calls, counter, seconds);
            self.sampled_kinds.push((kind, functions));
            self.sampled_kinds.len() - 1
        });
        &mut self.sampled_kinds[place].1
    }

    /// The time just before launches are sampled is like a window: all launches were counted in it.
    fn add_window_before_sampling(&mut self, now_ns: u64) {
        if let Some(length) = self.window_length_for_steps() {
            let from_ns = now_ns.saturating_sub(length.as_nanos() as u64);
            let steps = self.counted_steps(from_ns, now_ns);
            self.launches_per_step.add_window(&steps, length);
        }
    }

    /// Whole steps between two times whose launches were all counted.
    fn counted_steps(&self, from_ns: u64, to_ns: u64) -> Vec<WindowStep> {
        let steps = self.steps.recent().iter();
        let whole = steps.filter(|step| step.begin_ns >= from_ns && step.end_ns <= to_ns);
        let counted = whole.filter_map(|step| {
            Some(WindowStep {
                duration_ns: step.duration_ns(),
                launches: step.launches?,
            })
        });
        counted.collect()
    }

    /// Samples these functions from the start of the process.
    pub(in crate::observer) fn join_sampling(&mut self, symbols: &[usize], is_in_window: bool) {
        self.progress.is_in_window = is_in_window;
        for symbol in symbols {
            let zero = layout::Counter::new_zeroed();
            let mut functions = SampledFunctions::new(SampledCalls::default(), zero, 0.0);
            functions.begin();
            self.sampling.insert(*symbol, functions);
            let kind = SYMBOLS[*symbol].kind;
            if is_summed(kind) {
                self.sampled_kind_mut(kind).begin();
            }
        }
    }

    /// CallKind a function exactly again.
    pub(in crate::observer) fn end_sampling(&mut self, symbol: usize, now_ns: u64) {
        self.advance(now_ns);
        if let Some(functions) = self.sampling.get_mut(&symbol) {
            functions.is_sampled = false;
        }
        let kind = SYMBOLS[symbol].kind;
        let mut sampled = self.sampling.iter().filter(|(_, of)| of.is_sampled);
        if sampled.any(|(symbol, _)| SYMBOLS[*symbol].kind == kind) {
            return;
        }
        let kinds = self.sampled_kinds.iter_mut();
        for (_, functions) in kinds.filter(|(known, _)| *known == kind) {
            functions.is_sampled = false;
        }
    }

    /// Records that all probes are detached, or attached again.
    pub(in crate::observer) fn set_paused(&mut self, is_paused: bool, now_ns: u64) {
        self.advance(now_ns);
        self.progress.is_paused = is_paused;
    }

    /// Opens a window.
    pub(in crate::observer) fn open_window(&mut self, counters: &layout::Counters, now_ns: u64) {
        self.set_counters(counters);
        self.advance(now_ns);
        self.progress.is_in_window = true;
        self.launches_at_opening = self.kind_counter(CallKind::Launch).calls;
        let kinds = self.sampled_kinds.iter_mut().map(|(_, kind)| kind);
        for functions in self.sampling.values_mut().chain(kinds) {
            functions.at_opening = functions.last;
        }
        // Steps of an earlier window that were reported too late.
        self.steps.take_window_steps();
    }

    /// Closes a window. A probed call costs `cost_ns`.
    pub(in crate::observer) fn close_window(
        &mut self,
        counters: &layout::Counters,
        (from_ns, to_ns): (u64, u64),
        cost_ns: f64,
    ) {
        self.set_counters(counters);
        self.advance(to_ns);
        self.progress.is_in_window = false;
        self.progress.had_window = true;
        // A process that began in the window saw the rest of it.
        let from_ns = from_ns.max(self.first_ns);
        let length = Duration::from_nanos(to_ns.saturating_sub(from_ns));
        let mut steps = self.steps.take_window_steps();
        steps.extend(self.counted_steps(from_ns, to_ns));
        self.launches_per_step.add_window(&steps, length);
        let sampled = self.sampling.values().filter(|of| of.is_sampled);
        let calls: u64 = sampled
            .map(|of| difference(of.last, of.at_opening).calls)
            .sum();
        let launches = self.kind_counter(CallKind::Launch).calls;
        let window = WindowTotals {
            seconds: length.as_secs_f64(),
            launches: launches.saturating_sub(self.launches_at_opening),
            probe_seconds: calls as f64 * self.busiest_share() * cost_ns / 1e9,
        };
        let kinds = self.sampled_kinds.iter_mut().map(|(_, kind)| kind);
        for functions in self.sampling.values_mut().chain(kinds) {
            functions.close_window(&window);
        }
    }

    /// Whether a function that launches is sampled now.
    pub(in crate::observer) fn has_sampled_launches(&self) -> bool {
        let mut kinds = self.sampled_kinds.iter();
        kinds.any(|(kind, functions)| *kind == CallKind::Launch && functions.is_sampled)
    }

    /// Calls per second of a sampled function in the last windows.
    pub(in crate::observer) fn sampled_rate(&self, symbol: usize) -> f64 {
        let sampled = self.sampling.get(&symbol).filter(|of| of.is_sampled);
        sampled.and_then(|of| of.recent_rate).unwrap_or(0.0)
    }

    /// Whether the process calls functions that are sampled, or may do so: it makes steps, and has seen no window yet.
    pub(in crate::observer) fn needs_windows(&self) -> bool {
        let mut sampled = self.sampling.iter().filter(|(_, of)| of.is_sampled);
        sampled.any(|(symbol, functions)| match functions.recent_rate {
            Some(rate) => rate > 1.0,
            None => self.steps.count() > 0 || self.counters.contains_key(symbol),
        })
    }

    /// Whether no whole step lay in the open window yet, although steps are short enough.
    pub(in crate::observer) fn lacks_whole_step(&self) -> bool {
        self.calls_sampled(CallKind::Launch)
            && self.window_length_for_steps().is_some()
            && self.steps.window_steps().is_empty()
    }

    /// Whether a function that the process calls has no interval yet: that takes two windows.
    pub(in crate::observer) fn lacks_interval(&self) -> bool {
        let per_step = self.usable_launches_per_step();
        let mut sampled = self.sampling.values().filter(|of| of.is_sampled);
        sampled.any(|of| {
            of.recent_rate.is_none_or(|rate| rate > 1.0)
                && !of.calls.estimate(per_step).has_interval()
        })
    }

    /// Whether launches per step are known within 5 %, and every sampled function that is called has an interval.
    pub(in crate::observer) fn has_precise_estimates(&self) -> bool {
        let per_step = self.usable_launches_per_step();
        let error = per_step.and_then(|per_step| per_step.relative_error());
        error.is_some_and(|error| error <= PRECISE_ERROR) && !self.lacks_interval()
    }

    /// Window length that contains a few whole steps; `None` if the process makes no steps, or a tenth of them are too
    /// long for any window.
    pub(in crate::observer) fn window_length_for_steps(&self) -> Option<Duration> {
        let recent = self.steps.recent().iter();
        let mut lengths: Vec<u64> = recent.map(Step::duration_ns).collect();
        lengths.sort_unstable();
        let last = lengths.len().checked_sub(1)?;
        let of_steps = |ns: u64, times: f64| Duration::from_nanos(ns).mul_f64(times);
        let long = of_steps(lengths[9 * last / 10], LONG_STEP_FACTOR);
        let usual = of_steps(lengths[last / 2], MEDIAN_STEP_FACTOR).min(LONGEST_WINDOW);
        (long <= LONGEST_WINDOW).then_some(usual.max(long))
    }

    /// Launches per step from windows; `None` if steps are too long for windows, or no step lay in one.
    pub(super) fn usable_launches_per_step(&self) -> Option<Interval> {
        self.window_length_for_steps()?;
        self.launches_per_step.interval()
    }

    /// Launches per step: an estimate if launches were sampled, else the mean of the last steps.
    #[must_use]
    pub fn launches_per_step(&self) -> Option<Interval> {
        if self.sampled_kind(CallKind::Launch).is_some() {
            return self.usable_launches_per_step();
        }
        let steps = self.counted_steps(0, u64::MAX);
        let launches: f64 = steps.iter().map(|step| f64::from(step.launches)).sum();
        let is_known = launches > 0.0 && steps.len() == self.steps.recent().len();
        is_known.then(|| Interval {
            mean: launches / steps.len() as f64,
            half_width: Some(0.0),
        })
    }

    /// Whether windows have shown that the process launches only by functions that are not sampled.
    pub(super) fn launches_only_unsampled(&self) -> bool {
        let mut kinds = self.sampled_kinds.iter();
        let had_window = |(kind, functions): &(CallKind, SampledFunctions)| {
            *kind == CallKind::Launch && functions.recent_rate.is_some()
        };
        kinds.any(had_window)
            && !self.calls_sampled(CallKind::Launch)
            && self.kind_counter(CallKind::Launch).calls > 0
    }
}

#[cfg(test)]
mod tests;
