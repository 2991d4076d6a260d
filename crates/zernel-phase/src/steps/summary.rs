//! What a list of steps says.

use super::{Mark, MarkClass, Step};

/// A step takes this many times the median to be a long one.
const LONG_FACTOR: f64 = 1.5;
/// And this many to be a stall, if it also takes this many times what all but a tenth of the steps take: what comes
/// more often is a rhythm, such as that of two loaders which take turns.
const STALL_FACTOR: f64 = 3.0;
const STALL_OVER_P90_FACTOR: f64 = 1.5;
/// What fewer than this share of the steps do is not usual.
const RARE_SHARE: f64 = 0.1;
/// So many like it beside it make a step usual.
const MIN_SIMILAR_NEIGHBOURS: usize = 4;
/// With less than this share of the launches, it is no step but a part of an evaluation.
const MIN_TRAINING_LAUNCH_SHARE: f64 = 0.6;

/// A piece of time between usual steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeSpan {
    /// When it began.
    pub begin_ns: u64,
    /// How long it took.
    pub duration_ns: u64,
}

/// What a list of steps says.
///
/// Three things are no ordinary steps, and told apart from them. The **warm-up**: long steps at the
/// beginning. **Pauses**: long steps in which the process did what it does not usually do, such as evaluating
/// or writing a checkpoint; what exceeds the median is the pause. **Evaluation** where only copies separate
/// steps: intervals with far fewer launches than a step has. The median and the 99th percentile are those of
/// all other steps; the **stalls** are among these: steps of the usual kind that took three times the
/// median, and half as long again as nine of ten steps at least.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepSummary {
    /// How many steps there were, those of the warm-up and those with a pause included.
    pub steps: usize,
    /// The median of the ordinary ones.
    pub median_ns: u64,
    /// Their 99th percentile.
    pub p99_ns: u64,
    /// Their maximum.
    pub longest_ns: u64,
    /// When the first ordinary one began.
    pub begin_ns: u64,
    /// How many steps the warm-up has.
    pub warm_up: usize,
    /// How long it took.
    pub warm_up_ns: u64,
    /// Pauses, oldest first.
    pub pauses: Vec<TimeSpan>,
    /// Stalls, oldest first.
    pub stalls: Vec<TimeSpan>,
}

impl StepSummary {
    /// Of steps in their order, and what separates them; `None` without any.
    #[must_use]
    pub fn from_whole_run(steps: &[Step], boundary: Mark) -> Option<Self> {
        Self::new(steps, boundary, true)
    }

    /// The same of steps before which there were others: they have no warm-up.
    #[must_use]
    pub fn from_later_steps(steps: &[Step], boundary: Mark) -> Option<Self> {
        Self::new(steps, boundary, false)
    }

    fn new(steps: &[Step], boundary: Mark, has_first_step: bool) -> Option<Self> {
        let (steps, evaluation) = split_off_evaluations(steps, boundary);
        let median_ns = median_ns(&steps)?;
        let long_ns = (LONG_FACTOR * median_ns as f64) as u64;
        let is_long = |step: &Step| step.duration_ns() > long_ns;
        let max_warm_up = match has_first_step {
            true => (steps.len() / 10).max(10).min(steps.len() / 2),
            false => 0,
        };
        let warm_up = steps
            .iter()
            .take_while(|step| is_long(step))
            .count()
            .min(max_warm_up);
        let is_rare = rare_steps(&steps);
        let mut summary = Self {
            steps: steps.len(),
            begin_ns: steps.get(warm_up)?.begin_ns,
            warm_up,
            warm_up_ns: steps[..warm_up].iter().map(Step::duration_ns).sum(),
            pauses: evaluation,
            ..Self::default()
        };
        let mut ordinary = Vec::new();
        for (index, step) in steps.iter().enumerate().skip(warm_up) {
            if is_long(step) && is_rare(index) {
                summary.pauses.push(TimeSpan {
                    begin_ns: step.begin_ns,
                    duration_ns: step.duration_ns() - median_ns,
                });
            } else {
                ordinary.push(TimeSpan {
                    begin_ns: step.begin_ns,
                    duration_ns: step.duration_ns(),
                });
            }
        }
        summary.pauses.sort_by_key(|pause| pause.begin_ns);
        let mut durations: Vec<u64> = ordinary.iter().map(|step| step.duration_ns).collect();
        durations.sort_unstable();
        let last = durations.len().checked_sub(1)?;
        // Rounded down: of few steps, the longest is not one of the nine of ten.
        let p90_ns = durations[((1.0 - RARE_SHARE) * last as f64) as usize];
        let stall_ns = (STALL_FACTOR * median_ns as f64).max(STALL_OVER_P90_FACTOR * p90_ns as f64);
        ordinary.retain(|step| step.duration_ns as f64 > stall_ns);
        summary.stalls = ordinary;
        summary.p99_ns = durations[(0.99 * last as f64).round() as usize];
        summary.longest_ns = durations[last];
        summary.median_ns = median(durations)?;
        Some(summary)
    }
}

/// The median of some steps; `None` without any.
#[must_use]
pub fn median_ns<'a>(steps: impl IntoIterator<Item = &'a Step>) -> Option<u64> {
    median(steps.into_iter().map(Step::duration_ns).collect())
}

fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// The steps, and the evaluations between them.
fn split_off_evaluations(steps: &[Step], boundary: Mark) -> (Vec<Step>, Vec<TimeSpan>) {
    let mut launches: Vec<u32> = steps.iter().filter_map(|step| step.launches).collect();
    launches.sort_unstable();
    let is_training = boundary.class() == MarkClass::Training;
    // Evaluations may have many intervals, but hardly three of four.
    let usual = launches.get(launches.len() * 3 / 4);
    let Some(usual) = usual.filter(|_| !is_training) else {
        return (steps.to_vec(), Vec::new());
    };
    let least = MIN_TRAINING_LAUNCH_SHARE * f64::from(*usual);
    let is_step = |step: &Step| {
        step.launches
            .is_none_or(|launches| f64::from(launches) >= least)
    };
    let evaluation = steps.chunk_by(|a, b| !is_step(a) && !is_step(b));
    let evaluation = evaluation.filter(|batches| !is_step(&batches[0]));
    let evaluation = evaluation.map(|batches| TimeSpan {
        begin_ns: batches[0].begin_ns,
        duration_ns: batches.iter().map(Step::duration_ns).sum(),
    });
    let only_steps = steps.iter().copied().filter(is_step).collect();
    (only_steps, evaluation.collect())
}

/// Whether the step at a place did what few steps do, and hardly any of those beside it: from where on some marks
/// are no longer seen, all steps differ from those before. One that lacks marks did so if it has more of some than a
/// usual one. Where no two steps do the same, none is unusual.
fn rare_steps(steps: &[Step]) -> impl Fn(usize) -> bool {
    let complete = steps.iter().filter(|step| !step.lacks_marks);
    let mut kinds: Vec<[u16; 7]> = complete.map(|step| step.marks).collect();
    kinds.sort_unstable();
    let sizes: Vec<([u16; 7], usize)> = kinds
        .chunk_by(|a, b| a == b)
        .map(|kind| (kind[0], kind.len()))
        .collect();
    let largest = sizes.iter().map(|(_, size)| *size).max().unwrap_or(0);
    let total = steps.len();
    let is_few = move |size: usize| (size as f64) < RARE_SHARE * total as f64;
    move |index| {
        if 2 * largest < total {
            return false;
        }
        let marks = &steps[index].marks;
        if steps[index].lacks_marks {
            let usual = sizes.iter().filter(|(_, size)| !is_few(*size));
            let mut exceeded = usual.map(|(usual, _)| marks.iter().zip(usual).any(|(a, b)| a > b));
            return exceeded.all(|is_exceeded| is_exceeded);
        }
        let kind = sizes.binary_search_by_key(marks, |(marks, _)| *marks);
        let size = kind.map_or(0, |kind| sizes[kind].1);
        let is_similar = |step: &&Step| step.marks == *marks;
        let before = steps[..index]
            .iter()
            .rev()
            .take(MIN_SIMILAR_NEIGHBOURS)
            .take_while(is_similar)
            .count();
        let after = steps[index + 1..]
            .iter()
            .take(MIN_SIMILAR_NEIGHBOURS)
            .take_while(is_similar)
            .count();
        is_few(size) && before + after < MIN_SIMILAR_NEIGHBOURS
    }
}

#[cfg(test)]
mod tests;
