//! Opens and closes sampling windows, and plans when the next one opens.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use super::sampling_choice::{BUDGET_SHARE_OF_PERMANENT_PROBES, MAX_WINDOW_SHARE, window_share};
use super::{GovernedParts, Governor};
use crate::observer::attached_files::{self, AttachedFile};
use crate::observer::monotonic_ns;
use crate::observer::process::{ObservedProcess, window_length_for_steps};
use crate::observer::process_table::ProcessTable;
use crate::probe_link::ProbeLink;
use crate::probes::layout;

/// The shortest window: attaching and detaching takes milliseconds, so shorter ones would do little else.
const MIN_WINDOW: Duration = Duration::from_millis(50);
/// The longest window: it shows two whole steps of a training loop with two steps per second or more.
pub(in crate::observer) const LONGEST_WINDOW: Duration = Duration::from_millis(500);
/// Windows may open this long before the budget has paid for them. The budget holds on average over a minute or more.
const WINDOW_CREDIT: Duration = Duration::from_secs(5);
/// How long before the budget has paid for it a window may open while some function has no confidence interval: an
/// interval takes two windows, and the budget still holds over a minute.
const CREDIT_FOR_INTERVAL: Duration = Duration::from_secs(60);
/// Factor by which pauses between windows grow once the estimates of every process are precise.
const PRECISE_PAUSE_FACTOR: f64 = 5.0;

/// When windows open and close.
#[derive(Debug)]
pub(super) struct WindowSchedule {
    next_opening: Option<Instant>,
    /// Earliest start of the next window, even if the budget has credit for an earlier one.
    earliest_opening: Instant,
    /// When the budget will have paid for all windows so far.
    paid_at: Instant,
    /// When the open window closes.
    closes_at: Option<Instant>,
    /// When the last window opened, in nanoseconds of CLOCK_MONOTONIC.
    from_ns: u64,
}

impl WindowSchedule {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            next_opening: None,
            earliest_opening: now,
            paid_at: now,
            closes_at: None,
            from_ns: 0,
        }
    }

    /// Opens the first sampling window at once.
    pub(super) fn open_first(&mut self) {
        self.next_opening.get_or_insert_with(Instant::now);
    }

    /// Opens the next window as soon as the budget allows with this credit, if that is earlier than planned.
    fn bring_forward(&mut self, credit: Duration) {
        let on_credit = self.paid_at.checked_sub(credit);
        let earliest = on_credit.map_or(self.earliest_opening, |on| on.max(self.earliest_opening));
        self.next_opening = self.next_opening.map(|next| next.min(earliest));
    }

    /// Plans when the next window opens, after a window of this length. `duty` is the share of the time that windows
    /// may be open.
    fn plan_next(&mut self, length: Duration, duty: f64) {
        // The pause is random, so that windows do not follow the rhythm of the program.
        let jitter = 0.5 + fastrand::f64();
        let pause = |duty: f64| length.div_f64(duty).mul_f64(jitter).max(length);
        let now = Instant::now();
        self.paid_at = self.paid_at.max(now) + pause(duty);
        self.earliest_opening = now + pause(MAX_WINDOW_SHARE);
        self.next_opening = Some(now + pause(duty).mul_f64(PRECISE_PAUSE_FACTOR));
    }
}

/// The time spans in which all launches are counted: since permanent probes were attached, and in the last windows.
#[derive(Debug)]
pub(in crate::observer) struct LaunchSpans {
    pub(super) permanent_since_ns: Option<u64>,
    last_spans: VecDeque<RangeInclusive<u64>>,
}

impl Default for LaunchSpans {
    fn default() -> Self {
        Self {
            permanent_since_ns: Some(0),
            last_spans: VecDeque::new(),
        }
    }
}

impl LaunchSpans {
    /// Windows that are kept. A few are enough, because step marks are read soon after they occur.
    const MAX_KEPT_WINDOWS: usize = 4;

    fn open(&mut self, from_ns: u64) {
        if self.last_spans.len() == Self::MAX_KEPT_WINDOWS {
            self.last_spans.pop_front();
        }
        self.last_spans.push_back(from_ns..=u64::MAX);
    }

    fn close_span(&mut self, to_ns: u64) {
        if let Some(last) = self.last_spans.back_mut() {
            *last = *last.start()..=to_ns;
        }
    }

    /// Whether launches have been counted all the time since `from_ns`.
    pub(in crate::observer) fn are_permanent_since(&self, from_ns: u64) -> bool {
        self.permanent_since_ns
            .is_some_and(|since| since <= from_ns)
    }

    /// Whether one window was open from `from_ns` to `to_ns`.
    pub(in crate::observer) fn is_in_one_window(&self, from_ns: u64, to_ns: u64) -> bool {
        let mut windows = self.last_spans.iter();
        windows.any(|window| window.contains(&from_ns) && window.contains(&to_ns))
    }
}

impl Governor {
    pub(in crate::observer) fn is_window_open(&self) -> bool {
        self.windows.closes_at.is_some()
    }

    /// The time at which the next window opens or the open window closes.
    pub(in crate::observer) fn next_window_change(&self) -> Option<Instant> {
        let next = self
            .windows
            .next_opening
            .filter(|_| !self.sampled.is_empty());
        self.windows.closes_at.or(next)
    }

    /// Opens or closes a sampling window if that is due. Returns the links of a closed window, which the caller drops
    /// to detach the probes.
    pub(in crate::observer) fn open_or_close_window(
        &mut self,
        governed: &mut GovernedParts<'_>,
    ) -> Vec<ProbeLink> {
        let is_due = |turn: Instant| Instant::now() >= turn;
        if !self.next_window_change().is_some_and(is_due) {
            return Vec::new();
        }
        if !self.is_window_open() {
            self.open_window(governed);
            return Vec::new();
        }
        // Step times may be known only now, and steps are slower while probed. So the length of the window is
        // computed again.
        self.read_step_marks(governed);
        let open_for = Duration::from_nanos(monotonic_ns() - self.windows.from_ns);
        let length = window_length(governed.processes);
        let mut processes = governed.processes.running.values();
        let lacks_step = processes.any(|one| one.counts.lacks_whole_step(&one.steps));
        if open_for < length || (open_for < 2 * length && lacks_step) {
            self.windows.closes_at = Some(Instant::now() + length / 4);
            return Vec::new();
        }
        self.close_window(governed)
    }

    /// Opens a window: attaches probes to all sampled functions.
    fn open_window(&mut self, governed: &mut GovernedParts<'_>) {
        if governed.is_off {
            self.windows.next_opening = Some(Instant::now() + MIN_WINDOW.div_f64(MAX_WINDOW_SHARE));
            return;
        }
        let kernel = governed.kernel;
        attached_files::attach_for_window(kernel, governed.attachment.files.iter_mut());
        self.read_step_marks(governed);
        let now_ns = monotonic_ns();
        for (handle, process) in &mut governed.processes.running {
            let counters = kernel.call_counters(*handle);
            let steps = &mut process.steps;
            process.counts.open_window(&counters, now_ns, steps);
        }
        self.windows.from_ns = monotonic_ns();
        kernel.open_window(true);
        if self.samples_events() {
            self.restart_event_tracking(kernel);
        }
        self.launch_spans.open(monotonic_ns());
        self.windows.closes_at = Some(Instant::now() + window_length(governed.processes));
    }

    /// Closes the sampling window, if one is open. Returns the window's links: dropping them detaches the probes,
    /// which takes a while.
    pub(in crate::observer) fn close_window(
        &mut self,
        governed: &mut GovernedParts<'_>,
    ) -> Vec<ProbeLink> {
        if !self.is_window_open() {
            return Vec::new();
        }
        let kernel = governed.kernel;
        self.launch_spans.close_span(monotonic_ns());
        kernel.open_window(false);
        let to_ns = monotonic_ns();
        // Steps of every process up to the end of the window.
        self.read_step_marks(governed);
        self.windows.closes_at = None;
        self.cost.windows += 1;
        for (handle, process) in &mut governed.processes.running {
            let counters = kernel.call_counters(*handle);
            self.close_window_of(process, &counters, to_ns);
        }
        let length = Duration::from_nanos(to_ns - self.windows.from_ns);
        self.windows
            .plan_next(length, self.allowed_window_share(governed.processes));
        self.bring_window_forward(governed.processes);
        let files = governed.attachment.files.iter_mut();
        files.flat_map(AttachedFile::close_window).collect()
    }

    /// Closes the sampling window of one process, and adds the calls counted in it to the estimates.
    pub(in crate::observer) fn close_window_of(
        &self,
        process: &mut ObservedProcess,
        counters: &layout::Counters,
        to_ns: u64,
    ) {
        let from_ns = self.windows.from_ns;
        if to_ns > from_ns {
            let cost_ns = self.call_ns(process);
            process.close_window(counters, (from_ns, to_ns), cost_ns);
        }
    }

    /// The share of the time that windows may be open, so that the busiest thread stays within the budget.
    fn allowed_window_share(&self, processes: &ProcessTable) -> f64 {
        let budget = self.options.budget;
        let duties = processes.running.values().map(|process| {
            let sampled = self.sampled.keys();
            let calls: f64 = sampled
                .map(|symbol| process.counts.sampled_rate(*symbol))
                .sum();
            let left = budget - process.overhead.permanent_cost;
            let left = left.max(budget * (1.0 - BUDGET_SHARE_OF_PERMANENT_PROBES));
            window_share(calls * self.call_ns(process) / 1e9, left)
        });
        duties.fold(MAX_WINDOW_SHARE, f64::min)
    }

    /// Opens the next window soon if the estimates of some process are not precise yet.
    pub(super) fn bring_window_forward(&mut self, processes: &ProcessTable) {
        let watched: Vec<&ObservedProcess> = processes
            .running
            .values()
            .filter(|one| one.counts.needs_windows(&one.steps))
            .collect();
        let lacks_interval = |one: &&ObservedProcess| one.counts.lacks_interval(&one.steps);
        let is_precise = |one: &&ObservedProcess| one.counts.has_precise_estimates(&one.steps);
        if watched.iter().any(lacks_interval) {
            self.windows.bring_forward(CREDIT_FOR_INTERVAL);
        } else if !watched.iter().all(is_precise) {
            self.windows.bring_forward(WINDOW_CREDIT);
        }
    }
}

/// Window length that contains a few whole steps of every process.
fn window_length(processes: &ProcessTable) -> Duration {
    let processes = processes.running.values();
    let launching = processes.filter(|process| process.counts.has_sampled_launches());
    let lengths = launching.filter_map(|process| window_length_for_steps(&process.steps));
    lengths.max().unwrap_or_default().max(MIN_WINDOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_spans_in_one_window_are_counted() {
        let mut windows = LaunchSpans::default();
        assert!(!windows.is_in_one_window(1, 2));
        windows.open(10);
        assert!(windows.is_in_one_window(10, 15) && !windows.is_in_one_window(9, 15));
        windows.close_span(20);
        windows.open(30);
        assert!(windows.is_in_one_window(12, 20) && windows.is_in_one_window(30, 99));
        assert!(!windows.is_in_one_window(12, 21) && !windows.is_in_one_window(12, 35));
        (0..LaunchSpans::MAX_KEPT_WINDOWS).for_each(|_| windows.open(100));
        assert!(!windows.is_in_one_window(12, 20));
    }
}
