use super::*;
use crate::task_state::PhaseTimeAccumulator;
use ThreadEvent::*;
use WorkloadPhase::*;

const MS: u64 = 1_000_000;

/// Applies `events` (in ms) and returns the intervals as `(phase, start, end)` in ms.
pub(super) fn track(events: &[(u64, ThreadEvent)], end: u64) -> Vec<(WorkloadPhase, u64, u64)> {
    track_with_faults(events, end).0
}

fn track_with_faults(
    events: &[(u64, ThreadEvent)],
    end: u64,
) -> (Vec<(WorkloadPhase, u64, u64)>, TrackerFaults) {
    let mut closed = Vec::new();
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
    for (at, event) in events {
        tracker.observe(at * MS, *event, &mut closed);
    }
    let faults = tracker.finish(end * MS, &mut closed);
    let in_ms = |i: PhaseInterval| (i.phase, i.start_ns / MS, i.end_ns / MS);
    (closed.into_iter().map(in_ms).collect(), faults)
}

#[test]
fn phases_of_a_training_step_without_markers() {
    let step = [
        (0, GpuSyncEnter),
        (1, GpuSyncLeave),
        (2, Block(BlockReason::Poll)),
        (10, Unblock),
        (12, CopyToDevice),
        (13, Launch),
        (15, GpuSyncEnter),
        (15, Block(BlockReason::Futex)),
        (25, Unblock),
        (25, GpuSyncLeave),
        (26, CollectiveEnter),
        (27, CollectiveLeave),
        (27, GpuSyncEnter),
        (35, GpuSyncLeave),
        (38, Block(BlockReason::Poll)),
    ];
    let (intervals, faults) = track_with_faults(&step, 50);
    assert_eq!(
        intervals,
        [
            (GpuCompute, 0, 2),
            (DataLoading, 2, 12),
            (GpuCompute, 12, 26),
            (NcclCollective, 26, 27),
            (NcclCollective, 27, 35),
            (GpuCompute, 35, 38),
            (DataLoading, 38, 50),
        ]
    );
    assert_eq!(faults, TrackerFaults::default());
}

#[test]
fn phases_of_a_training_step_with_markers() {
    let step = [
        (0, CopyToDevice),
        (1, Launch),
        (2, Block(BlockReason::Futex)), // backward runs on its own thread
        (8, Unblock),
        (9, OptimizerMarker),
        (9, Launch),
        (11, GpuSyncEnter),
        (20, GpuSyncLeave),
        (21, Block(BlockReason::Futex)),
        (30, Unblock),
        (30, CopyToDevice),
    ];
    assert_eq!(
        track(&step, 31),
        [
            (GpuCompute, 0, 9),
            (OptimizerStep, 9, 11),
            (GpuCompute, 11, 21),
            (DataLoading, 21, 30),
            (GpuCompute, 30, 31),
        ]
    );
}

#[test]
fn launches_long_after_a_marker_are_gpu_compute() {
    assert_eq!(
        track(&[(1, OptimizerMarker), (1, Launch), (2, Launch)], 10),
        [(Unknown, 0, 1), (OptimizerStep, 1, 2), (GpuCompute, 2, 10)]
    );
}

#[test]
fn gpu_compute_resumes_after_a_ddp_collective_between_launches() {
    let backward = [
        (0, Launch),
        (2, CollectiveEnter),
        (2, Launch),
        (3, CollectiveLeave),
        (4, Launch),
        (5, GpuSyncEnter),
    ];
    assert_eq!(
        track(&backward, 10),
        [
            (GpuCompute, 0, 2),
            (NcclCollective, 2, 3),
            (GpuCompute, 3, 10)
        ]
    );
}

#[test]
fn a_sync_inside_a_collective_is_part_of_the_collective() {
    let events = [
        (0, CollectiveEnter),
        (1, GpuSyncEnter),
        (2, GpuSyncLeave),
        (3, CopyToDevice),
        (5, CollectiveLeave),
    ];
    let (intervals, faults) = track_with_faults(&events, 5);
    assert_eq!(intervals, [(NcclCollective, 0, 5)]);
    assert_eq!(faults, TrackerFaults::default());
}

/// The phases of a loop that announces what it does, as PyTorch's loops do.
#[test]
fn announced_steps_have_the_announced_phases() {
    let step = [
        (0, DataBegin),
        (1, Block(BlockReason::Futex)), // for the thread that pins memory
        (5, Unblock),
        (6, CopyToDevice),
        (7, ZeroGradients),
        (7, Launch), // the forward pass
        (10, BackwardBegin),
        (10, Block(BlockReason::Futex)),
        (30, UnblockAfterLaunches),
        (31, OptimizerBegin),
        (31, Launch),
        (35, Launch),
        (36, DataBegin),
    ];
    assert_eq!(
        track(&step, 40),
        [
            (DataLoading, 0, 6),
            (GpuCompute, 6, 30),
            (OptimizerStep, 30, 36),
            (DataLoading, 36, 40),
        ]
    );
}

/// Launches after the backward pass clip or unscale gradients if an optimizer step follows. With micro-batches none may
/// follow.
#[test]
fn launches_before_an_announced_update_belong_to_it() {
    let backward = [
        (0, DataBegin),
        (1, CopyToDevice),
        (2, BackwardBegin),
        (2, Block(BlockReason::Futex)),
        (10, UnblockAfterLaunches),
        (11, Launch),
    ];
    let clipping = [&backward[..], &[(13, OptimizerBegin)]].concat();
    assert_eq!(
        track(&clipping, 20)[1..],
        [(GpuCompute, 1, 10), (OptimizerStep, 10, 20)]
    );
    // Waiting for the GPU is no part of it.
    let scaler = [(13, GpuSyncEnter), (15, GpuSyncLeave), (16, OptimizerBegin)];
    assert_eq!(
        track(&[&backward[..], &scaler].concat(), 20)[1..],
        [(GpuCompute, 1, 15), (OptimizerStep, 15, 20)]
    );
    let accumulating = [&backward[..], &[(12, DataBegin), (13, CopyToDevice)]].concat();
    assert_eq!(
        track(&accumulating, 20)[1..],
        [
            (GpuCompute, 1, 12),
            (DataLoading, 12, 13),
            (GpuCompute, 13, 20)
        ]
    );
}

/// A block for the backward pass that a copy follows, in a loop that announces nothing.
#[test]
fn a_wait_in_which_other_threads_launched_is_not_for_data() {
    let micro_batches = [
        (0, CopyToDevice),
        (1, Launch),
        (2, Block(BlockReason::Futex)),
        (9, UnblockAfterLaunches),
        (10, CopyToDevice),
    ];
    assert_eq!(track(&micro_batches, 12), [(GpuCompute, 0, 12)]);
}

#[test]
fn a_thread_that_announces_its_batches_loads_at_no_other_time() {
    let events = [
        (0, DataBegin),
        (1, CopyToDevice),
        (2, Block(BlockReason::Poll)),
        (9, Unblock),
        (9, Block(BlockReason::Io)),
        (12, Unblock),
        (13, CopyToDevice),
    ];
    assert_eq!(
        track(&events, 14),
        [(DataLoading, 0, 1), (GpuCompute, 1, 14)]
    );
}

/// Inference: nothing shows an optimizer.
#[test]
fn work_between_syncs_is_gpu_compute() {
    let mut events = Vec::new();
    for token in 0..4 {
        events.extend([
            (10 * token, Launch),
            (10 * token + 2, GpuSyncEnter),
            (10 * token + 7, GpuSyncLeave),
        ]);
    }
    assert_eq!(track(&events, 40), [(GpuCompute, 0, 40)]);
    // After that the evidence ends.
    assert_eq!(track(&events, 2_000)[1..], [(Unknown, 1_037, 2_000)]);
}

/// Without a GPU nothing shows that a batch has arrived, except that the thread runs on.
#[test]
fn without_a_gpu_loading_ends_soon_after_its_last_block() {
    let events = [
        (0, OptimizerMarker),
        (1, Block(BlockReason::Poll)),
        (20, Unblock),
        (30, BackwardBegin),
        (40, OptimizerMarker),
    ];
    assert_eq!(
        track(&events, 41),
        [
            (OptimizerStep, 0, 1),
            (DataLoading, 1, 21),
            (GpuCompute, 21, 40),
            (OptimizerStep, 40, 41),
        ]
    );
}

#[test]
fn clearing_gradients_is_part_of_an_optimizer_step_that_it_follows() {
    let after = [(0, OptimizerBegin), (5, ZeroGradients), (6, GpuSyncEnter)];
    assert_eq!(
        track(&after, 7),
        [(OptimizerStep, 0, 6), (GpuCompute, 6, 7)]
    );
    let before = [(0, DataBegin), (5, CopyToDevice), (6, ZeroGradients)];
    assert_eq!(track(&before, 7), [(DataLoading, 0, 5), (GpuCompute, 5, 7)]);
}

/// A compiler runs backward passes without data and tries out kernels; a checkpoint copies tensors from the GPU.
#[test]
fn compiling_and_saving_have_no_phase() {
    let compiles = [
        (0, CopyToDevice),
        (1, CompileBegin),
        (100, BackwardBegin),
        (101, Launch),
        (102, CopyToDevice),
        (200, Block(BlockReason::Futex)), // other processes compile
        (9_000, Unblock),
        (9_001, Launch),
        (29_100, CompileEnd),
        (29_200, OptimizerBegin),
    ];
    assert_eq!(
        track(&compiles, 29_201),
        [
            (GpuCompute, 0, 1),
            (Unknown, 1, 29_100),
            (GpuCompute, 29_100, 29_200),
            (OptimizerStep, 29_200, 29_201)
        ]
    );
    let saves = [
        (0, DataBegin),
        (1, OtherWorkBegin),
        (2, Block(BlockReason::Io)),
        (12, Unblock),
        (13, GpuSyncEnter),
        (14, GpuSyncLeave),
        (20, DataBegin),
    ];
    assert_eq!(
        track(&saves, 21),
        [
            (DataLoading, 0, 1),
            (Unknown, 1, 13),
            (GpuCompute, 13, 14),
            (Unknown, 14, 20),
            (DataLoading, 20, 21)
        ]
    );
}

/// The thread of the backward pass compiles it, and waits for other processes meanwhile.
#[test]
fn a_thread_that_compiled_computes() {
    let events = [
        (0, Launch),
        (1, CompileBegin),
        (2, Block(BlockReason::Futex)),
        (500, Unblock),
        (510, CompileEnd),
        (511, CompileEnd), // of another counter
    ];
    assert_eq!(
        track(&events, 512),
        [
            (GpuCompute, 0, 1),
            (Unknown, 1, 510),
            (GpuCompute, 510, 512)
        ]
    );
}

/// Inference announces nothing after it has saved.
#[test]
fn other_work_without_announcement_is_over_after_its_limit() {
    let events = [
        (0, OtherWorkBegin),
        (999, Launch),
        (1_000, Launch),
        (1_001, GpuSyncEnter),
    ];
    assert_eq!(
        track(&events, 1_002),
        [(Unknown, 0, 1_000), (GpuCompute, 1_000, 1_002)]
    );
}

#[test]
fn a_thread_that_is_not_observed_is_unknown() {
    let events = [
        (0, DataBegin),
        (1, Block(BlockReason::Poll)),
        (2, NotObserved),
        (50, NotObserved),
        (60, Launch),
    ];
    let (intervals, faults) = track_with_faults(&events, 61);
    assert_eq!(
        intervals,
        [(DataLoading, 0, 2), (Unknown, 2, 60), (GpuCompute, 60, 61)]
    );
    assert_eq!(faults, TrackerFaults::default());
}

/// A starved thread keeps its phase: a deadline counts time on a CPU or in a block, not time in a run queue.
#[test]
fn deadlines_stand_still_while_a_thread_waits_for_a_cpu() {
    let starved = [(0, Launch), (10, Preempt), (510, Resume)];
    assert_eq!(
        track(&starved, 2_000),
        [(GpuCompute, 0, 1_500), (Unknown, 1_500, 2_000)]
    );
    let in_collective = [(0, CollectiveEnter), (900, Preempt), (5_000, Resume)];
    assert_eq!(
        track(&in_collective, 6_000),
        [(NcclCollective, 0, 5_100), (Unknown, 5_100, 6_000)]
    );
    // Its return to a CPU was not seen.
    let with_loss = [(0, Launch), (10, Preempt), (510, Launch)];
    assert_eq!(track(&with_loss, 520), [(GpuCompute, 0, 520)]);
}

#[test]
fn markers_do_not_end_an_announced_update() {
    let averages = [
        (0, OptimizerBegin),
        (2, DataBegin),
        (3, CopyToDevice),
        (4, OptimizerMarker), // an average of the model, say
    ];
    assert_eq!(
        track(&averages, 5),
        [
            (OptimizerStep, 0, 2),
            (DataLoading, 2, 3),
            (GpuCompute, 3, 5)
        ]
    );
}

#[test]
fn a_thread_that_waits_for_io_is_data_loading() {
    let events = [
        (0, GpuSyncEnter),
        (1, GpuSyncLeave),
        (1, Block(BlockReason::Io)),
        (4, Unblock),
        (9, Block(BlockReason::Futex)),
        (12, Unblock),
    ];
    assert_eq!(
        track(&events, 20),
        [(GpuCompute, 0, 1), (DataLoading, 1, 20)]
    );
}

/// A framework reads the library with the kernels of the next operation when it first needs them.
#[test]
fn io_between_launches_is_loading_only_if_a_copy_follows() {
    let library = [
        (0, Launch),
        (1, Block(BlockReason::Io)),
        (400, Unblock),
        (410, Launch),
    ];
    assert_eq!(track(&library, 420), [(GpuCompute, 0, 420)]);
    let mut batch = library;
    batch[3] = (410, CopyToDevice);
    assert_eq!(
        track(&batch, 420),
        [
            (GpuCompute, 0, 1),
            (DataLoading, 1, 410),
            (GpuCompute, 410, 420)
        ]
    );
}

#[test]
fn waits_of_an_idle_thread_leave_it_unknown() {
    let events = [
        (1, Block(BlockReason::Futex)),
        (2, Unblock),
        (3, Block(BlockReason::Other)),
        (4, Unblock),
        (5, Block(BlockReason::Poll)), // as of a helper thread that only polls
        (6, Unblock),
        (7, Block(BlockReason::Io)), // as of a program that starts
    ];
    assert_eq!(track(&events, 10), [(Unknown, 0, 10)]);
}

#[test]
fn deadlines_stand_still_while_a_thread_is_blocked() {
    let data = [
        (0, CopyToDevice),
        (1, Block(BlockReason::Poll)),
        (60_000, Unblock),
    ];
    let (intervals, faults) = track_with_faults(&data, 60_010);
    assert_eq!(intervals[1..], [(DataLoading, 1, 60_010)]);
    assert_eq!(faults, TrackerFaults::default());

    let stuck = [
        (0, CollectiveEnter),
        (0, Block(BlockReason::Futex)),
        (1_200_000, Unblock),
        (1_200_000, CollectiveLeave),
    ];
    let (intervals, faults) = track_with_faults(&stuck, 1_200_000);
    assert_eq!(intervals, [(NcclCollective, 0, 1_200_000)]);
    assert_eq!(faults, TrackerFaults::default());
}

#[test]
fn a_wait_without_unblock_ends_at_the_next_event_or_after_an_hour() {
    let with_later_event = [
        (0, GpuSyncEnter),
        (0, Block(BlockReason::Other)),
        (90_000, Launch),
    ];
    assert_eq!(
        track(&with_later_event, 90_001),
        [(GpuCompute, 0, 90_001)],
        "the launch ends the sync"
    );
    let (intervals, faults) = track_with_faults(&with_later_event[..2], 4_000_000);
    assert_eq!(
        intervals,
        [(GpuCompute, 0, 3_600_000), (Unknown, 3_600_000, 4_000_000)]
    );
    assert_eq!((faults.expired_phases, faults.lost_leave_events), (1, 1));
}

#[test]
fn a_wait_after_launches_is_data_loading_if_a_copy_follows() {
    let pinned_memory = [
        (0, CopyToDevice),
        (1, Launch),
        (2, Block(BlockReason::Futex)), // the backward pass
        (8, Unblock),
        (9, Launch),                     // the optimizer
        (10, Block(BlockReason::Futex)), // the next batch
        (210, Unblock),
        (211, CopyToDevice),
    ];
    assert_eq!(
        track(&pinned_memory, 212),
        [
            (GpuCompute, 0, 10),
            (DataLoading, 10, 211),
            (GpuCompute, 211, 212)
        ]
    );
}

#[test]
fn cpu_time_long_after_the_last_launch_is_unknown() {
    assert_eq!(
        track(&[(0, Launch), (4_000, CopyToDevice)], 4_001),
        [
            (GpuCompute, 0, 1_000),
            (Unknown, 1_000, 4_000),
            (GpuCompute, 4_000, 4_001)
        ]
    );
}

#[test]
fn a_thread_that_only_launches_is_unknown_while_it_waits() {
    let backward_thread = [
        (0, Launch),
        (19, Launch),
        (20, Block(BlockReason::Futex)),
        (800, Unblock),
        (800, Launch),
    ];
    assert_eq!(
        track(&backward_thread, 810),
        [
            (GpuCompute, 0, 20),
            (Unknown, 20, 800),
            (GpuCompute, 800, 810)
        ]
    );
}

#[test]
fn a_lost_collective_leave_does_not_hide_later_steps() {
    let mut events = vec![(0, CollectiveEnter), (0, Launch)];
    for step in 1..4 {
        let begin = step * 100;
        events.extend([
            (begin, CopyToDevice),
            (begin + 10, Launch),
            (begin + 20, GpuSyncEnter),
        ]);
        events.extend([
            (begin + 90, GpuSyncLeave),
            (begin + 91, Block(BlockReason::Poll)),
        ]);
    }
    let (intervals, faults) = track_with_faults(&events, 400);
    assert_eq!(
        intervals[..2],
        [(NcclCollective, 0, 100), (GpuCompute, 100, 191)]
    );
    assert_eq!(faults.lost_leave_events, 1);
}

#[test]
fn a_sync_after_launches_and_a_collective_is_gpu_compute() {
    let clip_grad_norm = [
        (0, Launch),
        (1, CollectiveEnter),
        (2, CollectiveLeave),
        (2, GpuSyncEnter),
    ];
    assert_eq!(track(&clip_grad_norm, 300)[2..], [(GpuCompute, 2, 300)]);
}

#[test]
fn a_short_wait_does_not_end_an_optimizer_step() {
    let mut closed = Vec::new();
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
    for (at_us, event) in [
        (0, OptimizerMarker),
        (100, Block(BlockReason::Io)), // a page fault
        (200, Unblock),
        (300, Launch),
    ] {
        tracker.observe(at_us * 1_000, event, &mut closed);
    }
    tracker.finish(900_000, &mut closed);
    let phases: Vec<_> = closed
        .iter()
        .map(|i| (i.phase, i.start_ns / 1_000))
        .collect();
    assert_eq!(
        phases,
        [(OptimizerStep, 0), (DataLoading, 100), (OptimizerStep, 200)]
    );
}

#[test]
fn validation_errors_name_the_limit() {
    assert_eq!(TrackerConfig::default().validate(), Ok(()));
    let config = TrackerConfig {
        sync_max_ns: u64::MAX,
        ..Default::default()
    };
    assert_eq!(
        config.validate().unwrap_err().to_string(),
        "sync_max_ns is 18446744073709551615, but must be from 1 to 3600000000000"
    );
}

#[test]
fn a_call_without_leave_ends_at_the_next_contradicting_event_or_its_deadline() {
    let (intervals, faults) = track_with_faults(&[(0, GpuSyncEnter), (7, CopyToDevice)], 8);
    assert_eq!(intervals, [(GpuCompute, 0, 8)]);
    assert_eq!(faults.lost_leave_events, 1);

    let (intervals, faults) = track_with_faults(&[(0, CollectiveEnter), (100, Launch)], 90_000);
    assert_eq!(
        intervals,
        [(NcclCollective, 0, 1_000), (Unknown, 1_000, 90_000)]
    );
    assert_eq!((faults.lost_leave_events, faults.expired_phases), (1, 1));

    let (intervals, faults) = track_with_faults(&[(0, CollectiveEnter), (9, OptimizerMarker)], 10);
    assert_eq!(intervals, [(NcclCollective, 0, 9), (OptimizerStep, 9, 10)]);
    assert_eq!(faults.lost_leave_events, 1);
}

#[test]
fn a_leave_without_enter_still_ends_the_sync() {
    let (intervals, faults) = track_with_faults(&[(0, Launch), (5, GpuSyncLeave)], 6);
    assert_eq!(intervals, [(GpuCompute, 0, 6)]);
    assert_eq!(faults.lost_enter_events, 1);
}

#[test]
fn a_late_leave_ends_only_its_own_call() {
    let late_but_matching = [
        (0, GpuSyncEnter),
        (6, Block(BlockReason::Other)),
        (5, GpuSyncLeave),
    ];
    let (intervals, faults) = track_with_faults(&late_but_matching, 8);
    assert_eq!(intervals, [(GpuCompute, 0, 8)]);
    assert_eq!(faults.late_events, 1);

    let of_an_earlier_call = [(10, GpuSyncEnter), (9, GpuSyncLeave)];
    let (intervals, _) = track_with_faults(&of_an_earlier_call, 20);
    assert_eq!(intervals, [(Unknown, 0, 10), (GpuCompute, 10, 20)]);
}

#[test]
fn an_enter_that_arrives_after_its_leave_opens_no_call() {
    let (intervals, faults) = track_with_faults(&[(5, GpuSyncLeave), (3, GpuSyncEnter)], 100);
    assert_eq!(intervals[1..], [(GpuCompute, 5, 100)]);
    assert_eq!((faults.late_events, faults.lost_enter_events), (1, 1));
}

#[test]
fn phase_at_returns_unknown_after_the_deadline() {
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
    let mut closed = Vec::new();
    tracker.observe(0, GpuSyncEnter, &mut closed);
    assert_eq!(tracker.phase_at(59_999 * MS), GpuCompute);
    assert_eq!(tracker.phase_at(60_000 * MS), Unknown);
    assert!(closed.is_empty());
}

#[test]
fn timestamps_near_u64_max_do_not_overflow() {
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), u64::MAX - 1);
    let mut times = PhaseTimeAccumulator::default();
    tracker.observe(u64::MAX - 1, GpuSyncEnter, &mut times);
    tracker.observe(u64::MAX, GpuSyncLeave, &mut times);
    tracker.observe(0, Launch, &mut times);
    tracker.finish(u64::MAX, &mut times);
    assert_eq!(times.gpu_compute_ns, 1);
}
