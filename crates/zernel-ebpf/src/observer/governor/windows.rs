//! Sampling windows: when they open and close.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use libbpf_rs::Link;

use super::{MAX_DUTY, PERMANENT_SHARE, PRECISE_PAUSE_FACTOR, SHORTEST_WINDOW, duty};
use crate::observer::files::AttachedFile;
use crate::observer::{ObservedProcess, Observer, monotonic_ns};

/// The time spans in which all launches are counted: since permanent probes were attached, and in the last windows.
#[derive(Debug)]
pub(in crate::observer) struct LaunchSpans {
    pub(super) permanent_since_ns: Option<u64>,
    last: VecDeque<RangeInclusive<u64>>,
}

impl Default for LaunchSpans {
    fn default() -> Self {
        Self {
            permanent_since_ns: Some(0),
            last: VecDeque::new(),
        }
    }
}

impl LaunchSpans {
    /// Windows that are kept. Step marks are read soon after they occur.
    const KEPT: usize = 4;

    fn open(&mut self, from_ns: u64) {
        if self.last.len() == Self::KEPT {
            self.last.pop_front();
        }
        self.last.push_back(from_ns..=u64::MAX);
    }

    fn close(&mut self, to_ns: u64) {
        if let Some(last) = self.last.back_mut() {
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
        let mut windows = self.last.iter();
        windows.any(|window| window.contains(&from_ns) && window.contains(&to_ns))
    }
}

impl Observer {
    /// Opens or closes a window if it is due. Returns the links of a closed window, to be dropped.
    pub(in crate::observer) fn open_or_close_window(&mut self) -> Vec<Link> {
        let is_due = |turn: Instant| Instant::now() >= turn;
        if !self.governor.next_window_change().is_some_and(is_due) {
            return Vec::new();
        }
        if !self.governor.is_window_open() {
            self.open_window();
            return Vec::new();
        }
        // Step times may be known only now, and steps are slower while probed. So the length is computed again.
        let _ = self.read_step_marks();
        let open_for = Duration::from_nanos(monotonic_ns() - self.governor.window_from_ns);
        let length = self.window_length();
        let mut processes = self.processes.running.values();
        let lacks_step = processes.any(ObservedProcess::lacks_whole_step);
        if open_for < length || (open_for < 2 * length && lacks_step) {
            self.governor.window = Some(Instant::now() + length / 4);
            return Vec::new();
        }
        self.close_window()
    }

    /// Opens a window: attaches probes to all sampled functions.
    fn open_window(&mut self) {
        if self.is_off() {
            self.governor.next_window = Some(Instant::now() + SHORTEST_WINDOW.div_f64(MAX_DUTY));
            return;
        }
        for file in &mut self.attachment.files {
            if let Err(problem) = file.open_window(&self.kernel) {
                file.detach(&problem);
            }
        }
        let _ = self.read_step_marks();
        let now_ns = monotonic_ns();
        for (index, process) in &mut self.processes.running {
            let counters = self.kernel.counters.read(*index as usize);
            process.open_window(&counters, now_ns);
        }
        self.governor.window_from_ns = monotonic_ns();
        self.kernel.open_window(true);
        if self.governor.samples_events() {
            self.restart_event_tracking();
        }
        self.governor.launch_spans.open(monotonic_ns());
        self.governor.window = Some(Instant::now() + self.window_length());
    }

    /// Window length that contains a few whole steps of every process.
    fn window_length(&self) -> Duration {
        let processes = self.processes.running.values();
        let launching = processes.filter(|process| process.has_sampled_launches());
        let lengths = launching.filter_map(ObservedProcess::window_length_for_steps);
        lengths.max().unwrap_or_default().max(SHORTEST_WINDOW)
    }

    /// Closes the window, if one is open. Returns its links: dropping them detaches, which takes a while.
    pub(in crate::observer) fn close_window(&mut self) -> Vec<Link> {
        if !self.governor.is_window_open() {
            return Vec::new();
        }
        self.governor.launch_spans.close(monotonic_ns());
        self.kernel.open_window(false);
        let to_ns = monotonic_ns();
        // Steps of every process up to the end of the window.
        let _ = self.read_step_marks();
        self.governor.window = None;
        self.governor.cost.windows += 1;
        for (index, process) in &mut self.processes.running {
            let counters = self.kernel.counters.read(*index as usize);
            self.governor.close_window_of(process, &counters, to_ns);
        }
        let length = Duration::from_nanos(to_ns - self.governor.window_from_ns);
        self.plan_next_window(length);
        let windows = self.attachment.files.iter_mut();
        windows.flat_map(AttachedFile::close_window).collect()
    }

    /// Plans the next window after one of this length, late enough that the busiest thread stays within the budget.
    fn plan_next_window(&mut self, length: Duration) {
        let budget = self.governor.options.budget;
        let costs = self.processes.running.values().map(|process| {
            let ns = self.governor.cost.call_ns(process.is_contended());
            let calls: f64 = self
                .governor
                .sampled
                .keys()
                .map(|symbol| process.sampled_rate(*symbol))
                .sum();
            let left = (budget - process.permanent_cost).max(budget * (1.0 - PERMANENT_SHARE));
            duty(calls * ns / 1e9, left)
        });
        let duty = costs.fold(MAX_DUTY, f64::min);
        // Random, so that windows do not follow the rhythm of the program.
        let jitter = 0.5 + fastrand::f64();
        let pause = |duty: f64| length.div_f64(duty).mul_f64(jitter).max(length);
        let now = Instant::now();
        let paid_at = self.governor.paid_at.max(now) + pause(duty);
        self.governor.paid_at = paid_at;
        self.governor.earliest_window = now + pause(MAX_DUTY);
        self.governor.next_window = Some(now + pause(duty).mul_f64(PRECISE_PAUSE_FACTOR));
        self.bring_window_forward();
    }
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
        windows.close(20);
        windows.open(30);
        assert!(windows.is_in_one_window(12, 20) && windows.is_in_one_window(30, 99));
        assert!(!windows.is_in_one_window(12, 21) && !windows.is_in_one_window(12, 35));
        (0..LaunchSpans::KEPT).for_each(|_| windows.open(100));
        assert!(!windows.is_in_one_window(12, 20));
    }
}
