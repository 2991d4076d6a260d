//! Collectives and messages: operations, bytes, and the progress of every rank.

mod exited_ranks;
mod layout;
pub(crate) mod metrics;
mod state;

pub(crate) use exited_ranks::ExitedRanks;
pub use exited_ranks::{ExitedRank, ProcessExit};
pub use state::{Communicator, Communicators};
pub(crate) use state::{forget, read_maps};

#[cfg(test)]
pub(super) use layout::MIRRORS;
use layout::{
    COLLECTIVE, DESTROY, GROUP, INIT_ALL, INIT_RANK, INIT_SCALABLE, POINT_TO_POINT, RANK, RANKS,
    SPLIT,
};
use zernel_phase::steps::Mark;
use zernel_phase::tracker::ThreadEvent::{CollectiveEnter, CollectiveLeave};

use super::{CallKind, DurationKind, Operation, Probe, ProbedFunction};
use zernel_elf::LibraryKind::Nccl;

const fn nccl_function(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(Nccl, Probe::Nccl, role, names)
}

/// `arguments` are the positions of four arguments: number of elements, type of an element, communicator, stream.
const fn communicating_function(
    role: u8,
    operation: Operation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    nccl_function(role, names)
        .arguments(arguments)
        .bytes(1)
        .kind(CallKind::Communication(operation))
        .duration(DurationKind::Enqueue(operation))
        .events(CollectiveEnter, CollectiveLeave)
}

const fn collective_function(
    operation: Operation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    communicating_function(COLLECTIVE, operation, names, arguments)
}

const fn message_function(
    operation: Operation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    communicating_function(POINT_TO_POINT, operation, names, arguments)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    // Since NCCL 2.32 each collective has a second form: the same first arguments, then further ones.
    collective_function(
        Operation::AllReduce,
        &["ncclAllReduce", "ncclAllReduceConfig"],
        [3, 4, 6, 7],
    )
    .step_mark(Mark::Reduce),
    // ncclBcast needs no probe, because it calls ncclBroadcast.
    collective_function(
        Operation::Broadcast,
        &["ncclBroadcast", "ncclBroadcastConfig"],
        [3, 4, 6, 7],
    ),
    collective_function(
        Operation::Reduce,
        &["ncclReduce", "ncclReduceConfig"],
        [3, 4, 7, 8],
    ),
    collective_function(
        Operation::AllGather,
        &["ncclAllGather", "ncclAllGatherConfig"],
        [3, 4, 5, 6],
    ),
    collective_function(
        Operation::ReduceScatter,
        &["ncclReduceScatter", "ncclReduceScatterConfig"],
        [3, 4, 6, 7],
    )
    .step_mark(Mark::Reduce),
    collective_function(
        Operation::AllToAll,
        &["ncclAlltoAll", "ncclAlltoAllConfig"],
        [3, 4, 5, 6],
    ),
    collective_function(
        Operation::Gather,
        &["ncclGather", "ncclGatherConfig"],
        [3, 4, 6, 7],
    ),
    collective_function(
        Operation::Scatter,
        &["ncclScatter", "ncclScatterConfig"],
        [3, 4, 6, 7],
    ),
    message_function(Operation::Send, &["ncclSend"], [2, 3, 5, 6]),
    message_function(Operation::Recv, &["ncclRecv"], [2, 3, 5, 6]),
    nccl_function(GROUP, &["ncclGroupStart"]),
    nccl_function(GROUP, &["ncclGroupEnd"])
        .duration(DurationKind::Enqueue(Operation::Group))
        .events(CollectiveEnter, CollectiveLeave),
    nccl_function(INIT_RANK, &["ncclCommInitRank", "ncclCommInitRankConfig"])
        .arguments([1, 2, 3, 0]),
    nccl_function(INIT_SCALABLE, &["ncclCommInitRankScalable"]).arguments([1, 2, 3, 5]),
    nccl_function(INIT_ALL, &["ncclCommInitAll"]).arguments([1, 2, 0, 0]),
    nccl_function(SPLIT, &["ncclCommSplit"]).arguments([1, 2, 3, 4]),
    // ncclCommShrink is a split in which all remaining ranks have the same color.
    nccl_function(SPLIT, &["ncclCommShrink"]).arguments([1, 0, 0, 4]),
    nccl_function(RANK, &["ncclCommUserRank"]).arguments([1, 2, 0, 0]),
    nccl_function(RANKS, &["ncclCommCount"]).arguments([1, 2, 0, 0]),
    nccl_function(
        DESTROY,
        &["ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize"],
    )
    .arguments([1, 0, 0, 0]),
];
