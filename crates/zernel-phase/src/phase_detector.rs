//! The sampled rule: a phase from a periodic sample of a task's state, debounced per pid.
//!
//! It needs no probe on the task. Where probes are attached, [`PhaseTracker`](crate::PhaseTracker)
//! knows better.

use std::fmt::Display;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::recent_pids::RecentPids;
use crate::task_state::{WorkloadPhase, ZernelTaskState};

/// How many tasks a detector follows unless told otherwise.
pub const DEFAULT_MAX_TASKS: usize = 1 << 17;

/// The thresholds of the sampled rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PhaseDetectorConfig {
    /// Above this share of I/O wait a task is loading data, 0–1.
    pub io_wait_threshold: f32,
    /// A CPU burst shorter than this, after a GPU sync, is an optimizer step.
    pub optimizer_burst_max_ns: u64,
    /// Below this utilisation the GPU is idle, 0–100.
    pub gpu_idle_threshold: u8,
    /// Above this utilisation the GPU is busy, 0–100.
    pub gpu_active_threshold: u8,
    /// Equal results in a row before one is reported; 0 and 1 report at once.
    pub phase_stability_count: u32,
    /// Whether collectives are detected at all.
    pub nccl_detection_enabled: bool,
}

impl Default for PhaseDetectorConfig {
    fn default() -> Self {
        Self {
            io_wait_threshold: 0.3,
            optimizer_burst_max_ns: 5_000_000,
            gpu_idle_threshold: 10,
            gpu_active_threshold: 80,
            phase_stability_count: 3,
            nccl_detection_enabled: false,
        }
    }
}

/// A setting that makes no sense: which one, its value, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field} is {value}, but must be {allowed}")]
pub struct ConfigError {
    /// The field's name.
    pub field: &'static str,
    /// The value it has.
    pub value: String,
    /// The values it may have.
    pub allowed: String,
}

impl ConfigError {
    pub(crate) fn new(
        field: &'static str,
        value: &dyn Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self {
            field,
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }
}

impl PhaseDetectorConfig {
    /// Refuses thresholds that are not numbers, out of range, or contradict each other.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(0.0..=1.0).contains(&self.io_wait_threshold) {
            return Err(ConfigError::new(
                "io_wait_threshold",
                &self.io_wait_threshold,
                "a number from 0 to 1",
            ));
        }
        for (field, percent) in [
            ("gpu_idle_threshold", self.gpu_idle_threshold),
            ("gpu_active_threshold", self.gpu_active_threshold),
        ] {
            if percent > 100 {
                return Err(ConfigError::new(field, &percent, "from 0 to 100"));
            }
        }
        if self.gpu_idle_threshold >= self.gpu_active_threshold {
            return Err(ConfigError::new(
                "gpu_idle_threshold",
                &self.gpu_idle_threshold,
                format!(
                    "below gpu_active_threshold, which is {}",
                    self.gpu_active_threshold
                ),
            ));
        }
        Ok(())
    }
}

/// The rule itself, first match wins. Total: any state and any configuration give a phase.
///
/// `bpf/phase_rule.h` holds the same rule for the kernel.
#[must_use]
pub fn classify(config: &PhaseDetectorConfig, state: &ZernelTaskState) -> WorkloadPhase {
    let gpu = state.gpu_utilization;
    let burst_ns = state.cpu_burst_duration_ns;
    let gpu_idle = gpu < config.gpu_idle_threshold;
    let gpu_active = gpu > config.gpu_active_threshold;
    let gpu_between = gpu > config.gpu_idle_threshold && gpu < config.gpu_active_threshold;

    if !state.is_ml_process {
        WorkloadPhase::Unknown
    } else if config.nccl_detection_enabled && state.nccl_active && state.futex_wait_count > 0 {
        WorkloadPhase::NcclCollective
    } else if state.io_wait_fraction > config.io_wait_threshold && gpu_idle {
        WorkloadPhase::DataLoading
    } else if gpu_active && burst_ns == 0 {
        WorkloadPhase::GpuCompute
    } else if burst_ns > 0 && burst_ns < config.optimizer_burst_max_ns && state.last_gpu_sync_ns > 0
    {
        WorkloadPhase::OptimizerStep
    } else if state.io_wait_fraction > config.io_wait_threshold / 2.0 && gpu_between {
        WorkloadPhase::DataLoading
    } else {
        WorkloadPhase::Unknown
    }
}

/// The last raw result of a task and how often in a row it came.
#[derive(Debug, Clone, Copy)]
struct Streak {
    raw: WorkloadPhase,
    length: u32,
}

/// Detects phases from samples, debounced per pid.
#[derive(Debug, Clone)]
pub struct PhaseDetector {
    config: PhaseDetectorConfig,
    streaks: RecentPids<Streak>,
    /// How many reported results differed from the state's current phase.
    pub transition_count: u64,
}

impl PhaseDetector {
    /// A detector that takes `config` as it is; [`PhaseDetectorConfig::validate`] tells whether it
    /// makes sense.
    #[must_use]
    pub fn new(config: PhaseDetectorConfig) -> Self {
        Self::with_max_tasks(config, DEFAULT_MAX_TASKS)
    }

    /// A detector that can follow `max_tasks` tasks at a time. With more than that, up to twice as many
    /// are remembered, then those not seen for longest are forgotten; such a task only has to prove its
    /// phase again.
    #[must_use]
    pub fn with_max_tasks(config: PhaseDetectorConfig, max_tasks: usize) -> Self {
        Self {
            config,
            streaks: RecentPids::with_capacity(max_tasks),
            transition_count: 0,
        }
    }

    /// The phase to report for `state`: a new one only after it came often enough in a row.
    ///
    /// A task of no ML process is [`Unknown`](WorkloadPhase::Unknown) at once and takes no memory.
    pub fn detect(&mut self, state: &ZernelTaskState) -> WorkloadPhase {
        let raw = classify(&self.config, state);
        let reported = if !state.is_ml_process {
            self.streaks.remove(state.pid);
            raw
        } else if self.config.phase_stability_count <= 1 || self.is_stable(state.pid, raw) {
            raw
        } else {
            state.current_phase
        };
        if reported != state.current_phase {
            self.transition_count = self.transition_count.saturating_add(1);
        }
        reported
    }

    /// Forgets a task that has ended.
    pub fn remove_task(&mut self, pid: u32) {
        self.streaks.remove(pid);
    }

    /// How many tasks are remembered.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.streaks.len()
    }

    /// How many tasks were forgotten to stay within the bound on memory.
    #[must_use]
    pub fn eviction_count(&self) -> u64 {
        self.streaks.evicted()
    }

    fn is_stable(&mut self, pid: u32, raw: WorkloadPhase) -> bool {
        let streak = self
            .streaks
            .get_or_insert_with(pid, || Streak { raw, length: 0 });
        if streak.raw != raw {
            *streak = Streak { raw, length: 0 };
        }
        streak.length = streak.length.saturating_add(1);
        streak.length >= self.config.phase_stability_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use WorkloadPhase::*;
    use proptest::prelude::*;

    /// An ML task that the default rule finds computing on the GPU.
    fn computing(pid: u32) -> ZernelTaskState {
        ZernelTaskState {
            is_ml_process: true,
            gpu_utilization: 95,
            ..ZernelTaskState::new(pid)
        }
    }

    fn undebounced() -> PhaseDetectorConfig {
        PhaseDetectorConfig {
            phase_stability_count: 0,
            nccl_detection_enabled: true,
            ..Default::default()
        }
    }

    #[test]
    fn each_row_of_the_rule_gives_its_phase() {
        let ml = || ZernelTaskState {
            is_ml_process: true,
            ..ZernelTaskState::new(1)
        };
        let cases = [
            (
                ZernelTaskState {
                    is_ml_process: false,
                    ..computing(1)
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    nccl_active: true,
                    futex_wait_count: 1,
                    ..computing(1)
                },
                NcclCollective,
            ),
            (
                ZernelTaskState {
                    nccl_active: true,
                    ..computing(1)
                },
                GpuCompute,
            ),
            (
                ZernelTaskState {
                    io_wait_fraction: 0.31,
                    gpu_utilization: 9,
                    ..ml()
                },
                DataLoading,
            ),
            (
                ZernelTaskState {
                    io_wait_fraction: 0.3,
                    gpu_utilization: 9,
                    ..ml()
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    io_wait_fraction: 0.31,
                    gpu_utilization: 10,
                    ..ml()
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    gpu_utilization: 81,
                    ..ml()
                },
                GpuCompute,
            ),
            (
                ZernelTaskState {
                    gpu_utilization: 80,
                    ..ml()
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    cpu_burst_duration_ns: 1,
                    ..computing(1)
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    cpu_burst_duration_ns: 4_999_999,
                    last_gpu_sync_ns: 1,
                    ..ml()
                },
                OptimizerStep,
            ),
            (
                ZernelTaskState {
                    cpu_burst_duration_ns: 5_000_000,
                    last_gpu_sync_ns: 1,
                    ..ml()
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    cpu_burst_duration_ns: 1,
                    ..ml()
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    io_wait_fraction: 0.16,
                    gpu_utilization: 11,
                    ..ml()
                },
                DataLoading,
            ),
            (
                ZernelTaskState {
                    io_wait_fraction: 0.16,
                    gpu_utilization: 80,
                    ..ml()
                },
                Unknown,
            ),
            (
                ZernelTaskState {
                    io_wait_fraction: 0.15,
                    gpu_utilization: 11,
                    ..ml()
                },
                Unknown,
            ),
        ];
        for (state, expected) in cases {
            assert_eq!(classify(&undebounced(), &state), expected, "{state:?}");
        }
    }

    #[test]
    fn collectives_are_detected_only_on_request() {
        let state = ZernelTaskState {
            nccl_active: true,
            futex_wait_count: 9,
            ..computing(1)
        };
        assert_eq!(
            classify(&PhaseDetectorConfig::default(), &state),
            GpuCompute
        );
    }

    #[test]
    fn a_phase_is_reported_after_three_equal_results() {
        let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
        let state = computing(1);
        assert_eq!(detector.detect(&state), Unknown);
        assert_eq!(detector.detect(&state), Unknown);
        assert_eq!(detector.transition_count, 0);
        assert_eq!(detector.detect(&state), GpuCompute);
        assert_eq!(detector.transition_count, 1);
    }

    #[test]
    fn a_different_result_restarts_the_streak_of_its_pid_only() {
        let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
        let (state, other) = (computing(1), computing(2));
        let idle = ZernelTaskState {
            gpu_utilization: 50,
            ..computing(1)
        };
        for sample in [&state, &state, &other, &idle, &state, &state, &other] {
            assert_eq!(detector.detect(sample), Unknown);
        }
        assert_eq!(detector.detect(&state), GpuCompute);
        assert_eq!(detector.detect(&other), GpuCompute);
    }

    #[test]
    fn removing_a_task_resets_its_streak() {
        let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
        let state = computing(1);
        detector.detect(&state);
        detector.detect(&state);
        detector.remove_task(1);
        assert_eq!(detector.task_count(), 0);
        assert_eq!(detector.detect(&state), Unknown);
    }

    #[test]
    fn a_stability_count_of_zero_or_one_turns_debouncing_off() {
        for phase_stability_count in [0, 1] {
            let mut detector = PhaseDetector::new(PhaseDetectorConfig {
                phase_stability_count,
                ..Default::default()
            });
            assert_eq!(detector.detect(&computing(1)), GpuCompute);
            assert_eq!(detector.task_count(), 0);
        }
    }

    #[test]
    fn a_process_that_is_no_longer_ml_is_unknown_at_once() {
        let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
        let state = ZernelTaskState {
            is_ml_process: false,
            current_phase: GpuCompute,
            ..computing(1)
        };
        assert_eq!(detector.detect(&state), Unknown);
        assert_eq!((detector.transition_count, detector.task_count()), (1, 0));
    }

    #[test]
    fn memory_is_bounded_for_any_number_of_pids() {
        let mut detector = PhaseDetector::with_max_tasks(PhaseDetectorConfig::default(), 100);
        for pid in 0..10_000 {
            detector.detect(&computing(pid));
            assert!(detector.task_count() <= 200);
        }
        assert_eq!(
            detector.eviction_count() + detector.task_count() as u64,
            10_000
        );
        for pid in 0..10_000 {
            detector.remove_task(pid);
        }
        assert_eq!(detector.task_count(), 0);
    }

    #[test]
    fn validation_errors_name_the_setting() {
        let default = PhaseDetectorConfig::default;
        assert_eq!(default().validate(), Ok(()));
        for (config, message) in [
            (
                PhaseDetectorConfig {
                    io_wait_threshold: f32::NAN,
                    ..default()
                },
                "io_wait_threshold is NaN, but must be a number from 0 to 1",
            ),
            (
                PhaseDetectorConfig {
                    io_wait_threshold: 1.5,
                    ..default()
                },
                "io_wait_threshold is 1.5, but must be a number from 0 to 1",
            ),
            (
                PhaseDetectorConfig {
                    io_wait_threshold: -0.1,
                    ..default()
                },
                "io_wait_threshold is -0.1, but must be a number from 0 to 1",
            ),
            (
                PhaseDetectorConfig {
                    gpu_active_threshold: 101,
                    ..default()
                },
                "gpu_active_threshold is 101, but must be from 0 to 100",
            ),
            (
                PhaseDetectorConfig {
                    gpu_idle_threshold: 200,
                    ..default()
                },
                "gpu_idle_threshold is 200, but must be from 0 to 100",
            ),
            (
                PhaseDetectorConfig {
                    gpu_idle_threshold: 80,
                    ..default()
                },
                "gpu_idle_threshold is 80, but must be below gpu_active_threshold, which is 80",
            ),
        ] {
            assert_eq!(config.validate().unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn missing_keys_get_defaults_and_unknown_keys_are_refused() {
        let config: PhaseDetectorConfig =
            serde_json::from_str(r#"{"nccl_detection_enabled": true}"#).unwrap();
        assert_eq!(config.gpu_active_threshold, 80);
        assert!(config.nccl_detection_enabled);
        let error = serde_json::from_str::<PhaseDetectorConfig>(r#"{"gpu_ative": 1}"#).unwrap_err();
        assert!(error.to_string().contains("gpu_ative"), "{error}");
    }

    fn any_state() -> impl Strategy<Value = ZernelTaskState> {
        (
            (0_u32..4, any::<bool>(), 0_u8..5, any::<u8>(), any::<u64>()),
            (0_u64..10_000_000, any::<f32>(), any::<bool>(), 0_u32..3),
        )
            .prop_map(|((pid, ml, phase, gpu, sync), (burst, io, nccl, futex))| {
                ZernelTaskState {
                    is_ml_process: ml,
                    current_phase: WorkloadPhase::from_raw(phase),
                    gpu_utilization: gpu,
                    last_gpu_sync_ns: sync,
                    cpu_burst_duration_ns: burst,
                    io_wait_fraction: io,
                    nccl_active: nccl,
                    futex_wait_count: futex,
                    ..ZernelTaskState::new(pid)
                }
            })
    }

    proptest! {
        /// The detector against its definition, spelled out over the whole history.
        #[test]
        fn a_result_is_reported_when_the_last_n_raw_results_agree(
            stability in 0_u32..5,
            states in prop::collection::vec(any_state(), 0..60),
        ) {
            let config = PhaseDetectorConfig {
                phase_stability_count: stability,
                nccl_detection_enabled: true,
                ..Default::default()
            };
            let mut detector = PhaseDetector::new(config.clone());
            let mut history: Vec<(u32, bool, WorkloadPhase)> = Vec::new();
            let mut transitions = 0;
            for state in &states {
                let raw = classify(&config, state);
                history.push((state.pid, state.is_ml_process, raw));
                let row = history.iter().rev().filter(|h| h.0 == state.pid)
                    .take_while(|h| h.1 == state.is_ml_process && h.2 == raw).count();
                let expected = if !state.is_ml_process {
                    Unknown
                } else if row >= stability as usize {
                    raw
                } else {
                    state.current_phase
                };
                transitions += u64::from(expected != state.current_phase);
                prop_assert_eq!(detector.detect(state), expected);
            }
            prop_assert_eq!(detector.transition_count, transitions);
        }
    }
}
