//! What of a daemon's snapshot commands use.
//!
//! A daemon of another version may leave things out: what is not there is `None` or empty.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use zernel_phase::task_state::{PhaseTimeAccumulator, WorkloadPhase};

/// The state of a moment.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Snapshot {
    pub(crate) observed: Vec<Process>,
    /// Processes that have ended while others still hold a communicator with them.
    pub(crate) gone_ranks: Vec<Process>,
}

/// An observed process.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) identity: Option<Identity>,
    pub(crate) role: String,
    pub(crate) ended_seconds_ago: Option<f64>,
    pub(crate) phase: Option<WorkloadPhase>,
    pub(crate) phase_times: Option<PhaseTimeAccumulator>,
    pub(crate) memory_by_caller: Vec<Memory>,
    pub(crate) communicators: Vec<Communicator>,
    pub(crate) cost: Cost,
    /// The thread that drives its steps.
    pub(crate) step_thread: Option<u32>,
    /// How it ended, if by itself.
    pub(crate) exit_code: Option<u8>,
    /// What ended it, if not.
    pub(crate) signal: Option<u8>,
    /// Whether it was seen from its first call on.
    pub(crate) complete: bool,
    /// By the name of the function.
    pub(crate) calls: BTreeMap<String, IgnoredAny>,
}

/// Who it is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Identity {
    pub(crate) comm: String,
    pub(crate) job: Option<String>,
    pub(crate) rank: Option<u32>,
    pub(crate) start_time: Option<u64>,
    pub(crate) world_size: Option<u32>,
}

/// GPU memory that it holds.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Memory {
    pub(crate) gpu_id: u32,
}

/// What it pays for being observed.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Cost {
    pub(crate) busiest_thread_ratio: f64,
}

/// How far it got on a communicator.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Communicator {
    pub(crate) communicator: String,
    pub(crate) rank: Option<u32>,
    pub(crate) ranks: Option<u32>,
    pub(crate) sequence: u64,
    pub(crate) op: String,
    pub(crate) bytes: u64,
    pub(crate) in_call: bool,
    pub(crate) entered_seconds_ago: Option<f64>,
    /// Between the entries of two successive collectives, so far.
    pub(crate) longest_gap_seconds: f64,
    /// The last operations, the last one first.
    pub(crate) last_ops: Vec<String>,
    /// Whether the call that makes it has not returned.
    pub(crate) is_being_made: bool,
}

impl Process {
    /// Whether it is there, and no loader.
    pub(crate) fn is_trainer(&self) -> bool {
        self.role == "trainer" && self.ended_seconds_ago.is_none()
    }

    /// Whether it is one of several, or talks to others.
    pub(crate) fn is_rank(&self) -> bool {
        let calls_nccl = self.calls.keys().any(|name| name.starts_with("nccl"));
        self.is_trainer() && (self.rank().is_some() || calls_nccl)
    }

    pub(crate) fn comm(&self) -> &str {
        self.identity.as_ref().map_or("", |identity| &identity.comm)
    }

    pub(crate) fn job(&self) -> Option<&str> {
        self.identity.as_ref()?.job.as_deref()
    }

    pub(crate) fn rank(&self) -> Option<u32> {
        self.identity.as_ref()?.rank
    }
}
