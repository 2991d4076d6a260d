//! Finds the steps of a training loop from the marks that its process makes.
//!
//! A training loop does not announce its steps, but it repeats some operations in every step: it
//! updates the model, reduces gradients, runs a backward pass, copies a batch. A [`StepDetector`]
//! receives these operations as [`StepMark`]s. It uses the best kind of mark that a process makes as
//! the boundary between steps, in this order:
//!
//! | | boundary | reason |
//! |---|---|---|
//! | 1 | the first optimizer mark after a backward pass | with gradient accumulation a step has several backward passes |
//! | 2 | gradient reduction or backward pass, whichever is rarer | a step may have several backward passes, or a collective per shard of the model |
//! | 3 | graph launch or copy to the device, whichever is rarer | evaluation has them too: see [`StepSummary`] |
//! | 4 | copy to the host | |
//! | 5 | wait for the GPU | |
//!
//! Consecutive marks of a kind count as one boundary, because gradients are reduced bucket by
//! bucket and a batch is several tensors. Backward passes are counted individually.
//!
//! A better kind becomes the boundary when it has occurred three times, and the step count
//! restarts: copies made while the model was loaded were not steps. A worse kind does not replace a
//! better one, because a process that has trained and now evaluates makes no steps. There are two
//! exceptions. A process that launches one graph after another replays captured training steps, so
//! graph launches become the boundary. If the marks of the boundary can no longer be observed, an
//! equally frequent kind replaces it and the count continues.

mod first_step;
mod summary;

use std::cmp::Ordering;
use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use first_step::PassesBeforeFirstUpdate;
pub use summary::{StepSummary, TimeSpan, median_ns};

/// An operation that a training process performs about once per step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum StepMark {
    /// An optimizer updates the model.
    Optimizer = 1,
    /// A backward pass starts.
    Backward = 2,
    /// Gradients are reduced between ranks.
    Reduce = 3,
    /// A graph is launched.
    Graph = 4,
    /// Data is copied to the device.
    CopyIn = 5,
    /// Data is copied to the host.
    CopyOut = 6,
    /// A thread waits for the GPU.
    Wait = 7,
}

impl StepMark {
    /// All marks, ordered by number.
    pub const ALL: [Self; 7] = [
        Self::Optimizer,
        Self::Backward,
        Self::Reduce,
        Self::Graph,
        Self::CopyIn,
        Self::CopyOut,
        Self::Wait,
    ];

    /// Returns the mark with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }

    /// Returns the evidence class of the mark.
    #[must_use]
    pub fn class(self) -> StepMarkClass {
        match self {
            Self::Optimizer | Self::Backward | Self::Reduce => StepMarkClass::Training,
            Self::Graph | Self::CopyIn | Self::CopyOut | Self::Wait => StepMarkClass::GpuUse,
        }
    }

    fn index(self) -> usize {
        self as usize - 1
    }

    /// Returns the rank of the mark as a boundary; 0 is best.
    fn boundary_rank(self) -> u8 {
        match self {
            Self::Optimizer => 0,
            Self::Backward | Self::Reduce => 1,
            Self::Graph | Self::CopyIn => 2,
            Self::CopyOut => 3,
            Self::Wait => 4,
        }
    }
}

/// What a mark is evidence of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StepMarkClass {
    /// Training of a model.
    Training,
    /// Any use of a GPU.
    GpuUse,
}

impl StepMarkClass {
    /// All classes.
    pub const ALL: [Self; 2] = [Self::Training, Self::GpuUse];
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
    fn continuous_count(self) -> Option<u32> {
        match self {
            Self::Counted(launches) => Some(launches),
            Self::InWindow(_) | Self::Unknown => None,
        }
    }

    /// The count, if it is exact.
    fn exact_count(self) -> Option<u32> {
        match self {
            Self::Counted(launches) | Self::InWindow(launches) => Some(launches),
            Self::Unknown => None,
        }
    }
}

/// A step that lay whole in a sampling window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowStep {
    /// Its duration.
    pub duration_ns: u64,
    /// Launches in it.
    pub launches: u32,
}

/// Returns the sum of two counts if both are known.
fn sum_if_known(a: Option<u32>, b: Option<u32>) -> Option<u32> {
    Some(a?.saturating_add(b?))
}

/// The interval between two step boundaries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Start, in nanoseconds of any one clock.
    pub begin_ns: u64,
    /// End, on the same clock.
    pub end_ns: u64,
    /// Number of launches; `None` if they were not all counted.
    pub launches: Option<u32>,
    /// Number of marks of each kind, in the order of [`StepMark::ALL`].
    pub marks: [u16; 7],
    /// Whether further marks of the step may be missing.
    #[serde(default)]
    pub lacks_marks: bool,
}

impl Step {
    /// Returns the length of the step.
    #[must_use]
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.begin_ns)
    }
}

/// Number of boundaries after which a kind can become the step boundary.
const MIN_BOUNDARIES: u64 = 3;
/// Longest run of marks of one kind that counts as one boundary. In a longer run the kind is all
/// that the process does, so each mark is a boundary.
const MAX_RUN_OF_MARKS: u32 = 64;
/// Recent counts are halved after this many steps, or after this many marks while the boundary is
/// unknown.
const DECAY_STEPS: u32 = 32;
const DECAY_MARKS: u32 = 256;
/// Recent count below which two kinds cannot be compared.
const MIN_RECENT_BOUNDARIES: u32 = 4;
/// Number of graph launches without a step boundary after which the launches are taken for steps.
const MIN_GRAPH_LAUNCHES: u64 = 32;
/// Number of recent steps that are kept.
const MAX_RECENT_STEPS: usize = 64;
/// Number of steps of a sampling window that are kept until they are taken: a window of 500 ms with steps of 2 ms.
const MAX_WINDOW_STEPS: usize = 256;

/// The intervals between the boundaries of one kind of mark.
#[derive(Debug, Clone, Copy, Default)]
struct BoundaryTrack {
    /// The interval since the last boundary, if there was one.
    open_interval: Option<Step>,
    /// Launches in the open interval; `None` if some of them were not counted.
    exact_launches: Option<u32>,
    /// Number of boundaries.
    boundary_count: u64,
    /// Number of recent boundaries; halved from time to time.
    recent_count: u32,
    /// The first intervals, which become steps if the kind becomes the boundary.
    first_intervals: [Option<Step>; MIN_BOUNDARIES as usize - 1],
    /// Whether marks of this kind are missing, so that it cannot be the boundary.
    is_incomplete: bool,
}

impl BoundaryTrack {
    /// Restarts the count of boundaries.
    fn reset_count(&mut self) {
        self.boundary_count = 0;
        self.first_intervals = Default::default();
    }

    /// Whether the two kinds had about equally many recent boundaries.
    fn is_as_frequent_as(&self, other: &Self) -> bool {
        let difference = self.recent_count.abs_diff(other.recent_count);
        let is_known = self.recent_count.min(other.recent_count) >= MIN_RECENT_BOUNDARIES;
        is_known && (difference <= 1 || 8 * difference <= self.recent_count.max(other.recent_count))
    }
}

/// Detects the steps of one process from its marks.
#[derive(Debug, Clone, Default)]
pub struct StepDetector {
    boundary_tracks: [BoundaryTrack; 7],
    boundary_mark: Option<StepMark>,
    /// Whether the boundary replaces a better kind that can no longer be observed.
    is_substitute: bool,
    last_mark: Option<StepMark>,
    run_length: u32,
    marks_since_decay: u32,
    backward_since_optimizer: bool,
    has_seen_backward: bool,
    passes_before_first_update: PassesBeforeFirstUpdate,
    count_restarts: u32,
    mark_gaps: u64,
    count: u64,
    /// Number of graph boundaries since the last step boundary.
    graph_launches: u64,
    steps: VecDeque<Step>,
    window_steps: Vec<WindowStep>,
}

impl StepDetector {
    /// Records a mark, with the launches since the mark before. Marks of several threads may arrive
    /// slightly out of order.
    pub fn record_mark(&mut self, mark: StepMark, at_ns: u64, launches: Launches) {
        let is_boundary = self.is_boundary(mark, launches);
        self.passes_before_first_update.mark(mark, at_ns);
        self.count_mark_in_intervals(mark, launches);
        if is_boundary {
            self.end_interval(mark, at_ns);
        }
    }

    /// Records that marks of these classes are missing up to the next mark. Steps in the gap are
    /// not counted, because their boundaries are unknown.
    pub fn record_gap(&mut self, classes: &[StepMarkClass]) {
        let is_missing = |mark: StepMark| classes.contains(&mark.class());
        for mark in StepMark::ALL.into_iter().filter(|mark| is_missing(*mark)) {
            self.boundary_tracks[mark.index()].open_interval = None;
        }
        let open = self
            .boundary_tracks
            .iter_mut()
            .filter_map(|track| track.open_interval.as_mut());
        open.for_each(|step| step.lacks_marks = true);
        // The next mark does not directly follow the last one.
        self.last_mark = None;
        if classes.contains(&StepMarkClass::Training) {
            self.passes_before_first_update = PassesBeforeFirstUpdate::default();
        }
        let separates = !classes.is_empty() && self.boundary_mark.is_none_or(is_missing);
        self.mark_gaps += u64::from(separates);
    }

    /// Number of gaps in the marks that separate steps. With a gap, the step count is a lower
    /// bound.
    #[must_use]
    pub fn gap_count(&self) -> u64 {
        self.mark_gaps
    }

    /// Stops using marks of these kinds, because not all of them are observed any more.
    pub fn ignore_marks(&mut self, marks: &[StepMark]) {
        for mark in marks {
            self.boundary_tracks[mark.index()].is_incomplete = true;
        }
        let Some(lost) = self.boundary_mark.filter(|known| marks.contains(known)) else {
            return;
        };
        self.boundary_mark = self.substitute_for(lost);
        self.is_substitute = self.boundary_mark.is_some();
        if !self.is_substitute {
            self.count_restarts += 1;
            self.count = 0;
            self.window_steps.clear();
            self.steps.clear();
        }
        self.passes_before_first_update = PassesBeforeFirstUpdate::default();
        // The first intervals of the other kinds are too old to be kept as steps.
        self.boundary_tracks
            .iter_mut()
            .for_each(BoundaryTrack::reset_count);
    }

    /// Returns the best kind that was as frequent as `mark`, so that it separates the same steps.
    fn substitute_for(&self, mark: StepMark) -> Option<StepMark> {
        let lost = &self.boundary_tracks[mark.index()];
        let candidates = StepMark::ALL.into_iter().filter(|candidate| {
            let track = &self.boundary_tracks[candidate.index()];
            !track.is_incomplete && track.is_as_frequent_as(lost)
        });
        candidates.min_by_key(|candidate| candidate.boundary_rank())
    }

    /// Returns the kind of mark that separates steps, once it is known.
    #[must_use]
    pub fn boundary_mark(&self) -> Option<StepMark> {
        self.boundary_mark
    }

    /// Returns the number of steps.
    #[must_use]
    pub fn step_count(&self) -> u64 {
        self.count
    }

    /// Returns how often the step count restarted: a better boundary was found, or the boundary was
    /// lost without a substitute.
    #[must_use]
    pub fn restart_count(&self) -> u32 {
        self.count_restarts
    }

    /// Returns the most recent steps, oldest first.
    #[must_use]
    pub fn recent_steps(&self) -> &VecDeque<Step> {
        &self.steps
    }

    /// The steps that lay whole in sampling windows since they were last taken.
    #[must_use]
    pub fn window_steps(&self) -> &[WindowStep] {
        &self.window_steps
    }

    /// The steps that lay whole in sampling windows since the last call. Steps whose launches are counted all the
    /// time are in [`Self::recent_steps`] instead.
    pub fn take_window_steps(&mut self) -> Vec<WindowStep> {
        std::mem::take(&mut self.window_steps)
    }

    fn is_boundary(&self, mark: StepMark, launches: Launches) -> bool {
        let track = &self.boundary_tracks[mark.index()];
        let begins_run = self.last_mark != Some(mark) || self.run_length >= MAX_RUN_OF_MARKS;
        match mark {
            StepMark::Backward => true,
            StepMark::Optimizer => {
                begins_run && (self.backward_since_optimizer || !self.has_seen_backward)
            }
            // Further tensors of a batch are copied before anything is launched.
            StepMark::CopyIn => {
                let so_far = track.open_interval.and_then(|open| open.launches);
                begins_run && sum_if_known(so_far, launches.continuous_count()) != Some(0)
            }
            _ => begins_run,
        }
    }

    /// Counts a mark in all open intervals.
    fn count_mark_in_intervals(&mut self, mark: StepMark, launches: Launches) {
        for track in &mut self.boundary_tracks {
            let Some(open) = &mut track.open_interval else {
                continue;
            };
            let count = &mut open.marks[mark.index()];
            *count = count.saturating_add(1);
            open.launches = sum_if_known(open.launches, launches.continuous_count());
            track.exact_launches = sum_if_known(track.exact_launches, launches.exact_count());
        }
        self.run_length = match self.last_mark == Some(mark) {
            true => self.run_length.saturating_add(1),
            false => 1,
        };
        self.last_mark = Some(mark);
        match mark {
            StepMark::Backward => {
                self.backward_since_optimizer = true;
                self.has_seen_backward = true;
            }
            StepMark::Optimizer => self.backward_since_optimizer = false,
            _ => {}
        }
        self.marks_since_decay = self.marks_since_decay.saturating_add(1);
        let is_due = match self.boundary_mark {
            Some(known) => self.boundary_tracks[known.index()].recent_count >= DECAY_STEPS,
            None => self.marks_since_decay >= DECAY_MARKS,
        };
        if is_due {
            self.marks_since_decay = 0;
            self.boundary_tracks
                .iter_mut()
                .for_each(|track| track.recent_count /= 2);
        }
    }

    fn end_interval(&mut self, mark: StepMark, at_ns: u64) {
        let track = &mut self.boundary_tracks[mark.index()];
        let next = Step {
            begin_ns: at_ns,
            end_ns: at_ns,
            launches: Some(0),
            marks: [0; 7],
            lacks_marks: false,
        };
        let ended = track.open_interval.replace(next);
        let exact_launches = track.exact_launches.replace(0);
        let ended = ended.map(|step| Step {
            end_ns: at_ns.max(step.begin_ns),
            ..step
        });
        track.boundary_count += 1;
        track.recent_count = track.recent_count.saturating_add(1);
        let first_intervals = track.first_intervals.iter_mut().find(|slot| slot.is_none());
        if let (Some(slot), Some(step)) = (first_intervals, ended) {
            *slot = Some(step);
        }
        if self.boundary_mark == Some(mark) {
            self.count += 1;
            self.graph_launches = 0;
            if let Some((step, launches)) = ended.zip(exact_launches) {
                self.keep_window_step(&step, launches);
            }
            self.push_step(ended);
        } else if mark == StepMark::Graph {
            self.graph_launches += 1;
        }
        self.consider_as_boundary(mark);
    }

    fn keep_window_step(&mut self, step: &Step, launches: u32) {
        if step.launches.is_none() && self.window_steps.len() < MAX_WINDOW_STEPS {
            self.window_steps.push(WindowStep {
                duration_ns: step.duration_ns(),
                launches,
            });
        }
    }

    fn push_step(&mut self, step: Option<Step>) {
        if self.steps.len() == MAX_RECENT_STEPS {
            self.steps.pop_front();
        }
        self.steps.extend(step);
    }

    /// Makes a kind the step boundary if it is better than the current one.
    fn consider_as_boundary(&mut self, mark: StepMark) {
        let track = self.boundary_tracks[mark.index()];
        if track.is_incomplete
            || track.boundary_count < MIN_BOUNDARIES
            || self.boundary_mark == Some(mark)
        {
            return;
        }
        let is_better = self.boundary_mark.is_none_or(|known| {
            let known_track = &self.boundary_tracks[known.index()];
            let is_rarer =
                4 * u64::from(track.recent_count) < 3 * u64::from(known_track.recent_count);
            let replaces = mark == StepMark::Graph && self.graph_launches >= MIN_GRAPH_LAUNCHES;
            match mark.boundary_rank().cmp(&known.boundary_rank()) {
                // A substitute separates the same steps as the better kind did, so it counts as
                // better than its tier.
                Ordering::Less => !self.is_substitute || is_rarer,
                Ordering::Equal => is_rarer || replaces,
                Ordering::Greater => replaces,
            }
        });
        if !is_better {
            return;
        }
        if let Some(known) = self.boundary_mark {
            // The replaced kind must reach the minimum again before it can return.
            self.boundary_tracks[known.index()].reset_count();
            self.count_restarts += 1;
        }
        self.boundary_mark = Some(mark);
        self.is_substitute = false;
        self.window_steps.clear();
        self.steps.clear();
        self.count = track.boundary_count;
        if mark == StepMark::Optimizer {
            self.push_step(
                self.passes_before_first_update
                    .slow_first_step(&track.first_intervals),
            );
        }
        for step in track.first_intervals {
            self.push_step(step);
        }
    }
}

#[cfg(test)]
mod tests;
