//! Waits for data.

pub(crate) mod metrics;

use super::layout;

/// Waits for data, by what those who load it did meanwhile: its loader processes, or where there are
/// none, the threads of the process itself.
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
    pub(crate) fn new(raw: &layout::Process) -> Self {
        let [prepare_ns, fetch_ns, sched_ns, other_ns] = raw.dataload_ns;
        Self {
            prepare_ns,
            fetch_ns,
            sched_ns,
            other_ns,
        }
    }

    /// All of it.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.prepare_ns + self.fetch_ns + self.sched_ns + self.other_ns
    }
}
