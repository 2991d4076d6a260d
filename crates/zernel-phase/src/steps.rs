//! Steps of a training loop, found from what its process is seen to do.
//!
//! A loop has no mark that says where a step begins. But it does the same things again and again, and some of
//! them once a step: it updates the model, reduces gradients, goes backward, copies a batch. A
//! [`StepDetector`] is fed with such [`Mark`]s and takes the best of them that a process makes as the
//! boundary between steps, in this order:
//!
//! | | boundary | because |
//! |---|---|---|
//! | 1 | the first optimizer mark after a backward pass | with gradient accumulation, several backward passes make a step |
//! | 2 | gradients being reduced or a backward pass, whichever is rarer | a step may have several backward passes, or collectives for every part of a sharded model |
//! | 3 | a graph launched or a batch copied in, whichever is rarer | evaluation does these too: see [`StepSummary`] |
//! | 4 | a copy to the host | |
//! | 5 | a wait for the GPU | |
//!
//! Marks of a kind that directly follow each other are one: gradients are reduced bucket by bucket, and a batch is
//! several tensors. A better kind replaces a worse one as soon as it was seen three times, and the count starts anew:
//! what was copied while a model was loaded was no step. It is hardly ever the other way round: a process that has
//! trained and now only evaluates makes no steps. But one that launches graph after graph trains with what it has
//! captured before: that shows no other mark. And where the boundary is no longer seen, another kind that came as
//! often takes its place, and the count goes on.

mod progress;
mod summary;

use std::cmp::Ordering;
use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

pub use progress::{Done, Glimpse, Progress, is_common};
pub use summary::{StepSummary, TimeSpan, median_ns};

/// Something that a process does about once a step; the numbers are those of `enum zernel_mark`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum Mark {
    /// An optimizer updates the model.
    Optimizer = 1,
    /// A backward pass begins.
    Backward = 2,
    /// Gradients are reduced between ranks.
    Reduce = 3,
    /// A graph is launched.
    Graph = 4,
    /// Something is copied to the device.
    CopyIn = 5,
    /// Something is copied to the host.
    CopyOut = 6,
    /// The GPU is waited for.
    Wait = 7,
}

impl Mark {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Optimizer,
        Self::Backward,
        Self::Reduce,
        Self::Graph,
        Self::CopyIn,
        Self::CopyOut,
        Self::Wait,
    ];

    /// The mark with that number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }

    /// Its sort.
    #[must_use]
    pub fn class(self) -> MarkClass {
        match self {
            Self::Optimizer | Self::Backward | Self::Reduce => MarkClass::Training,
            Self::Graph | Self::CopyIn | Self::CopyOut | Self::Wait => MarkClass::GpuUse,
        }
    }

    fn index(self) -> usize {
        self as usize - 1
    }

    /// How good a boundary it is; less is better.
    fn tier(self) -> u8 {
        match self {
            Self::Optimizer => 0,
            Self::Backward | Self::Reduce => 1,
            Self::Graph | Self::CopyIn => 2,
            Self::CopyOut => 3,
            Self::Wait => 4,
        }
    }
}

/// What a mark shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MarkClass {
    /// That a model is trained.
    Training,
    /// That a GPU is used, for whatever.
    GpuUse,
}

/// What was launched between a mark and the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launches {
    /// So much, as is known of all marks.
    Counted(u32),
    /// So much. Of most other marks it is not known: where steps end must not depend on it.
    Glimpsed(u32),
    /// Not all was counted.
    Unknown,
}

impl Launches {
    /// If it is known of all marks.
    fn counted_everywhere(self) -> Option<u32> {
        match self {
            Self::Counted(launches) => Some(launches),
            Self::Glimpsed(_) | Self::Unknown => None,
        }
    }

    /// If it is known of this one.
    fn known(self) -> Option<u32> {
        match self {
            Self::Counted(launches) | Self::Glimpsed(launches) => Some(launches),
            Self::Unknown => None,
        }
    }
}

/// Of two counts, if both are known.
fn sum_if_known(a: Option<u32>, b: Option<u32>) -> Option<u32> {
    Some(a?.saturating_add(b?))
}

/// From one boundary to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// When it began, in nanoseconds of any one clock.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Launches in it; `None` if they were not all counted.
    pub launches: Option<u32>,
    /// How many marks of each kind were in it, in the order of [`Mark::ALL`].
    pub marks: [u16; 7],
    /// Whether there were more, which nobody told of.
    #[serde(default)]
    pub lacks_marks: bool,
}

impl Step {
    /// How long it took.
    #[must_use]
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.begin_ns)
    }
}

/// How often a kind must be seen to be taken for the boundary of steps.
const MIN_BOUNDARIES: u64 = 3;
/// So many marks of a kind with no other in between are not one, but all there is.
const MAX_RUN: u32 = 64;
/// After so many steps, what came before counts half; after so many marks, where no steps are known.
const DECAY_STEPS: u32 = 32;
const DECAY_MARKS: u32 = 256;
/// Kinds that came less often of late cannot be compared.
const MIN_RECENT: u32 = 4;
/// So many graphs without any mark that was taken for the boundary are steps themselves.
const MIN_REPLAYS: u64 = 32;
/// How many steps are kept.
const MAX_RECENT_STEPS: usize = 64;

/// The intervals between the boundaries of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct BoundaryTrack {
    /// Since the last boundary, if there was one.
    open: Option<Step>,
    /// Launches in it, if they were all counted or glimpsed.
    glimpsed: Option<u32>,
    /// Boundaries so far.
    boundaries: u64,
    /// The same, of late.
    recent: u32,
    /// The first intervals, until it is known whether they are steps.
    first_intervals: [Option<Step>; MIN_BOUNDARIES as usize - 1],
    /// Whether it cannot be relied on.
    is_incomplete: bool,
}

impl BoundaryTrack {
    /// Counts boundaries anew.
    fn reset_count(&mut self) {
        self.boundaries = 0;
        self.first_intervals = Default::default();
    }

    /// Whether it has had about as many boundaries as another of late.
    fn is_as_frequent_as(&self, other: &Self) -> bool {
        let difference = self.recent.abs_diff(other.recent);
        let is_known = self.recent.min(other.recent) >= MIN_RECENT;
        is_known && (difference <= 1 || 8 * difference <= self.recent.max(other.recent))
    }
}

/// Finds the steps of one process.
#[derive(Debug, Clone, Default)]
pub struct StepDetector {
    tracks: [BoundaryTrack; 7],
    boundary: Option<Mark>,
    /// Whether that took the place of a better one, which is no longer seen.
    is_substitute: bool,
    last_mark: Option<Mark>,
    run_length: u32,
    marks_since_decay: u32,
    backward_since_optimizer: bool,
    has_seen_backward: bool,
    restarts: u32,
    gaps: u64,
    count: u64,
    /// Boundaries between graphs since the last one between steps.
    replays: u64,
    steps: VecDeque<Step>,
    glimpses: Vec<Glimpse>,
    /// By how much steps were longer that may have had more in them than a step.
    strange_ns: u64,
}

impl StepDetector {
    /// A process did something, after so many launches since the last time. Marks of several threads may come a
    /// little out of order.
    pub fn mark(&mut self, mark: Mark, at_ns: u64, launches: Launches) {
        let is_boundary = self.is_boundary(mark, launches);
        self.count_mark(mark, launches);
        if is_boundary {
            self.end_interval(mark, at_ns);
        }
    }

    /// Marks of these classes are missing from here to the next one: there may have been steps, but nobody knows from
    /// when to when.
    pub fn gap(&mut self, classes: &[MarkClass]) {
        let is_missing = |mark: Mark| classes.contains(&mark.class());
        for mark in Mark::ALL.into_iter().filter(|mark| is_missing(*mark)) {
            self.tracks[mark.index()].open = None;
        }
        let open = self
            .tracks
            .iter_mut()
            .filter_map(|track| track.open.as_mut());
        open.for_each(|step| step.lacks_marks = true);
        // Whatever comes next does not follow the last one directly.
        self.last_mark = None;
        let separates = !classes.is_empty() && self.boundary.is_none_or(is_missing);
        self.gaps += u64::from(separates);
    }

    /// How often marks were missing that separate steps. Then there were at least as many steps as were counted.
    #[must_use]
    pub fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Marks of these kinds are not all seen: nothing is concluded from them any more.
    pub fn distrust(&mut self, marks: &[Mark]) {
        for mark in marks {
            self.tracks[mark.index()].is_incomplete = true;
        }
        let Some(lost) = self.boundary.filter(|known| marks.contains(known)) else {
            return;
        };
        self.boundary = self.substitute_for(lost);
        self.is_substitute = self.boundary.is_some();
        if !self.is_substitute {
            self.restarts += 1;
            self.count = 0;
            self.glimpses.clear();
            self.steps.clear();
        }
        // What replaces it begins here: its first intervals are long past.
        self.tracks.iter_mut().for_each(BoundaryTrack::reset_count);
    }

    /// The best kind that separates the same steps as another.
    fn substitute_for(&self, mark: Mark) -> Option<Mark> {
        let lost = &self.tracks[mark.index()];
        let candidates = Mark::ALL.into_iter().filter(|candidate| {
            let track = &self.tracks[candidate.index()];
            !track.is_incomplete && track.is_as_frequent_as(lost)
        });
        candidates.min_by_key(|candidate| candidate.tier())
    }

    /// What separates steps, once that is known.
    #[must_use]
    pub fn boundary(&self) -> Option<Mark> {
        self.boundary
    }

    /// How many steps were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// How often the count started anew, because a better boundary was found, or the one known was no longer seen.
    #[must_use]
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// The last steps, oldest first.
    #[must_use]
    pub fn recent(&self) -> &VecDeque<Step> {
        &self.steps
    }

    fn is_boundary(&self, mark: Mark, launches: Launches) -> bool {
        let track = &self.tracks[mark.index()];
        let begins_run = self.last_mark != Some(mark) || self.run_length >= MAX_RUN;
        match mark {
            Mark::Backward => true,
            Mark::Optimizer => {
                begins_run && (self.backward_since_optimizer || !self.has_seen_backward)
            }
            // The next tensor of the same batch is copied before anything is launched.
            Mark::CopyIn => {
                let so_far = track.open.and_then(|open| open.launches);
                begins_run && sum_if_known(so_far, launches.counted_everywhere()) != Some(0)
            }
            _ => begins_run,
        }
    }

    /// Adds a mark to all intervals that are open.
    fn count_mark(&mut self, mark: Mark, launches: Launches) {
        for track in &mut self.tracks {
            let Some(open) = &mut track.open else {
                continue;
            };
            let count = &mut open.marks[mark.index()];
            *count = count.saturating_add(1);
            open.launches = sum_if_known(open.launches, launches.counted_everywhere());
            track.glimpsed = sum_if_known(track.glimpsed, launches.known());
        }
        self.run_length = match self.last_mark == Some(mark) {
            true => self.run_length.saturating_add(1),
            false => 1,
        };
        self.last_mark = Some(mark);
        match mark {
            Mark::Backward => {
                self.backward_since_optimizer = true;
                self.has_seen_backward = true;
            }
            Mark::Optimizer => self.backward_since_optimizer = false,
            _ => {}
        }
        self.marks_since_decay = self.marks_since_decay.saturating_add(1);
        let is_due = match self.boundary {
            Some(known) => self.tracks[known.index()].recent >= DECAY_STEPS,
            None => self.marks_since_decay >= DECAY_MARKS,
        };
        if is_due {
            self.marks_since_decay = 0;
            self.tracks.iter_mut().for_each(|track| track.recent /= 2);
        }
    }

    fn end_interval(&mut self, mark: Mark, at_ns: u64) {
        let track = &mut self.tracks[mark.index()];
        let next = Step {
            begin_ns: at_ns,
            end_ns: at_ns,
            launches: Some(0),
            marks: [0; 7],
            lacks_marks: false,
        };
        let ended = track.open.replace(next);
        let glimpsed = track.glimpsed.replace(0);
        let ended = ended.map(|step| Step {
            end_ns: at_ns.max(step.begin_ns),
            ..step
        });
        track.boundaries += 1;
        track.recent = track.recent.saturating_add(1);
        let first_intervals = track.first_intervals.iter_mut().find(|slot| slot.is_none());
        if let (Some(slot), Some(step)) = (first_intervals, ended) {
            *slot = Some(step);
        }
        if self.boundary == Some(mark) {
            self.count += 1;
            self.replays = 0;
            if let Some(step) = ended {
                self.note_work(&step, glimpsed);
            }
            self.push_step(ended);
        } else if mark == Mark::Graph {
            self.replays += 1;
        }
        self.consider_as_boundary(mark);
    }

    fn push_step(&mut self, step: Option<Step>) {
        if self.steps.len() == MAX_RECENT_STEPS {
            self.steps.pop_front();
        }
        self.steps.extend(step);
    }

    /// Takes a kind for the boundary if it is a better one.
    fn consider_as_boundary(&mut self, mark: Mark) {
        let track = self.tracks[mark.index()];
        if track.is_incomplete || track.boundaries < MIN_BOUNDARIES || self.boundary == Some(mark) {
            return;
        }
        let is_better = self.boundary.is_none_or(|known| {
            let known_track = &self.tracks[known.index()];
            let is_rarer = 4 * u64::from(track.recent) < 3 * u64::from(known_track.recent);
            let replaces = mark == Mark::Graph && self.replays >= MIN_REPLAYS;
            match mark.tier().cmp(&known.tier()) {
                // What separates the same steps as a better kind did is better than its tier.
                Ordering::Less => !self.is_substitute || is_rarer,
                Ordering::Equal => is_rarer || replaces,
                Ordering::Greater => replaces,
            }
        });
        if !is_better {
            return;
        }
        if let Some(known) = self.boundary {
            // One that was better has to show itself again before it counts again.
            self.tracks[known.index()].reset_count();
            self.restarts += 1;
        }
        self.boundary = Some(mark);
        self.is_substitute = false;
        self.glimpses.clear();
        self.steps.clear();
        self.count = track.boundaries;
        for step in track.first_intervals {
            self.push_step(step);
        }
    }
}

#[cfg(test)]
mod tests;
