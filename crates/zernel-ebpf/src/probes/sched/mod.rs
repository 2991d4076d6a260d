//! Threads on and off their CPUs.

pub(super) mod layout;
pub(crate) mod metrics;

use super::Symbol;

/// The scheduler's tracepoints show all of it: no function is probed.
pub(super) const SYMBOLS: &[Symbol] = &[];

/// What a thread is blocked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockedBy {
    /// A disk, or a file system.
    Io,
    /// A socket of the network.
    Network,
    /// A pipe, a unix socket or an eventfd.
    Ipc,
    /// A futex: another thread.
    Futex,
    /// Nothing in particular: it polls.
    Poll,
    /// A page that is not there.
    PageFault,
    /// Anything else, such as a sleep.
    Other,
}

impl BlockedBy {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Io,
        Self::Network,
        Self::Ipc,
        Self::Futex,
        Self::Poll,
        Self::PageFault,
        Self::Other,
    ];

    /// What a thread is blocked by while it fetches.
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

/// Where the threads of a process have been, together. What a thread is at counts when it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scheduling {
    /// On a CPU.
    pub on_cpu_ns: u64,
    /// Able to run, and not running.
    pub run_delay_ns: u64,
    /// On a CPU, those of them that make calls which are watched: the others do not hold up its steps.
    pub calling_on_cpu_ns: u64,
    /// Able to run, and not running, the same threads.
    pub calling_run_delay_ns: u64,
    /// How often one of them left its CPU.
    pub switches: u64,
    blocked_ns: [u64; BlockedBy::ALL.len()],
}

impl Scheduling {
    pub(crate) fn new(raw: &super::layout::Process) -> Self {
        let raw = &raw.sched;
        Self {
            on_cpu_ns: raw.on_cpu_ns,
            run_delay_ns: raw.run_delay_ns,
            calling_on_cpu_ns: raw.calling_on_cpu_ns,
            calling_run_delay_ns: raw.calling_run_delay_ns,
            switches: raw.switches,
            blocked_ns: raw.blocked_ns,
        }
    }

    /// How long they were blocked by something.
    #[must_use]
    pub fn blocked_ns(&self, by: BlockedBy) -> u64 {
        self.blocked_ns[by as usize]
    }
}
