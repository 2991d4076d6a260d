//! Threads on and off their CPUs.
//!
//! `sched.bpf.h` has the programs: `sched_switch`, `process_fork`, and the iterator `adopt_tasks`. It passes blocks and
//! wake-ups on through `tracked_waits.bpf.h`; `block_reason.bpf.h` finds out why a thread is blocked. Exits and `exec` are in
//! `observe.bpf.c`. `tests/waits` checks the times against the kernel's own account.

pub(crate) mod metrics;
mod state;

#[cfg(test)]
pub(super) use state::MIRRORS;
pub use state::Scheduling;

use super::ProbedFunction;

/// No function is probed: the scheduler's tracepoints show everything.
pub(super) const SYMBOLS: &[ProbedFunction] = &[];

/// What a blocked thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SchedBlockReason {
    /// A disk, or a file system.
    Io,
    /// A network socket.
    Network,
    /// A pipe, a unix socket or an eventfd.
    Ipc,
    /// A futex: another thread.
    Futex,
    /// File descriptors that it polls.
    Poll,
    /// A page that is not in memory.
    PageFault,
    /// Anything else, such as a sleep.
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

    /// Reasons that count as fetching data.
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
