//! Threads on and off their CPUs.

pub(super) mod layout;
pub(crate) mod metrics;
mod state;

pub use state::Scheduling;

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
