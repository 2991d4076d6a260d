//! What is told of the functions of a process that are watched in windows.

use std::time::Duration;

use zernel_phase::steps::{Progress, is_common, median_ns};
use zerocopy::FromZeros;

use super::{CallCount, ObservedProcess};
use crate::observer::estimate::{Before, CallRate, Estimate, Steps, Window};
use crate::observer::governor::LONGEST_WINDOW;
use crate::observer::monotonic_ns;
use crate::probes::{Counts, SYMBOLS, layout};

/// An error up to which what a step launches is well known.
const WELL_KNOWN: f64 = 0.05;

/// In so many times the length of a step there are a few whole ones.
const FEW_STEPS: f64 = 4.2;
/// In so many times its length, a step is often enough whole.
const ROOM: f64 = 1.4;
/// After so long, what a process needed of its CPUs counts a third.
const OF_LATE_NS: f64 = 10e9;

/// A sampled function: what was exact, what the windows counted, and what they stand for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sampling {
    /// Counted in windows, which the estimate replaces.
    pub(super) windowed: layout::Counter,
    /// The counter when it was last looked at.
    last: layout::Counter,
    /// Up to when the estimate goes.
    until_ns: u64,
    /// How far the process had got then.
    progress: Option<Progress>,
    /// Whether the process began while the function was sampled, and no window has been there yet.
    is_new: bool,
    /// Whether no window has been there since this began.
    is_unseen: bool,
    /// Whether it goes on.
    open: bool,
    estimate: Estimate,
    /// What is told: the estimate, up to when the process was last read if its steps tell that; never less than
    /// before.
    pub(super) told: CallCount,
    /// How many calls of these are more than the estimate is by now. Its error has them, too.
    pub(super) told_too_much: u64,
}

impl Sampling {
    /// Begins where everything is exact.
    fn new(counter: layout::Counter, now_ns: u64, progress: Option<Progress>) -> Self {
        Self {
            windowed: FromZeros::new_zeroed(),
            last: counter,
            until_ns: now_ns,
            progress,
            is_new: false,
            is_unseen: true,
            open: true,
            estimate: Estimate::default(),
            told: CallCount::default(),
            told_too_much: 0,
        }
    }

    /// Of a process whose first event was then, while the function was sampled.
    fn of_newcomer(first_ns: u64) -> Self {
        Self {
            is_new: true,
            ..Self::new(FromZeros::new_zeroed(), first_ns, None)
        }
    }

    /// Begins again.
    fn resume(&mut self, counter: layout::Counter, now_ns: u64, progress: Option<Progress>) {
        *self = Self {
            windowed: self.windowed,
            estimate: self.estimate,
            told: self.told,
            told_too_much: self.told_too_much,
            ..Self::new(counter, now_ns, progress)
        };
    }

    /// Takes in what a window has counted up to now.
    fn take(&mut self, counter: layout::Counter, of: &WindowOf) {
        let window = Window {
            calls: counter.calls - self.last.calls,
            bytes: counter.bytes - self.last.bytes,
            launched: of.launched,
            has_steps: of.has_steps(),
            seconds: of.seconds,
            slowed: of.slowed,
        };
        self.windowed.calls += window.calls;
        self.windowed.bytes += window.bytes;
        self.last = counter;
        let span_s = of.to_ns.saturating_sub(self.until_ns) as f64 / 1e9;
        let steps = of.steps_since(self.known_progress(of));
        self.estimate.add(window, span_s, steps);
        self.until_ns = of.to_ns;
        self.progress = of.progress;
        self.is_new &= of.progress.is_none() && window.calls == 0;
        self.is_unseen = false;
    }

    /// The counter before the window that may be open, while it is sampled.
    pub(super) fn counted_up_to(&self) -> Option<&layout::Counter> {
        self.open.then_some(&self.last)
    }

    /// Tells how it is at a moment.
    fn tell(&mut self, now: &WindowOf) {
        let mut estimate = self.estimate;
        let steps = now.steps_since(self.known_progress(now));
        if let Some(steps) = steps.filter(|_| self.open) {
            estimate.end(0.0, Some(steps));
        }
        self.told_too_much = self.told.calls.saturating_sub(estimate.calls());
        self.told = CallCount {
            calls: estimate.calls().max(self.told.calls),
            bytes: estimate.bytes().max(self.told.bytes),
            error: estimate.error() + self.told_too_much,
            failed: 0,
        };
    }

    /// How much of the error is of the time in which no steps are known.
    pub(super) fn timed_error(&self) -> u64 {
        self.estimate.timed_error()
    }

    /// How far the process had got when it was last looked at.
    fn known_progress(&self, of: &WindowOf) -> Option<Progress> {
        match self.is_new {
            true => Some(of.beginning),
            false => self.progress,
        }
    }

    /// The function is counted exactly again.
    fn end(&mut self, of: &WindowOf) {
        if self.open {
            let span_s = of.to_ns.saturating_sub(self.until_ns) as f64 / 1e9;
            let steps = of.steps_since(self.known_progress(of));
            self.estimate.end(span_s, steps);
            self.until_ns = of.to_ns;
            self.open = false;
        }
    }
}

/// For how long the threads of a process that make calls were on CPUs when it last made steps.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OnCpu {
    /// When that was last read.
    pub(super) read_ns: u64,
    /// When that was, if it has made steps all the time since it was noted.
    noted_ns: Option<u64>,
    until_step_ns: u64,
    /// For how long they were on CPUs while it made steps, and in how long a time. What was of late counts most: but
    /// one round may be short, or end what began long before.
    on_cpu_ns: f64,
    in_ns: f64,
}

impl OnCpu {
    /// It makes steps, and has been on CPUs for so long by now.
    fn note(&mut self, on_cpu_ns: u64) {
        if let Some(noted_ns) = self.noted_ns.filter(|noted| *noted < self.read_ns) {
            let in_ns = (self.read_ns - noted_ns) as f64;
            let kept = (-in_ns / OF_LATE_NS).exp();
            let on_cpu_ns = on_cpu_ns.saturating_sub(self.until_step_ns) as f64;
            self.on_cpu_ns = kept * self.on_cpu_ns + on_cpu_ns;
            self.in_ns = kept * self.in_ns + in_ns;
        }
        self.noted_ns = Some(self.read_ns);
        self.until_step_ns = on_cpu_ns;
    }

    /// For how long it may have been as busy since as it is while it makes steps, if that is known. What it does now
    /// counts when its threads leave their CPUs.
    fn busy_ns(&self, on_cpu_ns: u64, at_ns: u64) -> Option<u64> {
        if self.on_cpu_ns <= 0.0 {
            return None;
        }
        let share = self.on_cpu_ns / self.in_ns;
        let on_cpu_ns = on_cpu_ns.saturating_sub(self.until_step_ns);
        let unread_ns = at_ns.saturating_sub(self.read_ns);
        Some((on_cpu_ns as f64 / share) as u64 + unread_ns)
    }
}

/// A window as one process passed through it.
#[derive(Debug, Clone, Copy)]
struct WindowOf {
    seconds: f64,
    to_ns: u64,
    slowed: f64,
    /// Launches in it, sampled or not.
    launched: u64,
    /// How many launches a step has, and by what share that may be off.
    per_step: Option<(f64, f64)>,
    /// How far the process had got at its beginning.
    progress_before: Option<Progress>,
    /// How far the process had got at its end.
    progress: Option<Progress>,
    /// Where the process began.
    beginning: Progress,
}

impl WindowOf {
    /// The steps since another moment, as far as they are known.
    fn steps_since(&self, progress: Option<Progress>) -> Option<Steps> {
        let (per_step, relative_error) = self.per_step?;
        let worth = self.launched as f64 / per_step;
        Some(Steps {
            done: self.progress?.since(&progress?, self.launched > 0)?,
            // About as many as have ended in it: something else may be launched, too.
            seen: self.steps_within().map_or(worth, |steps| {
                worth.clamp((steps - 1.0).max(0.0), steps + 1.0)
            }),
            per_step,
            relative_error,
        })
    }

    /// Whether it was in a training loop of which it is known what a step launches, and in nothing else at its beginning.
    fn has_steps(&self) -> bool {
        let is_overdue = |progress: Progress| progress.is_overdue();
        self.per_step.is_some()
            && self.progress.is_some_and(|progress| !is_overdue(progress))
            && !self.progress_before.is_some_and(is_overdue)
    }

    /// The steps that were made in it, if that is known.
    fn steps_within(&self) -> Option<f64> {
        self.progress?.steps_since(&self.progress_before?)
    }
}

impl ObservedProcess {
    /// Calls per second of a sampled function.
    pub(in crate::observer) fn sampled_rate(&self, symbol: usize) -> f64 {
        let sampling = self.sampling.get(&symbol).filter(|sampling| sampling.open);
        sampling.map_or(0.0, |sampling| sampling.estimate.recent_rate())
    }

    /// A function is watched in windows from now on; up to here, all is exact.
    pub(in crate::observer) fn begin_sampling(
        &mut self,
        symbol: usize,
        counters: &layout::Counters,
    ) {
        self.set_counters(counters);
        let now_ns = monotonic_ns();
        let progress = self.progress(now_ns);
        let counter = counters.of[symbol];
        let makes_steps = self.makes_steps(now_ns);
        let sampling = self.sampling.entry(symbol);
        let sampling = sampling
            .and_modify(|sampling| sampling.resume(counter, now_ns, progress))
            .or_insert_with(|| Sampling::new(counter, now_ns, progress));
        let before = self.rates.get(&symbol).map(|rate| Before {
            rate: *rate,
            launches: self.launch_rate.filter(|_| makes_steps),
        });
        sampling.estimate.begin(before);
        if is_launch(&symbol) && !self.is_launching_sampled() {
            self.launches_per_step.keep_series(self.steps.restarts());
            self.launches_per_step
                .add_counted(self.steps.recent().iter());
            let counter = all_launches(counters);
            let new = Sampling::new(counter, now_ns, progress);
            let launching = self.launching.get_or_insert(new);
            launching.resume(counter, now_ns, progress);
            let before = self.launch_rate.map(|calls| Before {
                rate: CallRate { calls, bytes: 0.0 },
                launches: Some(calls),
            });
            launching.estimate.begin(before);
        }
    }

    /// It begins while these functions are sampled.
    pub(in crate::observer) fn join_sampling(&mut self, symbols: &[usize]) {
        let newcomer = Sampling::of_newcomer(self.first_ns);
        for symbol in symbols {
            self.sampling.insert(*symbol, newcomer);
            if is_launch(symbol) {
                self.launching = Some(newcomer);
            }
        }
    }

    /// Tells how often it has called what is sampled, as far as that is known by now.
    pub(in crate::observer) fn tell_sampled(&mut self, now_ns: u64) {
        if self.sampling.is_empty() {
            return;
        }
        let now = self.window_of(now_ns);
        let sampling = self.sampling.values_mut().chain(&mut self.launching);
        sampling.for_each(|sampling| sampling.tell(&now));
    }

    /// It is counted exactly again; the time since the last window is taken to be like it, or its steps like others.
    pub(in crate::observer) fn end_sampling(&mut self, symbol: usize, now_ns: u64) {
        let end = self.window_of(now_ns);
        if let Some(sampling) = self.sampling.get_mut(&symbol) {
            sampling.end(&end);
        }
        let mut launches = self.sampling.iter().filter(|(symbol, _)| is_launch(symbol));
        let goes_on = launches.any(|(_, sampling)| sampling.open);
        if let Some(launching) = self.launching.as_mut().filter(|_| !goes_on) {
            launching.end(&end);
        }
        self.tell_sampled(now_ns);
    }

    /// A window with nothing in it.
    fn window_of(&self, to_ns: u64) -> WindowOf {
        let fits = self.few_steps().is_some();
        let per_step = self.launches_per_step.mean().filter(|_| fits);
        let progress = self.progress(to_ns);
        WindowOf {
            seconds: 0.0,
            to_ns,
            slowed: 0.0,
            launched: 0,
            per_step: per_step.map(|mean| (mean, self.launches_per_step.relative_error())),
            progress_before: progress,
            progress,
            beginning: self.steps.beginning(),
        }
    }

    /// A window is about to open, for these functions.
    pub(in crate::observer) fn expect_window(
        &mut self,
        symbols: &[usize],
        counters: &layout::Counters,
        now_ns: u64,
    ) {
        let launches = all_launches(counters);
        for symbol in symbols {
            if let Some(sampling) = self.sampling.get_mut(symbol) {
                sampling.last = counters.of[*symbol];
            }
        }
        if let Some(launching) = &mut self.launching {
            launching.last = launches;
        }
        self.launched_before = launches.calls;
        self.progress_before = self.progress(now_ns);
        // They are of no window.
        self.steps.take_glimpses();
    }

    /// Takes in what a window counted, for all functions that are sampled. A call costs `cost_ns`.
    pub(in crate::observer) fn take_window(
        &mut self,
        symbols: &[usize],
        counters: &layout::Counters,
        from_ns: u64,
        to_ns: u64,
        cost_ns: f64,
    ) {
        self.set_counters(counters);
        let known = |symbol: &usize| {
            self.sampling
                .get(symbol)
                .map_or(0, |known| known.last.calls)
        };
        let calls: u64 = symbols
            .iter()
            .map(|symbol| counters.of[*symbol].calls - known(symbol))
            .sum();
        // A process that came during the window was seen for the rest of it.
        let length_ns = to_ns.saturating_sub(from_ns.max(self.first_ns));
        let seconds = length_ns as f64 / 1e9;
        let glimpses = self.steps.take_glimpses();
        self.launches_per_step.keep_series(self.steps.restarts());
        self.launches_per_step
            .add_window(&glimpses, Duration::from_nanos(length_ns));
        let launches = all_launches(counters);
        let window = WindowOf {
            seconds,
            slowed: calls as f64 * self.busiest_share() * cost_ns / 1e9 / seconds.max(f64::EPSILON),
            launched: launches.calls - self.launched_before,
            progress_before: self.progress_before,
            ..self.window_of(to_ns)
        };
        for symbol in symbols {
            if let Some(sampling) = self.sampling.get_mut(symbol) {
                sampling.take(counters.of[*symbol], &window);
            }
        }
        if let Some(launching) = self.launching.as_mut().filter(|all| all.open) {
            launching.take(launches, &window);
        }
        self.tell_sampled(to_ns);
    }

    /// Whether it launches by a function that is sampled now.
    pub(in crate::observer) fn is_launching_sampled(&self) -> bool {
        self.launching
            .as_ref()
            .is_some_and(|launching| launching.open)
    }

    /// Notes for how long it has been on a CPU, and whether it makes steps.
    pub(in crate::observer) fn note_on_cpu(&mut self, now_ns: u64) {
        match self.makes_steps(now_ns) {
            true => self.on_cpu.note(self.scheduling.calling_on_cpu_ns),
            false => self.on_cpu.noted_ns = None,
        }
    }

    /// How far it has got in its training loop. What it does beside that, it does on a CPU.
    fn progress(&self, at_ns: u64) -> Option<Progress> {
        let progress = self.steps.progress(at_ns)?;
        let on_cpu_ns = self.scheduling.calling_on_cpu_ns;
        let busy_ns = self.on_cpu.busy_ns(on_cpu_ns, at_ns);
        Some(busy_ns.map_or(progress, |ns| progress.busy_for_at_most(ns)))
    }

    fn makes_steps(&self, now_ns: u64) -> bool {
        let progress = self.progress(now_ns);
        progress.is_some_and(|progress| !progress.is_overdue())
    }

    /// Whether only windows can tell what it does: it calls what is sampled, or makes steps and they have not shown it
    /// at all.
    pub(in crate::observer) fn needs_windows(&self, now_ns: u64) -> bool {
        let is_new = self.sampling.values().all(|sampling| sampling.is_new);
        let mut open = self.sampling.iter().filter(|(_, sampling)| sampling.open);
        (is_new && self.makes_steps(now_ns))
            || open.any(|(symbol, sampling)| {
                let is_unseen = sampling.is_unseen && self.counters.contains_key(symbol);
                is_unseen || sampling.estimate.recent_rate() > 1.0
            })
    }

    /// For how long a window must be open to see a few whole steps of it, and a long one; `None` if it makes none, or
    /// no window is that long.
    pub(in crate::observer) fn few_steps(&self) -> Option<Duration> {
        let times = |ns: u64, times: f64| Duration::from_nanos(ns).mul_f64(times);
        let fits = |length: &Duration| *length <= LONGEST_WINDOW;
        let few = times(median_ns(self.steps.recent())?, FEW_STEPS);
        let steps = self.steps.recent().iter();
        let lengths = steps.map(|step| times(step.duration_ns(), ROOM));
        let (shown, too_long): (Vec<_>, Vec<_>) = lengths.partition(fits);
        // What no window shows is told beside the steps only as long as it is rare; the first steps may be long.
        if is_common(too_long.len(), self.steps.recent().len()) {
            return None;
        }
        let longest = shown.into_iter().max();
        Some(longest.unwrap_or_default().max(few)).filter(fits)
    }

    /// Whether it makes steps that a window can show, and fewer were seen than tell how many launches one has.
    pub(in crate::observer) fn lacks_steps(&self) -> bool {
        self.is_launching_sampled()
            && !self.launches_otherwise()
            && self.few_steps().is_some()
            && self.makes_steps(monotonic_ns())
            && self.launches_per_step.lacks(self.steps.glimpses())
    }

    /// Whether it makes steps, and it is well known how many launches one has.
    pub(in crate::observer) fn is_well_known(&self, now_ns: u64) -> bool {
        let mut open = self.sampling.values().filter(|sampling| sampling.open);
        !open.any(|sampling| sampling.is_unseen)
            && self.makes_steps(now_ns)
            && self.launches_per_step.relative_error() <= WELL_KNOWN
    }

    /// Whether it launches, and windows have shown that it does so only by functions that are not sampled.
    pub(super) fn launches_otherwise(&self) -> bool {
        let mut sampled = self.sampling.iter().filter(|(symbol, _)| is_launch(symbol));
        let is_seen = self.launching.is_some_and(|all| all.estimate.windows() > 0);
        let is_other = sampled.all(|(symbol, _)| !self.counters.contains_key(symbol));
        is_seen && is_other && self.counters.keys().any(is_launch)
    }
}

/// Whether a function launches.
pub(super) fn is_launch(symbol: &usize) -> bool {
    SYMBOLS[*symbol].counts == Counts::Launch
}

/// The sum of everything that launches.
fn all_launches(counters: &layout::Counters) -> layout::Counter {
    let mut sum: layout::Counter = FromZeros::new_zeroed();
    let counters = counters.of.iter().zip(SYMBOLS.iter());
    for (counter, _) in counters.filter(|(_, symbol)| symbol.counts == Counts::Launch) {
        sum.calls += counter.calls;
        sum.bytes += counter.bytes;
    }
    sum
}

#[cfg(test)]
mod tests;
