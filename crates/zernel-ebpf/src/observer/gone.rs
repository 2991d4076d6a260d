//! Ranks that have ended while others still hold a communicator with them: those may wait for them for ever.

use std::collections::BTreeSet;

use super::{Communicator, ObservedProcess};
use zernel_identity::Identity;

/// A rank that has ended.
#[derive(Debug, Clone)]
pub struct GoneRank {
    /// The pid it had.
    pub pid: u32,
    /// Who it was, if it lived long enough to be asked.
    pub identity: Option<Identity>,
    /// When it ended, in nanoseconds of CLOCK_MONOTONIC.
    pub ended_ns: u64,
    /// How it ended.
    pub end: End,
    /// Those it had made and not destroyed, as it left them.
    pub communicators: Vec<Communicator>,
}

/// How a process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself, with this code.
    Exited(u8),
    /// By this signal.
    Killed(u8),
}

impl End {
    /// From what a parent gets to know of its child.
    pub(super) fn new(status: u64) -> Self {
        match status & 0x7f {
            0 => Self::Exited((status >> 8) as u8),
            signal => Self::Killed(signal as u8),
        }
    }
}

/// Those that somebody may still wait for.
#[derive(Debug, Default)]
pub(super) struct GoneRanks(Vec<GoneRank>);

impl GoneRanks {
    /// A process has ended.
    pub(super) fn add(&mut self, process: &ObservedProcess, status: u64) {
        let Some(ended_ns) = process.ended_ns else {
            return;
        };
        if process.communicators.is_empty() {
            return;
        }
        self.0.push(GoneRank {
            pid: process.pid,
            identity: process.identity.clone(),
            ended_ns,
            end: End::new(status),
            communicators: process.communicators.clone(),
        });
    }

    /// Forgets those that no living process has a communicator with.
    pub(super) fn prune<'a>(&mut self, living: impl Iterator<Item = &'a ObservedProcess>) {
        let hashes: BTreeSet<u64> = living
            .flat_map(|process| &process.communicators)
            .map(|communicator| communicator.hash)
            .collect();
        for gone in &mut self.0 {
            let communicators = &mut gone.communicators;
            communicators.retain(|communicator| hashes.contains(&communicator.hash));
        }
        self.0.retain(|gone| !gone.communicators.is_empty());
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &GoneRank> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_as_a_parent_is_told() {
        assert_eq!(End::new(0), End::Exited(0));
        assert_eq!(End::new(3 << 8), End::Exited(3));
        assert_eq!(End::new(9), End::Killed(9));
        // With a core dump.
        assert_eq!(End::new(0x80 | 11), End::Killed(11));
    }
}
