//! When all probes are off: because someone asked for it, or because they cost more than they may.

use std::time::{Duration, Instant};

use super::{Observer, files, monotonic_ns};

/// For how long they are off at most before they are tried again.
const LONGEST_SUSPENSION: Duration = Duration::from_secs(600);

/// Why all probes are off.
#[derive(Debug, Clone, Copy)]
pub(super) enum Suspension {
    /// Someone asked for it.
    Requested,
    /// Watching a process cost more than the ceiling.
    OverCeiling { pid: u32, until: Instant },
}

impl Suspension {
    pub(super) fn reason(self) -> String {
        match self {
            Self::Requested => "observing is paused: all probes are off until SIGUSR2 comes".into(),
            Self::OverCeiling { pid, until } => format!(
                "all probes are off for another {} s: watching process {pid} cost more than the ceiling",
                until.saturating_duration_since(Instant::now()).as_secs()
            ),
        }
    }
}

/// How long the next rest is, and what there was of them.
#[derive(Debug)]
pub(super) struct SuspensionBackoff {
    first: Duration,
    next: Duration,
    /// Since when the probes have been on.
    on_since: Instant,
    /// How often they were off, and whom for at last.
    past: Option<(u32, u32)>,
}

impl SuspensionBackoff {
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
    fn next_duration(&mut self, pid: u32) -> Duration {
        self.past = Some((self.past.map_or(0, |(times, _)| times) + 1, pid));
        if self.on_since.elapsed() > self.next {
            self.next = self.first;
        }
        let duration = self.next;
        self.next = (2 * duration).min(LONGEST_SUSPENSION);
        duration
    }
}

impl Observer {
    /// Takes all probes off until [`Self::resume`]. What happens meanwhile is not seen.
    pub fn pause(&mut self) {
        self.suspend(Suspension::Requested);
    }

    /// Takes all probes off for a while, because of what this process paid.
    pub(super) fn suspend_over_ceiling(&mut self, pid: u32) {
        let until = Instant::now() + self.suspension_backoff.next_duration(pid);
        self.suspend(Suspension::OverCeiling { pid, until });
    }

    /// Puts them on again when that is over.
    pub(super) fn end_expired_suspension(&mut self) {
        if let Some(Suspension::OverCeiling { until, .. }) = self.suspension
            && Instant::now() >= until
        {
            self.resume();
        }
    }

    fn suspend(&mut self, suspension: Suspension) {
        files::detach(self.close_window());
        // What was done before; if it cannot be read, whoever reads all says so.
        let _ = self.read_step_marks();
        let now_ns = monotonic_ns();
        for process in self.processes.running.values_mut() {
            for symbol in self.governor.symbols() {
                process.end_sampling(symbol, now_ns);
            }
            process.set_paused(true, now_ns);
            process.mark_incomplete(now_ns);
        }
        self.suspension = Some(suspension);
        for file in &mut self.attachment.files {
            file.pause();
        }
        self.kernel.note_detached();
    }

    /// Puts the probes on again. No process counts as seen completely that was there before.
    pub fn resume(&mut self) {
        if self.suspension.take().is_none() {
            return;
        }
        self.suspension_backoff.on_since = Instant::now();
        for file in &mut self.attachment.files {
            file.resume(&self.kernel);
        }
        self.restart_event_tracking();
        for (index, process) in &mut self.processes.running {
            process.resume(monotonic_ns());
            let counters = self.kernel.counters.read(*index as usize);
            for symbol in self.governor.symbols() {
                process.begin_sampling(symbol, &counters);
            }
        }
    }

    /// Whether all probes are off.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.suspension.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspensions_double_until_probes_stay_attached() {
        let first = Duration::from_millis(1);
        let mut backoff = SuspensionBackoff::new(first);
        backoff.on_since = Instant::now() + Duration::from_secs(3600);
        let lengths: Vec<_> = (0..30).map(|_| backoff.next_duration(1)).collect();
        assert_eq!(lengths[..3], [first, 2 * first, 4 * first]);
        assert_eq!(lengths[29], LONGEST_SUSPENSION);
        backoff.next = 8 * first;
        backoff.on_since = Instant::now() - Duration::from_secs(1);
        assert_eq!(backoff.next_duration(2), first);
        let problem = backoff.problem().expect("there were some");
        assert!(
            problem.contains("31 times") && problem.contains("process 2 "),
            "{problem}"
        );
    }
}
