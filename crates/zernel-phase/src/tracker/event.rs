//! The events of a thread, and the intervals that they result in.

use serde::{Deserialize, Serialize};

use crate::task_state::{PhaseTimeAccumulator, WorkloadPhase};

/// An event of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ThreadEvent {
    /// Entered a GPU sync: a call that waits for the GPU.
    GpuSyncEnter,
    /// Left a GPU sync.
    GpuSyncLeave,
    /// Entered a collective call.
    CollectiveEnter,
    /// Left a collective call.
    CollectiveLeave,
    /// Launched work on the GPU.
    Launch,
    /// Copied data to the GPU.
    CopyToDevice,
    /// Left the CPU to wait.
    Block(BlockReason),
    /// Became runnable again.
    Unblock,
    /// Became runnable again. Other threads of its process launched meanwhile, or it is unknown whether they did.
    UnblockAfterLaunches,
    /// Called a function that only an optimizer step calls.
    OptimizerMarker,
    /// Begins to get its next batch.
    DataBegin,
    /// Begins a forward pass.
    ForwardBegin,
    /// Begins a backward pass.
    BackwardBegin,
    /// Begins an optimizer step.
    OptimizerBegin,
    /// Begins to clear gradients.
    ZeroGradients,
    /// The calls of the thread are not observed from now on.
    NotObserved,
    /// Left its CPU and is still runnable.
    Preempt,
    /// Runs again after that.
    Resume,
    /// Ends an optimizer step, or the clearing of gradients.
    UpdateEnd,
    /// Begins work that is no part of a step: it writes a checkpoint. Nothing shows its end.
    OtherWorkBegin,
    /// Begins to compile.
    CompileBegin,
    /// Has compiled and goes on.
    CompileEnd,
    /// Forked a process, which may load data for it.
    Fork,
    /// Has waited for another thread of its process, which compiled, and still waits.
    AwaitedCompile,
    /// Has waited for another thread of its process, which was in a collective, and still waits.
    AwaitedCollective,
    /// Has waited for a thread that loads data, and still waits.
    AwaitedData,
    /// Entered a copy to the host that may wait for the GPU: a copy to pageable memory does.
    CopyToHostEnter,
    /// Left such a copy.
    CopyToHostLeave,
}

/// The reason why a thread is blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockReason {
    /// A disk, a network file system, or a read from a pipe.
    Io,
    /// A futex, so usually another thread.
    Futex,
    /// A file descriptor becoming ready.
    Poll,
    /// A futex, for work from the training thread, which is another thread of the process.
    Request,
    /// A time, or a request from outside of the process.
    Sleep,
    /// Anything else, as in a call of a driver. It is no evidence for a phase.
    Other,
}

/// A period in one phase: from `start_ns` up to, not including, `end_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are self-explanatory
pub struct PhaseInterval {
    pub phase: WorkloadPhase,
    pub start_ns: u64,
    pub end_ns: u64,
}

impl PhaseInterval {
    /// Returns the length of the interval.
    #[must_use]
    pub fn duration_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

impl Extend<PhaseInterval> for PhaseTimeAccumulator {
    fn extend<I: IntoIterator<Item = PhaseInterval>>(&mut self, intervals: I) {
        for interval in intervals {
            self.record(interval.phase, interval.duration_ns());
        }
    }
}
