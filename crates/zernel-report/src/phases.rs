//! The phases of a process.

use serde::{Deserialize, Serialize};
use zernel_model::snapshot;
use zernel_phase::task_state::WorkloadPhase;

/// Seconds of the training thread in each phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[serde(default)]
pub(crate) struct PhaseSeconds {
    pub(crate) data_loading: f64,
    pub(crate) gpu_compute: f64,
    pub(crate) nccl_collective: f64,
    pub(crate) optimizer_step: f64,
    /// No evidence, or no training thread.
    pub(crate) unknown: f64,
    /// Time beyond the wall time, because there were several training threads.
    pub(crate) more_than_wall: f64,
}

impl PhaseSeconds {
    pub(crate) fn new(process: &snapshot::ProcessSnapshot, wall: f64) -> Self {
        let times = process.phases.phase_times.as_ref();
        let seconds_in = |phase| times.map_or(0.0, |times| times.phase_ns(phase) as f64 / 1e9);
        let mut phases = Self {
            data_loading: seconds_in(WorkloadPhase::DataLoading),
            gpu_compute: seconds_in(WorkloadPhase::GpuCompute),
            nccl_collective: seconds_in(WorkloadPhase::NcclCollective),
            optimizer_step: seconds_in(WorkloadPhase::OptimizerStep),
            unknown: seconds_in(WorkloadPhase::Unknown),
            more_than_wall: 0.0,
        };
        phases.fill_unknown(wall);
        phases
    }

    /// Combines each phase of `self` and `other` with `combine_one`, then makes the phases add up to `wall`.
    pub(crate) fn combine_with(
        &self,
        other: &Self,
        wall: f64,
        combine_one: impl Fn(f64, f64) -> f64,
    ) -> Self {
        let mut combined = Self {
            data_loading: combine_one(self.data_loading, other.data_loading),
            gpu_compute: combine_one(self.gpu_compute, other.gpu_compute),
            nccl_collective: combine_one(self.nccl_collective, other.nccl_collective),
            optimizer_step: combine_one(self.optimizer_step, other.optimizer_step),
            unknown: 0.0,
            more_than_wall: 0.0,
        };
        combined.fill_unknown(wall);
        combined
    }

    /// Counts the rest of the wall time as unknown.
    fn fill_unknown(&mut self, wall: f64) {
        let difference = wall - self.total_seconds();
        self.unknown += difference.max(0.0);
        self.more_than_wall = (-difference).max(0.0);
    }

    pub(crate) fn total_seconds(&self) -> f64 {
        self.seconds_by_phase_name()
            .iter()
            .map(|(_, seconds)| seconds)
            .sum()
    }

    pub(crate) fn seconds_by_phase_name(&self) -> [(&'static str, f64); 5] {
        [
            ("DataLoading", self.data_loading),
            ("GpuCompute", self.gpu_compute),
            ("NcclCollective", self.nccl_collective),
            ("OptimizerStep", self.optimizer_step),
            ("Unknown", self.unknown),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::times::ProcessTimes;

    #[test]
    fn phases_add_up_to_the_wall_time() {
        let mut phases = PhaseSeconds {
            gpu_compute: 3.0,
            unknown: 0.5,
            ..PhaseSeconds::default()
        };
        phases.fill_unknown(5.0);
        assert_eq!((phases.total_seconds(), phases.unknown), (5.0, 2.0));
    }

    #[test]
    fn phases_of_several_threads_exceed_the_wall_time() {
        let mut phases = PhaseSeconds {
            gpu_compute: 7.0,
            ..PhaseSeconds::default()
        };
        phases.fill_unknown(5.0);
        assert_eq!((phases.unknown, phases.more_than_wall), (0.0, 2.0));
    }

    #[test]
    fn combined_phases_add_up_to_the_wall_time() {
        let times = |wall_seconds, gpu_compute| {
            let mut phases = PhaseSeconds {
                gpu_compute,
                ..PhaseSeconds::default()
            };
            phases.fill_unknown(wall_seconds);
            ProcessTimes {
                wall_seconds,
                phases,
                ..ProcessTimes::default()
            }
        };
        let part = times(9.0, 6.0).combine_with(&times(4.0, 2.0), |to, from| to - from);
        assert_eq!(part, times(5.0, 4.0));
    }
}
