//! The sampled rule: a phase from periodic samples of a task's state, debounced per pid.
//!
//! It needs no probe on the task. Where probes are attached, [`PhaseTracker`](crate::PhaseTracker)
//! is more accurate.

use std::fmt::Display;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::recent_pids::RecentPids;
use crate::task_state::{WorkloadPhase, ZernelTaskState};

/// Default number of tasks that a detector can follow.
pub const DEFAULT_MAX_TASKS: usize = 1 << 17;

/// The thresholds of the sampled rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PhaseDetectorConfig {
    /// Share of I/O wait (0–1) above which a task is loading data.
    pub io_wait_threshold: f32,
    /// Length below which a CPU burst after a GPU sync is an optimizer step.
    pub optimizer_burst_max_ns: u64,
    /// GPU utilisation (0–100) below which the GPU is idle.
    pub gpu_idle_threshold: u8,
    /// GPU utilisation (0–100) above which the GPU is busy.
    pub gpu_active_threshold: u8,
    /// Number of equal results in a row before a phase is reported; 0 and 1 report at once.
    pub phase_stability_count: u32,
    /// Whether NCCL collectives are detected.
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

/// An invalid setting: its name, its value and the allowed values.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field} is {value}, but must be {allowed}")]
pub struct ConfigError {
    /// Name of the setting.
    pub field: &'static str,
    /// The invalid value.
    pub value: String,
    /// The allowed values.
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
    /// Returns an error if a threshold is NaN, out of range, or in conflict with another.
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

/// Returns the phase of a sampled state, without debouncing. The first matching condition decides.
///
/// Any state and any configuration give a phase. `bpf/phase_rule.h` implements the same rule for
/// the kernel.
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

/// The latest raw result of a task and the number of times in a row it occurred.
#[derive(Debug, Clone, Copy)]
struct Streak {
    raw_phase: WorkloadPhase,
    length: u32,
}

/// Detects phases from samples, debounced per pid.
#[derive(Debug, Clone)]
pub struct PhaseDetector {
    config: PhaseDetectorConfig,
    streaks: RecentPids<Streak>,
    /// Number of reported results that differed from the state's current phase.
    pub transition_count: u64,
}

impl PhaseDetector {
    /// Creates a detector without checking `config`; see [`PhaseDetectorConfig::validate`].
    #[must_use]
    pub fn new(config: PhaseDetectorConfig) -> Self {
        Self::with_max_tasks(config, DEFAULT_MAX_TASKS)
    }

    /// Creates a detector that can follow `max_tasks` tasks at a time.
    ///
    /// Up to twice as many are remembered; beyond that the least recently sampled tasks are
    /// evicted. An evicted task only starts a new streak.
    #[must_use]
    pub fn with_max_tasks(config: PhaseDetectorConfig, max_tasks: usize) -> Self {
        Self {
            config,
            streaks: RecentPids::with_capacity(max_tasks),
            transition_count: 0,
        }
    }

    /// Returns the phase to report for `state`. A new phase is reported after
    /// `phase_stability_count` equal results in a row.
    ///
    /// A task outside an ML process is [`Unknown`](WorkloadPhase::Unknown) at once and takes no
    /// memory.
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

    /// Removes a task that has exited.
    pub fn remove_task(&mut self, pid: u32) {
        self.streaks.remove(pid);
    }

    /// Number of remembered tasks.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.streaks.len()
    }

    /// Number of tasks evicted to bound the memory.
    #[must_use]
    pub fn eviction_count(&self) -> u64 {
        self.streaks.eviction_count()
    }

    fn is_stable(&mut self, pid: u32, raw: WorkloadPhase) -> bool {
        let streak = self.streaks.get_or_insert_with(pid, || Streak {
            raw_phase: raw,
            length: 0,
        });
        if streak.raw_phase != raw {
            *streak = Streak {
                raw_phase: raw,
                length: 0,
            };
        }
        streak.length = streak.length.saturating_add(1);
        streak.length >= self.config.phase_stability_count
    }
}

#[cfg(test)]
mod tests;
