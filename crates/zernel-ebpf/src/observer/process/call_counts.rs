//! The calls of one process: exact counts, and estimates of the functions that are sampled.
//!
//! Estimates rely on steps, which the process detects beside its calls, so most methods take its [`StepDetector`].

use std::collections::BTreeMap;
use std::time::Duration;

use zernel_model::snapshot::CountedCalls;
use zernel_phase::steps::{Step, StepDetector, WindowStep};
use zerocopy::FromZeros;

use super::sampled_calls::{ElapsedWork, SampledCalls, add_counter};
use crate::observer::estimate::{CallEstimator, ConfidenceInterval, LaunchesPerStep, WindowTotals};
use crate::observer::governor::LONGEST_WINDOW;
use crate::probes::{CallKind, ProbedFunction, SYMBOLS, layout};

/// Window length in median steps. A window of this length contains at least three whole steps, wherever in a step it
/// opens.
const WINDOW_LENGTH_IN_MEDIAN_STEPS: f64 = 4.2;
/// Window length in steps of the ninth decile. A step of the ninth decile lies whole in a window of this length for
/// 0.4 / 1.4 = 0.29 of all openings. If windows may not be that long, calls are estimated by time.
const WINDOW_LENGTH_IN_LONG_STEPS: f64 = 1.4;
/// Largest relative error of launches per step that counts as precise: within 5 %.
const MAX_PRECISE_ERROR: f64 = 0.05;

/// Counters of the functions that a process has called. A process calls few functions, and these counters are summed
/// often, so they are in a map of their own.
pub(super) type CountersBySymbol = BTreeMap<usize, layout::Counter>;

/// Calls of one function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallCount {
    /// Calls that returned.
    pub calls: u64,
    /// Calls that returned an error.
    pub failed_calls: u64,
    /// Bytes of the calls that succeeded.
    pub bytes: u64,
    /// Half width of the 95 % interval of `calls`: 0 unless the function was sampled, `None` if fewer than two windows
    /// have shown the process.
    pub error: Option<u64>,
}

impl CallCount {
    fn exact(counter: layout::Counter) -> Self {
        Self {
            calls: counter.calls,
            failed_calls: counter.failed_calls,
            bytes: counter.bytes,
            error: Some(0),
        }
    }
}

/// No calls, counted exactly.
impl Default for CallCount {
    fn default() -> Self {
        Self::exact(layout::Counter::new_zeroed())
    }
}

/// Which calls an estimate is about: those of one function or of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EstimateSubject {
    Function(usize),
    /// The calls of all functions of a kind: the estimate of the sum is more precise than that of each function.
    Kind(CallKind),
}

impl EstimateSubject {
    /// A function, and its kind if the functions of that kind are also estimated together.
    fn subjects_of_symbol(symbol: usize) -> impl Iterator<Item = Self> {
        let kind = SYMBOLS[symbol].kind;
        let is_summed = matches!(kind, CallKind::Launch | CallKind::Copy(_));
        [Self::Function(symbol)]
            .into_iter()
            .chain(is_summed.then_some(Self::Kind(kind)))
    }

    fn includes_symbol(self, symbol: usize) -> bool {
        match self {
            Self::Function(function) => function == symbol,
            Self::Kind(kind) => SYMBOLS[symbol].kind == kind,
        }
    }

    fn sum_of_counters(self, counters: &CountersBySymbol) -> layout::Counter {
        let mut sum = layout::Counter::new_zeroed();
        let included = counters
            .iter()
            .filter(|(symbol, _)| self.includes_symbol(**symbol));
        included.for_each(|(_, counter)| add_counter(&mut sum, *counter));
        sum
    }
}

/// Time and steps of a process up to the last read.
#[derive(Debug, Clone, Copy, Default)]
struct ReadProgress {
    at_ns: u64,
    /// Series of steps: how often the detector has started to count anew.
    series: u32,
    /// Steps in that series.
    steps: u64,
    /// Time from which the calls of the current series of steps are estimated.
    series_from_ns: u64,
    /// Whether a sampling window has closed since the current series of steps began.
    had_window: bool,
    /// Seconds in which permanent probes were attached.
    attached_seconds: f64,
    /// When launches were last counted exactly again after they had been sampled, in nanoseconds of CLOCK_MONOTONIC.
    sampled_until_ns: u64,
    is_paused: bool,
    is_in_window: bool,
}

/// The calls of one process, by function: exact counts, and estimates of sampled functions.
#[derive(Debug)]
pub(in crate::observer) struct CallCounts {
    pub(super) counters: CountersBySymbol,
    /// The functions and kinds that are or were sampled.
    sampled: BTreeMap<EstimateSubject, SampledCalls>,
    launches_per_step: LaunchesPerStep,
    launches_at_opening: u64,
    progress: ReadProgress,
}

impl CallCounts {
    /// Creates the counts of a process that began at this time.
    pub(super) fn new(at_ns: u64) -> Self {
        Self {
            counters: CountersBySymbol::new(),
            sampled: BTreeMap::new(),
            launches_per_step: LaunchesPerStep::default(),
            launches_at_opening: 0,
            progress: ReadProgress {
                at_ns,
                series_from_ns: at_ns,
                ..ReadProgress::default()
            },
        }
    }

    /// Takes over the kernel's counters.
    pub(super) fn read_counters(&mut self, counters: &layout::Counters) {
        let counters = counters.functions.iter().enumerate();
        let called = counters.filter(|(_, counter)| counter.calls > 0);
        self.counters
            .extend(called.map(|(symbol, counter)| (symbol, *counter)));
    }

    /// Adds the calls and steps up to `now_ns` to the estimates, which rely on it being called before any change.
    pub(in crate::observer) fn advance_to(&mut self, now_ns: u64, steps: &StepDetector) {
        let passed_ns = match self.progress.is_paused {
            true => 0,
            false => now_ns.saturating_sub(self.progress.at_ns),
        };
        let elapsed = ElapsedWork {
            elapsed_seconds: passed_ns as f64 / 1e9,
            elapsed_steps: self.new_steps(steps),
            is_in_window: self.progress.is_in_window,
        };
        self.progress.at_ns = self.progress.at_ns.max(now_ns);
        self.progress.attached_seconds += elapsed.elapsed_seconds;
        let sampled_kinds: Vec<CallKind> = self.called_and_sampled().map(|row| row.kind).collect();
        for (subject, calls) in &mut self.sampled {
            let is_exact =
                matches!(subject, EstimateSubject::Kind(kind) if !sampled_kinds.contains(kind));
            calls.add_calls(subject.sum_of_counters(&self.counters), elapsed, is_exact);
        }
    }

    /// Steps since the last read. When the detector counts steps anew, from another boundary, estimates begin anew too.
    fn new_steps(&mut self, steps: &StepDetector) -> f64 {
        let (series, count) = (steps.restart_count(), steps.step_count());
        let before = (self.progress.series, self.progress.steps);
        (self.progress.series, self.progress.steps) = (series, count);
        if before.0 == series {
            return match before.1 {
                // Steps are counted from the first one on, but only once it is clear what separates them.
                0 => steps_after(steps, self.progress.series_from_ns),
                before => count.saturating_sub(before) as f64,
            };
        }
        let launches_per_step = self.launches_per_step.launches_interval();
        for calls in self.sampled.values_mut() {
            calls.estimator.begin_series(launches_per_step);
        }
        self.launches_per_step = LaunchesPerStep::default();
        // A series without a window has no estimate, so its time belongs to the new series.
        if std::mem::take(&mut self.progress.had_window) {
            self.progress.series_from_ns = self.progress.at_ns;
        }
        steps_after(steps, self.progress.series_from_ns)
    }

    /// The sampled functions that the process has called.
    fn called_and_sampled(&self) -> impl Iterator<Item = &'static ProbedFunction> {
        let called = self.sampled_functions().map(|(symbol, _)| symbol);
        called
            .filter(|symbol| self.counters.contains_key(symbol))
            .map(|symbol| &SYMBOLS[symbol])
    }

    /// Functions that are or were sampled.
    fn sampled_functions(&self) -> impl Iterator<Item = (usize, &SampledCalls)> {
        let subjects = self.sampled.iter();
        subjects.filter_map(|(subject, calls)| match subject {
            EstimateSubject::Function(symbol) => Some((*symbol, calls)),
            EstimateSubject::Kind(_) => None,
        })
    }

    /// The functions that are sampled now.
    fn sampled_now(&self) -> impl Iterator<Item = (usize, &SampledCalls)> {
        let functions = self.sampled_functions();
        functions.filter(|(_, calls)| calls.is_sampled)
    }

    /// Whether a function that meets the condition is or was sampled.
    pub(in crate::observer) fn is_any_sampled(
        &self,
        wanted: impl Fn(&ProbedFunction) -> bool,
    ) -> bool {
        let mut functions = self.sampled_functions();
        functions.any(|(symbol, _)| wanted(&SYMBOLS[symbol]))
    }

    /// Whether the process has called a function that meets the condition and is or was sampled.
    pub(in crate::observer) fn has_called_sampled(
        &self,
        wanted: impl Fn(&ProbedFunction) -> bool,
    ) -> bool {
        self.called_and_sampled().any(wanted)
    }

    /// The estimate of all functions of a kind, if the process calls some that are sampled.
    fn sampled_kind(&self, kind: CallKind) -> Option<&SampledCalls> {
        let calls = self.sampled.get(&EstimateSubject::Kind(kind))?;
        self.has_called_sampled(|row| row.kind == kind)
            .then_some(calls)
    }

    /// Calls and bytes of all functions whose kind meets the condition.
    pub(super) fn count_calls(
        &self,
        what: impl Fn(CallKind) -> bool,
        steps: &StepDetector,
    ) -> CallCount {
        let mut sum = CallCount::default();
        let mut add = |count: CallCount| {
            sum.calls += count.calls;
            sum.failed_calls += count.failed_calls;
            sum.bytes += count.bytes;
            // Errors add up, because all estimates come from the same windows.
            sum.error = sum.error.zip(count.error).map(|(sum, more)| sum + more);
        };
        let per_step = self.usable_launches_per_step(steps);
        for (subject, calls) in &self.sampled {
            if let EstimateSubject::Kind(kind) = subject
                && what(*kind)
            {
                let count = calls.count_with_estimate(per_step);
                add(match self.sampled_kind(*kind) {
                    Some(_) => count,
                    // After too few windows nothing shows whether the process calls sampled functions.
                    None => CallCount {
                        error: count.error.map(|_| 0),
                        ..CallCount::default()
                    },
                });
            }
        }
        let of_kind = self
            .calls_by_function(steps)
            .map(|(symbol, count)| (SYMBOLS[symbol].kind, count))
            .filter(|(kind, _)| what(*kind) && self.sampled_kind(*kind).is_none());
        of_kind.for_each(|(_, count)| add(count));
        sum
    }

    /// Calls of every function that was called.
    pub(super) fn calls_by_function(
        &self,
        steps: &StepDetector,
    ) -> impl Iterator<Item = (usize, CallCount)> {
        let per_step = self.usable_launches_per_step(steps);
        let counts = self.counters.iter().map(move |(symbol, counter)| {
            let sampled = self.sampled.get(&EstimateSubject::Function(*symbol));
            let exact = || CallCount::exact(*counter);
            (
                *symbol,
                sampled.map_or_else(exact, |calls| calls.count_with_estimate(per_step)),
            )
        });
        counts.filter(|(_, count)| count.calls > 0)
    }

    /// Counted calls of a kind. Unlike an estimate, this never falls.
    pub(super) fn counted_calls_of(&self, kind: CallKind) -> CountedCalls {
        let subject = EstimateSubject::Kind(kind);
        let known = self.sampled.get(&subject);
        let (counter, seconds) = match known {
            Some(calls) => (calls.counted_calls, calls.counted_seconds),
            None => (
                subject.sum_of_counters(&self.counters),
                self.progress.attached_seconds,
            ),
        };
        CountedCalls {
            calls: counter.calls,
            bytes: counter.bytes,
            seconds,
            was_sampled: known.is_some(),
        }
    }

    fn counted_launches(&self) -> u64 {
        EstimateSubject::Kind(CallKind::Launch)
            .sum_of_counters(&self.counters)
            .calls
    }

    /// Marks a function as sampled from now on; the count of its calls so far is exact.
    pub(in crate::observer) fn begin_sampling(
        &mut self,
        symbol: usize,
        counters: &layout::Counters,
        now_ns: u64,
        steps: &StepDetector,
    ) {
        self.read_counters(counters);
        self.advance_to(now_ns, steps);
        self.progress.series_from_ns = now_ns;
        if SYMBOLS[symbol].kind == CallKind::Launch && !self.has_sampled_launches() {
            self.add_steps_before_sampling(steps);
        }
        self.begin_sampling_calls(
            symbol,
            self.progress.attached_seconds,
            step_progress(steps, now_ns),
        );
    }

    /// Marks these functions as sampled from the start of the process on.
    pub(super) fn mark_sampled_from_start(&mut self, symbols: &[usize], is_in_window: bool) {
        self.progress.is_in_window = is_in_window;
        for symbol in symbols {
            self.begin_sampling_calls(*symbol, 0.0, 0.0);
        }
    }

    fn begin_sampling_calls(&mut self, symbol: usize, counted_seconds: f64, step_progress: f64) {
        for subject in EstimateSubject::subjects_of_symbol(symbol) {
            let calls = self.sampled.entry(subject).or_insert_with(|| {
                let estimator =
                    CallEstimator::new(subject == EstimateSubject::Kind(CallKind::Launch));
                SampledCalls::new(
                    estimator,
                    subject.sum_of_counters(&self.counters),
                    counted_seconds,
                )
            });
            calls.begin_sampling(step_progress);
        }
    }

    /// The steps before launches are sampled are like those of two windows: their launches were counted. With these steps,
    /// launches per step have an interval at once, even if sampling begins in an evaluation. Steps that are too long for a
    /// window are left out, because no window contains such a step.
    fn add_steps_before_sampling(&mut self, steps: &StepDetector) {
        let Some(length) = window_length_for_steps(steps) else {
            return;
        };
        let mut counted = counted_steps(steps, self.progress.sampled_until_ns, u64::MAX);
        counted.retain(|step| Duration::from_nanos(step.duration_ns) <= length);
        let (first, second) = counted.split_at(counted.len() / 2);
        self.launches_per_step.add_counted(first, length);
        self.launches_per_step.add_counted(second, length);
    }

    /// Ends the sampling of a function: its calls are counted exactly again.
    pub(in crate::observer) fn end_sampling(
        &mut self,
        symbol: usize,
        now_ns: u64,
        steps: &StepDetector,
    ) {
        self.advance_to(now_ns, steps);
        self.progress.sampled_until_ns = now_ns;
        for subject in EstimateSubject::subjects_of_symbol(symbol) {
            let goes_on = self
                .sampled_now()
                .any(|(other, _)| other != symbol && subject.includes_symbol(other));
            if let Some(calls) = self.sampled.get_mut(&subject) {
                calls.is_sampled &= goes_on;
            }
        }
    }

    /// Ends all sampling.
    pub(super) fn end_all_sampling(&mut self, now_ns: u64, steps: &StepDetector) {
        self.advance_to(now_ns, steps);
        for calls in self.sampled.values_mut() {
            calls.is_sampled = false;
        }
    }

    /// Records that all probes are detached, or attached again.
    pub(super) fn set_paused(&mut self, is_paused: bool, now_ns: u64, steps: &StepDetector) {
        self.advance_to(now_ns, steps);
        self.progress.is_paused = is_paused;
    }

    /// Opens a window.
    pub(in crate::observer) fn open_window(
        &mut self,
        counters: &layout::Counters,
        now_ns: u64,
        steps: &mut StepDetector,
    ) {
        self.read_counters(counters);
        self.advance_to(now_ns, steps);
        self.progress.is_in_window = true;
        self.launches_at_opening = self.counted_launches();
        self.sampled
            .values_mut()
            .for_each(SampledCalls::open_window);
        // Steps of an earlier window that were reported too late.
        steps.take_window_steps();
    }

    /// Closes the window that is open, if one is. A probed call costs the busiest thread `cost_ns`.
    pub(super) fn close_window(
        &mut self,
        counters: &layout::Counters,
        (from_ns, to_ns): (u64, u64),
        cost_ns: f64,
        steps: &mut StepDetector,
    ) {
        self.read_counters(counters);
        self.advance_to(to_ns, steps);
        if !std::mem::take(&mut self.progress.is_in_window) {
            return;
        }
        self.progress.had_window = true;
        let length = Duration::from_nanos(to_ns.saturating_sub(from_ns));
        let mut whole_steps = steps.take_window_steps();
        whole_steps.extend(counted_steps(steps, from_ns, to_ns));
        self.launches_per_step.add_window(&whole_steps, length);
        let calls: u64 = self.sampled_now().map(|(_, it)| it.calls_in_window()).sum();
        let window = WindowTotals {
            window_seconds: length.as_secs_f64(),
            launches: self
                .counted_launches()
                .saturating_sub(self.launches_at_opening),
            probe_seconds: calls as f64 * cost_ns / 1e9,
        };
        for calls in self.sampled.values_mut() {
            calls.close_window(&window);
        }
    }

    /// Ends a window that did not show all calls.
    pub(super) fn discard_window(&mut self) {
        self.progress.is_in_window = false;
    }

    /// Whether a function that launches is sampled now.
    pub(in crate::observer) fn has_sampled_launches(&self) -> bool {
        let launches = self.sampled.get(&EstimateSubject::Kind(CallKind::Launch));
        launches.is_some_and(|calls| calls.is_sampled)
    }

    /// Calls per second of a sampled function in the last windows.
    pub(in crate::observer) fn sampled_rate(&self, symbol: usize) -> f64 {
        let sampled = self.sampled.get(&EstimateSubject::Function(symbol));
        let sampled = sampled.filter(|calls| calls.is_sampled);
        sampled.and_then(|calls| calls.recent_rate).unwrap_or(0.0)
    }

    /// Whether the process calls functions that are sampled, or may do so: it makes steps, and has seen no window yet.
    pub(in crate::observer) fn needs_windows(&self, steps: &StepDetector) -> bool {
        self.sampled_now()
            .any(|(symbol, calls)| match calls.recent_rate {
                Some(rate) => rate > 1.0,
                None => steps.step_count() > 0 || self.counters.contains_key(&symbol),
            })
    }

    /// Whether no whole step lay in the open window yet, although steps are short enough.
    pub(in crate::observer) fn lacks_whole_step(&self, steps: &StepDetector) -> bool {
        self.has_called_sampled(|row| row.kind == CallKind::Launch)
            && window_length_for_steps(steps).is_some()
            && steps.window_steps().is_empty()
    }

    /// Whether a function that the process calls has no confidence interval yet: that takes two windows.
    pub(in crate::observer) fn lacks_interval(&self, steps: &StepDetector) -> bool {
        let per_step = self.usable_launches_per_step(steps);
        self.sampled_now().any(|(_, calls)| {
            calls.recent_rate.is_none_or(|rate| rate > 1.0)
                && !calls.estimator.estimate_calls(per_step).has_interval()
        })
    }

    /// Whether launches per step are known within 5 %, and every sampled function that is called has an interval.
    pub(in crate::observer) fn has_precise_estimates(&self, steps: &StepDetector) -> bool {
        let per_step = self.usable_launches_per_step(steps);
        let error = per_step.and_then(|per_step| per_step.relative_error());
        error.is_some_and(|error| error <= MAX_PRECISE_ERROR) && !self.lacks_interval(steps)
    }

    /// Launches per step from windows; `None` if steps are too long for windows, or no step lay in one.
    fn usable_launches_per_step(&self, steps: &StepDetector) -> Option<ConfidenceInterval> {
        window_length_for_steps(steps)?;
        self.launches_per_step.launches_interval()
    }

    /// Launches per step: an estimate if launches were sampled, else the mean of the last steps.
    pub(super) fn launches_per_step(&self, steps: &StepDetector) -> Option<ConfidenceInterval> {
        if self.sampled_kind(CallKind::Launch).is_some() {
            return self.usable_launches_per_step(steps);
        }
        let counted = counted_steps(steps, 0, u64::MAX);
        let launches: f64 = counted.iter().map(|step| f64::from(step.launches)).sum();
        let is_known = launches > 0.0 && counted.len() == steps.recent_steps().len();
        is_known.then(|| ConfidenceInterval::exact(launches / counted.len() as f64))
    }

    /// Whether windows have shown that the process launches only by functions that are not sampled.
    pub(super) fn launches_only_unsampled(&self) -> bool {
        let launches = self.sampled.get(&EstimateSubject::Kind(CallKind::Launch));
        launches.is_some_and(|calls| calls.recent_rate.is_some())
            && !self.has_called_sampled(|row| row.kind == CallKind::Launch)
            && self.counted_launches() > 0
    }
}

/// Window length that contains a few whole steps; `None` if the process makes no steps, or a tenth of them are too long
/// for any window.
pub(in crate::observer) fn window_length_for_steps(steps: &StepDetector) -> Option<Duration> {
    let of_steps = |ns: u64, times: f64| Duration::from_nanos(ns).mul_f64(times);
    let long = of_steps(step_quantile_ns(steps, 9, 10)?, WINDOW_LENGTH_IN_LONG_STEPS);
    let usual = of_steps(
        step_quantile_ns(steps, 1, 2)?,
        WINDOW_LENGTH_IN_MEDIAN_STEPS,
    );
    (long <= LONGEST_WINDOW).then_some(usual.min(LONGEST_WINDOW).max(long))
}

/// The quantile `part` / `of` of the lengths of the last steps.
fn step_quantile_ns(steps: &StepDetector, part: usize, of: usize) -> Option<u64> {
    let mut lengths: Vec<u64> = steps.recent_steps().iter().map(Step::duration_ns).collect();
    lengths.sort_unstable();
    let last = lengths.len().checked_sub(1)?;
    Some(lengths[part * last / of])
}

/// Whole steps between two times whose launches were all counted.
fn counted_steps(steps: &StepDetector, from_ns: u64, to_ns: u64) -> Vec<WindowStep> {
    let steps = steps.recent_steps().iter();
    let whole = steps.filter(|step| step.begin_ns >= from_ns && step.end_ns <= to_ns);
    let counted = whole.filter_map(|step| {
        Some(WindowStep {
            duration_ns: step.duration_ns(),
            launches: step.launches?,
        })
    });
    counted.collect()
}

/// Number of steps since a recent time. Of the step that contains `at_ns`, only the part after that time counts.
fn steps_after(steps: &StepDetector, at_ns: u64) -> f64 {
    let recent = steps.recent_steps();
    if recent.front().is_none_or(|first| first.begin_ns > at_ns) {
        return steps.step_count() as f64;
    }
    let rest = |step: &Step| {
        let after_ns = step.end_ns.saturating_sub(at_ns.max(step.begin_ns));
        after_ns as f64 / step.duration_ns().max(1) as f64
    };
    recent.iter().map(rest).sum()
}

/// The share of the current step that is over, judged by the median length of a step.
fn step_progress(steps: &StepDetector, now_ns: u64) -> f64 {
    let last = steps.recent_steps().back();
    last.zip(step_quantile_ns(steps, 1, 2))
        .map_or(0.0, |(last, usual_ns)| {
            let passed_ns = now_ns.saturating_sub(last.end_ns);
            (passed_ns as f64 / usual_ns.max(1) as f64).min(1.0)
        })
}

#[cfg(test)]
mod tests;
