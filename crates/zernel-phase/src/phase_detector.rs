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
mod tests;
