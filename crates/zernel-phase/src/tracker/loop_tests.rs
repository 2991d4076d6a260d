//! Training loops of other shapes than batch, forward, backward, update.

use super::tests::track;
use super::*;
use ThreadEvent::*;
use WorkloadPhase::*;

/// A discriminator and a generator, each with its optimizer, and one batch for both.
#[test]
fn the_second_forward_pass_of_two_models_is_gpu_compute() {
    let step = [
        (0, DataBegin),
        (5, CopyToDevice),
        (6, ZeroGradients),
        (20, BackwardBegin),
        (21, Block(BlockReason::Futex)),
        (30, UnblockAfterLaunches),
        (31, OptimizerBegin),
        (33, OptimizerMarker),
        (34, ZeroGradients), // of the generator, whose forward pass follows
        (50, BackwardBegin),
        (51, Block(BlockReason::Futex)),
        (60, UnblockAfterLaunches),
        (60, OptimizerBegin),
        (62, OptimizerMarker),
        (63, DataBegin),
    ];
    assert_eq!(
        track(&step, 64),
        [
            (DataLoading, 0, 5),
            (GpuCompute, 5, 30),
            (OptimizerStep, 30, 33),
            (GpuCompute, 33, 60),
            (OptimizerStep, 60, 63),
            (DataLoading, 63, 64)
        ]
    );
}

/// `optimizer.step(closure)`, as Lightning calls it: the step runs forward and backward pass before it updates.
#[test]
fn a_step_with_a_closure_updates_after_its_backward_pass() {
    let step = [
        (0, DataBegin),
        (5, CopyToDevice),
        (6, OptimizerBegin),
        (20, ZeroGradients),
        (21, BackwardBegin),
        (21, Block(BlockReason::Futex)),
        (40, UnblockAfterLaunches),
        (42, OptimizerMarker),
        (44, OptimizerMarker),
        (45, DataBegin),
    ];
    assert_eq!(
        track(&step, 46),
        [
            (DataLoading, 0, 5),
            (GpuCompute, 5, 6),
            (GpuCompute, 6, 40),
            (OptimizerStep, 40, 45),
            (DataLoading, 45, 46)
        ]
    );
}

/// The same once the ends of records are seen: gradients are cleared after the forward pass of the closure.
#[test]
fn the_forward_pass_of_a_closure_may_come_before_gradients_are_cleared() {
    let step = |begin| {
        [
            (begin, OptimizerBegin),
            (begin + 10, ZeroGradients),
            (begin + 11, ForwardBegin), // the end of clearing
            (begin + 12, BackwardBegin),
            (begin + 12, Block(BlockReason::Futex)),
            (begin + 20, UnblockAfterLaunches),
            (begin + 21, OptimizerMarker),
            (begin + 24, UpdateEnd),
        ]
    };
    let mut events = vec![(0, DataBegin), (4, OptimizerBegin), (5, UpdateEnd)];
    events.extend(step(6));
    events.push((30, DataBegin));
    events.extend(step(34));
    let intervals = track(&events, 58);
    let computed = intervals
        .iter()
        .filter(|(phase, _, _)| *phase == GpuCompute);
    let computed: u64 = computed.map(|(_, from, to)| to - from).sum();
    let updated: Vec<_> = intervals
        .iter()
        .filter(|(phase, _, _)| *phase == OptimizerStep)
        .copied()
        .collect();
    assert_eq!(
        updated,
        [
            (OptimizerStep, 4, 5),
            (OptimizerStep, 26, 30),
            (OptimizerStep, 54, 58)
        ]
    );
    assert_eq!(computed, 1 + 20 + 20, "{intervals:?}");
}

/// The same without a GPU: the backward pass runs on the thread itself.
#[test]
fn a_closure_on_the_cpu_updates_after_its_backward_pass() {
    let step = [
        (0, DataBegin),
        (5, OptimizerBegin),
        (20, BackwardBegin),
        (40, OptimizerMarker),
        (42, DataBegin),
    ];
    assert_eq!(
        track(&step, 43),
        [
            (DataLoading, 0, 5),
            (GpuCompute, 5, 40),
            (OptimizerStep, 40, 42),
            (DataLoading, 42, 43)
        ]
    );
}

/// All data is in GPU memory, so no batch is announced or copied.
#[test]
fn without_batches_the_forward_pass_follows_the_update() {
    let mut events = vec![(0, BackwardBegin)];
    for begin in [10, 40] {
        events.extend([
            (begin, OptimizerBegin),
            (begin + 3, OptimizerMarker),
            (begin + 20, ZeroGradients),
            (begin + 21, BackwardBegin),
        ]);
    }
    assert_eq!(
        track(&events, 70),
        [
            (GpuCompute, 0, 10),
            (OptimizerStep, 10, 13),
            (GpuCompute, 13, 40),
            (OptimizerStep, 40, 43),
            (GpuCompute, 43, 70)
        ]
    );
}

/// A collective inside the optimizer step keeps its time.
#[test]
fn a_backward_pass_takes_no_time_from_a_collective() {
    let sharded = [
        (0, OptimizerBegin),
        (2, CollectiveEnter),
        (4, CollectiveLeave),
        (20, BackwardBegin),
    ];
    assert_eq!(
        track(&sharded, 21),
        [
            (OptimizerStep, 0, 2),
            (NcclCollective, 2, 4),
            (GpuCompute, 4, 21)
        ]
    );
}

/// Launches are sampled, so most backward passes of the autograd thread show none.
#[test]
fn a_thread_that_launched_computes_when_it_wakes_up_after_launches() {
    let autograd = [
        (0, Launch),
        (10, Block(BlockReason::Futex)),
        (100, UnblockAfterLaunches),
        (110, Block(BlockReason::Futex)),
        (200, Unblock), // its process has launched nothing
        (210, Block(BlockReason::Futex)),
    ];
    assert_eq!(
        track(&autograd, 300),
        [
            (GpuCompute, 0, 10),
            (Unknown, 10, 100),
            (GpuCompute, 100, 110),
            (Unknown, 110, 300)
        ]
    );
}

/// A thread of the process prepares batches. The training thread waits for it after its update, and copies then.
#[test]
fn a_wait_for_a_loader_thread_after_the_update_is_data_loading() {
    let step = |begin| {
        [
            (begin, CopyToDevice),
            (begin + 5, BackwardBegin),
            (begin + 5, Block(BlockReason::Futex)),
            (begin + 10, UnblockAfterLaunches),
            (begin + 10, OptimizerBegin),
            (begin + 12, ZeroGradients),
            (begin + 13, Block(BlockReason::Futex)),
            (begin + 40, UnblockAfterLaunches), // the loader thread pins memory
            (begin + 40, Block(BlockReason::Futex)), // for the interpreter
            (begin + 45, UnblockAfterLaunches),
        ]
    };
    let mut events = step(0).to_vec();
    events.extend(step(46));
    assert_eq!(
        track(&events[..], 92),
        [
            (GpuCompute, 0, 10),
            (OptimizerStep, 10, 13),
            (DataLoading, 13, 46),
            (GpuCompute, 46, 56),
            (OptimizerStep, 56, 59),
            (DataLoading, 59, 92) // at once: the wait before was for data
        ]
    );
}

/// Without a copy, a wait in an optimizer step is not for data. An optimizer on the CPU waits for its threads.
#[test]
fn a_wait_inside_an_update_is_an_optimizer_step() {
    let step = [
        (0, OptimizerBegin),
        (2, Block(BlockReason::Futex)),
        (4, Unblock),
        (6, OptimizerMarker),
        (8, ZeroGradients),
    ];
    assert_eq!(track(&step, 9), [(OptimizerStep, 0, 9)]);
}

/// LBFGS: each step runs its closure several times, and compares numbers on the GPU in between. The time between two runs is
/// `OptimizerStep`.
#[test]
fn an_optimizer_that_repeats_its_closure_works_between_its_runs() {
    let run = |begin| {
        [
            (begin, ZeroGradients),
            (begin + 5, BackwardBegin),
            (begin + 5, Block(BlockReason::Futex)),
            (begin + 8, UnblockAfterLaunches),
            (begin + 8, GpuSyncEnter), // the closure reads its loss
            (begin + 9, GpuSyncLeave),
            (begin + 12, GpuSyncEnter), // the optimizer compares
            (begin + 13, GpuSyncLeave),
        ]
    };
    let mut events = vec![(0, OptimizerBegin), (1, UpdateEnd), (2, OptimizerBegin)];
    for begin in [2, 20, 40] {
        events.extend(run(begin));
    }
    events.push((60, UpdateEnd));
    assert_eq!(
        track(&events, 61),
        [
            (OptimizerStep, 0, 1),
            (GpuCompute, 1, 2),
            (GpuCompute, 2, 10),
            (GpuCompute, 10, 11),
            (OptimizerStep, 11, 14),
            (GpuCompute, 14, 15),
            (OptimizerStep, 15, 20),
            (GpuCompute, 20, 28),
            (GpuCompute, 28, 29),
            (OptimizerStep, 29, 32),
            (GpuCompute, 32, 33),
            (OptimizerStep, 33, 40),
            (GpuCompute, 40, 48),
            (GpuCompute, 48, 49),
            (OptimizerStep, 49, 52),
            (GpuCompute, 52, 53),
            (OptimizerStep, 53, 60),
            (GpuCompute, 60, 61)
        ]
    );
}

/// A skipped step, as after gradients that are not finite, is no closure: the forward pass after a later backward pass is
/// not the optimizer's.
#[test]
fn a_skipped_step_does_not_turn_later_passes_into_updates() {
    let pass = |begin| {
        [
            (begin, BackwardBegin),
            (begin, Block(BlockReason::Futex)),
            (begin + 5, UnblockAfterLaunches),
        ]
    };
    let mut events = vec![(0, OptimizerBegin), (2, ForwardBegin)];
    events.extend(pass(10));
    events.extend([(16, ZeroGradients), (17, ForwardBegin)]); // the step is skipped
    events.extend(pass(20));
    events.extend([(26, OptimizerBegin), (28, ForwardBegin)]);
    events.extend(pass(30));
    events.extend([(36, Launch), (38, CopyToDevice)]); // the next micro-batch
    events.extend(pass(40));
    events.push((46, OptimizerBegin));
    let intervals = track(&events, 47);
    let after = intervals.iter().filter(|(_, from, _)| *from >= 28);
    let after: Vec<_> = after.copied().collect();
    assert_eq!(after, [(GpuCompute, 28, 45), (OptimizerStep, 45, 47)]);
}

/// A wait for a lock in the backward pass of a closure is not its end.
#[test]
fn a_wait_for_a_lock_does_not_end_the_backward_pass_of_a_closure() {
    let mut events = vec![(0, OptimizerBegin), (0, UpdateEnd), (0, OptimizerBegin)];
    for begin in [0, 20] {
        events.extend([
            (begin, ZeroGradients),
            (begin + 5, BackwardBegin),
            (begin + 5, Block(BlockReason::Futex)),
            (begin + 8, UnblockAfterLaunches),
        ]);
    }
    events.extend([
        (40, ZeroGradients),
        (45, BackwardBegin),
        (46, Block(BlockReason::Futex)),
        (46, Unblock),
        (48, Block(BlockReason::Futex)),
    ]);
    events.extend([(48, Unblock), (50, ZeroGradients)]);
    let intervals = track(&events, 51);
    let last: Vec<_> = intervals
        .iter()
        .filter(|(_, from, _)| *from >= 40)
        .copied()
        .collect();
    assert_eq!(last, [(GpuCompute, 40, 51)], "{intervals:?}");
}

/// With the ends of announced work, what follows an optimizer step is not the optimizer's.
#[test]
fn work_after_the_end_of_an_update_is_gpu_compute() {
    let step = [
        (0, DataBegin),
        (5, ForwardBegin), // the end of the wait for a batch
        (20, BackwardBegin),
        (21, Block(BlockReason::Futex)),
        (30, UnblockAfterLaunches),
        (32, OptimizerBegin),
        (36, UpdateEnd),
        (40, OptimizerBegin), // clears gradients
        (41, UpdateEnd),
        (44, DataBegin),
    ];
    assert_eq!(
        track(&step, 45),
        [
            (DataLoading, 0, 5),
            (GpuCompute, 5, 30),
            (OptimizerStep, 30, 36),
            (GpuCompute, 36, 40),
            (OptimizerStep, 40, 41),
            (GpuCompute, 41, 44),
            (DataLoading, 44, 45)
        ]
    );
}

/// The loop reads its loss after the update, and waits for its loader thread then.
#[test]
fn a_wait_for_a_loader_thread_after_a_sync_is_data_loading() {
    let step = [
        (0, BackwardBegin),
        (1, OptimizerBegin),
        (3, UpdateEnd),
        (3, GpuSyncEnter),
        (4, GpuSyncLeave),
        (5, Block(BlockReason::Futex)),
        (20, UnblockAfterLaunches),
        (21, CopyToDevice),
    ];
    assert_eq!(
        track(&step, 22),
        [
            (GpuCompute, 0, 1),
            (OptimizerStep, 1, 3),
            (GpuCompute, 3, 5),
            (DataLoading, 5, 21),
            (GpuCompute, 21, 22)
        ]
    );
}

/// The loop prepares its batches itself, without a `DataLoader`: it parses a file, say.
#[test]
fn work_between_an_update_and_a_copy_is_data_loading() {
    let step = [
        (0, OptimizerBegin),
        (2, UpdateEnd),
        (2, GpuSyncEnter), // it reads its loss
        (3, GpuSyncLeave),
        (5, Block(BlockReason::Io)),
        (5, Unblock),
        (40, CopyToDevice),
        (41, Launch),
        (50, BackwardBegin),
    ];
    let loading = [
        (OptimizerStep, 0, 2),
        (GpuCompute, 2, 3),
        (DataLoading, 3, 40),
        (GpuCompute, 40, 51),
    ];
    assert_eq!(track(&step, 51), loading);
    // It copies at once: nothing was prepared.
    let mut prepared = step;
    prepared[6] = (3, CopyToDevice);
    prepared[4..6].fill((3, GpuSyncLeave));
    assert_eq!(
        track(&prepared, 51),
        [(OptimizerStep, 0, 2), (GpuCompute, 2, 51)]
    );
    // It launched before it copied: the copy is of its forward pass.
    let mut forward = step;
    forward[5] = (20, Launch);
    forward[4] = (20, Launch);
    assert_eq!(
        track(&forward, 51),
        [(OptimizerStep, 0, 2), (GpuCompute, 2, 51)]
    );
}

/// The loop prepares its batch, and waits for a thread that helps it. An earlier copy showed that it loads after its update.
#[test]
fn a_wait_while_preparing_a_batch_is_part_of_it() {
    let step = [
        (0, OptimizerBegin),
        (2, UpdateEnd),
        (10, CopyToDevice),
        (11, OptimizerBegin),
        (13, UpdateEnd),
        (30, Block(BlockReason::Futex)),
        (34, Unblock),
        (40, CopyToDevice),
    ];
    let loading = [
        (OptimizerStep, 0, 2),
        (DataLoading, 2, 10),
        (GpuCompute, 10, 11),
        (OptimizerStep, 11, 13),
        (DataLoading, 13, 40),
        (GpuCompute, 40, 41),
    ];
    assert_eq!(track(&step, 41), loading);
}

/// The loop clears gradients after it has prepared its batch, and waits for the copy of the batch.
#[test]
fn clearing_gradients_does_not_end_the_preparation_of_a_batch() {
    let step = [
        (0, OptimizerBegin),
        (2, UpdateEnd),
        (40, ZeroGradients),
        (41, UpdateEnd),
        (42, CopyToDevice),
        (42, GpuSyncEnter),
        (43, GpuSyncLeave),
        (60, CopyToDevice), // of the forward pass
        (61, Launch),
    ];
    let loading = [
        (OptimizerStep, 0, 2),
        (DataLoading, 2, 42),
        (GpuCompute, 42, 62),
    ];
    assert_eq!(track(&step, 62), loading);
}

/// The loop bounds a weight after its step, and reads its loss.
#[test]
fn a_launch_right_after_an_update_is_not_the_next_forward_pass() {
    let us = 1_000;
    let ms = 1_000 * us;
    let mut intervals: Vec<PhaseInterval> = Vec::new();
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
    for (at_ns, event) in [
        (0, OptimizerBegin),
        (2 * ms, UpdateEnd),
        (2 * ms + 100 * us, Launch),
        (2 * ms + 200 * us, GpuSyncEnter),
        (3 * ms, GpuSyncLeave),
        (40 * ms, CopyToDevice),
    ] {
        tracker.observe(at_ns, event, &mut intervals);
    }
    let last = intervals.last().unwrap();
    assert_eq!(
        (last.phase, last.start_ns, last.end_ns),
        (DataLoading, 3 * ms, 40 * ms)
    );
}

/// Launches are not observed all the time. A later sync shows that the forward pass has begun.
#[test]
fn work_after_a_late_sync_is_not_data_loading() {
    let step = [
        (0, OptimizerBegin),
        (2, UpdateEnd),
        (20, GpuSyncEnter),
        (21, GpuSyncLeave),
        (40, CopyToDevice),
    ];
    assert_eq!(
        track(&step, 41),
        [(OptimizerStep, 0, 2), (GpuCompute, 2, 41)]
    );
}

/// The first epoch with loaders comes after updates that had none.
#[test]
fn forking_loaders_after_an_update_is_data_loading() {
    let epoch = [
        (0, OptimizerBegin),
        (2, UpdateEnd),
        (10, Fork),
        (14, DataBegin),
        (20, CopyToDevice),
    ];
    assert_eq!(
        track(&epoch, 21),
        [
            (OptimizerStep, 0, 2),
            (DataLoading, 2, 20),
            (GpuCompute, 20, 21)
        ]
    );
}

/// LBFGS: the step ends after work of its own.
#[test]
fn a_step_that_repeats_its_closure_ends() {
    let step = [
        (0, OptimizerBegin),
        (1, BackwardBegin),
        (1, Block(BlockReason::Futex)),
        (8, UnblockAfterLaunches),
        (12, UpdateEnd),
    ];
    assert_eq!(
        track(&step, 14),
        [
            (GpuCompute, 0, 8),
            (OptimizerStep, 8, 12),
            (GpuCompute, 12, 14)
        ]
    );
}

/// An optimizer that reads a number back from the GPU goes on, if its end is seen.
#[test]
fn a_sync_inside_a_step_whose_end_is_seen_does_not_end_it() {
    let step = [
        (0, OptimizerBegin),
        (1, UpdateEnd),
        (2, OptimizerBegin),
        (4, GpuSyncEnter),
        (6, GpuSyncLeave),
        (7, CopyToDevice),
        (8, Block(BlockReason::Futex)),
        (10, Unblock),
        (11, CopyToDevice), // waits inside of the step are not for data
        (12, UpdateEnd),
    ];
    assert_eq!(
        track(&step, 13),
        [
            (OptimizerStep, 0, 1),
            (GpuCompute, 1, 2),
            (OptimizerStep, 2, 4),
            (GpuCompute, 4, 6),
            (OptimizerStep, 6, 12),
            (GpuCompute, 12, 13)
        ]
    );
}

/// A server waits for its next request. A wait of less than a millisecond changes nothing.
#[test]
fn a_thread_that_sleeps_does_not_compute() {
    let request = [
        (0, Launch),
        (2, Block(BlockReason::Sleep)),
        (2, Unblock),
        (4, GpuSyncEnter),
        (5, GpuSyncLeave),
        (6, Block(BlockReason::Sleep)),
        (50, Unblock),
        (51, Launch),
    ];
    assert_eq!(
        track(&request, 52),
        [(GpuCompute, 0, 7), (Unknown, 7, 51), (GpuCompute, 51, 52)]
    );
    // The driver may sleep in a call that waits for the GPU.
    let sync = [(0, GpuSyncEnter), (1, Block(BlockReason::Sleep))];
    assert_eq!(track(&sync, 50), [(GpuCompute, 0, 50)]);
}

/// Without a GPU, the end of a wait for a batch is seen once ends are.
#[test]
fn a_batch_without_a_gpu_is_received_until_its_end() {
    let step = [
        (0, OptimizerBegin),
        (1, UpdateEnd),
        (2, DataBegin),
        (3, Block(BlockReason::Poll)),
        (20, Unblock),
        (40, ForwardBegin), // the end of the wait for a batch
    ];
    assert_eq!(
        track(&step, 41),
        [
            (OptimizerStep, 0, 1),
            (GpuCompute, 1, 2),
            (DataLoading, 2, 40),
            (GpuCompute, 40, 41)
        ]
    );
}

/// An epoch begins: the loop forks its loaders and asks for a batch. The thread is preempted meanwhile.
#[test]
fn forking_loaders_is_data_loading() {
    let epoch = [
        (0, DataBegin),
        (2, Launch),
        (5, Block(BlockReason::Futex)),
        (5, Unblock),
        (8, Preempt),
        (9, Resume),
        (20, Fork),
        (22, Block(BlockReason::Futex)),
        (22, Unblock),
        (30, Fork),
        (32, DataBegin),
        (40, Launch),
    ];
    assert_eq!(
        track(&epoch, 41),
        [
            (DataLoading, 0, 2),
            (GpuCompute, 2, 5),
            (DataLoading, 5, 40),
            (GpuCompute, 40, 41)
        ]
    );
}

/// A process that no batch follows loads nothing.
#[test]
fn a_fork_without_a_batch_is_not_data_loading() {
    let events = [(0, Launch), (5, Fork), (8, Launch), (9, DataBegin)];
    assert_eq!(
        track(&events, 10),
        [(GpuCompute, 0, 9), (DataLoading, 9, 10)]
    );
}

/// The backward pass of an embedding syncs on the autograd thread, which has nothing to do between two passes.
#[test]
fn a_thread_that_syncs_for_another_one_idles_between_its_passes() {
    let autograd = [
        (0, GpuSyncEnter),
        (1, GpuSyncLeave),
        (5, Block(BlockReason::Request)),
        (50, UnblockAfterLaunches),
        (60, Block(BlockReason::Request)),
    ];
    assert_eq!(
        track(&autograd, 90),
        [
            (GpuCompute, 0, 5),
            (Unknown, 5, 50),
            (GpuCompute, 50, 60),
            (Unknown, 60, 90)
        ]
    );
}
