//! The state of all observed processes at one moment.
//!
//! The observer publishes one [`Snapshot`] after another; every reader works on one of them. A process is described by what
//! all processes have in common and by one part per probe. The part of a probe is defined in the file with the probe's
//! name. On the wire the parts are flattened into one JSON object per process. Readers of other versions skip keys that
//! they do not know; a key that is missing takes its default. Fields marked `skip` are not serialised: they are only for
//! metrics.

include!("../../../../bpf/probes.rs");

mod ledger;
mod ledger_wire;
mod process;
mod wire;

/// Declares the parts of a process that probes describe.
macro_rules! declare_probe_snapshots {
    (all { $($all:tt)* } process { $($process:tt)* } thread { $($thread:tt)* }
     snapshot { $($part:ident: $state:ident => $snapshot:ident,)* }
     $($rest:tt)*) => {
        $(mod $part;)*
        $(pub use $part::*;)*

        /// The parts of a process that probes describe.
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
        #[serde(default)]
        #[allow(missing_docs)] // documented as parts
        pub struct ProbeSnapshots {
            $(#[serde(flatten)]
            pub $part: $snapshot,)*
        }
    };
}
for_each_probe!(declare_probe_snapshots);

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use ledger::{
    AttachState, FunctionEntry, Ledger, LibraryFile, MappingProcess, PROC_START_TIME_UNIT_NS,
    RefusalCause, RefusedFile, RefusedFiles,
};
pub use process::{
    FunctionCalls, ObservingCost, PhaseSnapshot, ProcessSnapshot, Role, StepSnapshot,
};
pub use wire::{SNAPSHOT_FORMAT, ZERNEL_VERSION, is_snapshot_late, late_snapshot_problem};

use crate::aggregation::{AggregatedMetrics, LatencyHistogram};
use crate::gpu::{GpuFacts, ProcessGpuMemory};
use crate::identity::Identity;

/// Durations that a snapshot shares with the observer, which copies them before it adds to them.
pub type SharedHistogram = Arc<LatencyHistogram>;

/// The processes that a reader may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// All processes, and the figures of the machine.
    All,
    /// The processes of the user with this id.
    User(u32),
    /// The processes of a Kubernetes pod.
    Pod(PodUid),
    /// No process: only figures of the machine and of the observer, and sums over all processes. Nothing in the scope
    /// `Machine` names a process, user, cgroup or job.
    Machine,
}

impl Scope {
    /// Whether a process of this identity is within the scope. A process without an identity belongs to no user.
    #[must_use]
    pub fn contains_process(self, identity: Option<&Identity>) -> bool {
        match self {
            Self::Pod(own) => {
                let identity = identity.filter(|identity| identity.pod_is_certain);
                let pod = identity.and_then(|identity| identity.pod_uid.as_deref());
                pod.and_then(PodUid::parse) == Some(own)
            }
            _ => self.contains_user(identity.map(|identity| identity.uid)),
        }
    }

    /// Whether all processes of this user are within the scope. A user may have processes in several pods.
    #[must_use]
    pub fn contains_user(self, uid: Option<u32>) -> bool {
        match self {
            Self::All => true,
            Self::User(own) => uid == Some(own),
            Self::Pod(_) | Self::Machine => false,
        }
    }

    /// Whether sums without a pid count the processes of this user.
    #[must_use]
    pub fn counts_user_in_sums(self, uid: Option<u32>) -> bool {
        self == Self::Machine || self.contains_user(uid)
    }

    /// Whether figures of the machine and of the observer are within the scope.
    #[must_use]
    pub fn has_machine(self) -> bool {
        matches!(self, Self::All | Self::Machine)
    }
}

/// UID of a Kubernetes pod: 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PodUid(u128);

impl PodUid {
    /// Parses a UID, with or without separators.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits: String = text.chars().filter(|it| !matches!(it, '-' | '_')).collect();
        let is_uid = digits.len() == 32 && digits.bytes().all(|it| it.is_ascii_hexdigit());
        let number = is_uid.then(|| u128::from_str_radix(&digits, 16).ok());
        number.flatten().map(Self)
    }
}

/// Everything that was observed up to one moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// The observed processes, including those that exited a short while ago.
    pub observed: Vec<ProcessSnapshot>,
    /// Processes that exited while other ranks still hold a communicator with them.
    pub gone_ranks: Vec<ProcessSnapshot>,
    /// The functions that are sampled now.
    pub sampled: Vec<String>,
    /// How probes are attached.
    pub rung: String,
    /// Problems that make the numbers incomplete, one sentence each.
    pub problems: Vec<String>,
    /// Time that a probed call costs its thread.
    pub call_cost_seconds: f64,
    /// Path of the pinned map in which a scheduler finds the states of tasks.
    pub shared_state: TaskStateMapPath,
    /// Age of the snapshot when it was serialised; 0 in the observer's own process.
    #[serde(skip_serializing)]
    pub age_seconds: f64,
    /// When the snapshot was taken, in milliseconds since 1970.
    #[serde(skip)]
    pub taken_unix_ms: u64,
    /// When the snapshot was taken, in nanoseconds of CLOCK_MONOTONIC.
    #[serde(skip)]
    pub taken_ns: u64,
    /// The GPUs of the machine.
    #[serde(skip)]
    pub gpus: Vec<GpuFacts>,
    /// GPU memory of every process of the machine, as NVML reports it.
    #[serde(skip)]
    pub gpu_processes: Vec<ProcessGpuMemory>,
    /// The observer's own figures.
    #[serde(skip)]
    pub observer: ObserverSnapshot,
    /// Durations of collectives of processes that are no longer listed.
    #[serde(skip)]
    pub exited_ranks: Vec<ExitedRankTimes>,
    /// Which functions are probed in which file.
    #[serde(skip)]
    pub ledger: Ledger,
}

/// Path of the pinned map in which a scheduler finds the states of tasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskStateMapPath {
    /// The pinned BPF map.
    Path(PathBuf),
    /// Why there is none.
    Missing(String),
}

impl Default for TaskStateMapPath {
    fn default() -> Self {
        Self::Missing(String::new())
    }
}

/// The observer's own figures.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ObserverSnapshot {
    /// Whether all probes are detached, by request or because they cost too much.
    pub is_off: bool,
    /// Number of threads of the contended calibration.
    pub calibration_threads: usize,
    /// Time that a probed call costs its thread while `calibration_threads` threads call at once.
    pub contended_call_cost_seconds: f64,
    /// Sampling windows so far.
    pub windows: u64,
    /// Events that the kernel had no room for, by cause.
    pub lost: Vec<(&'static str, u64)>,
    /// Library files with at least one probe attached.
    pub files: usize,
    /// Library mappings that no event announced and a scan found.
    pub mappings_found_by_scan: u64,
}

impl Snapshot {
    /// The processes within a scope.
    pub fn processes_in_scope(&self, scope: Scope) -> impl Iterator<Item = &ProcessSnapshot> {
        let observed = self.observed.iter();
        observed.filter(move |process| scope.contains_process(process.identity.as_ref()))
    }

    /// The metrics that every source has, of the processes within a scope.
    #[must_use]
    pub fn to_aggregated_metrics(&self, scope: Scope) -> AggregatedMetrics {
        let mut metrics = AggregatedMetrics {
            last_update_ms: self.taken_unix_ms,
            ..AggregatedMetrics::default()
        };
        let copy = |histogram: &SharedHistogram| LatencyHistogram::clone(histogram);
        for process in self.processes_in_scope(scope) {
            let pid = process.pid;
            let probes = &process.probes;
            for device in &probes.gpu_mem.memory {
                let key = format!("{pid}:{}", device.gpu_label());
                metrics.gpu_memory.insert(key, device.to_gpu_mem_metrics());
            }
            let waits = [
                (&mut metrics.cuda_latency, &probes.cuda_trace.launch_times),
                (&mut metrics.dataloader_wait, &probes.dataload.wait_times),
                (&mut metrics.dist_sync, &probes.dist_sync.wait_times),
            ];
            for (by_pid, times) in waits {
                by_pid.extend(times.as_ref().map(|times| (pid, copy(times))));
            }
        }
        metrics.nccl_duration = self.until_sync_times(scope);
        metrics
    }
}
