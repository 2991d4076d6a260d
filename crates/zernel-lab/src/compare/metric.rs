//! The figure by which schedulers are compared in a scenario.

use serde::{Deserialize, Serialize};
use zernel_workload::WorkType;

use crate::scenario::Scenario;
use crate::scenario::figures::{RunFigures, exact_quantile};

/// The figure by which schedulers are compared in a scenario: a figure of the first group of `training`, or of the
/// first group if the scenario has no training.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metric {
    /// The name of the group.
    pub group: String,
    /// Which figure of the group is compared.
    pub kind: MetricKind,
}

/// A figure of a group that schedulers are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricKind {
    /// Steps per second, or rounds per second for a group without steps.
    Rate,
    /// The 99th percentile of the wake-up latency, in microseconds.
    WakeP99,
    /// The 99th percentile of the time from request to answer, in microseconds.
    StepP99,
}

impl Metric {
    pub(super) fn compared_in_scenario(scenario: &Scenario) -> Self {
        let first = scenario.groups.first().map(|group| group.name.clone());
        let group = scenario
            .training
            .first()
            .cloned()
            .or(first)
            .unwrap_or_default();
        let kind = match scenario.find_group(&group).map(|group| &group.work_type) {
            Some(WorkType::TimerDeadline(_)) => MetricKind::WakeP99,
            Some(WorkType::Inference(_)) => MetricKind::StepP99,
            _ => MetricKind::Rate,
        };
        Self { group, kind }
    }

    /// The value of the figure in a run; `None` if the run measured none.
    pub(super) fn value_in_run(&self, figures: &RunFigures) -> Option<f64> {
        let group = figures.find_group(&self.group)?;
        let us = |ns: u64| ns as f64 / 1e3;
        match self.kind {
            MetricKind::Rate => Some(group.rate_per_second(figures.window_ns)),
            MetricKind::WakeP99 => group.wake_latency.quantile(0.99).map(us),
            MetricKind::StepP99 => exact_quantile(&group.steps_ns, 0.99).map(us),
        }
    }

    /// Whether a larger value of the figure is better.
    #[must_use]
    pub fn higher_is_better(&self) -> bool {
        self.kind == MetricKind::Rate
    }

    /// The name of the figure, with its unit.
    #[must_use]
    pub fn label(&self) -> String {
        let what = match self.kind {
            MetricKind::Rate => "steps or rounds per second",
            MetricKind::WakeP99 => "wake-up latency p99, µs",
            MetricKind::StepP99 => "request p99, µs",
        };
        format!("{}: {what}", self.group)
    }
}
