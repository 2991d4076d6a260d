//! Copies to the host, which may wait for the GPU.

use super::tests::track;
use super::*;
use ThreadEvent::*;
use WorkloadPhase::*;

/// A copy to pinned memory returns at once. The sync after it waits for the collective.
#[test]
fn a_short_copy_to_the_host_changes_nothing() {
    let events = [
        (0, DataBegin),
        (1, CopyToDevice),
        (1, BackwardBegin),
        (2, Block(BlockReason::Futex)),
        (5, UnblockAfterLaunches),
        (6, OptimizerBegin),
        (8, UpdateEnd),
        (9, Launch),
        (10, GpuSyncEnter),
        (11, GpuSyncLeave),
        (12, CollectiveEnter),
        (13, CollectiveLeave),
        (14, GpuSyncEnter),
        (20, GpuSyncLeave),
    ];
    let expected = track(&events, 30);
    assert!(expected.contains(&(NcclCollective, 14, 20)));
    for (index, (at, event)) in events.into_iter().enumerate() {
        if matches!(event, Block(_) | GpuSyncEnter) {
            continue; // the thread is not on its CPU, or in another call
        }
        let mut with_copy = events.to_vec();
        with_copy.splice(
            index + 1..index + 1,
            [(at, CopyToHostEnter), (at, CopyToHostLeave)],
        );
        assert_eq!(track(&with_copy, 30), expected, "after {event:?}");
    }
}

/// A copy to pageable memory waits for the GPU. The sync after it may still wait for a collective of another stream.
#[test]
fn a_long_copy_to_the_host_is_a_sync_since_its_begin() {
    let events = [
        (0, OptimizerBegin),
        (4, CopyToHostEnter),
        (9, CopyToHostLeave),
        (10, CollectiveEnter),
        (11, CollectiveLeave),
        (12, CopyToHostEnter),
        (17, CopyToHostLeave),
        (17, GpuSyncEnter),
        (21, GpuSyncLeave),
    ];
    assert_eq!(
        track(&events, 22),
        [
            (OptimizerStep, 0, 4),
            (GpuCompute, 4, 10),
            (NcclCollective, 10, 11),
            (GpuCompute, 11, 12),
            (NcclCollective, 12, 17),
            (NcclCollective, 17, 21),
            (GpuCompute, 21, 22),
        ]
    );
}
