//! The state of one task and the time it spent in each phase.
//!
//! [`ZernelTaskState`] is the userspace mirror of the state that lives in BPF maps while probes
//! run. [`shared`](crate::shared) has the kernel's layout.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The phase that a task of an ML workload is in.
///
/// The discriminants are those of `enum zernel_phase` in `bpf/task_state.h`. Zeroed kernel memory
/// reads as [`Unknown`](Self::Unknown).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[repr(u8)]
pub enum WorkloadPhase {
    /// I/O heavy, many threads, CPU preprocessing.
    DataLoading = 1,
    /// The CPU is idle or launching work, and waits for the GPU.
    GpuCompute = 2,
    /// Network coordination for a collective.
    NcclCollective = 3,
    /// A short CPU burst after GPU compute.
    OptimizerStep = 4,
    /// No evidence; scheduled as by the kernel's default class.
    #[default]
    Unknown = 0,
}

impl WorkloadPhase {
    /// Every phase, ordered by discriminant.
    pub const ALL: [Self; 5] = [
        Self::Unknown,
        Self::DataLoading,
        Self::GpuCompute,
        Self::NcclCollective,
        Self::OptimizerStep,
    ];

    /// Returns the phase with this discriminant, or [`Unknown`](Self::Unknown) for an undefined
    /// value.
    #[must_use]
    pub fn from_raw(raw: u8) -> Self {
        Self::ALL.get(usize::from(raw)).copied().unwrap_or_default()
    }
}

impl fmt::Display for WorkloadPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DataLoading => "DataLoading",
            Self::GpuCompute => "GpuCompute",
            Self::NcclCollective => "NcclCollective",
            Self::OptimizerStep => "OptimizerStep",
            Self::Unknown => "Unknown",
        })
    }
}

/// Nanoseconds spent in each phase. Sums saturate.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are self-explanatory
pub struct PhaseTimeAccumulator {
    pub data_loading_ns: u64,
    pub gpu_compute_ns: u64,
    pub nccl_collective_ns: u64,
    pub optimizer_step_ns: u64,
    pub unknown_ns: u64,
}

impl PhaseTimeAccumulator {
    /// Adds `duration_ns` to the time spent in `phase`.
    pub fn record(&mut self, phase: WorkloadPhase, duration_ns: u64) {
        let sum = match phase {
            WorkloadPhase::DataLoading => &mut self.data_loading_ns,
            WorkloadPhase::GpuCompute => &mut self.gpu_compute_ns,
            WorkloadPhase::NcclCollective => &mut self.nccl_collective_ns,
            WorkloadPhase::OptimizerStep => &mut self.optimizer_step_ns,
            WorkloadPhase::Unknown => &mut self.unknown_ns,
        };
        *sum = sum.saturating_add(duration_ns);
    }

    /// Returns the time recorded for `phase`.
    #[must_use]
    pub fn phase_ns(&self, phase: WorkloadPhase) -> u64 {
        match phase {
            WorkloadPhase::DataLoading => self.data_loading_ns,
            WorkloadPhase::GpuCompute => self.gpu_compute_ns,
            WorkloadPhase::NcclCollective => self.nccl_collective_ns,
            WorkloadPhase::OptimizerStep => self.optimizer_step_ns,
            WorkloadPhase::Unknown => self.unknown_ns,
        }
    }

    /// Returns the time recorded for all phases together.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        WorkloadPhase::ALL
            .into_iter()
            .fold(0, |sum, phase| sum.saturating_add(self.phase_ns(phase)))
    }

    /// Returns the share of the recorded time spent in `phase`; 0.0 when nothing was recorded.
    ///
    /// The shares of all phases add up to one even where [`total_ns`](Self::total_ns) saturated.
    #[must_use]
    pub fn phase_fraction(&self, phase: WorkloadPhase) -> f64 {
        let total: u128 = WorkloadPhase::ALL
            .into_iter()
            .map(|phase| u128::from(self.phase_ns(phase)))
            .sum();
        if total == 0 {
            return 0.0;
        }
        self.phase_ns(phase) as f64 / total as f64
    }
}

/// The state of one task.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ZernelTaskState {
    /// Kernel id of the task.
    pub pid: u32,
    /// Whether the task belongs to an ML process. Other tasks are always
    /// [`WorkloadPhase::Unknown`].
    pub is_ml_process: bool,
    /// The current phase.
    pub current_phase: WorkloadPhase,
    /// Utilisation of the task's GPU, 0–100.
    pub gpu_utilization: u8,
    /// Time of the task's last return from a GPU sync; 0 if never.
    pub last_gpu_sync_ns: u64,
    /// Length of the current CPU burst; 0 while off the CPU.
    pub cpu_burst_duration_ns: u64,
    /// Share of recent time spent waiting for I/O, 0–1.
    pub io_wait_fraction: f32,
    /// Whether a NCCL collective is in progress.
    pub nccl_active: bool,
    /// Number of recent futex waits.
    pub futex_wait_count: u32,
    /// The GPU that the task uses; `None` if unknown.
    pub gpu_id: Option<u32>,
    /// Time spent in completed phases.
    pub phase_time_ns: PhaseTimeAccumulator,
    /// Start of the current phase; 0 if unknown.
    pub phase_start_ns: u64,
}

impl ZernelTaskState {
    /// Creates the state of a task without evidence: everything zero, false, `Unknown` or `None`.
    #[must_use]
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            ..Self::default()
        }
    }

    /// Changes the phase to `new` at `now_ns` and records the time spent in the old phase.
    ///
    /// Nothing is recorded if the start is unknown or the clock went backward.
    pub fn transition_phase(&mut self, new: WorkloadPhase, now_ns: u64) {
        self.phase_time_ns
            .record(self.current_phase, self.open_ns(now_ns));
        self.current_phase = new;
        self.phase_start_ns = now_ns;
    }

    /// Returns the time spent in each phase up to `now_ns`, including the current phase.
    #[must_use]
    pub fn phase_time_until(&self, now_ns: u64) -> PhaseTimeAccumulator {
        let mut times = self.phase_time_ns.clone();
        times.record(self.current_phase, self.open_ns(now_ns));
        times
    }

    /// Returns the duration of the current phase at `now_ns`.
    fn open_ns(&self, now_ns: u64) -> u64 {
        match self.phase_start_ns {
            0 => 0,
            start => now_ns.saturating_sub(start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_new_state_has_only_a_pid() {
        let state = ZernelTaskState::new(7);
        assert_eq!(state.pid, 7);
        assert!(!state.is_ml_process && !state.nccl_active);
        assert_eq!(state.current_phase, WorkloadPhase::Unknown);
        assert_eq!(state.gpu_id, None);
        assert_eq!(state.phase_time_ns, PhaseTimeAccumulator::default());
        assert_eq!(
            state,
            ZernelTaskState {
                pid: 7,
                ..Default::default()
            }
        );
    }

    #[test]
    fn phases_display_and_serialise_as_their_names() {
        for phase in WorkloadPhase::ALL {
            assert_eq!(phase.to_string(), format!("{phase:?}"));
            assert_eq!(
                serde_json::to_value(phase).unwrap(),
                serde_json::Value::String(phase.to_string())
            );
            assert_eq!(WorkloadPhase::from_raw(phase as u8), phase);
        }
        assert_eq!(WorkloadPhase::from_raw(5), WorkloadPhase::Unknown);
        assert_eq!(WorkloadPhase::from_raw(255), WorkloadPhase::Unknown);
        assert_eq!(
            format!("{:<14}|", WorkloadPhase::Unknown),
            "Unknown       |"
        );
    }

    #[test]
    fn a_transition_records_the_phase_being_left() {
        let mut state = ZernelTaskState::new(1);
        state.transition_phase(WorkloadPhase::DataLoading, 100);
        assert_eq!(state.phase_time_ns.total_ns(), 0, "no start was known");
        state.transition_phase(WorkloadPhase::GpuCompute, 350);
        assert_eq!(state.phase_time_ns.data_loading_ns, 250);
        assert_eq!(state.phase_start_ns, 350);
    }

    #[test]
    fn a_backward_clock_step_records_nothing() {
        let mut state = ZernelTaskState::new(1);
        state.transition_phase(WorkloadPhase::GpuCompute, 1_000);
        state.transition_phase(WorkloadPhase::DataLoading, 400);
        assert_eq!(state.phase_time_ns.total_ns(), 0);
        state.transition_phase(WorkloadPhase::Unknown, 500);
        assert_eq!(state.phase_time_ns.data_loading_ns, 100);
    }

    #[test]
    fn an_open_phase_counts_up_to_now() {
        let mut state = ZernelTaskState::new(1);
        assert_eq!(state.phase_time_until(9_999).total_ns(), 0);
        state.transition_phase(WorkloadPhase::OptimizerStep, 10);
        assert_eq!(state.phase_time_until(15).optimizer_step_ns, 5);
        assert_eq!(state.phase_time_until(5).total_ns(), 0);
        assert_eq!(state.phase_time_ns.total_ns(), 0, "reading changes nothing");
    }

    #[test]
    fn sums_saturate() {
        let mut times = PhaseTimeAccumulator::default();
        assert_eq!(times.phase_fraction(WorkloadPhase::GpuCompute), 0.0);
        times.record(WorkloadPhase::GpuCompute, u64::MAX);
        times.record(WorkloadPhase::GpuCompute, 1);
        times.record(WorkloadPhase::DataLoading, u64::MAX);
        assert_eq!(times.gpu_compute_ns, u64::MAX);
        assert_eq!(times.total_ns(), u64::MAX);
        assert_eq!(times.phase_fraction(WorkloadPhase::GpuCompute), 0.5);
    }

    #[test]
    fn a_state_round_trips_through_json() {
        let mut state = ZernelTaskState::new(42);
        state.gpu_id = Some(3);
        state.io_wait_fraction = 0.25;
        state.transition_phase(WorkloadPhase::NcclCollective, u64::MAX);
        let json = serde_json::to_string(&state).unwrap();
        assert_eq!(
            serde_json::from_str::<ZernelTaskState>(&json).unwrap(),
            state
        );
    }

    proptest! {
        #[test]
        fn transitions_account_for_all_time(steps in prop::collection::vec((0_u8..5, 1_u64..1_000_000), 1..50)) {
            let mut state = ZernelTaskState::new(1);
            let mut now = 1;
            state.transition_phase(WorkloadPhase::Unknown, now);
            for (phase, elapsed) in steps {
                now += elapsed;
                state.transition_phase(WorkloadPhase::from_raw(phase), now);
            }
            prop_assert_eq!(state.phase_time_ns.total_ns(), now - 1);
            let shares: f64 = WorkloadPhase::ALL.iter().map(|p| state.phase_time_ns.phase_fraction(*p)).sum();
            prop_assert!((shares - 1.0).abs() < 1e-9);
        }
    }
}
