//! The state of a moment, as live clients get it: plain numbers, in seconds and bytes.
//!
//! What is serialised here is read by programs of other versions. What they do not know of they skip; what is
//! not there is empty or `None`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zernel_phase::steps::{Mark, Step};
use zernel_phase::task_state::{PhaseTimeAccumulator, WorkloadPhase};

use super::metrics::{Told, Whose, by_caller, is_of};
use super::process::{self, ObservedProcess, Seen};
use super::{End, GoneRank, Observer, monotonic_ns};
use crate::aggregation::AggregatedMetrics;
use crate::identity::Identity;
use crate::probes::{BlockedBy, Counts, Family, Operation};

/// How many steps go over the wire.
const STEPS: usize = 32;

/// Declares what is told: public fields, each optional when read.
macro_rules! told {
    ($($(#[$doc:meta])* struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
    )*};
}

told! {
    /// What clients use of a snapshot; it holds more, for those who draw it.
    struct Snapshot {
        /// All that were seen, those that ended a short while ago included.
        observed: Vec<Process>,
        /// Processes that have ended while others still hold a communicator with them.
        gone_ranks: Vec<Process>,
        /// The functions that are sampled now.
        sampled: Vec<String>,
        /// How functions are attached to.
        rung: String,
        /// What makes the numbers less than they should be.
        problems: Vec<String>,
        /// What a probed call costs its thread.
        call_cost_seconds: f64,
    }

    /// An observed process.
    struct Process {
        /// Its pid.
        pid: u32,
        /// When it started, in nanoseconds since boot: with the pid, who it is for ever.
        start_ns: u64,
        /// Who it is, if it lived long enough to be asked.
        identity: Option<Identity>,
        /// What it does.
        role: Role,
        /// The pid of the process that it loads data for.
        loads_for: Option<u32>,
        /// Whether it was observed from its first CUDA call on.
        complete: bool,
        /// If not, since when.
        since_seconds_ago: Option<f64>,
        /// When its program was first seen, in nanoseconds of CLOCK_MONOTONIC: with the above, which of those that
        /// it has executed this is.
        first_seen_ns: u64,
        /// From then to its end, or to now.
        observed_seconds: f64,
        /// `None`: it lives.
        ended_seconds_ago: Option<f64>,
        /// How it ended, of ranks that are gone, if by itself.
        exit_code: Option<u8>,
        /// What ended it, if not.
        signal: Option<u8>,
        /// The phase of the thread that drives its steps.
        phase: Option<WorkloadPhase>,
        /// Which thread that is.
        step_thread: Option<u32>,
        /// How long it was in each.
        phase_times: Option<PhaseTimeAccumulator>,
        /// Its training loop.
        steps: Steps,
        /// Waits for data, by what those who load it did meanwhile.
        data_waits: DataWaits,
        /// Waits for other ranks, through whatever library.
        peer_wait_seconds: f64,
        /// In calls that wait for the GPU, whatever it had to do.
        gpu_wait_seconds: f64,
        /// How many such calls there were.
        gpu_waits: u64,
        /// In calls that launch; an estimate, if they were sampled.
        launch_seconds: f64,
        /// Launches of kernels and graphs.
        launches: u64,
        /// By how much `launches` may be off, because they were sampled.
        launches_error: u64,
        /// Launches per step: an estimate if launches were sampled, else the mean of the last steps.
        launches_per_step: Option<f64>,
        /// Half width of the 95 % interval of `launches_per_step`.
        launches_per_step_error: Option<f64>,
        /// Copies between host and device.
        copies: u64,
        /// By how much `copies` may be off, because they were sampled.
        copies_error: u64,
        /// Bytes of these.
        copied_bytes: u64,
        /// What was communicated.
        collectives: Vec<Collective>,
        /// Every function it called.
        calls: BTreeMap<String, Calls>,
        /// The share of the last moment in which its GPUs had something to do, for whomever, as NVML says.
        gpu_utilization: Option<f64>,
        /// GPU memory.
        memory: Vec<Memory>,
        /// GPU memory in use, by who asked for it.
        memory_by_caller: Vec<CallerMemory>,
        /// How far it got on each communicator.
        communicators: Vec<Communicator>,
        /// Time of all its threads on CPUs.
        cpu_seconds: f64,
        /// Time in which its threads could have run, and did not.
        run_delay_seconds: f64,
        /// Time on CPUs of its threads that make calls which are watched.
        calling_cpu_seconds: f64,
        /// Time in which these could have run, and did not.
        calling_run_delay_seconds: f64,
        /// Time in which its threads waited for disk, network or pages.
        fetch_seconds: f64,
        /// What it pays for being observed.
        cost: Cost,
        /// Whether any of its functions is sampled, or was.
        sampled: bool,
    }

    /// The steps of a training loop.
    struct Steps {
        /// What separates them, once that is known.
        boundary: Option<Mark>,
        /// How many there were.
        count: u64,
        /// How often marks of them were missing: then there were at least as many.
        gaps: u64,
        /// How often the count started anew, because something better was found to separate them.
        restarts: u32,
        /// The last ones, oldest first.
        recent: Vec<Step>,
    }

    /// Seconds of waits for data.
    #[derive(Copy)]
    struct DataWaits {
        /// Meanwhile the loaders were on CPUs.
        prepare: f64,
        /// They waited for disk or network.
        fetch: f64,
        /// They could run, and did not.
        sched: f64,
        /// None of these.
        other: f64,
    }

    /// All operations of a kind.
    struct Collective {
        /// NCCL's name of it.
        op: String,
        /// How often.
        calls: u64,
        /// How much in all.
        bytes: u64,
        /// From the call to the end of the wait that shows it done.
        until_sync_median_seconds: Option<f64>,
        /// The same, on average.
        until_sync_mean_seconds: Option<f64>,
    }

    /// Calls of one function.
    struct Calls {
        /// That returned.
        calls: u64,
        /// That returned an error.
        failed: u64,
        /// Bytes that the others were about.
        bytes: u64,
        /// By how much `calls` may be off.
        error: u64,
    }

    /// GPU memory of a process on a GPU.
    struct Memory {
        /// NVML's number of the GPU.
        gpu_id: u32,
        /// What NVML calls it.
        gpu: Option<String>,
        /// In use.
        bytes: u64,
        /// The most that was.
        peak_bytes: u64,
    }

    /// GPU memory that a library asked for.
    struct CallerMemory {
        /// NVML's number of the GPU.
        gpu_id: u32,
        /// The library's name.
        caller: String,
        /// In use.
        bytes: u64,
    }

    /// How far a process got on a communicator.
    struct Communicator {
        /// The same for all its ranks.
        communicator: String,
        /// Which of them it is.
        rank: Option<u32>,
        /// How many there are.
        ranks: Option<u32>,
        /// Collectives entered.
        sequence: u64,
        /// What the last one was.
        op: String,
        /// How much that was about.
        bytes: u64,
        /// Whether the call has not returned.
        in_call: bool,
        /// When it was entered.
        entered_seconds_ago: Option<f64>,
        /// Between the entries of two successive collectives, so far.
        longest_gap_seconds: f64,
        /// The last operations, the last one first.
        last_ops: Vec<String>,
        /// Whether the call that makes it has not returned.
        is_being_made: bool,
    }

    /// What being observed costs.
    #[derive(Copy)]
    struct Cost {
        /// The share of its time that the busiest thread pays.
        busiest_thread_ratio: f64,
        /// What all threads have paid.
        seconds: f64,
    }
}

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It trains, or may.
    Trainer,
    /// It loads data for another.
    Loader,
    /// Whoever told of it knows something that we do not.
    #[default]
    #[serde(other)]
    Unknown,
}

/// All that a snapshot is made of. Making text of it takes a while, in which others may use the observer.
#[derive(Debug)]
pub struct Moment {
    aggregated: AggregatedMetrics,
    shared_state: Result<PathBuf, String>,
    snapshot: Snapshot,
}

/// Written as it is, not by way of a [`Value`], which takes several times the memory and the time.
#[derive(Serialize)]
struct Served<'a> {
    #[serde(flatten)]
    aggregated: Value,
    shared_state: Value,
    #[serde(flatten)]
    snapshot: &'a Snapshot,
}

impl Observer {
    /// The state of this moment, for live clients.
    #[must_use]
    pub fn moment(&self, whose: Whose) -> Moment {
        let told = self.told(whose);
        let shared_state = self.shared_state();
        Moment {
            aggregated: self.aggregate(&told, whose),
            shared_state: shared_state.map_err(str::to_owned),
            snapshot: self.describe_all(&told, whose, STEPS),
        }
    }

    fn describe(&self, told: &Told<'_>, steps: usize) -> Process {
        Process {
            gpu_utilization: self.utilization(told),
            memory: self.memory(told),
            ..describe(told, steps)
        }
    }

    fn memory(&self, told: &Told<'_>) -> Vec<Memory> {
        let memory = told.memory().into_iter();
        let memory = memory.map(|(gpu_id, memory)| {
            let mut known = self.gpu_facts.iter();
            let gpu = known.find(|gpu| gpu.index == gpu_id);
            Memory {
                gpu_id,
                gpu: gpu.map(|gpu| gpu.name.clone()),
                bytes: memory.current_bytes,
                peak_bytes: memory.peak_bytes,
            }
        });
        memory.collect()
    }

    /// The mean of the GPUs on which a process has memory.
    fn utilization(&self, told: &Told<'_>) -> Option<f64> {
        let used = told.memory();
        let used = self
            .gpu_facts
            .iter()
            .filter(|gpu| used.contains_key(&gpu.index));
        let shares: Vec<f64> = used
            .filter_map(|gpu| Some(f64::from(gpu.utilization?) / 100.0))
            .collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }

    fn described_gone(&self, whose: Whose) -> Vec<Process> {
        self.gone_ranks()
            .filter(|gone| is_of(whose, gone.identity.as_ref()))
            .map(describe_gone)
            .collect()
    }

    /// The part of a snapshot that clients use, with all the steps that are kept.
    #[must_use]
    pub fn observed(&self, whose: Whose) -> Snapshot {
        self.describe_all(&self.told(whose), whose, usize::MAX)
    }

    fn describe_all(&self, told: &[Told<'_>], whose: Whose, steps: usize) -> Snapshot {
        let describe = |told: &Told<'_>| self.describe(told, steps);
        Snapshot {
            observed: told.iter().map(describe).collect(),
            gone_ranks: self.described_gone(whose),
            sampled: self.sampled().map(str::to_owned).collect(),
            rung: self.rung().name().to_owned(),
            problems: self.problems(),
            call_cost_seconds: self.cost().ns_per_call / 1e9,
        }
    }
}

impl Moment {
    /// As it is served.
    #[must_use]
    pub fn to_json(&self) -> String {
        let served = Served {
            aggregated: self.aggregated.to_ws_snapshot(),
            shared_state: match &self.shared_state {
                Ok(path) => json!({ "path": path }),
                Err(reason) => json!({ "missing": reason }),
            },
            snapshot: &self.snapshot,
        };
        serde_json::to_string(&served).expect("all keys are text")
    }
}

impl Process {
    /// Whether it is there, and no loader.
    #[must_use]
    pub fn is_trainer(&self) -> bool {
        self.role == Role::Trainer && self.ended_seconds_ago.is_none()
    }

    /// Whether it is one of several, or talks to others.
    #[must_use]
    pub fn is_rank(&self) -> bool {
        let calls_nccl = self.calls.keys().any(|name| name.starts_with("nccl"));
        self.is_trainer() && (self.rank().is_some() || calls_nccl)
    }

    /// The name of its main thread.
    #[must_use]
    pub fn comm(&self) -> &str {
        self.identity.as_ref().map_or("", |identity| &identity.comm)
    }

    /// The job it belongs to.
    #[must_use]
    pub fn job(&self) -> Option<&str> {
        self.identity.as_ref()?.job.as_deref()
    }

    /// Its rank in the job.
    #[must_use]
    pub fn rank(&self) -> Option<u32> {
        self.identity.as_ref()?.rank
    }
}

impl Steps {
    /// The median of the last steps.
    #[must_use]
    pub fn median_seconds(&self) -> Option<f64> {
        zernel_phase::steps::median_ns(&self.recent).map(seconds)
    }
}

impl DataWaits {
    /// By their cause.
    #[must_use]
    pub fn by_name(&self) -> [(&'static str, f64); 4] {
        [
            ("prepare", self.prepare),
            ("fetch", self.fetch),
            ("sched", self.sched),
            ("other", self.other),
        ]
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.by_name().iter().map(|(_, seconds)| seconds).sum()
    }
}

/// A process in a snapshot, with so many of its last steps, but for what the GPUs say.
fn describe(told: &Told<'_>, steps: usize) -> Process {
    let process = told.process;
    let launches = process.count(|what| what == Counts::Launch);
    let per_step = process.launches_per_step();
    let copies = process.count(|what| matches!(what, Counts::Copy(_)));
    let end_ns = process.ended_ns.unwrap_or_else(monotonic_ns);
    let causes = &process.dataload;
    Process {
        pid: process.pid,
        start_ns: process.start_ns,
        identity: process.identity.clone(),
        role: match process.is_loader {
            true => Role::Loader,
            false => Role::Trainer,
        },
        loads_for: process.loads_for,
        complete: process.seen == Seen::Complete,
        since_seconds_ago: match process.seen {
            Seen::Complete => None,
            Seen::Since(ns) => seconds_ago(ns),
        },
        first_seen_ns: process.first_ns,
        observed_seconds: seconds(end_ns.saturating_sub(process.first_ns)),
        ended_seconds_ago: process.ended_ns.and_then(seconds_ago),
        exit_code: None,
        signal: None,
        phase: process.phases.as_ref().map(|phases| phases.current),
        step_thread: process.phases.as_ref().map(|phases| phases.tid),
        phase_times: process.phases.as_ref().map(|phases| phases.times.clone()),
        steps: Steps {
            boundary: process.steps.boundary(),
            count: process.steps.count(),
            gaps: process.steps.gaps(),
            restarts: process.steps.restarts(),
            recent: last(process, steps),
        },
        data_waits: DataWaits {
            prepare: seconds(causes.prepare_ns),
            fetch: seconds(causes.fetch_ns),
            sched: seconds(causes.sched_ns),
            other: seconds(causes.other_ns),
        },
        peer_wait_seconds: duration(process, Family::DistSync),
        gpu_wait_seconds: super::metrics::WAIT_KINDS
            .iter()
            .map(|(family, _)| duration(process, *family))
            .sum(),
        gpu_waits: process.count(|what| what == Counts::Wait).calls,
        launch_seconds: duration(process, Family::Launch),
        launches: launches.calls,
        launches_error: launches.error,
        launches_per_step: per_step.map(|interval| interval.mean),
        launches_per_step_error: per_step.and_then(|interval| interval.half_width),
        copies: copies.calls,
        copies_error: copies.error,
        copied_bytes: copies.bytes,
        collectives: collectives(process),
        calls: calls(process),
        gpu_utilization: None,
        memory: Vec::new(),
        memory_by_caller: by_caller(told)
            .into_iter()
            .map(|((gpu_id, caller), bytes)| CallerMemory {
                gpu_id,
                caller,
                bytes,
            })
            .collect(),
        communicators: process.communicators.iter().map(communicator).collect(),
        cpu_seconds: seconds(process.scheduling.on_cpu_ns),
        run_delay_seconds: seconds(process.scheduling.run_delay_ns),
        calling_cpu_seconds: seconds(process.scheduling.calling_on_cpu_ns),
        calling_run_delay_seconds: seconds(process.scheduling.calling_run_delay_ns),
        fetch_seconds: BlockedBy::FETCHING
            .iter()
            .map(|reason| seconds(process.scheduling.blocked_ns(*reason)))
            .sum(),
        cost: Cost {
            busiest_thread_ratio: process.cost.busiest_thread,
            seconds: process.cost.seconds,
        },
        sampled: process.is_sampled(),
    }
}

/// A rank that has ended, as far as others may wait for it.
fn describe_gone(gone: &GoneRank) -> Process {
    let (exit_code, signal) = match gone.end {
        End::Exited(code) => (Some(code), None),
        End::Killed(signal) => (None, Some(signal)),
    };
    Process {
        pid: gone.pid,
        identity: gone.identity.clone(),
        ended_seconds_ago: seconds_ago(gone.ended_ns),
        exit_code,
        signal,
        communicators: gone.communicators.iter().map(communicator).collect(),
        ..Process::default()
    }
}

fn last(process: &ObservedProcess, count: usize) -> Vec<Step> {
    let steps = process.steps.recent();
    let skipped = steps.len().saturating_sub(count);
    steps.range(skipped..).copied().collect()
}

fn collectives(process: &ObservedProcess) -> Vec<Collective> {
    let mut collectives = Vec::new();
    for operation in Operation::ALL {
        let count = process.count(|what| what == Counts::Communication(operation));
        if count.calls == 0 {
            continue;
        }
        let until_sync = process.duration(Family::UntilSync(operation));
        collectives.push(Collective {
            op: operation.name().to_owned(),
            calls: count.calls,
            bytes: count.bytes,
            until_sync_median_seconds: until_sync.map(|times| seconds(times.p50_ns())),
            until_sync_mean_seconds: until_sync
                .map(|times| seconds(times.sum_ns) / times.count.max(1) as f64),
        });
    }
    collectives
}

fn calls(process: &ObservedProcess) -> BTreeMap<String, Calls> {
    let calls = process.calls().map(|(name, count)| {
        let calls = Calls {
            calls: count.calls,
            failed: count.failed,
            bytes: count.bytes,
            error: count.error,
        };
        (name.to_owned(), calls)
    });
    calls.collect()
}

fn communicator(communicator: &process::Communicator) -> Communicator {
    Communicator {
        communicator: format!("{:016x}", communicator.hash),
        rank: communicator.rank,
        ranks: communicator.ranks,
        sequence: communicator.sequence,
        op: communicator.operation.name().to_owned(),
        bytes: communicator.bytes,
        in_call: communicator.entered_ns != 0 && communicator.left_ns == 0,
        entered_seconds_ago: seconds_ago(communicator.entered_ns),
        longest_gap_seconds: seconds(communicator.longest_gap_ns),
        last_ops: (communicator.last_operations())
            .map(|operation| operation.name().to_owned())
            .collect(),
        is_being_made: communicator.is_being_made,
    }
}

fn duration(process: &ObservedProcess, family: Family) -> f64 {
    process.total_ns(family) / 1e9
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn seconds_ago(ns: u64) -> Option<f64> {
    (ns != 0).then(|| seconds(monotonic_ns().saturating_sub(ns)))
}
