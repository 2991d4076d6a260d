//! Compilations, on the thread itself and on others that it waits for.

use super::tests::track;
use super::*;
use ThreadEvent::*;
use WorkloadPhase::*;

/// A thread of a pool compiles for others.
#[test]
fn a_thread_that_only_compiles_has_no_phase() {
    let events = [(0, CompileBegin), (5, CompileEnd)];
    assert_eq!(track(&events, 7), [(Unknown, 0, 7)]);
}

/// A missed end of a compilation is over with the next announcement.
#[test]
fn the_end_of_a_compilation_changes_no_later_phase() {
    let events = [(0, CompileBegin), (5, DataBegin), (6, CompileEnd)];
    assert_eq!(track(&events, 7), [(Unknown, 0, 5), (DataLoading, 5, 7)]);
}

/// The training thread waits while another thread compiles the backward pass, and then runs that pass.
#[test]
fn a_wait_for_a_compilation_belongs_to_no_phase() {
    let backward = [
        (0, DataBegin),
        (1, CopyToDevice),
        (2, BackwardBegin),
        (3, Block(BlockReason::Futex)),
        (900, AwaitedCompile),
        (950, UnblockAfterLaunches),
        (960, OptimizerBegin),
    ];
    assert_eq!(
        track(&backward, 970),
        [
            (DataLoading, 0, 1),
            (GpuCompute, 1, 3),
            (Unknown, 3, 900),
            (GpuCompute, 900, 950),
            (OptimizerStep, 950, 970)
        ]
    );
    // A copy after the wait shows nothing about the compilation in it.
    let undecided = [
        (0, Launch),
        (1, GpuSyncEnter),
        (2, GpuSyncLeave),
        (3, Block(BlockReason::Futex)),
        (90, AwaitedCompile),
        (95, Unblock),
        (96, CopyToDevice),
    ];
    assert_eq!(
        track(&undecided, 97),
        [
            (GpuCompute, 0, 3),
            (Unknown, 3, 90),
            (DataLoading, 90, 96),
            (GpuCompute, 96, 97)
        ]
    );
}

#[test]
fn a_wait_for_data_or_for_the_gpu_is_no_wait_for_a_compilation() {
    let data = [
        (0, DataBegin),
        (1, Block(BlockReason::Futex)),
        (90, AwaitedCompile),
        (95, Unblock),
        (96, CopyToDevice),
    ];
    assert_eq!(
        track(&data, 97),
        [(DataLoading, 0, 96), (GpuCompute, 96, 97)]
    );
    let sync = [
        (0, GpuSyncEnter),
        (1, Block(BlockReason::Futex)),
        (90, AwaitedCompile),
        (95, Unblock),
    ];
    assert_eq!(track(&sync, 97), [(GpuCompute, 0, 97)]);
    let not_blocked = [(0, Launch), (90, AwaitedCompile)];
    assert_eq!(track(&not_blocked, 97), [(GpuCompute, 0, 97)]);
}
