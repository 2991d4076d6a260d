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
//! | 3 | a graph launched or a batch copied in, whichever is rarer | evaluation does these too: see [`Summary`] |
//! | 4 | a copy to the host | |
//! | 5 | a wait for the GPU | |
//!
//! Marks of a kind that directly follow each other are one: gradients are reduced bucket by bucket, and a batch is
//! several tensors. A better kind replaces a worse one as soon as it was seen three times, and the count starts anew:
//! what was copied while a model was loaded was no step. It is hardly ever the other way round: a process that has
//! trained and now only evaluates makes no steps. But one that launches graph after graph trains with what it has
//! captured before: that shows no other mark. And where the boundary is no longer seen, another kind that came as
//! often takes its place, and the count goes on.

mod summary;

use std::cmp::Ordering;
use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

pub use summary::{Stretch, Summary, median_ns};

/// Something that a process does about once a step.
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
    pub fn sort(self) -> MarkSort {
        match self {
            Self::Optimizer | Self::Backward | Self::Reduce => MarkSort::Training,
            Self::Graph | Self::CopyIn | Self::CopyOut | Self::Wait => MarkSort::Use,
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
pub enum MarkSort {
    /// That a model is trained.
    Training,
    /// That a GPU is used, for whatever.
    Use,
}

impl MarkSort {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Training, Self::Use];
}

/// Launches between a mark and the mark before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launches {
    /// Exact. Launches are counted all the time.
    Counted(u32),
    /// Exact, because both marks lie in one sampling window. Most other marks have no count, so step boundaries must
    /// not depend on this one.
    InWindow(u32),
    /// Not all launches were counted.
    Unknown,
}

impl Launches {
    /// The count, if launches are counted all the time.
    fn counted(self) -> Option<u32> {
        match self {
            Self::Counted(launches) => Some(launches),
            Self::InWindow(_) | Self::Unknown => None,
        }
    }

    /// The count, if it is exact.
    fn exact(self) -> Option<u32> {
        match self {
            Self::Counted(launches) | Self::InWindow(launches) => Some(launches),
            Self::Unknown => None,
        }
    }
}

/// A step that lay whole in a sampling window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowStep {
    /// How long it took.
    pub duration_ns: u64,
    /// Launches in it.
    pub launches: u32,
}

/// Of two counts, if both are known.
fn sum(a: Option<u32>, b: Option<u32>) -> Option<u32> {
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
const OFTEN: u64 = 3;
/// So many marks of a kind with no other in between are not one, but all there is.
const LONGEST_RUN: u32 = 64;
/// After so many steps, what came before counts half; after so many marks, where no steps are known.
const RECENT_STEPS: u32 = 32;
const RECENT_MARKS: u32 = 256;
/// Kinds that came less often of late cannot be compared.
const COMPARABLE: u32 = 4;
/// So many graphs without any mark that was taken for the boundary are steps themselves.
const REPLAYS: u64 = 32;
/// How many steps are kept.
const KEPT: usize = 64;
/// How many steps of a sampling window are kept until they are taken: a window of 500 ms with steps of 2 ms.
const KEPT_WINDOW_STEPS: usize = 256;

/// The intervals between the boundaries of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct Track {
    /// Since the last boundary, if there was one.
    open: Option<Step>,
    /// Launches in it, if all of them were counted, be it always or in a window.
    exact_launches: Option<u32>,
    /// Boundaries so far.
    boundaries: u64,
    /// The same, of late.
    recent: u32,
    /// The first intervals, until it is known whether they are steps.
    early: [Option<Step>; OFTEN as usize - 1],
    /// Whether it cannot be relied on.
    is_partial: bool,
}

impl Track {
    /// Counts boundaries anew.
    fn forget(&mut self) {
        self.boundaries = 0;
        self.early = Default::default();
    }

    /// Whether it has had about as many boundaries as another of late.
    fn is_as_frequent_as(&self, other: &Self) -> bool {
        let difference = self.recent.abs_diff(other.recent);
        let is_known = self.recent.min(other.recent) >= COMPARABLE;
        is_known && (difference <= 1 || 8 * difference <= self.recent.max(other.recent))
    }
}

/// Finds the steps of one process.
#[derive(Debug, Clone, Default)]
pub struct StepDetector {
    tracks: [Track; 7],
    boundary: Option<Mark>,
    /// Whether that took the place of a better one, which is no longer seen.
    is_substitute: bool,
    last: Option<Mark>,
    run: u32,
    marks: u32,
    went_backward: bool,
    knows_backward: bool,
    restarts: u32,
    gaps: u64,
    count: u64,
    /// Boundaries between graphs since the last one between steps.
    replays: u64,
    steps: VecDeque<Step>,
    window_steps: Vec<WindowStep>,
}

impl StepDetector {
    /// A process did something, after so many launches since the last time. Marks of several threads may come a
    /// little out of order.
    pub fn mark(&mut self, mark: Mark, at_ns: u64, launches: Launches) {
        let is_boundary = self.is_boundary(mark, launches);
        self.note(mark, launches);
        if is_boundary {
            self.end_interval(mark, at_ns);
        }
    }

    /// Marks of these sorts are missing from here to the next one: there may have been steps, but nobody knows from
    /// when to when.
    pub fn gap(&mut self, sorts: &[MarkSort]) {
        let is_missing = |mark: Mark| sorts.contains(&mark.sort());
        for mark in Mark::ALL.into_iter().filter(|mark| is_missing(*mark)) {
            self.tracks[mark.index()].open = None;
        }
        let open = self
            .tracks
            .iter_mut()
            .filter_map(|track| track.open.as_mut());
        open.for_each(|step| step.lacks_marks = true);
        // Whatever comes next does not follow the last one directly.
        self.last = None;
        let separates = !sorts.is_empty() && self.boundary.is_none_or(is_missing);
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
            self.tracks[mark.index()].is_partial = true;
        }
        let Some(lost) = self.boundary.filter(|known| marks.contains(known)) else {
            return;
        };
        self.boundary = self.substitute_for(lost);
        self.is_substitute = self.boundary.is_some();
        if !self.is_substitute {
            self.restarts += 1;
            self.count = 0;
            self.window_steps.clear();
            self.steps.clear();
        }
        // What replaces it begins here: its first intervals are long past.
        self.tracks.iter_mut().for_each(Track::forget);
    }

    /// The best kind that separates the same steps as another.
    fn substitute_for(&self, mark: Mark) -> Option<Mark> {
        let lost = &self.tracks[mark.index()];
        let candidates = Mark::ALL.into_iter().filter(|candidate| {
            let track = &self.tracks[candidate.index()];
            !track.is_partial && track.is_as_frequent_as(lost)
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

    /// The steps that lay whole in sampling windows since they were last taken.
    #[must_use]
    pub fn window_steps(&self) -> &[WindowStep] {
        &self.window_steps
    }

    /// The steps that lay whole in sampling windows since the last call. Steps whose launches are counted all the
    /// time are in [`Self::recent`] instead.
    pub fn take_window_steps(&mut self) -> Vec<WindowStep> {
        std::mem::take(&mut self.window_steps)
    }

    fn is_boundary(&self, mark: Mark, launches: Launches) -> bool {
        let track = &self.tracks[mark.index()];
        let begins_run = self.last != Some(mark) || self.run >= LONGEST_RUN;
        match mark {
            Mark::Backward => true,
            Mark::Optimizer => begins_run && (self.went_backward || !self.knows_backward),
            // The next tensor of the same batch is copied before anything is launched.
            Mark::CopyIn => {
                let so_far = track.open.and_then(|open| open.launches);
                begins_run && sum(so_far, launches.counted()) != Some(0)
            }
            _ => begins_run,
        }
    }

    /// Adds a mark to all intervals that are open.
    fn note(&mut self, mark: Mark, launches: Launches) {
        for track in &mut self.tracks {
            let Some(open) = &mut track.open else {
                continue;
            };
            let count = &mut open.marks[mark.index()];
            *count = count.saturating_add(1);
            open.launches = sum(open.launches, launches.counted());
            track.exact_launches = sum(track.exact_launches, launches.exact());
        }
        self.run = match self.last == Some(mark) {
            true => self.run.saturating_add(1),
            false => 1,
        };
        self.last = Some(mark);
        match mark {
            Mark::Backward => {
                self.went_backward = true;
                self.knows_backward = true;
            }
            Mark::Optimizer => self.went_backward = false,
            _ => {}
        }
        self.marks = self.marks.saturating_add(1);
        let is_past = match self.boundary {
            Some(known) => self.tracks[known.index()].recent >= RECENT_STEPS,
            None => self.marks >= RECENT_MARKS,
        };
        if is_past {
            self.marks = 0;
            self.tracks.iter_mut().for_each(|track| track.recent /= 2);
        }
    }

    fn end_interval(&mut self, mark: Mark, at_ns: u64) {
        let track = &mut self.tracks[mark.index()];
        let begun = Step {
            begin_ns: at_ns,
            end_ns: at_ns,
            launches: Some(0),
            marks: [0; 7],
            lacks_marks: false,
        };
        let ended = track.open.replace(begun);
        let exact_launches = track.exact_launches.replace(0);
        let ended = ended.map(|step| Step {
            end_ns: at_ns.max(step.begin_ns),
            ..step
        });
        track.boundaries += 1;
        track.recent = track.recent.saturating_add(1);
        let early = track.early.iter_mut().find(|place| place.is_none());
        if let (Some(place), Some(step)) = (early, ended) {
            *place = Some(step);
        }
        if self.boundary == Some(mark) {
            self.count += 1;
            self.replays = 0;
            if let Some((step, launches)) = ended.zip(exact_launches) {
                self.keep_window_step(&step, launches);
            }
            self.keep(ended);
        } else if mark == Mark::Graph {
            self.replays += 1;
        }
        self.choose(mark);
    }

    fn keep_window_step(&mut self, step: &Step, launches: u32) {
        if step.launches.is_none() && self.window_steps.len() < KEPT_WINDOW_STEPS {
            self.window_steps.push(WindowStep {
                duration_ns: step.duration_ns(),
                launches,
            });
        }
    }

    fn keep(&mut self, step: Option<Step>) {
        if self.steps.len() == KEPT {
            self.steps.pop_front();
        }
        self.steps.extend(step);
    }

    /// Takes a kind for the boundary if it is a better one.
    fn choose(&mut self, mark: Mark) {
        let track = self.tracks[mark.index()];
        if track.is_partial || track.boundaries < OFTEN || self.boundary == Some(mark) {
            return;
        }
        let is_better = self.boundary.is_none_or(|known| {
            let of_known = &self.tracks[known.index()];
            let is_rarer = 4 * u64::from(track.recent) < 3 * u64::from(of_known.recent);
            let replaces = mark == Mark::Graph && self.replays >= REPLAYS;
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
            self.tracks[known.index()].forget();
            self.restarts += 1;
        }
        self.boundary = Some(mark);
        self.is_substitute = false;
        self.window_steps.clear();
        self.steps.clear();
        self.count = track.boundaries;
        for step in track.early {
            self.keep(step);
        }
    }
}

#[cfg(test)]
mod tests;
