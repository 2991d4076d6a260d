//! How many launches a step has, as the few steps tell in which all were counted.

use std::collections::VecDeque;
use std::time::Duration;

use zernel_phase::steps::{Glimpse, Step, median_ns};

use super::estimate::student;

/// How many batches are kept: what a step does may change.
const KEPT: usize = 8;
/// So many steps say how many launches a step has.
const FEWEST: f64 = 3.0;
/// How many of the last steps are taken where all are counted.
const LAST: usize = 24;
/// What is longer than this many times the median had something else in it.
const LONG: u64 = 2;
/// The least share of a window that a step counts as not filling.
const LEAST_ROOM: f64 = 0.1;

/// How many launches a step has.
///
/// A long step lies less often wholly in a window than a short one: if a window is `w` long, one of the length `l`
/// does for `w - l` of all moments at which the window may open. So it counts `1 / (w - l)`.
#[derive(Debug, Clone, Default)]
pub(super) struct LaunchesPerStep {
    batches: VecDeque<Batch>,
    series: u32,
}

/// The steps of one window, or those that were counted before there was any.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Batch {
    steps: f64,
    /// Sums over its steps of their weights, with and without their launches, and of the squares of these.
    weights: f64,
    launches: f64,
    weights_squared: f64,
    mixed: f64,
    launches_squared: f64,
    /// The fewest and the most launches that a step has.
    least: u32,
    most: u32,
}

impl Batch {
    fn add(&mut self, weight: f64, launches: u32) {
        let weighted = weight * f64::from(launches);
        self.least = match self.steps > 0.0 {
            true => self.least.min(launches),
            false => launches,
        };
        self.most = self.most.max(launches);
        self.steps += 1.0;
        self.weights += weight;
        self.launches += weighted;
        self.weights_squared += weight * weight;
        self.mixed += weight * weighted;
        self.launches_squared += weighted * weighted;
    }

    fn sum<'a>(batches: impl Iterator<Item = &'a Self>) -> Self {
        batches.fold(Self::default(), |a, b| Self {
            steps: a.steps + b.steps,
            weights: a.weights + b.weights,
            launches: a.launches + b.launches,
            weights_squared: a.weights_squared + b.weights_squared,
            mixed: a.mixed + b.mixed,
            launches_squared: a.launches_squared + b.launches_squared,
            least: match a.steps > 0.0 {
                true => a.least.min(b.least),
                false => b.least,
            },
            most: a.most.max(b.most),
        })
    }

    fn mean(&self) -> f64 {
        self.launches / self.weights
    }

    /// The squared distance of its steps from a mean.
    fn residue(&self, mean: f64) -> f64 {
        let residue =
            self.launches_squared - 2.0 * mean * self.mixed + mean * mean * self.weights_squared;
        residue.max(0.0)
    }
}

impl LaunchesPerStep {
    /// Forgets steps of another series than this one.
    pub(super) fn keep_series(&mut self, series: u32) {
        if self.series != series {
            *self = Self {
                series,
                ..Self::default()
            };
        }
    }

    /// Takes in the steps that lay wholly in a window.
    pub(super) fn add_window(&mut self, glimpses: &[Glimpse], window: Duration) {
        let window_ns = (window.as_nanos() as f64).max(1.0);
        let mut batch = Batch::default();
        for glimpse in glimpses {
            let room_ns = window_ns - glimpse.duration_ns as f64;
            batch.add(1.0 / room_ns.max(LEAST_ROOM * window_ns), glimpse.launches);
        }
        self.add(batch);
    }

    /// Takes in the last of the steps that were all counted.
    pub(super) fn add_counted<'a>(&mut self, steps: impl DoubleEndedIterator<Item = &'a Step>) {
        let last: Vec<&Step> = steps.rev().take(LAST).collect();
        let long_ns = LONG * median_ns(last.iter().copied()).unwrap_or(0);
        let ordinary = last.iter().filter(|step| step.duration_ns() <= long_ns);
        let counted = ordinary.filter_map(|step| Some((step.duration_ns(), step.launches?)));
        let counted: Vec<(u64, u32)> = counted.collect();
        let all_ns = counted.iter().map(|(ns, _)| *ns).sum::<u64>().max(1);
        let mut batch = Batch::default();
        for (_, launches) in counted {
            batch.add(1.0 / all_ns as f64, launches);
        }
        self.add(batch);
    }

    fn add(&mut self, batch: Batch) {
        if batch.steps == 0.0 {
            return;
        }
        // If none of a few steps is as any was before, steps do something else now.
        let before = Batch::sum(self.batches.iter());
        let differs = batch.least > before.most || batch.most < before.least;
        if differs && batch.steps >= FEWEST {
            self.batches.clear();
        }
        if self.batches.len() == KEPT {
            self.batches.pop_front();
        }
        self.batches.push_back(batch);
    }

    /// Whether too few steps would have been seen with so many more.
    pub(super) fn lacks(&self, more: usize) -> bool {
        Batch::sum(self.batches.iter()).steps + (more as f64) < FEWEST
    }

    /// How many; `None` if too few steps were seen, or nothing in them.
    pub(super) fn mean(&self) -> Option<f64> {
        let all = Batch::sum(self.batches.iter());
        (all.steps >= FEWEST && all.launches > 0.0).then(|| all.mean())
    }

    /// By what share of it the mean may be off, 19 times out of 20. The steps of a window may be more alike than those
    /// of two; and steps that are all alike do not prove that there are no others.
    pub(super) fn relative_error(&self) -> f64 {
        let Some(mean) = self.mean() else {
            return 1.0;
        };
        let all = Batch::sum(self.batches.iter());
        let error = |residue: f64, count: f64| {
            let deviation = (residue * count / (count - 1.0)).sqrt() / all.weights;
            student(count - 1.0) * deviation
        };
        let mut largest = error(all.residue(mean), all.steps);
        if self.batches.len() > 1 {
            let distances = self
                .batches
                .iter()
                .map(|batch| batch.launches - mean * batch.weights);
            let residue = distances.map(|distance| distance * distance).sum();
            largest = largest.max(error(residue, self.batches.len() as f64));
        }
        largest / mean + 1.0 / all.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_millis(100);

    fn glimpse(milliseconds: u64, launches: u32) -> Glimpse {
        Glimpse {
            duration_ns: 1_000_000 * milliseconds,
            launches,
        }
    }

    fn relative(of: &LaunchesPerStep, truth: f64) -> f64 {
        (of.mean().expect("steps were seen") - truth).abs() / truth
    }

    #[test]
    fn steps_that_are_all_alike_are_known_the_better_the_more_there_are() {
        let mut of = LaunchesPerStep::default();
        assert_eq!((of.mean(), of.relative_error()), (None, 1.0));
        of.add_window(&[glimpse(10, 300); 2], WINDOW);
        assert_eq!((of.mean(), of.relative_error()), (None, 1.0));
        of.add_window(&[glimpse(10, 300); 8], WINDOW);
        assert!((of.relative_error() - 0.1).abs() < 1e-6);
        (0..20).for_each(|_| of.add_window(&[glimpse(10, 300); 8], WINDOW));
        assert!(relative(&of, 300.0) < 1e-9);
        assert!((of.relative_error() - 1.0 / 64.0).abs() < 1e-6);
    }

    #[test]
    fn what_has_changed_is_noticed() {
        let mut of = LaunchesPerStep::default();
        (0..8).for_each(|_| of.add_window(&[glimpse(10, 300); 8], WINDOW));
        of.add_window(&[glimpse(10, 600); 8], WINDOW);
        assert!(relative(&of, 600.0) < 1e-9);
        of.add_window(&[], WINDOW);
        assert!(relative(&of, 600.0) < 1e-9);
    }

    #[test]
    fn long_steps_count_as_often_as_they_come() {
        // In turns of 90 ms: three short steps and a long one, seen through windows that open anywhere.
        let turn = [(10, 200), (10, 200), (10, 200), (60, 1600)];
        let truth = (3.0 * 200.0 + 1600.0) / 4.0;
        let mut random = fastrand::Rng::with_seed(3);
        let mut held = 0;
        for _ in 0..1000 {
            let mut of = LaunchesPerStep::default();
            for _ in 0..KEPT {
                let opens = random.u64(0..90);
                let closes = opens + WINDOW.as_millis() as u64;
                let mut begin = 0;
                let mut glimpses = Vec::new();
                for (milliseconds, launches) in turn.into_iter().cycle().take(12) {
                    if begin >= opens && begin + milliseconds <= closes {
                        glimpses.push(glimpse(milliseconds, launches));
                    }
                    begin += milliseconds;
                }
                of.add_window(&glimpses, WINDOW);
            }
            held += u32::from(relative(&of, truth) <= of.relative_error());
        }
        assert!((930..=999).contains(&held), "{held}");
    }

    #[test]
    fn an_evaluation_among_counted_steps_is_none_of_them() {
        let mut now_ns = 0;
        let steps: Vec<Step> = (0..40)
            .map(|number| {
                let (ns, launches) = if number == 30 { (500, 9000) } else { (10, 300) };
                now_ns += ns;
                Step {
                    begin_ns: now_ns - ns,
                    end_ns: now_ns,
                    launches: Some(launches),
                    marks: [0; 7],
                    lacks_marks: false,
                }
            })
            .collect();
        let mut of = LaunchesPerStep::default();
        of.add_counted(steps.iter());
        assert!(relative(&of, 300.0) < 1e-9);
        assert!((of.relative_error() - 1.0 / 23.0).abs() < 1e-6);
    }
}
