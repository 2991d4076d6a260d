//! Waits for a thread that is in a collective for a part of the wait.

use super::tests::track;
use super::*;
use ThreadEvent::*;
use WorkloadPhase::*;

/// The thread loads what is left of the wait if it copies next.
#[test]
fn the_rest_of_a_wait_for_a_collective_may_be_for_data() {
    let events = |after_wait| {
        [
            (0, Launch),
            (1, GpuSyncEnter),
            (2, GpuSyncLeave),
            (3, Block(BlockReason::Futex)),
            (10, AwaitedCollective),
            (95, Unblock),
            (96, after_wait),
        ]
    };
    assert_eq!(
        track(&events(CopyToDevice), 97),
        [
            (GpuCompute, 0, 3),
            (NcclCollective, 3, 10),
            (DataLoading, 10, 96),
            (GpuCompute, 96, 97)
        ]
    );
    assert_eq!(
        track(&events(Launch), 97),
        [
            (GpuCompute, 0, 3),
            (NcclCollective, 3, 10),
            (GpuCompute, 10, 97)
        ]
    );
}

#[test]
fn a_wait_that_a_collective_covers_is_for_peers() {
    let events = [
        (0, GpuSyncEnter),
        (1, GpuSyncLeave),
        (1, Block(BlockReason::Futex)),
        (90, AwaitedCollective),
        (90, Unblock),
        (91, CopyToDevice),
    ];
    assert_eq!(
        track(&events, 97),
        [
            (GpuCompute, 0, 1),
            (NcclCollective, 1, 90),
            (GpuCompute, 90, 97)
        ]
    );
}
