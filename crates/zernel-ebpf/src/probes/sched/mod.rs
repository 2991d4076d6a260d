//! Threads on and off their CPUs.
//!
//! `sched.bpf.h` has the programs: `sched_switch`, `process_fork`, and the iterator `adopt_tasks`. The programs pass blocks
//! and wake-ups to the trackers through `tracked_waits.bpf.h`; `block_reason.bpf.h` finds out why a thread is blocked. The
//! programs for exits and `exec` are in `observe.bpf.c`. `tests/waits` checks the times against the kernel's own account.

pub(crate) mod metrics;
mod state;

#[cfg(test)]
pub(super) use state::MIRRORS;
pub use state::SchedulingTimes;

use super::ProbedFunction;

/// No function is probed: the scheduler's tracepoints show everything.
pub(super) const SYMBOLS: &[ProbedFunction] = &[];

/// What a blocked thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SchedBlockReason {
    /// The thread waits for a disk or a file system.
    Io,
    /// A network socket.
    Network,
    /// The thread waits for a pipe, a unix socket or an eventfd.
    Ipc,
    /// A futex: another thread.
    Futex,
    /// The thread polls file descriptors.
    Poll,
    /// The thread waits for a page that is not in memory.
    PageFault,
    /// The thread waits for anything else, such as the end of a sleep.
    Other,
}

impl SchedBlockReason {
    /// All reasons.
    pub const ALL: [Self; 7] = [
        Self::Io,
        Self::Network,
        Self::Ipc,
        Self::Futex,
        Self::Poll,
        Self::PageFault,
        Self::Other,
    ];

    /// Reasons for which a blocked loader counts as fetching data.
    pub const FETCHING: [Self; 3] = [Self::Io, Self::Network, Self::PageFault];

    /// The value of the label `reason`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Io => "io",
            Self::Network => "network",
            Self::Ipc => "ipc",
            Self::Futex => "futex",
            Self::Poll => "poll",
            Self::PageFault => "page_fault",
            Self::Other => "other",
        }
    }
}
