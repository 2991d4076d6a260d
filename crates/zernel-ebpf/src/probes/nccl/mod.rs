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

const fn nccl(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(Nccl, Probe::Nccl, role, names)
}

/// `arguments` are the numbers of these arguments: elements, type of an element, communicator, stream.
const fn communicates(
    role: u8,
    operation: Operation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    nccl(role, names)
        .arguments(arguments)
        .bytes(1)
        .kind(CallKind::Communication(operation))
        .duration(DurationKind::Enqueue(operation))
        .events(CollectiveEnter, CollectiveLeave)
}

const fn collective(
    operation: Operation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    communicates(COLLECTIVE, operation, names, arguments)
}

const fn message(
    operation: Operation,
    names: &'static [&'static str],
    arguments: [u8; 4],
) -> ProbedFunction {
    communicates(POINT_TO_POINT, operation, names, arguments)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    // Since 2.32 each collective has a second form with more arguments after the same first ones.
    collective(
        Operation::AllReduce,
        &["ncclAllReduce", "ncclAllReduceConfig"],
        [3, 4, 6, 7],
    )
    .step_mark(Mark::Reduce),
    // ncclBcast calls ncclBroadcast, so it needs no probe.
    collective(
        Operation::Broadcast,
        &["ncclBroadcast", "ncclBroadcastConfig"],
        [3, 4, 6, 7],
    ),
    collective(
        Operation::Reduce,
        &["ncclReduce", "ncclReduceConfig"],
        [3, 4, 7, 8],
    ),
    collective(
        Operation::AllGather,
        &["ncclAllGather", "ncclAllGatherConfig"],
        [3, 4, 5, 6],
    ),
    collective(
        Operation::ReduceScatter,
        &["ncclReduceScatter", "ncclReduceScatterConfig"],
        [3, 4, 6, 7],
    )
    .step_mark(Mark::Reduce),
    collective(
        Operation::AllToAll,
        &["ncclAlltoAll", "ncclAlltoAllConfig"],
        [3, 4, 5, 6],
    ),
    collective(
        Operation::Gather,
        &["ncclGather", "ncclGatherConfig"],
        [3, 4, 6, 7],
    ),
    collective(
        Operation::Scatter,
        &["ncclScatter", "ncclScatterConfig"],
        [3, 4, 6, 7],
    ),
    message(Operation::Send, &["ncclSend"], [2, 3, 5, 6]),
    message(Operation::Recv, &["ncclRecv"], [2, 3, 5, 6]),
    nccl(GROUP, &["ncclGroupStart"]),
    nccl(GROUP, &["ncclGroupEnd"])
        .duration(DurationKind::Enqueue(Operation::Group))
        .events(CollectiveEnter, CollectiveLeave),
    nccl(INIT_RANK, &["ncclCommInitRank", "ncclCommInitRankConfig"]).arguments([1, 2, 3, 0]),
    nccl(INIT_SCALABLE, &["ncclCommInitRankScalable"]).arguments([1, 2, 3, 5]),
    nccl(INIT_ALL, &["ncclCommInitAll"]).arguments([1, 2, 0, 0]),
    nccl(SPLIT, &["ncclCommSplit"]).arguments([1, 2, 3, 4]),
    // The remaining ranks have one color.
    nccl(SPLIT, &["ncclCommShrink"]).arguments([1, 0, 0, 4]),
    nccl(RANK, &["ncclCommUserRank"]).arguments([1, 2, 0, 0]),
    nccl(RANKS, &["ncclCommCount"]).arguments([1, 2, 0, 0]),
    nccl(
        DESTROY,
        &["ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize"],
    )
    .arguments([1, 0, 0, 0]),
];
