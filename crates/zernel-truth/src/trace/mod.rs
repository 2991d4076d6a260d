//! A trace: the events of every observed thread with the phases that followed, and when probes were on or off.
//!
//! A file has three parts. The first line of a trace is [`TRACE_FIRST_LINE`]. The second line is a [`TraceHeader`] as JSON. All
//! following bytes are entries, each a tag byte and its fields. Numbers are varints: seven bits per byte, lowest first,
//! the high bit set on all bytes but the last. Signed numbers are zigzag-coded. Times are differences to the time of
//! the entry before.
//!
//! | tag, low 3 bits | entry | fields |
//! |---|---|---|
//! | 0 | event | time, thread, event number, then what the high bits of the tag announce |
//! | 1 | process | handle, pid, whether it is a loader, handle of its trainer |
//! | 2 | sample | time, tid, handle, and the inputs of the sampled rule |
//! | 3 | coverage | time, kind, value, handle |
//! | 4 | loss | time, number of lost events |
//!
//! High bits of an event's tag: 8 a new thread (tid, handle), 16 a probed function, 32 another phase (phase, sequence,
//! age of its start), 64 other tracker flags, 128 another time to the deadline (0 for never). A thread is named by the
//! order of first events.

mod decode;
mod encode;
mod varint;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use zernel_phase::WorkloadPhase;

pub use decode::TraceError;
pub use encode::TraceEncoder;

/// First line of a trace.
pub const TRACE_FIRST_LINE: &str = "zernel-trace 1\n";

/// Event number of a call that gives the tracker no event.
pub const CALL_EVENT_NUMBER: u8 = 0xf0;
/// Event number of the exit of a thread.
pub const EXIT_EVENT_NUMBER: u8 = 0xf1;
/// Event number of the time from which a thread loads data for its own process.
pub const LOADING_BEGIN_EVENT_NUMBER: u8 = 0xf2;
/// Event number of the time from which it does so no more.
pub const LOADING_END_EVENT_NUMBER: u8 = 0xf3;

const EVENT_TAG: u8 = 0;
const PROCESS_TAG: u8 = 1;
const SAMPLE_TAG: u8 = 2;
const COVERAGE_TAG: u8 = 3;
const LOSS_TAG: u8 = 4;
const TAG_KIND_MASK: u8 = 7;
const NEW_THREAD_BIT: u8 = 8;
const HAS_SYMBOL_BIT: u8 = 16;
const NEW_PHASE_BIT: u8 = 32;
const NEW_FLAGS_BIT: u8 = 64;
const NEW_DEADLINE_BIT: u8 = 128;

/// What is known about a whole trace.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceHeader {
    /// Version of Zernel.
    pub zernel: String,
    /// Release of the kernel.
    pub kernel: String,
    /// The command that was observed.
    pub command: Vec<String>,
    /// When observing began, before the command started, in nanoseconds of CLOCK_MONOTONIC.
    pub began_ns: u64,
    /// When observing ended.
    pub ended_ns: u64,
    /// Events that are missing.
    pub lost_events: u64,
    /// Why the trace is incomplete, one sentence per problem.
    pub problems: Vec<String>,
    /// Distribution of the time from a probed call until its phase was recorded, in nanoseconds.
    pub delay: DelaySummary,
    /// The report of the run, as `zernel run --json` writes it.
    pub report: Option<serde_json::Value>,
    /// Numbers of the tracker's events, by their name in C.
    pub events: BTreeMap<String, u8>,
    /// Names of the probed functions, by number.
    pub functions: Vec<String>,
}

/// The distribution of delays in nanoseconds. Values are at most 65535.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are self-explanatory
pub struct DelaySummary {
    pub count: u64,
    pub median_ns: u16,
    pub p99_ns: u16,
    pub max_ns: u16,
}

/// A trace in memory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RecordedTrace {
    /// The header: what is known about the whole trace.
    pub header: TraceHeader,
    /// Entries of the trace, in the order of the file.
    pub entries: Vec<TraceEntry>,
}

/// An entry of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TraceEntry {
    /// An event of a thread.
    Event(EventEntry),
    /// A process: written before the first event of the process and whenever its role changes.
    Process(ProcessEntry),
    /// The inputs of the sampled rule for one thread.
    Sample(SampleEntry),
    /// Probes, a sampling window or a rest of a process changed what is observed.
    Coverage {
        /// Time of the change, in nanoseconds of CLOCK_MONOTONIC.
        at_ns: u64,
        /// What changed.
        coverage: CoverageEntry,
    },
    /// Events were lost before this time.
    Loss {
        /// When the loss was noticed.
        at_ns: u64,
        /// How many.
        lost_events: u64,
    },
}

/// An event of a thread, and the thread's phase after the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventEntry {
    /// Time of the event, in nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The thread.
    pub tid: u32,
    /// Handle of its process.
    pub process_handle: u32,
    /// Number of the event; see [`TraceHeader::events`], [`CALL_EVENT_NUMBER`] and [`EXIT_EVENT_NUMBER`].
    pub event_number: u8,
    /// Number of the probed function; `None`: a context switch.
    pub symbol_number: Option<u8>,
    /// The phase.
    pub phase: WorkloadPhase,
    /// Number of phase changes of the thread, modulo 4096.
    pub sequence: u16,
    /// Start of the phase.
    pub phase_start_ns: u64,
    /// When the phase ends without another event; `u64::MAX` for never.
    pub deadline_ns: u64,
    /// Flags of the tracker, as `enum zernel_tracker_flags` numbers them.
    pub tracker_flags: u16,
}

/// A process of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessEntry {
    /// The number that identifies the process in the trace, because a pid may be reused.
    pub handle: u32,
    /// Its pid.
    pub pid: u32,
    /// Whether the process was forked to load data.
    pub is_loader: bool,
    /// Handle of the trainer that the process loads data for; 0 if it is no loader.
    pub trainer_handle: u32,
}

/// The inputs of the sampled rule for one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleEntry {
    /// Time of the sample, in nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The thread.
    pub tid: u32,
    /// Its process, by pid.
    pub pid: u32,
    /// When the thread last returned from a GPU sync, or 0.
    pub last_gpu_sync_ns: u64,
    /// Length of the thread's current CPU burst in nanoseconds, or 0.
    pub cpu_burst_ns: u64,
    /// Share of recent time spent waiting for I/O, in units of 1/65536.
    pub io_wait_q16: u32,
    /// Recent futex waits.
    pub futex_waits: u32,
    /// Utilization of the GPU that the thread uses, in percent.
    pub gpu_utilization_percent: u8,
    /// Whether the thread is in a collective.
    pub nccl_active: bool,
}

/// A change of what is observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoverageEntry {
    /// Whether probes are attached.
    ProbesAttached(bool),
    /// Whether a sampling window is open: only then sampled functions give events.
    WindowOpen(bool),
    /// Whether launches are sampled, so that threads are assumed to launch after a copy or a backward pass.
    LaunchesAssumed(bool),
    /// A process began or ceased to be observed: it is not observed while it is excluded because of its overhead.
    ProcessObserved {
        /// Its handle.
        handle: u32,
        /// Whether it is observed.
        is_observed: bool,
    },
}

/// What an encoder or decoder remembers of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct CodedThreadState {
    tid: u32,
    process_handle: u32,
    phase: WorkloadPhase,
    sequence: u16,
    phase_start_ns: u64,
    tracker_flags: u16,
    /// Time to the deadline; `None`: never.
    time_to_deadline_ns: Option<i64>,
}

#[cfg(test)]
mod tests;
