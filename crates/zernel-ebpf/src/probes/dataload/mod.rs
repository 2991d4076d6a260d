//! Waits for data.

pub(super) mod layout;
pub(crate) mod metrics;

use layout::{FETCHES, PREPARES, QUEUES, WORKS};

use super::Symbol;

/// Waits for data show in how threads block: no function is probed for them.
pub(super) const SYMBOLS: &[Symbol] = &[];

/// Waits for data, by what the loaders did meanwhile: loader processes, or where there are none, the threads of the
/// process itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DataloadCauses {
    /// They were on CPUs.
    pub prepare_ns: u64,
    /// They waited for a disk, the network or a page.
    pub fetch_ns: u64,
    /// They could have run, and did not.
    pub sched_ns: u64,
    /// They did nothing of the kind.
    pub other_ns: u64,
}

impl DataloadCauses {
    pub(crate) fn new(raw: &super::layout::Process) -> Self {
        let waited_ns = raw.dataload.waited_ns;
        Self {
            prepare_ns: waited_ns[PREPARES],
            fetch_ns: waited_ns[FETCHES],
            sched_ns: waited_ns[QUEUES],
            other_ns: waited_ns[WORKS],
        }
    }

    /// All of it.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.prepare_ns + self.fetch_ns + self.sched_ns + self.other_ns
    }
}
