//! How much work a training loop has done, where not all of its launches are counted.
//!
//! Steps are counted one by one, and each has about as many launches as the other: who has counted those of a few
//! steps knows about how many there were in all.

use super::{Step, StepDetector, median_ns};

/// So many steps say how many launches a step has.
const FEWEST: f64 = 3.0;
/// After so many, what came before counts half.
const RECENT: f64 = 256.0;
/// A step may take this many times the median and be one like all others.
const USUAL: u64 = 2;
/// After this many times the median, one that has not ended is no step any more.
const OVERDUE: u64 = 4;

/// How many launches a step has, as those tell in which they were counted.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LaunchesPerStep {
    steps: f64,
    sum: f64,
    squares: f64,
    /// The most marks of each kind that any of these had.
    marks: [u16; 7],
}

impl LaunchesPerStep {
    fn add(&mut self, step: &Step, launches: u32) {
        if self.steps >= RECENT {
            for value in [&mut self.steps, &mut self.sum, &mut self.squares] {
                *value /= 2.0;
            }
        }
        let launches = f64::from(launches);
        self.steps += 1.0;
        self.sum += launches;
        self.squares += launches * launches;
        for (most, marks) in self.marks.iter_mut().zip(step.marks) {
            *most = marks.max(*most);
        }
    }

    /// Whether a step did more of something than any whose launches were counted.
    fn is_exceeded_by(&self, step: &Step) -> bool {
        step.marks.iter().zip(self.marks).any(|(a, b)| *a > b)
    }

    /// How many; `None` if too few steps were seen, or nothing in them.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.steps >= FEWEST && self.sum > 0.0).then(|| self.sum / self.steps)
    }

    /// By what share of it the mean may be off, 19 times out of 20. Steps that are all alike do not prove that there
    /// are no others.
    #[must_use]
    pub fn relative_error(&self) -> f64 {
        let Some(mean) = self.mean() else {
            return 1.0;
        };
        let variance = (self.squares / self.steps - mean * mean).max(0.0);
        let of_mean = (variance / (self.steps - 1.0)).sqrt();
        // Student's t for 95 %, to within 3 %.
        let freedom = self.steps - 1.0;
        let t = 1.96 + 2.5 / freedom + 8.0 / freedom.powi(3);
        t * of_mean / mean + 1.0 / self.steps
    }
}

/// How far a process has got in its training loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// How often steps were lost or counted anew.
    series: (u32, u64),
    steps: f64,
    strange_ns: u64,
    /// For how long no step has ended that should have.
    overdue_ns: u64,
    /// Whether it has done more since than a step does.
    is_strange: bool,
}

/// What it has done between two moments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Done {
    /// Steps, and parts of them.
    pub steps: f64,
    /// Time in which it did something else.
    pub strange_ns: u64,
    /// Whether it still does.
    pub is_strange: bool,
}

impl Progress {
    /// Whether no step has ended for so long that there is none any more.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.overdue_ns > 0
    }

    /// What was done since an earlier moment; `None` if steps do not tell that. A process of which no step has ended
    /// for long rests, unless it is seen to be at work.
    #[must_use]
    pub fn since(&self, earlier: &Self, is_at_work: bool) -> Option<Done> {
        let is_strange = self.is_overdue() && (self.is_strange || is_at_work);
        let steps = (self.steps - earlier.steps).max(0.0);
        if self.series != earlier.series || (is_strange && steps < 1.0) {
            return None;
        }
        let overdue_ns = if is_strange { self.overdue_ns } else { 0 };
        Some(Done {
            steps,
            strange_ns: (self.strange_ns + overdue_ns)
                .saturating_sub(earlier.strange_ns + earlier.overdue_ns),
            is_strange,
        })
    }
}

impl StepDetector {
    /// How many launches a step has.
    #[must_use]
    pub fn launches_per_step(&self) -> &LaunchesPerStep {
        &self.launches_per_step
    }

    /// How far it has got at a moment, of which all marks were told; `None` if that is not known.
    #[must_use]
    pub fn progress(&self, at_ns: u64) -> Option<Progress> {
        let open = self.tracks[self.boundary?.index()].open?;
        let usual_ns = median_ns(&self.steps)?.max(1);
        let since_ns = at_ns.saturating_sub(open.begin_ns);
        Some(Progress {
            series: (self.restarts, self.gaps),
            steps: self.count as f64 + (since_ns as f64 / usual_ns as f64).min(1.0),
            strange_ns: self.strange_ns,
            overdue_ns: match since_ns > OVERDUE * usual_ns {
                true => since_ns - usual_ns,
                false => 0,
            },
            is_strange: self.launches_per_step.is_exceeded_by(&open),
        })
    }

    /// A step has ended, in which so many launches were counted.
    pub(super) fn note_work(&mut self, step: &Step, launches: Option<u32>) {
        match launches {
            Some(launches) => self.launches_per_step.add(step, launches),
            None if self.launches_per_step.is_exceeded_by(step) => {
                let usual_ns = median_ns(&self.steps).unwrap_or(0);
                if step.duration_ns() > USUAL * usual_ns {
                    self.strange_ns += step.duration_ns() - usual_ns;
                }
            }
            None => {}
        }
    }
}
