//! How far a training loop has got, for those who do not count all that it launches.

use super::{Step, StepDetector, median_ns};

/// How many glimpses are kept until somebody takes them.
const GLIMPSES: usize = 256;
/// A step that takes this many times the median is a long one.
const LONG: u64 = 2;
/// Fewer than this share of the steps are long where that is out of the ordinary.
const RARE: f64 = 0.1;
/// With fewer steps, nobody knows what is ordinary.
const FEWEST: usize = 16;
/// After this many times the median, one that has not ended is no step any more.
const OVERDUE: u64 = 4;

/// A step in which all launches were counted, although most of the time they are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Glimpse {
    /// How long it took.
    pub duration_ns: u64,
    /// How many they were.
    pub launches: u32,
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
    /// For how long of that it may have been at work.
    busy_ns: u64,
    /// Whether it has done more since than any step of late.
    is_strange: bool,
}

/// What it has done between two moments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Done {
    /// Steps, and parts of them.
    pub steps: f64,
    /// Time in which it did something else beside.
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

    /// The same, if it cannot have been at work for longer than this since its last step ended.
    #[must_use]
    pub fn busy_for_at_most(self, ns: u64) -> Self {
        Self {
            busy_ns: self.busy_ns.min(ns),
            ..self
        }
    }

    /// The steps since an earlier moment, and parts of them, whatever else was done; `None` if they were counted anew.
    #[must_use]
    pub fn steps_since(&self, earlier: &Self) -> Option<f64> {
        (self.series == earlier.series).then(|| (self.steps - earlier.steps).max(0.0))
    }

    /// What was done since an earlier moment; `None` if steps do not tell that. A process of which no step has ended
    /// for long rests, unless it is seen to be at work.
    #[must_use]
    pub fn since(&self, earlier: &Self, is_at_work: bool) -> Option<Done> {
        let is_strange = self.is_overdue() && (self.is_strange || is_at_work);
        let steps = self.steps_since(earlier)?;
        if is_strange && steps < 1.0 {
            return None;
        }
        let ended_ns = self.strange_ns.saturating_sub(earlier.strange_ns);
        let strange_ns = match is_strange {
            true => ended_ns + self.overdue_ns.min(self.busy_ns),
            false => ended_ns,
        };
        Some(Done {
            steps,
            strange_ns: strange_ns.saturating_sub(earlier.overdue_ns),
            is_strange,
        })
    }
}

/// Whether it is nothing out of the ordinary if so many of some steps are alike.
#[must_use]
pub fn is_common(alike: usize, of: usize) -> bool {
    of >= FEWEST && alike as f64 >= RARE * of as f64
}

impl StepDetector {
    /// The steps that were glimpsed since the last time.
    pub fn take_glimpses(&mut self) -> Vec<Glimpse> {
        std::mem::take(&mut self.glimpses)
    }

    /// How many there are.
    #[must_use]
    pub fn glimpses(&self) -> usize {
        self.glimpses.len()
    }

    /// Where it began, as steps are counted now.
    #[must_use]
    pub fn beginning(&self) -> Progress {
        Progress {
            series: (self.restarts, self.gaps),
            steps: 0.0,
            strange_ns: 0,
            overdue_ns: 0,
            busy_ns: 0,
            is_strange: false,
        }
    }

    /// How far it has got at a moment, up to which all marks were told; `None` if that is not known.
    #[must_use]
    pub fn progress(&self, at_ns: u64) -> Option<Progress> {
        let open = self.tracks[self.boundary?.index()].open?;
        let usual_ns = median_ns(&self.steps)?.max(1);
        let since_ns = at_ns.saturating_sub(open.begin_ns);
        let is_overdue = since_ns > OVERDUE * usual_ns;
        Some(Progress {
            series: (self.restarts, self.gaps),
            steps: self.count as f64 + (since_ns as f64 / usual_ns as f64).min(1.0),
            strange_ns: self.strange_ns,
            overdue_ns: if is_overdue { since_ns - usual_ns } else { 0 },
            busy_ns: since_ns,
            is_strange: (0..open.marks.len()).any(|kind| {
                let most = self.steps.iter().map(|step| step.marks[kind]).max();
                Some(open.marks[kind]) > most
            }),
        })
    }

    /// A step has ended, in which so many launches were counted or glimpsed.
    pub(super) fn note_work(&mut self, step: &Step, launches: Option<u32>) {
        let strange_ns = self.strange_part_ns(step);
        match launches {
            None => self.strange_ns += strange_ns,
            // Not what a step usually launches.
            Some(_) if strange_ns > 0 => {}
            Some(launches) if step.launches.is_none() && self.glimpses.len() < GLIMPSES => {
                self.glimpses.push(Glimpse {
                    duration_ns: step.duration_ns(),
                    launches,
                });
            }
            Some(_) => {}
        }
    }

    /// By how much a step is longer than others, if hardly any of late was half as long: then it may have had an
    /// evaluation in it, or a checkpoint.
    fn strange_part_ns(&self, step: &Step) -> u64 {
        let usual_ns = median_ns(&self.steps).unwrap_or(0);
        let duration_ns = step.duration_ns();
        if self.steps.len() < FEWEST || duration_ns <= LONG * usual_ns {
            return 0;
        }
        let is_alike = |other: &&Step| other.duration_ns() > duration_ns / 2;
        let alike = self.steps.iter().filter(is_alike).count();
        match is_common(alike, self.steps.len()) {
            true => 0,
            false => duration_ns - usual_ns,
        }
    }
}
