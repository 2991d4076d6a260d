//! Communicators of a process, and the progress of the process on each of them.

use std::collections::{BTreeMap, BTreeSet};

use libbpf_rs::MapCore;
use zernel_model::snapshot::{CollectiveTotals, CommunicatorSnapshot, NcclSnapshot};

use super::layout;
use crate::observer::{KernelPrograms, ObservedProcess, TenantTable, seconds_ago};
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{CallKind, DurationKind, NcclOperation, ProbeState};

/// Number of operations that a communicator remembers.
const REMEMBERED_OPERATIONS: u64 = 16;
/// Bits per remembered operation.
const OPERATION_BITS: u64 = 4;

/// Communicators that a process has created and not destroyed.
#[derive(Debug, Default)]
pub struct Communicators {
    /// The communicators.
    pub communicators: Vec<Communicator>,
}

/// A communicator of a process, and the progress of the process on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Communicator {
    /// Id of the communicator, which all its ranks share, on every node.
    pub unique_id_hash: u64,
    /// Rank of the process in the communicator, if known.
    pub rank: Option<u32>,
    /// Number of ranks, if known.
    pub ranks: Option<u32>,
    /// Collectives entered.
    pub sequence: u64,
    /// Operation of the latest collective.
    pub operation: NcclOperation,
    /// Bytes of the latest collective.
    pub bytes: u64,
    /// When the process entered the latest collective, in nanoseconds of CLOCK_MONOTONIC.
    pub entered_ns: u64,
    /// When the latest call returned, in nanoseconds of CLOCK_MONOTONIC; 0 while it has not.
    pub left_ns: u64,
    /// Whether the call that creates the communicator has not returned yet. While the call has not returned,
    /// `entered_ns` is when it was entered.
    pub is_being_made: bool,
    /// Longest time between the entries of two successive collectives.
    pub longest_gap_ns: u64,
    /// Latest operations of the process on the communicator, four bits each, the newest in the lowest bits.
    operations: u64,
}

/// Reads the communicators of all processes.
pub(crate) fn read_maps(
    kernel: &KernelPrograms,
    processes: &mut BTreeMap<u32, ObservedProcess>,
) -> libbpf_rs::Result<()> {
    for process in processes.values_mut() {
        process.probes.nccl.communicators.clear();
    }
    for (key, record) in kernel.read_map_entries("communicators")? {
        let key: layout::CommunicatorKey = key;
        if let Some(process) = processes.get_mut(&key.process) {
            let communicator = Communicator::new(&key, &record);
            if let (Some(rank), Some(ranks)) = (communicator.rank, communicator.ranks) {
                process.adopt_rank(rank, ranks);
            }
            process.probes.nccl.communicators.push(communicator);
        }
    }
    Ok(())
}

/// Deletes the communicators of exited processes.
pub(crate) fn delete_entries(
    kernel: &KernelPrograms,
    processes: &BTreeSet<u32>,
) -> libbpf_rs::Result<()> {
    let is_theirs =
        |key: &layout::CommunicatorKey, _: &layout::Communicator| processes.contains(&key.process);
    let deleted = kernel.delete_where("communicators", is_theirs)?;
    kernel.count_deleted(
        TenantTable::Communicators,
        deleted.iter().map(|key| key.process),
    );
    for name in ["pending_collectives", "expected_communicators"] {
        let map = kernel.find_map_by_name(name)?;
        for process in processes {
            // The deletion fails for a process without an entry in this map.
            let _ = map.delete(&process.to_ne_bytes());
        }
    }
    Ok(())
}

impl Communicator {
    fn new(key: &layout::CommunicatorKey, record: &layout::Communicator) -> Self {
        Self {
            unique_id_hash: record.unique_id_hash,
            rank: (record.rank != layout::NO_RANK).then_some(record.rank),
            ranks: (record.ranks != 0).then_some(record.ranks),
            sequence: record.sequence,
            operation: operation_from_number(record.operation.into()),
            bytes: record.bytes,
            entered_ns: record.entered_ns,
            left_ns: record.left_ns,
            is_being_made: key.is_being_made != 0,
            longest_gap_ns: record.longest_gap_ns,
            operations: record.operations,
        }
    }

    /// Latest operations on the communicator, newest first; at most 16.
    pub fn last_operations(&self) -> impl Iterator<Item = NcclOperation> {
        let known = self.sequence.min(REMEMBERED_OPERATIONS);
        (0..known)
            .map(|place| operation_from_number(self.operations >> (OPERATION_BITS * place) & 0xf))
    }

    /// The communicator in a snapshot.
    pub(super) fn snapshot(&self) -> CommunicatorSnapshot {
        let last_operations = self.last_operations();
        CommunicatorSnapshot {
            communicator: format!("{:016x}", self.unique_id_hash),
            rank: self.rank,
            ranks: self.ranks,
            sequence: self.sequence,
            op: self.operation.name().into(),
            bytes: self.bytes,
            in_call: self.entered_ns != 0 && self.left_ns == 0,
            entered_seconds_ago: seconds_ago(self.entered_ns),
            longest_gap_seconds: self.longest_gap_ns as f64 / 1e9,
            last_ops: last_operations.map(|it| it.name().into()).collect(),
            is_being_made: self.is_being_made,
        }
    }
}

fn operation_from_number(number: u64) -> NcclOperation {
    let known = NcclOperation::ALL.get(number as usize);
    known.copied().unwrap_or(NcclOperation::Other)
}

impl ProbeState for Communicators {
    type Snapshot = NcclSnapshot;

    fn release_on_exit(&mut self) {
        self.communicators.clear();
    }

    fn snapshot(&self, process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> NcclSnapshot {
        let operations = NcclOperation::ALL.into_iter();
        NcclSnapshot {
            collectives: operations
                .filter_map(|operation| collective_totals(process, operation))
                .collect(),
            communicators: self
                .communicators
                .iter()
                .map(Communicator::snapshot)
                .collect(),
        }
    }
}

/// Totals of all collectives of one operation; `None` if the process made no such collective.
fn collective_totals(
    process: &ObservedProcess,
    operation: NcclOperation,
) -> Option<CollectiveTotals> {
    let count = process.count_calls(|what| what == CallKind::Communication(operation));
    let enqueue_times = process.shared_duration_histogram(DurationKind::Enqueue(operation));
    let until_sync_times = process.shared_duration_histogram(DurationKind::UntilSync(operation));
    if count.calls == 0 && enqueue_times.is_none() && until_sync_times.is_none() {
        return None;
    }
    let until_sync = until_sync_times.as_ref();
    Some(CollectiveTotals {
        op: operation.name().into(),
        calls: count.calls,
        bytes: count.bytes,
        until_sync_median_seconds: until_sync.map(|times| times.p50_ns() as f64 / 1e9),
        until_sync_mean_seconds: until_sync.map(|times| times.mean_ns() / 1e9),
        enqueue_times,
        until_sync_times,
    })
}
