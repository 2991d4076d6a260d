//! Opens and closes sampling windows, and plans when the next one opens.

use std::collections::VecDeque;
use std::mem::offset_of;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::sampling_choice::{BUDGET_SHARE_OF_PERMANENT_PROBES, MAX_WINDOW_SHARE, window_share};
use super::{GovernedParts, Governor};
use crate::discovery::ProcessKey;
use crate::observer::attached_files::{self, AttachedFile};
use crate::observer::attachment::LibraryAttachments;
use crate::observer::kernel::KernelPrograms;
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
    budget_paid_at: Instant,
    /// When the open window closes.
    closes_at: Option<Instant>,
    /// When the last window opened, in nanoseconds of CLOCK_MONOTONIC.
    from_ns: u64,
    /// Since when the calls of the last window were counted, in nanoseconds of CLOCK_MONOTONIC.
    counted_from_ns: u64,
}

impl WindowSchedule {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            next_opening: None,
            earliest_opening: now,
            budget_paid_at: now,
            closes_at: None,
            from_ns: 0,
            counted_from_ns: 0,
        }
    }

    /// Opens the first sampling window at once.
    pub(super) fn open_first(&mut self) {
        self.next_opening.get_or_insert_with(Instant::now);
    }

    /// Opens the next window as soon as the budget allows with this credit, if that is earlier than planned.
    fn bring_forward(&mut self, credit: Duration) {
        let on_credit = self.budget_paid_at.checked_sub(credit);
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
        self.budget_paid_at = self.budget_paid_at.max(now) + pause(duty);
        self.earliest_opening = now + pause(MAX_WINDOW_SHARE);
        self.next_opening = Some(now + pause(duty).mul_f64(PRECISE_PAUSE_FACTOR));
    }
}

/// The time spans in which all launches of a process are counted although they are sampled: its last windows.
#[derive(Debug, Default)]
pub(in crate::observer) struct WindowSpans {
    last_spans: VecDeque<RangeInclusive<u64>>,
}

impl WindowSpans {
    /// Windows that are kept. A few are enough, because step marks are read soon after they occur.
    const MAX_KEPT_WINDOWS: usize = 4;

    pub(in crate::observer) fn open(&mut self, from_ns: u64) {
        if self.last_spans.len() == Self::MAX_KEPT_WINDOWS {
            self.last_spans.pop_front();
        }
        self.last_spans.push_back(from_ns..=u64::MAX);
    }

    /// Closes the span that is open, if one is.
    fn close_span(&mut self, to_ns: u64) {
        let last = self.last_spans.back_mut();
        if let Some(last) = last.filter(|last| *last.end() == u64::MAX) {
            *last = *last.start()..=to_ns;
        }
    }

    /// Forgets the span that is open, if one is.
    fn discard_span(&mut self) {
        self.last_spans.retain(|span| *span.end() != u64::MAX);
    }

    /// Whether one window was open from `from_ns` to `to_ns`.
    pub(in crate::observer) fn is_in_one_window(&self, from_ns: u64, to_ns: u64) -> bool {
        let mut windows = self.last_spans.iter();
        windows.any(|window| window.contains(&from_ns) && window.contains(&to_ns))
    }
}

impl Governor {
    pub(in crate::observer) fn is_window_open(&self) -> bool {
        self.window_schedule.closes_at.is_some()
    }

    /// The time at which the next window opens or the open window closes.
    pub(in crate::observer) fn next_window_change(&self) -> Option<Instant> {
        let next = self
            .window_schedule
            .next_opening
            .filter(|_| !self.sampled_functions.is_empty());
        self.window_schedule.closes_at.or(next)
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
        let open_for = Duration::from_nanos(monotonic_ns() - self.window_schedule.from_ns);
        let length = window_length(governed.processes);
        let mut processes = governed.processes.running_processes.values();
        let lacks_step =
            processes.any(|one| !one.misses_window && one.call_counts.lacks_whole_step(&one.steps));
        if open_for < length || (open_for < 2 * length && lacks_step) {
            self.window_schedule.closes_at = Some(Instant::now() + length / 4);
            return Vec::new();
        }
        self.close_window(governed)
    }

    /// Opens a window: attaches probes to all sampled functions. A process without these probes has no window.
    fn open_window(&mut self, governed: &mut GovernedParts<'_>) {
        let kernel = governed.kernel;
        if !governed.are_probes_off {
            attached_files::attach_for_window(kernel, governed.attachment.files.iter_mut());
            self.read_step_marks(governed);
            note_missed_windows(governed);
        }
        if governed.are_probes_off || !has_window(&governed.attachment.files) {
            self.window_schedule.next_opening =
                Some(Instant::now() + MIN_WINDOW.div_f64(MAX_WINDOW_SHARE));
            return;
        }
        let now_ns = monotonic_ns();
        let processes = governed.processes.running_processes.iter_mut();
        for (handle, process) in processes.filter(|(_, process)| !process.misses_window) {
            let counters = kernel.call_counters(*handle);
            let steps = &mut process.steps;
            process.call_counts.open_window(&counters, now_ns, steps);
        }
        self.window_schedule.from_ns = monotonic_ns();
        kernel.set_window_open(true);
        if self.samples_events() {
            self.restart_event_tracking(kernel);
        }
        self.window_schedule.counted_from_ns = monotonic_ns();
        let processes = governed.processes.running_processes.values_mut();
        for process in processes.filter(|process| !process.misses_window) {
            process
                .window_spans
                .open(self.window_schedule.counted_from_ns);
        }
        self.window_schedule.closes_at = Some(Instant::now() + window_length(governed.processes));
    }

    /// Since when calls have been counted in the window that is open for a process; `None` if none is.
    pub(in crate::observer) fn open_window_of(
        &self,
        process: ProcessKey,
        attachment: &LibraryAttachments,
    ) -> Option<u64> {
        let is_open = self.is_window_open() && !misses_window(process, attachment);
        is_open.then_some(self.window_schedule.counted_from_ns)
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
        // A process may have mapped another file meanwhile.
        note_missed_windows(governed);
        for process in governed.processes.running_processes.values_mut() {
            match process.misses_window {
                true => process.window_spans.discard_span(),
                false => process.window_spans.close_span(monotonic_ns()),
            }
        }
        kernel.set_window_open(false);
        let to_ns = monotonic_ns();
        // Steps of every process up to the end of the window.
        self.read_step_marks(governed);
        self.window_schedule.closes_at = None;
        self.cost.sampling_windows += 1;
        for (handle, process) in &mut governed.processes.running_processes {
            let counters = kernel.call_counters(*handle);
            self.close_window_of(process, &counters, to_ns);
        }
        let length = Duration::from_nanos(to_ns - self.window_schedule.from_ns);
        self.window_schedule
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
        let from_ns = self.window_schedule.from_ns;
        if to_ns > from_ns {
            let cost_ns = self.probed_call_ns(process);
            process.close_window(counters, (from_ns, to_ns), cost_ns);
        }
    }

    /// The share of the time that windows may be open, so that the busiest thread stays within the budget.
    fn allowed_window_share(&self, processes: &ProcessTable) -> f64 {
        let budget = self.options.budget;
        let duties = processes.running_processes.values().map(|process| {
            let sampled = self.sampled_functions.keys();
            let calls: f64 = sampled
                .map(|symbol| process.call_counts.sampled_rate(*symbol))
                .sum();
            let left = budget - process.overhead.permanent_cost;
            let left = left.max(budget * (1.0 - BUDGET_SHARE_OF_PERMANENT_PROBES));
            window_share(calls * self.probed_call_ns(process) / 1e9, left)
        });
        duties.fold(MAX_WINDOW_SHARE, f64::min)
    }

    /// Opens the next window soon if the estimates of some process are not precise yet.
    pub(super) fn bring_window_forward(&mut self, processes: &ProcessTable) {
        let watched: Vec<&ObservedProcess> = processes
            .running_processes
            .values()
            .filter(|one| one.call_counts.needs_windows(&one.steps))
            .collect();
        let lacks_interval = |one: &&ObservedProcess| one.call_counts.lacks_interval(&one.steps);
        let is_precise = |one: &&ObservedProcess| one.call_counts.has_precise_estimates(&one.steps);
        if watched.iter().any(lacks_interval) {
            self.window_schedule.bring_forward(CREDIT_FOR_INTERVAL);
        } else if !watched.iter().all(is_precise) {
            self.window_schedule.bring_forward(WINDOW_CREDIT);
        }
    }
}

/// Whether a process maps a file whose sampled functions have no probes in this window.
fn misses_window(process: ProcessKey, attachment: &LibraryAttachments) -> bool {
    let mapped = attachment.files_of(process);
    let mut missing = attachment.files.iter().filter(|file| file.misses_window);
    missing.any(|file| mapped.contains(&file.file_number))
}

/// Records which processes have no window.
fn note_missed_windows(governed: &mut GovernedParts<'_>) {
    for (handle, process) in &mut governed.processes.running_processes {
        let misses = misses_window(process.discovery_key(), governed.attachment);
        set_misses_window(governed.kernel, *handle, process, misses);
    }
}

/// Sets whether a process has no window, for the kernel too.
pub(in crate::observer) fn set_misses_window(
    kernel: &KernelPrograms,
    handle: u32,
    process: &mut ObservedProcess,
    misses: bool,
) {
    if std::mem::replace(&mut process.misses_window, misses) != misses {
        let place = offset_of!(layout::Process, misses_window);
        let index = layout::index_of_handle(handle);
        let word = kernel.processes.word(index, place);
        word.store(misses.into(), Ordering::Release);
    }
}

/// Whether some sampled functions have probes, or no file has sampled functions.
fn has_window(files: &[AttachedFile]) -> bool {
    let mut linked = files.iter().filter(|it| !it.links.window_links.is_empty());
    linked.next().is_some() || !files.iter().any(|file| file.misses_window)
}

/// Window length that contains a few whole steps of every process.
fn window_length(processes: &ProcessTable) -> Duration {
    let processes = processes.running_processes.values();
    let launching = processes.filter(|process| process.call_counts.has_sampled_launches());
    let lengths = launching.filter_map(|process| window_length_for_steps(&process.steps));
    lengths.max().unwrap_or_default().max(MIN_WINDOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_spans_in_one_window_are_counted() {
        let mut windows = WindowSpans::default();
        assert!(!windows.is_in_one_window(1, 2));
        windows.open(10);
        assert!(windows.is_in_one_window(10, 15) && !windows.is_in_one_window(9, 15));
        windows.close_span(20);
        windows.close_span(25);
        windows.open(22);
        windows.discard_span();
        windows.open(30);
        assert!(windows.is_in_one_window(12, 20) && windows.is_in_one_window(30, 99));
        assert!(!windows.is_in_one_window(12, 21) && !windows.is_in_one_window(12, 35));
        (0..WindowSpans::MAX_KEPT_WINDOWS).for_each(|_| windows.open(100));
        assert!(!windows.is_in_one_window(12, 20));
    }
}
