//! Ranks that exited while other ranks still hold a communicator with them. The other ranks may wait for an exited
//! rank forever.

use std::collections::BTreeSet;

use zernel_model::identity::Identity;
use zernel_model::snapshot::{NcclSnapshot, ProcessSnapshot};

use super::Communicator;
use crate::observer::{ObservedProcess, seconds_ago};

/// A rank that exited.
#[derive(Debug, Clone)]
pub struct ExitedRank {
    /// Its pid.
    pub pid: u32,
    /// Identity of the rank; `None` if the rank exited before its identity was read.
    pub identity: Option<Identity>,
    /// When the rank exited, in nanoseconds of CLOCK_MONOTONIC.
    pub ended_ns: u64,
    /// How it exited.
    pub exit: ProcessExit,
    /// The communicators that the rank had not destroyed when it exited.
    pub communicators: Vec<Communicator>,
}

/// How a process exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessExit {
    /// The rank exited with this code.
    Code(u8),
    /// This signal killed it.
    Signal(u8),
}

impl ProcessExit {
    /// Decodes a wait status, as a parent process receives it.
    fn from_wait_status(status: u64) -> Self {
        match status & 0x7f {
            0 => Self::Code((status >> 8) as u8),
            signal => Self::Signal(signal as u8),
        }
    }
}

/// The exited ranks that others may wait for.
#[derive(Debug, Default)]
pub(crate) struct ExitedRanks(Vec<ExitedRank>);

impl ExitedRanks {
    /// Adds a process that exited with a wait status, if it has communicators.
    pub(crate) fn add_exited_process(&mut self, process: &ObservedProcess, status: u64) {
        let communicators = &process.probes.nccl.communicators;
        let Some(ended_ns) = process.ended_ns.filter(|_| !communicators.is_empty()) else {
            return;
        };
        self.0.push(ExitedRank {
            pid: process.pid,
            identity: process.identity.clone(),
            ended_ns,
            exit: ProcessExit::from_wait_status(status),
            communicators: communicators.clone(),
        });
    }

    /// Forgets the ranks that no running process shares a communicator with.
    pub(crate) fn forget_unshared<'a>(
        &mut self,
        running: impl Iterator<Item = &'a ObservedProcess>,
    ) {
        let hashes: BTreeSet<u64> = running
            .flat_map(|process| &process.probes.nccl.communicators)
            .map(|communicator| communicator.unique_id_hash)
            .collect();
        for rank in &mut self.0 {
            let communicators = &mut rank.communicators;
            communicators.retain(|communicator| hashes.contains(&communicator.unique_id_hash));
        }
        self.0.retain(|rank| !rank.communicators.is_empty());
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ExitedRank> {
        self.0.iter()
    }
}

impl ExitedRank {
    /// The rank in a snapshot.
    pub(crate) fn snapshot(&self) -> ProcessSnapshot {
        let (exit_code, signal) = match self.exit {
            ProcessExit::Code(code) => (Some(code), None),
            ProcessExit::Signal(signal) => (None, Some(signal)),
        };
        let mut snapshot = ProcessSnapshot {
            pid: self.pid,
            identity: self.identity.clone(),
            ended_seconds_ago: seconds_ago(self.ended_ns),
            exit_code,
            signal,
            ..ProcessSnapshot::default()
        };
        snapshot.probes.nccl = NcclSnapshot {
            communicators: self
                .communicators
                .iter()
                .map(Communicator::snapshot)
                .collect(),
            ..NcclSnapshot::default()
        };
        snapshot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_status_is_a_code_or_a_signal() {
        assert_eq!(ProcessExit::from_wait_status(0), ProcessExit::Code(0));
        assert_eq!(ProcessExit::from_wait_status(3 << 8), ProcessExit::Code(3));
        assert_eq!(ProcessExit::from_wait_status(9), ProcessExit::Signal(9));
        // With a core dump.
        let dumped = ProcessExit::from_wait_status(0x80 | 11);
        assert_eq!(dumped, ProcessExit::Signal(11));
    }
}
