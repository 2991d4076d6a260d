//! Estimates how often a process called its sampled functions.
//!
//! Probes on a sampled function are attached only in short sampling windows. Steps are counted all the time, so the
//! number users ask for, launches per step, is a mean over the whole steps that lay in windows ([`PerStep`]):
//!
//! ```text
//! launches while sampled  =  launches per step × steps made while launches were sampled
//! calls of a function     =  calls per launch in windows × launches per step × steps made while it was sampled
//! without steps           =  calls per second in windows × seconds in which it was sampled
//! ```
//!
//! The last line serves a process that makes no steps, makes steps too long for a window, or launches nothing in
//! windows. For other processes, calls outside of steps are not extrapolated: an evaluation counts as far as windows
//! saw it, or as part of a step that lay whole in a window.
//!
//! Every interval is a 95 % interval by Student's t. The unit is the window, because the steps of one window may be
//! more alike than the steps of two. All means are ratios Σy / Σn over windows ([`RatioOfSums`]); the residual of window i is
//! yᵢ − (Σy / Σn) nᵢ. With fewer than two windows there is no interval.

use std::time::Duration;

use zernel_phase::steps::WindowStep;

/// A mean with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConfidenceInterval {
    /// The estimate.
    pub mean: f64,
    /// Half the width of the interval; `None` if there were fewer than two windows.
    pub half_width: Option<f64>,
}

impl ConfidenceInterval {
    pub(super) fn exact(mean: f64) -> Self {
        let half_width = Some(0.0);
        Self { mean, half_width }
    }

    /// Half the width as a share of the mean.
    pub(super) fn relative_error(&self) -> Option<f64> {
        self.half_width.map(|half| half / self.mean)
    }
}

/// Estimated number of calls of a function while it was sampled.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct CallEstimate {
    pub(super) calls: f64,
    /// Half the width of the 95 % interval; `None` if there were fewer than two windows.
    pub(super) half_width: Option<f64>,
}

impl CallEstimate {
    pub(super) fn has_interval(&self) -> bool {
        self.half_width.is_some()
    }

    /// The half width, or all calls if there is none.
    pub(super) fn half_width_or_all(&self) -> f64 {
        self.half_width.unwrap_or(self.calls)
    }
}

/// The ratio of two sums over windows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct RatioOfSums {
    window_count: u32,
    sum_y: f64,
    sum_n: f64,
    sum_yy: f64,
    sum_yn: f64,
    sum_nn: f64,
}

impl RatioOfSums {
    /// Adds a window, unless both values are 0.
    fn add_window(&mut self, y: f64, n: f64) {
        if y == 0.0 && n == 0.0 {
            return;
        }
        self.window_count += 1;
        self.sum_y += y;
        self.sum_n += n;
        self.sum_yy += y * y;
        self.sum_yn += y * n;
        self.sum_nn += n * n;
    }

    fn ratio_interval(&self) -> Option<ConfidenceInterval> {
        if self.sum_n <= 0.0 {
            return None;
        }
        let mean = self.sum_y / self.sum_n;
        let residue = self.sum_yy - 2.0 * mean * self.sum_yn + mean * mean * self.sum_nn;
        let half_width = (self.window_count > 1).then(|| {
            let freedom = f64::from(self.window_count) - 1.0;
            let variance = residue.max(0.0) * f64::from(self.window_count) / freedom;
            student_t_percentile(self.window_count - 1) * variance.sqrt() / self.sum_n
        });
        Some(ConfidenceInterval { mean, half_width })
    }
}

/// Student's t for a 95 % interval: from a table up to 10 degrees of freedom, then at most 0.5 % too large.
fn student_t_percentile(freedom: u32) -> f64 {
    const PERCENTILES_BY_FREEDOM: [f64; 10] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    ];
    let known = PERCENTILES_BY_FREEDOM
        .get((freedom as usize).wrapping_sub(1))
        .copied();
    known.unwrap_or(1.96 + 2.7 / f64::from(freedom))
}

/// Launches per step, from the whole steps that lay in windows.
///
/// A step of length l lies whole in a window of length w only if the window opens within the w − l before the step begins.
/// So a step has the weight 1 / (w − l): without this weight, long steps would be under-represented.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct LaunchesPerStep {
    /// Weighted launches and weights, summed over the steps of each window.
    by_window: RatioOfSums,
    /// Weighted launches and weights of each single step.
    by_step: RatioOfSums,
}

/// A step of length l has the weight 1/(w − l) in a window of length w. w − l counts as at least this share of w. Windows are planned to be 1.4 times as long as nine
/// of ten steps, which leaves 0.29; without a limit, one step that just fitted would outweigh all others.
const MIN_ROOM_FOR_STEP: f64 = 0.1;

/// With fewer windows, the interval is at least as wide as it would be with the step as the unit: two or three windows
/// may agree by chance although their steps differ. Where a short and a long step alternate, the window alone as the
/// unit covers the truth in 83 of 100 simulated runs of 3 windows, and in 94 of 100 with 8.
const MAX_FEW_WINDOWS: u32 = 8;

impl LaunchesPerStep {
    /// Adds a window of this length and the steps that lay whole in it.
    pub(super) fn add_window(&mut self, steps: &[WindowStep], length: Duration) {
        self.add_steps(steps, |step| {
            let room = length.saturating_sub(Duration::from_nanos(step.duration_ns));
            1.0 / room.max(length.mul_f64(MIN_ROOM_FOR_STEP)).as_secs_f64()
        });
    }

    /// Adds successive steps that were all counted, as if they were those of a window of this length. When all steps
    /// are counted, none is under-represented, so all have the same weight.
    pub(super) fn add_counted(&mut self, steps: &[WindowStep], length: Duration) {
        self.add_steps(steps, |_| 1.0 / length.as_secs_f64());
    }

    fn add_steps(&mut self, steps: &[WindowStep], weight: impl Fn(&WindowStep) -> f64) {
        let (mut launches, mut weights) = (0.0, 0.0);
        for step in steps {
            let weight = weight(step);
            launches += weight * f64::from(step.launches);
            weights += weight;
            self.by_step
                .add_window(weight * f64::from(step.launches), weight);
        }
        self.by_window.add_window(launches, weights);
    }

    /// Launches per step; `None` until a step with launches lay whole in a window.
    pub(super) fn launches_interval(&self) -> Option<ConfidenceInterval> {
        let by_window = self.by_window.ratio_interval()?;
        let by_step = self.by_step.ratio_interval()?.half_width;
        let by_step = by_step.filter(|_| self.by_window.window_count < MAX_FEW_WINDOWS);
        let half_width = by_window.half_width;
        let half_width = half_width.map(|half| half.max(by_step.unwrap_or(0.0)));
        let mean = by_window.mean;
        (mean > 0.0).then_some(ConfidenceInterval { mean, half_width })
    }
}

/// Totals of one process in one sampling window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct WindowTotals {
    pub(super) window_seconds: f64,
    /// Launches of the process, by any function.
    pub(super) launches: u64,
    /// Upper bound of the overhead of the process in the window.
    pub(super) probe_seconds: f64,
}

/// The launches of the last step may all have been made although the step is not over.
const LAST_STEP_ERROR: f64 = 1.0;

/// Estimates the calls of a function, or of all functions of one kind, while it was sampled.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct CallEstimator {
    /// Whether the estimated calls are all launches of the process: then the calls per launch are 1 by definition.
    are_all_launches: bool,
    calls_per_launch: RatioOfSums,
    calls_per_second: RatioOfSums,
    probe_seconds: f64,
    /// Time and number of steps in which the function was sampled. Of the step in which sampling began, only the part
    /// after that moment counts.
    sampled_seconds: f64,
    sampled_steps: f64,
    /// Upper bound of the error of `sampled_steps`: by how much of a step the launches at the begin and at the end of sampling
    /// may be off.
    sampled_steps_error: f64,
    /// The estimated calls of earlier series, which ended when steps were counted anew from another boundary.
    earlier_series: CallEstimate,
}

impl CallEstimator {
    pub(super) fn new(are_all_launches: bool) -> Self {
        Self {
            are_all_launches,
            ..Self::default()
        }
    }

    /// Begins sampling, after this share of a step: the calls of that share were counted. After a share of the step's time,
    /// any share of its launches may have been made.
    pub(super) fn begin_sampling(&mut self, step_progress: f64) {
        let begin_error = match step_progress > 0.0 {
            true => step_progress.max(1.0 - step_progress),
            false => 0.0,
        };
        self.sampled_steps_error += begin_error + LAST_STEP_ERROR;
        self.sampled_steps -= step_progress;
    }

    /// Adds time, and the number of steps in it, in which the function was sampled.
    pub(super) fn add_elapsed_work(&mut self, seconds: f64, steps: f64) {
        self.sampled_seconds += seconds;
        self.sampled_steps += steps;
    }

    /// Adds a window with its calls.
    pub(super) fn add_window(&mut self, calls: u64, window: &WindowTotals) {
        self.calls_per_launch
            .add_window(calls as f64, window.launches as f64);
        self.calls_per_second
            .add_window(calls as f64, window.window_seconds);
        self.probe_seconds += window.probe_seconds;
    }

    /// Begins a new series, because the step detector counts steps anew from another boundary. The estimate of the
    /// earlier series is kept.
    pub(super) fn begin_series(&mut self, launches_per_step: Option<ConfidenceInterval>) {
        let so_far = self.estimate_calls(launches_per_step);
        let earlier = CallEstimate {
            calls: so_far.calls,
            half_width: Some(so_far.half_width_or_all()),
        };
        *self = Self {
            are_all_launches: self.are_all_launches,
            sampled_steps_error: LAST_STEP_ERROR,
            earlier_series: earlier,
            ..Self::default()
        };
    }

    /// Estimates the calls of the function while it was sampled. Without `launches_per_step` the estimate is by time.
    pub(super) fn estimate_calls(
        &self,
        launches_per_step: Option<ConfidenceInterval>,
    ) -> CallEstimate {
        let per_launch = match self.are_all_launches {
            true => Some(ConfidenceInterval::exact(1.0)),
            false => self.calls_per_launch.ratio_interval(),
        };
        let now = match launches_per_step.zip(per_launch) {
            Some((per_step, per_launch)) => self.estimate_by_steps(per_step, per_launch),
            None => self.estimate_by_time(),
        };
        let half_width = now
            .half_width
            .map(|half| half + self.earlier_series.half_width_or_all());
        CallEstimate {
            calls: self.earlier_series.calls + now.calls,
            // A function without calls while sampled has the interval of the earlier series.
            half_width: half_width.or(self.earlier_series.half_width.filter(|_| now.calls == 0.0)),
        }
    }

    /// Estimate by steps. The error has three parts: both factors, and the steps in which sampling begins and ends.
    fn estimate_by_steps(
        &self,
        per_step: ConfidenceInterval,
        per_launch: ConfidenceInterval,
    ) -> CallEstimate {
        let calls_per_step = per_step.mean * per_launch.mean;
        let steps = self.sampled_steps.max(0.0);
        let calls = calls_per_step * steps;
        let relative = per_step.relative_error().zip(per_launch.half_width);
        let half_width = relative.map(|(of_step, of_launch)| {
            let of_launch = of_launch * per_step.mean * steps;
            (of_step * calls).hypot(of_launch) + calls_per_step * self.sampled_steps_error
        });
        CallEstimate { calls, half_width }
    }

    /// Estimate by time. The error includes the overhead of the probes, because a process is slower in windows.
    fn estimate_by_time(&self) -> CallEstimate {
        if self.sampled_seconds <= 0.0 {
            return CallEstimate {
                calls: 0.0,
                half_width: Some(0.0),
            };
        }
        let Some(rate) = self.calls_per_second.ratio_interval() else {
            return CallEstimate::default();
        };
        let calls = rate.mean * self.sampled_seconds;
        let watched = self.calls_per_second.sum_n;
        let slower = self.probe_seconds / (watched - self.probe_seconds).max(0.5 * watched);
        let half_width = rate.half_width.map(|half| half * self.sampled_seconds);
        CallEstimate {
            calls,
            half_width: half_width.map(|half| half + slower * calls),
        }
    }
}

#[cfg(test)]
mod tests;
