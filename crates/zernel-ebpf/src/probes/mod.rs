//! The probes: the functions that are probed, and the data that the kernel and userspace keep about their calls.
//!
//! A probe is one folder:
//!
//! | file | holds |
//! |---|---|
//! | `mod.rs` | its functions as rows of data: name, role, arguments kept, events reported |
//! | `layout.rs` | the types and numbers that its kernel side shares with userspace, unless `state.rs` mirrors them |
//! | `<name>.bpf.h` | its kernel code; code that all calls run is in `observe.bpf.c` |
//! | `state.bpf.h` | its kernel state per process and per thread |
//! | `state.rs` | its userspace state per process, its part of a snapshot, and its counters that are exported as they are |
//! | `metrics.rs` | its other metric families, written from a snapshot |
//!
//! In `<name>.bpf.h` a probe defines the hooks it needs, `<name>_enter`, `<name>_leave`, `<name>_mark`, `<name>_read` and
//! `<name>_failed`, and a macro of the same name for each. `bpf/probes.rs` lists the probes. From that list the build script
//! generates the dispatch to the hooks, and this module declares the folders. Adding a probe
//! takes its folder, the list, and the file of its part of a snapshot in `zernel-model`.
//!
//! If the kernel keeps state per process, the mirror of that struct in `state.rs` is the userspace state. So a new counter
//! per process takes three files: `state.bpf.h` has the field, `<name>.bpf.h` updates it, and `state.rs` mirrors the field
//! and makes it a metric with a row of `COUNTERS`. A metric with labels besides `pid`, or one that some processes do not
//! have, is a family of `metrics.rs`, and its value a field of the probe's part of a snapshot.

include!("../../../../bpf/probes.rs");

mod counter;
pub(crate) mod layout;

/// Declares the modules of the probes, their numbers, their functions and their userspace parts.
macro_rules! declare_probes {
    (all { $($(#[$doc:meta])* $variant:ident = $name:ident,)* }
     process { $($process:ident: $mirror:ident),* }
     thread { $($thread:ident),* }
     snapshot { $($part:ident: $state:ident => $snapshot:ident,)* }
     maps { $($maps:ident),* }
     metrics { $($metrics:ident),* }) => {
        $(pub(crate) mod $name;)*

        /// The probe that a function belongs to.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Probe {
            $($(#[$doc])* $variant,)*
        }

        /// All probed functions. The index of a function in this list is the number that the kernel uses for the
        /// function.
        pub static SYMBOLS: LazyLock<Vec<ProbedFunction>> = LazyLock::new(|| [$($name::SYMBOLS,)*].concat());

        /// Userspace state of all probes for one process.
        #[derive(Debug, Default)]
        #[allow(missing_docs)] // documented as probes
        pub struct ProbeStates {
            $(pub $part: $part::$state,)*
        }

        impl ProbeStates {
            /// Copies the states of all probes out of the kernel's record of the process.
            pub(crate) fn read(&mut self, record: &layout::Process) {
                $(self.$process = record.$process;)*
            }

            /// Drops the state of resources that the process has released by exiting.
            pub(crate) fn release_on_exit(&mut self) {
                $(self.$part.release_on_exit();)*
            }

            /// The parts of a snapshot.
            pub(crate) fn snapshots(
                &self,
                process: &ObservedProcess,
                gpus: &ProcessGpus<'_>,
            ) -> ProbeSnapshots {
                ProbeSnapshots {
                    $($part: self.$part.snapshot(process, gpus),)*
                }
            }

            /// The names and values of all counters that are exported as the states hold them.
            pub(crate) fn counters(&self) -> Vec<(&'static str, f64)> {
                let mut counters = Vec::new();
                $(counters.extend(counter::counter_values(&self.$part));)*
                counters
            }
        }

        /// Reads the BPF maps of the probes into the processes.
        pub(crate) fn read_maps(
            kernel: &KernelPrograms,
            processes: &mut BTreeMap<u32, ObservedProcess>,
        ) -> libbpf_rs::Result<()> {
            $($maps::read_maps(kernel, processes)?;)*
            Ok(())
        }

        /// Deletes the entries of exited processes from the BPF maps of the probes, in one pass over each map.
        pub(crate) fn delete_entries(kernel: &KernelPrograms, processes: &BTreeSet<u32>) -> libbpf_rs::Result<()> {
            $($maps::delete_entries(kernel, processes)?;)*
            Ok(())
        }

        /// The metric families of all probes, in the order of the text.
        pub(crate) fn families() -> Vec<MetricFamily> {
            let mut families = Vec::new();
            $(families.extend(counter::counter_families(|states| &states.$metrics));
            families.extend($metrics::metrics::FAMILIES);)*
            families
        }

        /// Writes the metric families of all probes.
        pub(crate) fn expose(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
            $(counter::expose_counters(out, scoped, |states| &states.$metrics);
            $metrics::metrics::expose(out, scoped);)*
        }

        /// All types and numbers that the kernel shares with this module.
        #[cfg(test)]
        pub(crate) const MIRRORS: &[Mirrors] =
            &[layout::MIRRORS, layout::PROCESS_MIRRORS, $($name::MIRRORS,)*];

        /// The folders and numbers of the probes.
        #[cfg(test)]
        pub(crate) const PROBES: &[(&str, Probe)] = &[$((stringify!($name), Probe::$variant),)*];
    };
}
for_each_probe!(declare_probes);

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

pub use cuda_trace::CudaCalls;
pub use dataload::DataWaitCauses;
pub use dist_sync::PeerWaits;
pub use gpu_mem::{GpuMemory, MemoryUse};
pub use nccl::{Communicator, Communicators, ExitedRank, ProcessExit};
pub use sched::{SchedBlockReason, SchedulingTimes};
pub use torch::CompileTimes;

use zernel_model::aggregation::exposition::Exposition;
#[cfg(test)]
use zernel_phase::mirror::Mirrors;
use zernel_phase::steps::StepMark;
use zernel_phase::tracker::ThreadEvent;

use zernel_elf::LibraryKind;
use zernel_model::snapshot::ProbeSnapshots;

use crate::metrics::{MetricFamily, ScopedSnapshot};
use crate::observer::{KernelPrograms, ObservedProcess};
use counter::ProcessCounter;
use gpu_mem::ProcessGpus;

/// Userspace state of a probe for one process.
pub(crate) trait ProbeState: Sized + 'static {
    /// Counters of the probe that are exported as they are.
    const COUNTERS: &'static [ProcessCounter<Self>] = &[];

    /// The probe's part of a snapshot.
    type Snapshot;

    /// Drops the state of resources that the process has released by exiting.
    fn release_on_exit(&mut self) {}

    /// The probe's part of a snapshot of `process`.
    fn snapshot(&self, process: &ObservedProcess, gpus: &ProcessGpus<'_>) -> Self::Snapshot;
}

/// What a duration measures. A process has one histogram per kind of duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DurationKind {
    /// A call that launches work on the GPU.
    Launch,
    /// A wait for a stream.
    StreamWait,
    /// A wait for an event.
    EventWait,
    /// A wait for everything on a context.
    ContextWait,
    /// A call that copies, and returns or may return only when the copy is done.
    CopyWait,
    /// A trainer's wait for its next batch.
    Dataload,
    /// A wait for a peer.
    DistSync,
    /// Runnable but not running.
    RunDelay,
    /// A call that enqueues a collective on the GPU.
    Enqueue(NcclOperation),
    /// From the call that enqueues a collective to the end of the wait that shows it done.
    UntilSync(NcclOperation),
}

impl DurationKind {
    /// Number of kinds.
    pub const COUNT: usize = 8 + 2 * NcclOperation::ALL.len();

    /// The number of this kind in the kernel.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Launch => 0,
            Self::StreamWait => 1,
            Self::EventWait => 2,
            Self::ContextWait => 3,
            Self::CopyWait => 4,
            Self::Dataload => 5,
            Self::DistSync => 6,
            Self::RunDelay => 7,
            Self::Enqueue(operation) => 8 + operation as usize,
            Self::UntilSync(operation) => 8 + NcclOperation::ALL.len() + operation as usize,
        }
    }

    /// The kind with that number in the kernel.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Self> {
        let simple = [
            Self::Launch,
            Self::StreamWait,
            Self::EventWait,
            Self::ContextWait,
            Self::CopyWait,
            Self::Dataload,
            Self::DistSync,
            Self::RunDelay,
        ];
        let operations = NcclOperation::ALL.len();
        match index.checked_sub(simple.len()) {
            None => Some(simple[index]),
            Some(enqueue) if enqueue < operations => {
                Some(Self::Enqueue(NcclOperation::ALL[enqueue]))
            }
            Some(other) => {
                let operation = NcclOperation::ALL.get(other - operations)?;
                Some(Self::UntilSync(*operation))
            }
        }
    }
}

/// An operation of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // NCCL's own names
pub enum NcclOperation {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Send,
    Recv,
    Group,
    Other,
}

impl NcclOperation {
    /// All operations, by their numbers in the kernel.
    pub const ALL: [Self; 12] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Gather,
        Self::Scatter,
        Self::Send,
        Self::Recv,
        Self::Group,
        Self::Other,
    ];

    /// The value of the label `op`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "AllReduce",
            Self::Broadcast => "Broadcast",
            Self::Reduce => "Reduce",
            Self::AllGather => "AllGather",
            Self::ReduceScatter => "ReduceScatter",
            Self::AllToAll => "AlltoAll",
            Self::Gather => "Gather",
            Self::Scatter => "Scatter",
            Self::Send => "Send",
            Self::Recv => "Recv",
            Self::Group => "Group",
            Self::Other => "Other",
        }
    }
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CopyDirection {
    /// From the host's memory to the device's.
    HostToDevice,
    /// From the device's memory to the host's.
    DeviceToHost,
    /// Within a device or between devices.
    DeviceToDevice,
    /// A copy between addresses of either kind: only the addresses determine the direction.
    Unified,
}

impl CopyDirection {
    /// The value of the label `direction`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "h2d",
            Self::DeviceToHost => "d2h",
            Self::DeviceToDevice => "d2d",
            Self::Unified => "unified",
        }
    }
}

/// What a call counts as in reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallKind {
    /// A launch of work.
    Launch,
    /// A copy.
    Copy(CopyDirection),
    /// A wait.
    Wait,
    /// A collective, or a message from one rank to another.
    Communication(NcclOperation),
    /// Reports do not count calls of this function.
    NotReported,
}

/// Functions that are sampled together, because the calls of one mean little without the calls of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SamplingGroup {
    /// Functions that launch kernels: a program may use any of them.
    Kernels,
    /// Functions that allocate from memory pools or free such allocations.
    Pools,
}

/// A probed function, or several that are probed alike.
#[derive(Debug, Clone, Copy)]
pub struct ProbedFunction {
    /// The library that exports the function.
    pub library: LibraryKind,
    /// Exported names of the function. Reports use the first name.
    pub names: &'static [&'static str],
    /// The probe that the function belongs to.
    pub probe: Probe,
    /// What a call counts as.
    pub kind: CallKind,
    /// The kind of histogram that records the durations of the function's calls.
    pub duration: Option<DurationKind>,
    /// Whether a busy program calls the function so often that the function may have to be sampled.
    pub is_frequent: bool,
    /// The group of functions that the function is sampled together with.
    pub sampling_group: Option<SamplingGroup>,
    /// Whether only the entry of the function is probed. All C++ functions are probed like this: an exception that
    /// unwinds through a return probe kills the process.
    pub is_entry_only: bool,
    /// Whether `names` are prefixes of the exported names: mangled names end in argument types, which differ between
    /// versions.
    pub is_found_by_prefix: bool,
    /// Whether a call of the function is no reason to observe its process.
    pub is_no_ml_evidence: bool,
    label: Option<&'static str>,
    role: u8,
    enter_event: Option<ThreadEvent>,
    leave_event: Option<ThreadEvent>,
    /// Numbers of the arguments that are kept, from 1; 0: none.
    kept_arguments: [u8; 4],
    /// Place of the number of bytes among the kept arguments, from 1; 0: none.
    bytes_argument: u8,
    /// The step mark that a call of the function makes, if any.
    pub mark: Option<StepMark>,
}

impl ProbedFunction {
    const fn new(
        library: LibraryKind,
        probe: Probe,
        role: u8,
        names: &'static [&'static str],
    ) -> Self {
        Self {
            library,
            names,
            probe,
            kind: CallKind::NotReported,
            duration: None,
            is_frequent: false,
            sampling_group: None,
            is_entry_only: false,
            is_found_by_prefix: false,
            is_no_ml_evidence: false,
            label: None,
            role,
            enter_event: None,
            leave_event: None,
            kept_arguments: [0; 4],
            bytes_argument: 0,
            mark: None,
        }
    }

    const fn kept_arguments(mut self, arguments: [u8; 4]) -> Self {
        self.kept_arguments = arguments;
        self
    }

    const fn bytes_argument(mut self, kept: u8) -> Self {
        self.bytes_argument = kept;
        self
    }

    /// Sets the kind that a call counts as.
    const fn counted_as(mut self, kind: CallKind) -> Self {
        self.kind = kind;
        self
    }

    const fn timed_as(mut self, kind: DurationKind) -> Self {
        self.duration = Some(kind);
        self
    }

    const fn enter_event(mut self, enter: ThreadEvent) -> Self {
        self.enter_event = Some(enter);
        self
    }

    const fn enter_and_leave_events(mut self, enter: ThreadEvent, leave: ThreadEvent) -> Self {
        self.enter_event = Some(enter);
        self.leave_event = Some(leave);
        self
    }

    const fn step_mark(mut self, mark: StepMark) -> Self {
        self.mark = Some(mark);
        self
    }

    const fn called_frequently(mut self) -> Self {
        self.is_frequent = true;
        self
    }

    const fn sampled_with(mut self, group: SamplingGroup) -> Self {
        self.sampling_group = Some(group);
        self.called_frequently()
    }

    /// Marks a C++ function whose mangled name begins with one of the row's names; reports use `label`.
    const fn cpp_function(mut self, label: &'static str) -> Self {
        self.is_entry_only = true;
        self.is_found_by_prefix = true;
        self.label = Some(label);
        self
    }

    /// Marks a function that programs without machine learning call too.
    const fn no_ml_evidence(mut self) -> Self {
        self.is_no_ml_evidence = true;
        self
    }

    /// Its name in reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.label.unwrap_or(self.names[0])
    }

    /// Whether a call begins a backward pass.
    pub(crate) fn begins_backward(&self) -> bool {
        self.enter_event == Some(ThreadEvent::BackwardBegin)
    }

    /// The function's row in the kernel's table of functions.
    pub(crate) fn raw_symbol(&self, sampled: bool) -> layout::Symbol {
        const NONE: u8 = layout::NONE as u8;
        let event =
            |event: Option<ThreadEvent>| event.map_or(NONE, zernel_phase::shared::raw_event);
        let flag = |flag, is_set| if is_set { flag } else { 0 };
        layout::Symbol {
            probe: self.probe as u8,
            role: self.role,
            duration_kind: self.duration.map_or(NONE, |kind| kind.index() as u8),
            enter_event: event(self.enter_event),
            leave_event: event(self.leave_event),
            flags: layout::Symbol::RETURNS_STATUS
                | flag(layout::Symbol::IS_SAMPLED, sampled)
                | flag(layout::Symbol::LAUNCHES_WORK, self.kind == CallKind::Launch)
                | flag(layout::Symbol::IS_NO_ML_EVIDENCE, self.is_no_ml_evidence),
            bytes_argument: self.bytes_argument,
            mark: self.mark.map_or(0, |mark| mark as u8),
            kept_arguments: self.kept_arguments,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_kinds_survive_the_trip_through_their_numbers() {
        for index in 0..DurationKind::COUNT {
            assert_eq!(
                DurationKind::from_index(index).map(DurationKind::index),
                Some(index)
            );
        }
        assert_eq!(DurationKind::from_index(DurationKind::COUNT), None);
    }

    #[test]
    fn every_function_is_listed_once_and_fits_the_kernels_table() {
        let mut names = BTreeSet::new();
        for symbol in SYMBOLS.iter() {
            for name in symbol.names {
                assert!(names.insert((symbol.library, name)), "{name} twice");
            }
            assert!(usize::from(symbol.bytes_argument) <= symbol.kept_arguments.len());
        }
        assert!(SYMBOLS.len() <= layout::SYMBOLS);
    }

    /// A probe that has rows only must also be in the list `metrics`.
    #[test]
    fn every_counter_is_exported() {
        let exported: BTreeSet<_> = families().iter().map(|family| family.name).collect();
        for (name, _) in ProbeStates::default().counters() {
            assert!(
                exported.contains(name),
                "{name}: list its probe in `metrics`"
            );
        }
    }
}
