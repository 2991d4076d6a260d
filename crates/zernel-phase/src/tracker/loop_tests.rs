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
