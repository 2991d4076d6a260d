//! The least score that a trace must have, so that a worse detector fails a test.

use serde::Deserialize;

use crate::report::TruthReport;

/// Bars of one trace. A bar that is not set is not checked.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScoreLimits {
    /// Least macro-F1 of phases.
    pub phase_f1: Option<f64>,
    /// Least macro-F1 of thread classes.
    pub class_f1: Option<f64>,
    /// Largest share of time in a phase that does not occur.
    pub absent_share: Option<f64>,
    /// Largest difference between a phase's detected and true share, in percentage points.
    pub share_error_points: Option<f64>,
    /// Largest share of time in the phase `Unknown`.
    pub unknown_share: Option<f64>,
    /// Largest median distance between a true and a detected change of phase, in microseconds.
    pub boundary_us: Option<f64>,
    /// Largest median error of GPU busy in a second, in percentage points.
    pub gpu_busy_points: Option<f64>,
    /// Whether the verdict must be the one that is known to be right.
    pub verdict: Option<bool>,
}

impl ScoreLimits {
    /// Sentences about the bars that a score does not reach.
    #[must_use]
    pub fn violated_limits(&self, report: &TruthReport) -> Vec<String> {
        let phases = &report.phases;
        let at_least = [
            ("phase_f1", self.phase_f1, phases.macro_f1),
            ("class_f1", self.class_f1, report.classes.macro_f1),
        ];
        let at_most = [
            ("absent_share", self.absent_share, Some(phases.absent_share)),
            (
                "share_error_points",
                self.share_error_points,
                Some(phases.share_error_points),
            ),
            (
                "unknown_share",
                self.unknown_share,
                Some(phases.unknown_share),
            ),
            ("boundary_us", self.boundary_us, report.boundaries.median_us),
            (
                "gpu_busy_points",
                self.gpu_busy_points,
                report.gpu_busy.map(|busy| busy.median_points),
            ),
        ];
        let too_low = at_least.into_iter().filter_map(|(name, bar, value)| {
            let bar = bar?;
            let is_reached = value.is_some_and(|value| value >= bar);
            (!is_reached).then(|| format!("{name} is {value:?}, at least {bar} is required"))
        });
        let too_high = at_most.into_iter().filter_map(|(name, bar, value)| {
            let bar = bar?;
            let is_reached = value.is_some_and(|value| value <= bar);
            (!is_reached).then(|| format!("{name} is {value:?}, at most {bar} is allowed"))
        });
        let verdict = report.reported.as_ref();
        let is_right =
            verdict.is_some_and(|verdict| verdict.is_right == Some(true) && !verdict.overstates);
        let wrong_verdict = (self.verdict == Some(true) && !is_right)
            .then(|| format!("the verdict is wrong: {verdict:?}"));
        too_low.chain(too_high).chain(wrong_verdict).collect()
    }
}
