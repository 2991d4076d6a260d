//! Collectives and messages: operations, bytes, and the progress of every rank.

mod exited_ranks;
mod layout;
pub(crate) mod metrics;
mod state;

pub(crate) use exited_ranks::ExitedRanks;
pub use exited_ranks::{ExitedRank, ProcessExit};
pub use state::{Communicator, Communicators};
pub(crate) use state::{delete_entries, read_maps};

#[cfg(test)]
pub(super) use layout::MIRRORS;
use layout::{
    COLLECTIVE, DESTROY, GROUP, INIT_ALL, INIT_RANK, INIT_SCALABLE, POINT_TO_POINT, RANK, RANKS,
    SPLIT,
};
use zernel_phase::steps::StepMark;
use zernel_phase::tracker::ThreadEvent::{CollectiveEnter, CollectiveLeave};

use super::{CallKind, DurationKind, NcclOperation, Probe, ProbedFunction};
use zernel_elf::LibraryKind::Nccl;

const fn nccl_function(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(Nccl, Probe::Nccl, role, names)
}

/// `arguments` are the positions of four arguments: number of elements, type of an element, communicator, stream.
const fn communicating_function(
    role: u8,
    operation: NcclOperation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    nccl_function(role, names)
        .kept_arguments(arguments)
        .bytes_argument(1)
        .counted_as(CallKind::Communication(operation))
        .timed_as(DurationKind::Enqueue(operation))
        .enter_and_leave_events(CollectiveEnter, CollectiveLeave)
}

const fn collective_function(
    operation: NcclOperation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    communicating_function(COLLECTIVE, operation, names, arguments)
}

const fn message_function(
    operation: NcclOperation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    communicating_function(POINT_TO_POINT, operation, names, arguments)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    // Since NCCL 2.32 each collective has a second form: the same first arguments, then further ones.
    collective_function(
        NcclOperation::AllReduce,
        &["ncclAllReduce", "ncclAllReduceConfig"],
        [3, 4, 6, 7],
    )
    .step_mark(StepMark::Reduce),
    // ncclBcast needs no probe, because it calls ncclBroadcast.
    collective_function(
        NcclOperation::Broadcast,
        &["ncclBroadcast", "ncclBroadcastConfig"],
        [3, 4, 6, 7],
    ),
    collective_function(
        NcclOperation::Reduce,
        &["ncclReduce", "ncclReduceConfig"],
        [3, 4, 7, 8],
    ),
    collective_function(
        NcclOperation::AllGather,
        &["ncclAllGather", "ncclAllGatherConfig"],
        [3, 4, 5, 6],
    ),
    collective_function(
        NcclOperation::ReduceScatter,
        &["ncclReduceScatter", "ncclReduceScatterConfig"],
        [3, 4, 6, 7],
    )
    .step_mark(StepMark::Reduce),
    collective_function(
        NcclOperation::AllToAll,
        &["ncclAlltoAll", "ncclAlltoAllConfig"],
        [3, 4, 5, 6],
    ),
    collective_function(
        NcclOperation::Gather,
        &["ncclGather", "ncclGatherConfig"],
        [3, 4, 6, 7],
    ),
    collective_function(
        NcclOperation::Scatter,
        &["ncclScatter", "ncclScatterConfig"],
        [3, 4, 6, 7],
    ),
    message_function(NcclOperation::Send, &["ncclSend"], [2, 3, 5, 6]),
    message_function(NcclOperation::Recv, &["ncclRecv"], [2, 3, 5, 6]),
    nccl_function(GROUP, &["ncclGroupStart"]),
    nccl_function(GROUP, &["ncclGroupEnd"])
        .timed_as(DurationKind::Enqueue(NcclOperation::Group))
        .enter_and_leave_events(CollectiveEnter, CollectiveLeave),
    nccl_function(INIT_RANK, &["ncclCommInitRank", "ncclCommInitRankConfig"])
        .kept_arguments([1, 2, 3, 0]),
    nccl_function(INIT_SCALABLE, &["ncclCommInitRankScalable"]).kept_arguments([1, 2, 3, 5]),
    nccl_function(INIT_ALL, &["ncclCommInitAll"]).kept_arguments([1, 2, 0, 0]),
    nccl_function(SPLIT, &["ncclCommSplit"]).kept_arguments([1, 2, 3, 4]),
    // ncclCommShrink is a split in which all remaining ranks have the same color.
    nccl_function(SPLIT, &["ncclCommShrink"]).kept_arguments([1, 0, 0, 4]),
    nccl_function(RANK, &["ncclCommUserRank"]).kept_arguments([1, 2, 0, 0]),
    nccl_function(RANKS, &["ncclCommCount"]).kept_arguments([1, 2, 0, 0]),
    nccl_function(
        DESTROY,
        &["ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize"],
    )
    .kept_arguments([1, 0, 0, 0]),
];
