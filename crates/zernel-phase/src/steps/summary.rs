//! Summary of a list of steps: step times, warm-up, pauses and stalls.

use super::{Step, StepMark, StepMarkClass};

/// A step longer than this multiple of the median is long.
const LONG_STEP_FACTOR: f64 = 1.5;
/// A stall is longer than this multiple of the median and than [`STALL_OVER_P90_FACTOR`] times the
/// 90th percentile. Long steps that are more frequent are periodic, as with two data loaders that
/// take turns.
const STALL_FACTOR: f64 = 3.0;
const STALL_OVER_P90_FACTOR: f64 = 1.5;
/// A kind of step is rare below this share of all steps.
const RARE_STEP_SHARE: f64 = 0.1;
/// A step with this many similar steps directly beside it is not rare.
const MIN_SIMILAR_NEIGHBOURS: usize = 4;
/// An interval with less than this share of a step's launches is part of an evaluation.
const MIN_TRAINING_LAUNCH_SHARE: f64 = 0.6;

/// A period of time, such as a pause or a stall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeSpan {
    /// Start.
    pub begin_ns: u64,
    /// Length.
    pub duration_ns: u64,
}

/// Summary of a list of steps.
///
/// Three things are not ordinary steps:
/// - **Warm-up**: long steps at the start of a run.
/// - **Pauses**: long steps with rare marks, such as an evaluation or a checkpoint. The pause is the
///   time above the median.
/// - **Evaluations**, where only copies separate steps: intervals with far fewer launches than a
///   step. They count as pauses.
///
/// Median, 99th percentile and maximum are those of the ordinary steps. **Stalls** are among these:
/// steps with the usual marks that took more than three times the median and more than 1.5 times
/// the 90th percentile.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepSummary {
    /// Number of steps, including warm-up steps and steps with a pause.
    pub steps: usize,
    /// Median of the ordinary steps.
    pub median_ns: u64,
    /// 99th percentile of the ordinary steps.
    pub p99_ns: u64,
    /// Longest ordinary step.
    pub longest_ns: u64,
    /// Start of the first ordinary step.
    pub begin_ns: u64,
    /// Number of warm-up steps.
    pub warm_up: usize,
    /// Length of the warm-up.
    pub warm_up_ns: u64,
    /// Pauses, oldest first.
    pub pauses: Vec<TimeSpan>,
    /// Stalls, oldest first.
    pub stalls: Vec<TimeSpan>,
}

impl StepSummary {
    /// Summarises the steps of a run from its first step on; `None` without steps.
    #[must_use]
    pub fn from_whole_run(steps: &[Step], boundary: StepMark) -> Option<Self> {
        Self::new(steps, boundary, true)
    }

    /// Summarises steps that others precede, so that they have no warm-up; `None` without steps.
    #[must_use]
    pub fn from_later_steps(steps: &[Step], boundary: StepMark) -> Option<Self> {
        Self::new(steps, boundary, false)
    }

    fn new(steps: &[Step], boundary: StepMark, has_first_step: bool) -> Option<Self> {
        let (steps, evaluation) = split_off_evaluations(steps, boundary);
        let median_ns = median_ns(&steps)?;
        let long_ns = (LONG_STEP_FACTOR * median_ns as f64) as u64;
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
        // Rounded down, so that among few steps the longest one is above the percentile.
        let p90_ns = durations[((1.0 - RARE_STEP_SHARE) * last as f64) as usize];
        let stall_ns = (STALL_FACTOR * median_ns as f64).max(STALL_OVER_P90_FACTOR * p90_ns as f64);
        ordinary.retain(|step| step.duration_ns as f64 > stall_ns);
        summary.stalls = ordinary;
        summary.p99_ns = durations[(0.99 * last as f64).round() as usize];
        summary.longest_ns = durations[last];
        summary.median_ns = median(durations)?;
        Some(summary)
    }
}

/// Returns the median length of some steps; `None` without steps.
#[must_use]
pub fn median_ns<'a>(steps: impl IntoIterator<Item = &'a Step>) -> Option<u64> {
    median(steps.into_iter().map(Step::duration_ns).collect())
}

fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// Separates training steps from the evaluations between them. A training mark as the boundary
/// needs no separation, because evaluation does not make it.
fn split_off_evaluations(steps: &[Step], boundary: StepMark) -> (Vec<Step>, Vec<TimeSpan>) {
    let mut launches: Vec<u32> = steps.iter().filter_map(|step| step.launches).collect();
    launches.sort_unstable();
    let is_training = boundary.class() == StepMarkClass::Training;
    // Evaluation may have many intervals, but hardly three quarters of all.
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

/// Returns a predicate on step indexes: whether the marks of a step are rare among all steps and
/// among its neighbours.
///
/// Neighbours count because all steps change when some marks stop being observed. A step with
/// missing marks is rare if it has more marks of some kind than every frequent kind of step.
/// Without a kind that makes up half of the steps, no step is rare.
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
    let is_few = move |size: usize| (size as f64) < RARE_STEP_SHARE * total as f64;
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
