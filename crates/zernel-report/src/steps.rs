//! The steps of one process, collected from snapshots.

use serde::{Deserialize, Serialize};
use zernel_model::snapshot::StepSnapshot;
use zernel_phase::steps::{Step, StepMark, StepSummary, TimeSpan};

/// Most steps kept. Beyond that, every second one is dropped.
const MAX_KEPT_STEPS: usize = 1 << 18;
/// Fewest steps that count as training.
const MIN_TRAINING_STEPS: usize = 3;
/// Most pauses and stalls listed.
const MAX_LISTED_INTERRUPTIONS: usize = 5;

/// The steps of a process so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct StepLog {
    boundary: Option<StepMark>,
    restarts: u32,
    count: u64,
    /// Steps made before it was attached to. They do not count.
    baseline_count: u64,
    /// Whether the process ran before it was attached to.
    ran_before_attach: bool,
    has_gaps: bool,
    is_thinned: bool,
    /// Whether its first steps are missing, so that nothing shows whether they were slow.
    lacks_first: bool,
    steps: Vec<Step>,
}

/// The report on the steps of a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default)]
pub(crate) struct StepReport {
    /// Number of steps, with the warm-up.
    pub(crate) count: u64,
    /// Whether there were more, because not all calls that separate steps were observed.
    pub(crate) at_least: bool,
    /// Whether steps were dropped, so that pauses and stalls come from a subset.
    pub(crate) thinned: bool,
    /// The call that separates steps.
    pub(crate) separated_by: Option<StepMark>,
    pub(crate) median_seconds: f64,
    pub(crate) p99_seconds: f64,
    pub(crate) longest_seconds: f64,
    /// Slow steps at the beginning. Median, p99 and longest exclude them.
    pub(crate) warm_up: usize,
    pub(crate) warm_up_seconds: f64,
    /// The longest interruptions between steps, such as evaluations and checkpoints.
    pub(crate) pauses: Vec<Interruption>,
    pub(crate) pause_seconds: f64,
    /// The longest stalls: ordinary steps that took three times the median and longer than a periodic slow step.
    pub(crate) stalls: Vec<Interruption>,
    /// Number of stalls.
    pub(crate) stalled: usize,
    /// Steps for the charts.
    #[serde(skip)]
    pub(crate) series: Vec<Step>,
}

/// A pause or a stall: seconds after the first step, and length.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Interruption {
    pub(crate) at_seconds: f64,
    pub(crate) seconds: f64,
}

impl StepReport {
    /// Number of steps after the warm-up.
    pub(crate) fn count_after_warm_up(&self) -> u64 {
        self.count.saturating_sub(self.warm_up as u64)
    }

    /// Whether the steps after the warm-up are too few to count as training.
    pub(crate) fn has_few_steps_after_warm_up(&self) -> bool {
        self.count_after_warm_up() < MIN_TRAINING_STEPS as u64
    }
}

impl StepLog {
    /// Steps from now on, of a process that was attached to. They have no warm-up. If no step was observed before, the
    /// first one does not count, because the probes were attached during it.
    pub(crate) fn for_running_process(steps: &StepSnapshot) -> Self {
        Self {
            restarts: steps.restarts,
            count: steps.count,
            baseline_count: steps.count,
            ran_before_attach: true,
            ..Self::default()
        }
    }

    /// Adds the steps that are new in a snapshot.
    pub(crate) fn add_new_steps(&mut self, steps: &StepSnapshot) {
        if steps.restarts != self.restarts || steps.count < self.count {
            *self = Self {
                restarts: steps.restarts,
                ran_before_attach: self.ran_before_attach,
                ..Self::default()
            };
        }
        let new = usize::try_from(steps.count - self.count).unwrap_or(usize::MAX);
        let known = steps.recent.len().saturating_sub(new);
        // A snapshot has the latest steps only, and one through the daemon fewer of them. The call that begins the
        // first step counts as one.
        let is_first = self.steps.is_empty();
        if new > steps.recent.len() + usize::from(is_first) {
            self.is_thinned = true;
            self.lacks_first |= is_first;
        }
        self.steps.extend_from_slice(&steps.recent[known..]);
        self.count = steps.count;
        self.has_gaps = steps.gaps > 0;
        self.boundary = steps.boundary.or(self.boundary);
        if self.steps.len() > MAX_KEPT_STEPS {
            self.is_thinned = true;
            let mut is_odd = false;
            self.steps.retain(|_| {
                is_odd = !is_odd;
                is_odd
            });
        }
    }

    /// The report, and the begin and the end of the steps. `None` if there are too few steps.
    pub(crate) fn into_report(mut self) -> Option<(StepReport, u64, u64)> {
        let boundary = self.boundary?;
        let summary = match self.ran_before_attach {
            true => {
                let cut = usize::from(self.baseline_count == 0).min(self.steps.len());
                self.steps.drain(..cut);
                StepSummary::from_later_steps(&self.steps, boundary)?
            }
            false if self.lacks_first => StepSummary::from_later_steps(&self.steps, boundary)?,
            false => StepSummary::from_whole_run(&self.steps, boundary)?,
        };
        if summary.steps < MIN_TRAINING_STEPS {
            return None;
        }
        let first_ns = self.steps.first()?.begin_ns;
        let begin_ns = summary.begin_ns;
        let end_ns = self.steps.last()?.end_ns;
        let report = StepReport {
            count: self.count - self.baseline_count,
            at_least: self.has_gaps,
            thinned: self.is_thinned,
            separated_by: Some(boundary),
            median_seconds: ns_to_seconds(summary.median_ns),
            p99_seconds: ns_to_seconds(summary.p99_ns),
            longest_seconds: ns_to_seconds(summary.longest_ns),
            warm_up: summary.warm_up,
            warm_up_seconds: ns_to_seconds(summary.warm_up_ns),
            pause_seconds: ns_to_seconds(
                summary.pauses.iter().map(|pause| pause.duration_ns).sum(),
            ),
            pauses: longest_interruptions(&summary.pauses, first_ns),
            stalled: summary.stalls.len(),
            stalls: longest_interruptions(&summary.stalls, first_ns),
            series: self.steps,
        };
        Some((report, begin_ns, end_ns))
    }
}

/// The longest interruptions, in order of time.
fn longest_interruptions(stretches: &[TimeSpan], first_ns: u64) -> Vec<Interruption> {
    let mut stretches = stretches.to_vec();
    stretches.sort_by_key(|stretch| std::cmp::Reverse(stretch.duration_ns));
    stretches.truncate(MAX_LISTED_INTERRUPTIONS);
    stretches.sort_by_key(|stretch| stretch.begin_ns);
    let listed = stretches.into_iter().map(|stretch| Interruption {
        at_seconds: ns_to_seconds(stretch.begin_ns.saturating_sub(first_ns)),
        seconds: ns_to_seconds(stretch.duration_ns),
    });
    listed.collect()
}

fn ns_to_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_snapshot(count: u64, restarts: u32, recent: std::ops::Range<u64>) -> StepSnapshot {
        let step = |number| Step {
            begin_ns: 1000 * number,
            end_ns: 1000 * (number + 1),
            launches: None,
            marks: [0; 7],
            lacks_marks: false,
        };
        StepSnapshot {
            boundary: Some(StepMark::Backward),
            count,
            restarts,
            gaps: 0,
            recent: recent.map(step).collect(),
        }
    }

    #[test]
    fn every_step_is_added_once() {
        let mut log = StepLog::default();
        log.add_new_steps(&step_snapshot(3, 0, 0..2));
        log.add_new_steps(&step_snapshot(3, 0, 0..2));
        log.add_new_steps(&step_snapshot(6, 0, 1..5));
        assert_eq!(log.steps, step_snapshot(0, 0, 0..5).recent);
        // More steps were made since the last snapshot than a snapshot has.
        log.add_new_steps(&step_snapshot(20, 0, 15..19));
        assert_eq!((log.steps.len(), log.count), (9, 20));
        let (report, begin_ns, end_ns) = log.clone().into_report().expect("steps");
        assert_eq!((begin_ns, end_ns), (0, 19_000));
        assert_eq!((report.count, report.median_seconds), (20, 1e-6));
        // After a restart of the detection, the steps before do not count.
        log.add_new_steps(&step_snapshot(4, 1, 30..33));
        assert_eq!(log.steps, step_snapshot(0, 0, 30..33).recent);
    }

    /// Through the daemon, a snapshot may lack most steps of a fast loop.
    #[test]
    fn missing_steps_are_reported() {
        let report = |snapshots: &[StepSnapshot]| {
            let mut log = StepLog::default();
            snapshots.iter().for_each(|steps| log.add_new_steps(steps));
            let (report, _, _) = log.into_report().expect("steps");
            (report.count, report.warm_up, report.thinned)
        };
        let mut first = step_snapshot(8, 0, 0..8);
        first.recent[0].begin_ns = 0;
        first.recent[0].end_ns = 1000;
        first.recent[1..].iter_mut().for_each(|step| {
            step.begin_ns = 990 + step.begin_ns / 100;
            step.end_ns = 990 + step.end_ns / 100;
        });
        let mut late = first.clone();
        late.count = 20;
        assert_eq!(report(&[first.clone()]), (8, 1, false));
        assert_eq!(report(&[late]), (20, 0, true));
        let mut next = step_snapshot(30, 0, 0..8);
        for step in &mut next.recent {
            step.begin_ns += 10_000;
            step.end_ns += 10_000;
        }
        assert!(report(&[first, next]).2);
    }

    #[test]
    fn an_attached_process_has_no_warm_up() {
        let mut steps = step_snapshot(13, 1, 9..21);
        steps.recent[0].begin_ns = 0;
        let summary = |mut log: StepLog| {
            log.add_new_steps(&steps);
            let (report, begin_ns, _) = log.into_report().expect("steps");
            (report.warm_up, report.stalled, begin_ns)
        };
        assert_eq!(summary(StepLog::default()), (1, 0, 10_000));
        // Attaching the probes made the first step long.
        let nothing_yet = StepLog::for_running_process(&StepSnapshot::default());
        assert_eq!(summary(nothing_yet), (0, 0, 10_000));
        // The first step of a process that was observed before is a stall.
        let one_before = StepLog::for_running_process(&step_snapshot(1, 1, 0..0));
        assert_eq!(summary(one_before), (0, 1, 0));
    }

    #[test]
    fn many_steps_are_thinned() {
        let mut log = StepLog::default();
        for round in 1..=2 * MAX_KEPT_STEPS as u64 / 200 {
            log.add_new_steps(&step_snapshot(
                round * 200,
                0,
                (round - 1) * 200..round * 200,
            ));
        }
        assert!(log.steps.len() <= MAX_KEPT_STEPS);
        let (report, begin_ns, _) = log.into_report().expect("steps");
        assert_eq!((report.median_seconds, begin_ns), (1e-6, 0));
    }
}
