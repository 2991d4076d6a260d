//! The probes: which functions of which libraries are watched, and what is kept of their calls.
//!
//! Functions are **data**: a row of a table says what a function is called, what it is taken for, which
//! of its arguments matter and what it tells of a thread's phase. A probe is one folder: the rows in
//! `mod.rs`, and in `probe.bpf.c` what the kernel does with them beyond what all calls have in common
//! (`observe.bpf.c`). Adding one touches its folder, the list here and the list there.

mod cuda_context;
pub(crate) mod cuda_trace;
mod dataload;
mod dist_sync;
pub(crate) mod gpu_mem;
pub(crate) mod layout;
mod nccl;
mod sched;
mod torch;

pub use dataload::DataloadCauses;
pub use sched::{BlockedBy, Scheduling};

use zernel_phase::steps::Mark;
use zernel_phase::tracker::ThreadEvent;

use crate::library::LibraryKind;

/// What is kept of durations, per process; the order is that of `enum zernel_family`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// A call that launches work on the GPU.
    Launch,
    /// A wait for a stream.
    StreamWait,
    /// A wait for an event.
    EventWait,
    /// A wait for everything on a context.
    ContextWait,
    /// A copy that returns when it is done, or may do so.
    CopyWait,
    /// A trainer's wait for its next batch.
    Dataload,
    /// A wait for a peer.
    DistSync,
    /// From being able to run to running.
    RunDelay,
    /// Handing a collective to the GPU.
    Enqueue(Operation),
    /// From handing over a collective to the end of the wait that shows it done.
    UntilSync(Operation),
}

impl Family {
    /// How many there are.
    pub const COUNT: usize = 8 + 2 * Operation::ALL.len();

    /// Its number in the kernel.
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
            Self::UntilSync(operation) => 8 + Operation::ALL.len() + operation as usize,
        }
    }

    /// The family with that number.
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
        let operations = Operation::ALL.len();
        match index.checked_sub(simple.len()) {
            None => Some(simple[index]),
            Some(enqueue) if enqueue < operations => Some(Self::Enqueue(Operation::ALL[enqueue])),
            Some(other) => {
                let operation = Operation::ALL.get(other - operations)?;
                Some(Self::UntilSync(*operation))
            }
        }
    }
}

/// What is communicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // NCCL's own names
pub enum Operation {
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

impl Operation {
    /// All of them, in the kernel's order.
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
pub enum Direction {
    /// From the host's memory to the device's.
    HostToDevice,
    /// From the device's memory to the host's.
    DeviceToHost,
    /// Within a device or between devices.
    DeviceToDevice,
    /// Only the addresses tell.
    Unified,
}

impl Direction {
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

/// Whose function it is; the order is that of `enum zernel_probe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// Launches, copies and waits.
    CudaTrace,
    /// On which device a thread works.
    CudaContext,
    /// GPU memory.
    GpuMem,
    /// Collectives.
    Nccl,
    /// What only a training loop calls.
    Torch,
}

/// What people count a call as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// A launch of work.
    Launch,
    /// A copy.
    Copy(Direction),
    /// A wait.
    Wait,
    /// Something communicated.
    Communication(Operation),
    /// Nothing by itself.
    Nothing,
}

/// Functions that are sampled together: the calls of some of them mean little without those of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SamplingGroup {
    /// Launches of kernels: a program may use any of these functions.
    Kernels,
    /// Allocations from memory pools, and their frees.
    Pools,
}

/// A function to watch.
#[derive(Debug, Clone, Copy)]
pub struct Symbol {
    /// The library that exports it.
    pub library: LibraryKind,
    /// The names it is exported under; the first is the one it is called by.
    pub names: &'static [&'static str],
    /// Whose it is.
    pub probe: Probe,
    /// What a call counts as.
    pub counts: Counts,
    /// Where its duration goes.
    pub family: Option<Family>,
    /// Whether a busy program calls it so often that it may have to be sampled.
    pub frequent: bool,
    /// The functions it is sampled together with.
    pub sampling_group: Option<SamplingGroup>,
    /// Whether only its entry is probed: an exception that unwinds through a return probe kills the
    /// process, so functions of C++ are never probed otherwise.
    pub entry_only: bool,
    /// Whether the names are only how the exported names begin: mangled names end in argument types,
    /// which differ between versions.
    pub by_prefix: bool,
    label: Option<&'static str>,
    role: u8,
    enter: Option<ThreadEvent>,
    leave: Option<ThreadEvent>,
    /// Which arguments are kept, from 1.
    arguments: [u8; 4],
    /// Which of the kept ones counts as bytes, from 1.
    bytes: u8,
    /// What it tells of steps.
    pub mark: Option<Mark>,
}

impl Symbol {
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
            counts: Counts::Nothing,
            family: None,
            frequent: false,
            sampling_group: None,
            entry_only: false,
            by_prefix: false,
            label: None,
            role,
            enter: None,
            leave: None,
            arguments: [0; 4],
            bytes: 0,
            mark: None,
        }
    }

    const fn keeps(mut self, arguments: [u8; 4]) -> Self {
        self.arguments = arguments;
        self
    }

    const fn bytes(mut self, kept: u8) -> Self {
        self.bytes = kept;
        self
    }

    const fn counts(mut self, counts: Counts) -> Self {
        self.counts = counts;
        self
    }

    const fn lasts(mut self, family: Family) -> Self {
        self.family = Some(family);
        self
    }

    const fn tells(mut self, enter: ThreadEvent) -> Self {
        self.enter = Some(enter);
        self
    }

    const fn tells_until(mut self, enter: ThreadEvent, leave: ThreadEvent) -> Self {
        self.enter = Some(enter);
        self.leave = Some(leave);
        self
    }

    const fn marks(mut self, mark: Mark) -> Self {
        self.mark = Some(mark);
        self
    }

    const fn frequent(mut self) -> Self {
        self.frequent = true;
        self
    }

    const fn sampled_with(mut self, group: SamplingGroup) -> Self {
        self.sampling_group = Some(group);
        self.frequent()
    }

    /// A function of C++, whose mangled name begins with one of its names.
    const fn of_cpp(mut self, label: &'static str) -> Self {
        self.entry_only = true;
        self.by_prefix = true;
        self.label = Some(label);
        self
    }

    /// What it is called in reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.label.unwrap_or(self.names[0])
    }

    /// The row that the kernel gets.
    pub(crate) fn raw(&self, sampled: bool) -> layout::Symbol {
        const HAS_RESULT: u8 = 1 << 0;
        const SAMPLED: u8 = 1 << 1;
        const LAUNCHES: u8 = 1 << 2;
        const NONE: u8 = 0xff;
        let event =
            |event: Option<ThreadEvent>| event.map_or(NONE, zernel_phase::shared::raw_event);
        layout::Symbol {
            probe: self.probe as u8,
            role: self.role,
            family: self.family.map_or(NONE, |family| family.index() as u8),
            enter_event: event(self.enter),
            leave_event: event(self.leave),
            flags: HAS_RESULT
                | if sampled { SAMPLED } else { 0 }
                | if self.counts == Counts::Launch {
                    LAUNCHES
                } else {
                    0
                },
            bytes: self.bytes,
            mark: self.mark.map_or(0, |mark| mark as u8),
            arguments: self.arguments,
        }
    }
}

/// Every function that is watched; its place here is its number in the kernel.
pub static SYMBOLS: std::sync::LazyLock<Vec<Symbol>> = std::sync::LazyLock::new(|| {
    [
        cuda_context::SYMBOLS,
        gpu_mem::SYMBOLS,
        cuda_trace::SYMBOLS,
        nccl::SYMBOLS,
        dist_sync::SYMBOLS,
        torch::SYMBOLS,
    ]
    .concat()
});

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn families_and_their_numbers_agree() {
        for index in 0..Family::COUNT {
            assert_eq!(Family::from_index(index).map(Family::index), Some(index));
        }
        assert_eq!(Family::from_index(Family::COUNT), None);
    }

    #[test]
    fn every_function_is_listed_once_and_fits() {
        let mut names = BTreeSet::new();
        for symbol in SYMBOLS.iter() {
            for name in symbol.names {
                assert!(names.insert((symbol.library, name)), "{name} twice");
            }
            assert!(usize::from(symbol.bytes) <= symbol.arguments.len());
        }
        assert!(SYMBOLS.len() <= layout::SYMBOLS);
    }
}
