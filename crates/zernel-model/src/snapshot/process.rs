//! One observed process.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};
use zernel_phase::steps::{Step, StepMark};
use zernel_phase::task_state::{PhaseTimeAccumulator, WorkloadPhase};

use super::ProbeSnapshots;
use crate::identity::Identity;

/// The most steps of a process that are serialised.
const MAX_SERIALISED_STEPS: usize = 32;

/// One observed process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessSnapshot {
    /// Process id.
    pub pid: u32,
    /// Start time in nanoseconds since boot. Pid and start time together are unique.
    pub start_ns: u64,
    /// Identity of the process; `None` if the process exited before its identity was read.
    pub identity: Option<Identity>,
    /// Whether the process trains or loads data.
    pub role: Role,
    /// Pid of the trainer that the process loads data for; `None` if it is no loader.
    pub loads_for: Option<u32>,
    /// Whether the process was observed from its first CUDA call on.
    pub complete: bool,
    /// If not, since when.
    pub since_seconds_ago: Option<f64>,
    /// Time of the first event of the process's current program, in nanoseconds of CLOCK_MONOTONIC. After an exec it
    /// is another time.
    pub first_seen_ns: u64,
    /// Time from the first event of the process to its exit, or to now.
    pub observed_seconds: f64,
    /// The part of the observed time in which calls of the process were not observed.
    pub not_observed_seconds: f64,
    /// Time since the process exited; `None` while it runs.
    pub ended_seconds_ago: Option<f64>,
    /// Exit code of a rank that exited by itself.
    pub exit_code: Option<u8>,
    /// Signal that killed a rank.
    pub signal: Option<u8>,
    /// Phases of its training thread.
    #[serde(flatten)]
    pub phases: PhaseSnapshot,
    /// Steps of its training loop.
    pub steps: StepSnapshot,
    /// What the probes describe.
    #[serde(flatten)]
    pub probes: ProbeSnapshots,
    /// Counters that are exported as they are: the name of the metric, and the value.
    #[serde(skip)]
    pub counters: Vec<(&'static str, f64)>,
    /// Calls of the process by probed function.
    pub calls: BTreeMap<Cow<'static, str>, FunctionCalls>,
    /// Overhead of being observed.
    pub cost: ObservingCost,
    /// Whether a function that the process calls is or was sampled.
    pub sampled: bool,
    /// Whether the sampled rule decides the phases of the process, because its calls are not probed.
    pub sampled_phases: bool,
}

/// Whether a process trains or loads data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The process trains, or may begin to train.
    Trainer,
    /// The process loads data for a trainer.
    Loader,
    /// A role that this version does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Phases of the training thread of a process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PhaseSnapshot {
    /// Current phase; `None` without a training thread.
    pub phase: Option<WorkloadPhase>,
    /// Thread id of the training thread.
    pub step_thread: Option<u32>,
    /// Time that the process has spent in each phase so far.
    pub phase_times: Option<PhaseTimeAccumulator>,
}

/// Steps of a training loop.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StepSnapshot {
    /// The step mark that separates steps; `None` until it is known.
    pub boundary: Option<StepMark>,
    /// Number of steps.
    pub count: u64,
    /// How often marks were lost. If marks were lost, `count` is a lower bound.
    pub gaps: u64,
    /// How often the count restarted because a better boundary was found.
    pub restarts: u32,
    /// The latest steps, oldest first.
    #[serde(serialize_with = "serialise_latest_steps")]
    pub recent: Vec<Step>,
}

fn serialise_latest_steps<S: Serializer>(steps: &[Step], serializer: S) -> Result<S::Ok, S::Error> {
    let skipped = steps.len().saturating_sub(MAX_SERIALISED_STEPS);
    steps[skipped..].serialize(serializer)
}

/// Calls of one function.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FunctionCalls {
    /// Calls that returned; an estimate if the function was sampled.
    pub calls: u64,
    /// Calls that returned an error.
    pub failed: u64,
    /// Bytes that the calls without an error moved or allocated.
    pub bytes: u64,
    /// Half width of the 95 % interval of `calls`; `None` if the function was sampled in fewer than two windows.
    pub error: Option<u64>,
}

/// Overhead of observing one process.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ObservingCost {
    /// Share of its own time that the busiest thread of the process spends in probes.
    pub busiest_thread_ratio: f64,
    /// Time that all threads have spent in probes.
    pub seconds: f64,
}

impl ProcessSnapshot {
    /// Whether the process runs and is not a loader.
    #[must_use]
    pub fn is_trainer(&self) -> bool {
        self.role == Role::Trainer && self.ended_seconds_ago.is_none()
    }

    /// Whether the process is a running trainer that has a rank or calls NCCL.
    #[must_use]
    pub fn is_rank(&self) -> bool {
        let calls_nccl = self.calls.keys().any(|name| name.starts_with("nccl"));
        self.is_trainer() && (self.rank().is_some() || calls_nccl)
    }

    /// Name of its main thread; empty if unknown.
    #[must_use]
    pub fn comm(&self) -> &str {
        self.identity.as_ref().map_or("", |identity| &identity.comm)
    }

    /// Name of its job.
    #[must_use]
    pub fn job(&self) -> Option<&str> {
        self.identity.as_ref()?.job.as_deref()
    }

    /// The value of the counter with this metric name.
    #[must_use]
    pub fn find_counter(&self, name: &str) -> Option<f64> {
        let mut counters = self.counters.iter();
        counters
            .find(|(it, _)| *it == name)
            .map(|(_, value)| *value)
    }

    /// Rank of the process in its job.
    #[must_use]
    pub fn rank(&self) -> Option<u32> {
        self.identity.as_ref()?.rank
    }
}

impl StepSnapshot {
    /// Median of the latest steps.
    #[must_use]
    pub fn median_seconds(&self) -> Option<f64> {
        zernel_phase::steps::median_ns(&self.recent).map(|ns| ns as f64 / 1e9)
    }
}
