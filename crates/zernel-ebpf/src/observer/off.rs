//! When all probes are off: because someone asked for it, or because they cost more than they may.

use std::time::{Duration, Instant};

use super::{Observer, files, monotonic_ns};

/// For how long they are off at most before they are tried again.
const LONGEST_REST: Duration = Duration::from_secs(600);

/// Why all probes are off.
#[derive(Debug, Clone, Copy)]
pub(super) enum Off {
    /// Someone asked for it.
    Asked,
    /// Watching a process cost more than the ceiling.
    TooDear { pid: u32, until: Instant },
}

impl Off {
    pub(super) fn why(self) -> String {
        match self {
            Self::Asked => "observing is paused: all probes are off until SIGUSR2 comes".into(),
            Self::TooDear { pid, until } => format!(
                "all probes are off for another {} s: watching process {pid} cost more than the ceiling",
                until.saturating_duration_since(Instant::now()).as_secs()
            ),
        }
    }
}

/// How long the next rest is, and what there was of them.
#[derive(Debug)]
pub(super) struct Rests {
    first: Duration,
    next: Duration,
    /// Since when the probes have been on.
    on_since: Instant,
    /// How often they were off, and whom for at last.
    past: Option<(u32, u32)>,
}

impl Rests {
    pub(super) fn new(first: Duration) -> Self {
        Self {
            first,
            next: first,
            on_since: Instant::now(),
            past: None,
        }
    }

    /// What is missing because of them.
    pub(super) fn problem(&self) -> Option<String> {
        let (times, pid) = self.past?;
        let times = match times {
            1 => "once".to_owned(),
            more => format!("{more} times"),
        };
        Some(format!(
            "all probes were off for a while, {times}, at last because watching process {pid} cost more than the ceiling"
        ))
    }

    /// Twice as long as the last one, unless the probes were on for longer than that.
    fn take(&mut self, pid: u32) -> Duration {
        self.past = Some((self.past.map_or(0, |(times, _)| times) + 1, pid));
        if self.on_since.elapsed() > self.next {
            self.next = self.first;
        }
        let rest = self.next;
        self.next = (2 * rest).min(LONGEST_REST);
        rest
    }
}

impl Observer {
    /// Takes all probes off until [`Self::resume`]. What happens meanwhile is not seen.
    pub fn pause(&mut self) {
        self.turn_off(Off::Asked);
    }

    /// Takes all probes off for a while, because of what this process paid.
    pub(super) fn rest(&mut self, pid: u32) {
        let until = Instant::now() + self.rests.take(pid);
        self.turn_off(Off::TooDear { pid, until });
    }

    /// Puts them on again when that is over.
    pub(super) fn end_rest(&mut self) {
        if let Some(Off::TooDear { until, .. }) = self.off
            && Instant::now() >= until
        {
            self.resume();
        }
    }

    fn turn_off(&mut self, off: Off) {
        files::detach(self.close_window());
        // What was done before; if it cannot be read, whoever reads all says so.
        let _ = self.read_step_marks();
        let now_ns = monotonic_ns();
        for process in self.processes.running.values_mut() {
            for symbol in self.governor.symbols() {
                process.end_sampling(symbol, now_ns);
            }
            process.set_paused(true, now_ns);
            process.lose_sight(now_ns);
        }
        self.off = Some(off);
        for file in &mut self.attachment.files {
            file.pause();
        }
        self.kernel.note_taken_off();
    }

    /// Puts the probes on again. No process counts as seen completely that was there before.
    pub fn resume(&mut self) {
        if self.off.take().is_none() {
            return;
        }
        self.rests.on_since = Instant::now();
        for file in &mut self.attachment.files {
            file.resume(&self.kernel);
        }
        self.note_events();
        for (index, process) in &mut self.processes.running {
            process.miss(monotonic_ns());
            let counters = self.kernel.counters.read(*index as usize);
            for symbol in self.governor.symbols() {
                process.begin_sampling(symbol, &counters);
            }
        }
    }

    /// Whether all probes are off.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.off.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rest_is_longer_until_all_is_well_for_a_while() {
        let first = Duration::from_millis(1);
        let mut rests = Rests::new(first);
        rests.on_since = Instant::now() + Duration::from_secs(3600);
        let lengths: Vec<_> = (0..30).map(|_| rests.take(1)).collect();
        assert_eq!(lengths[..3], [first, 2 * first, 4 * first]);
        assert_eq!(lengths[29], LONGEST_REST);
        rests.next = 8 * first;
        rests.on_since = Instant::now() - Duration::from_secs(1);
        assert_eq!(rests.take(2), first);
        let problem = rests.problem().expect("there were some");
        assert!(
            problem.contains("31 times") && problem.contains("process 2 "),
            "{problem}"
        );
    }
}
