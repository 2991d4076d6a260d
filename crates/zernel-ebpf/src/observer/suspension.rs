//! Detaches all probes for a while: on request, or because their overhead exceeds the ceiling.

use std::time::{Duration, Instant};

use super::{Observer, files, monotonic_ns};

/// Longest suspension over the ceiling before the probes are attached again.
const LONGEST_SUSPENSION: Duration = Duration::from_secs(600);

/// Why all probes are detached.
#[derive(Debug, Clone, Copy)]
pub(super) enum Suspension {
    /// A user asked for it, until [`Observer::resume`].
    Requested,
    /// The overhead of this process exceeded the ceiling.
    OverCeiling { pid: u32, until: Instant },
}

impl Suspension {
    /// The reason as a sentence for users.
    pub(super) fn reason(self) -> String {
        match self {
            Self::Requested => {
                "all probes are detached on request; send SIGUSR2 to attach them".into()
            }
            Self::OverCeiling { pid, until } => format!(
                "all probes are detached for another {} s: the overhead of process {pid} exceeded the ceiling",
                until.saturating_duration_since(Instant::now()).as_secs()
            ),
        }
    }
}

/// Length of the next suspension over the ceiling, and a record of earlier ones.
#[derive(Debug)]
pub(super) struct SuspensionBackoff {
    first: Duration,
    next: Duration,
    /// When the probes were last attached.
    on_since: Instant,
    /// Number of suspensions so far, and the pid that caused the last one.
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

    /// A sentence about earlier suspensions, because their time is missing from all figures.
    pub(super) fn problem(&self) -> Option<String> {
        let (times, pid) = self.past?;
        let times = match times {
            1 => "once".to_owned(),
            more => format!("{more} times"),
        };
        Some(format!(
            "all probes were detached {times}, last because the overhead of process {pid} exceeded the ceiling"
        ))
    }

    /// Records a suspension and returns its length: twice the last one, or the first one if the probes were attached
    /// for longer than that since.
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
    /// Detaches all probes until [`Self::resume`]. Nothing is counted meanwhile.
    pub fn pause(&mut self) {
        self.suspend(Suspension::Requested);
    }

    /// Detaches all probes for a while, because the overhead of this process exceeded the ceiling.
    pub(super) fn suspend_over_ceiling(&mut self, pid: u32) {
        let until = Instant::now() + self.suspension_backoff.next_duration(pid);
        self.suspend(Suspension::OverCeiling { pid, until });
    }

    /// Attaches the probes again if a suspension over the ceiling is over.
    pub(super) fn end_expired_suspension(&mut self) {
        if let Some(Suspension::OverCeiling { until, .. }) = self.suspension
            && Instant::now() >= until
        {
            self.resume();
        }
    }

    fn suspend(&mut self, suspension: Suspension) {
        files::detach(self.close_window());
        // Marks from before the suspension. The next `read` reports the error if they cannot be read.
        let _ = self.read_step_marks();
        let now_ns = monotonic_ns();
        for process in self.processes.running.values_mut() {
            for symbol in self.governor.symbols() {
                process.counts.end_sampling(symbol, now_ns, &process.steps);
            }
            process.suspend(now_ns);
        }
        self.suspension = Some(suspension);
        files::pause_all(self.attachment.files.iter_mut());
        self.kernel.note_detached();
    }

    /// Attaches all probes again. Coverage of every running process starts anew.
    pub fn resume(&mut self) {
        if self.suspension.take().is_none() {
            return;
        }
        self.suspension_backoff.on_since = Instant::now();
        for file in &mut self.attachment.files {
            file.resume(&self.kernel);
        }
        self.governor.restart_event_tracking(&self.kernel);
        for (handle, process) in &mut self.processes.running {
            let now_ns = monotonic_ns();
            process.resume(now_ns);
            let counters = self.kernel.counters(*handle);
            for symbol in self.governor.symbols() {
                let steps = &process.steps;
                process
                    .counts
                    .begin_sampling(symbol, &counters, now_ns, steps);
            }
        }
    }

    /// Whether all probes are detached.
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
