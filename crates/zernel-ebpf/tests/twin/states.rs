//! Random states, configurations and events, often at boundaries.

use std::env;

use fastrand::Rng;
use zernel_phase::shared::{
    NO_GPU, PhaseWord, RawTaskState, TASK_IS_LOADER, TASK_IS_ML, TASK_IS_SAMPLED, TASK_NCCL_ACTIVE,
};
use zernel_phase::{
    BlockReason, ClassWord, PhaseDetectorConfig, ThreadEvent, WorkloadPhase, ZernelTaskState,
};

/// The generator of random states: the same states in every run, unless `ZERNEL_SEED` is set.
pub(crate) fn rng() -> Rng {
    let seed = env::var("ZERNEL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    Rng::with_seed(seed.unwrap_or(42))
}

/// The kind of a thread, so that rules for rare kinds are tested too.
#[derive(Clone, Copy)]
pub(crate) struct ThreadKind {
    uses_gpu: bool,
    announces: bool,
    announces_data: bool,
    repeats_closure: bool,
    reads_loss: bool,
    copies_to_host: bool,
}

impl ThreadKind {
    /// The kinds take turns.
    pub(crate) fn from_index(index: usize) -> Self {
        Self {
            uses_gpu: !index.is_multiple_of(3),
            announces: index.is_multiple_of(2),
            announces_data: !index.is_multiple_of(4),
            repeats_closure: index.is_multiple_of(8),
            reads_loss: index % 16 == 12,
            copies_to_host: index % 16 == 7 || index % 32 == 28,
        }
    }
}

pub(crate) fn any_event(rng: &mut Rng, kind: ThreadKind) -> ThreadEvent {
    let event = match kind.announces && rng.bool() {
        _ if kind.reads_loss => event_of_loop_that_reads_its_loss(rng),
        true if kind.announces_data => event_of_loop(rng),
        true if kind.repeats_closure => event_of_closure(rng),
        true => event_of_loop_without_loader(rng),
        false => event_of_any_thread(rng),
    };
    // In place of other events, because one more random number would change all events that follow.
    let event = match event {
        ThreadEvent::GpuSyncEnter if kind.copies_to_host && kind.reads_loss => {
            ThreadEvent::CopyToHostEnter
        }
        ThreadEvent::GpuSyncLeave if kind.copies_to_host && kind.reads_loss => {
            ThreadEvent::CopyToHostLeave
        }
        ThreadEvent::OtherWorkBegin if kind.copies_to_host => ThreadEvent::CopyToHostEnter,
        ThreadEvent::CompileBegin if kind.copies_to_host => ThreadEvent::CopyToHostLeave,
        event => event,
    };
    match event {
        ThreadEvent::GpuSyncEnter
        | ThreadEvent::GpuSyncLeave
        | ThreadEvent::Launch
        | ThreadEvent::CopyToDevice
        | ThreadEvent::CopyToHostEnter
        | ThreadEvent::CopyToHostLeave
            if !kind.uses_gpu =>
        {
            ThreadEvent::Unblock
        }
        event => event,
    }
}

/// An event that shows what a thread that is still blocked has waited for.
fn event_in_wait(rng: &mut Rng) -> ThreadEvent {
    rng.choice([
        ThreadEvent::AwaitedCompile,
        ThreadEvent::AwaitedCollective,
        ThreadEvent::AwaitedData,
    ])
    .unwrap()
}

/// An event of a training loop that announces what it does.
fn event_of_loop(rng: &mut Rng) -> ThreadEvent {
    rng.choice([
        ThreadEvent::DataBegin,
        ThreadEvent::CopyToDevice,
        ThreadEvent::Launch,
        ThreadEvent::BackwardBegin,
        ThreadEvent::Block(BlockReason::Futex),
        ThreadEvent::UnblockAfterLaunches,
        ThreadEvent::OptimizerBegin,
        ThreadEvent::UpdateEnd,
        ThreadEvent::OtherWorkBegin,
        ThreadEvent::CompileBegin,
        ThreadEvent::CompileEnd,
        ThreadEvent::Fork,
        ThreadEvent::GpuSyncEnter,
        ThreadEvent::GpuSyncLeave,
        ThreadEvent::Preempt,
        ThreadEvent::Resume,
    ])
    .unwrap()
}

/// An event of a training loop that announces its steps and no batches.
fn event_of_loop_without_loader(rng: &mut Rng) -> ThreadEvent {
    let in_wait = event_in_wait(rng);
    rng.choice([
        ThreadEvent::CopyToDevice,
        ThreadEvent::Launch,
        ThreadEvent::BackwardBegin,
        ThreadEvent::Block(BlockReason::Futex),
        ThreadEvent::UnblockAfterLaunches,
        in_wait,
        ThreadEvent::OptimizerBegin,
        ThreadEvent::ZeroGradients,
        ThreadEvent::UpdateEnd,
        ThreadEvent::Fork,
    ])
    .unwrap()
}

/// An event of a training loop around the end of its step, where only certain orders of several events matter.
fn event_of_loop_that_reads_its_loss(rng: &mut Rng) -> ThreadEvent {
    rng.choice([
        ThreadEvent::OptimizerBegin,
        ThreadEvent::UpdateEnd,
        ThreadEvent::Launch,
        ThreadEvent::GpuSyncEnter,
        ThreadEvent::GpuSyncLeave,
        ThreadEvent::CopyToDevice,
    ])
    .unwrap()
}

/// An event of an optimizer that runs a closure several times per step.
fn event_of_closure(rng: &mut Rng) -> ThreadEvent {
    let of_step = [ThreadEvent::OptimizerBegin, ThreadEvent::UpdateEnd];
    let of_run = [
        ThreadEvent::ZeroGradients,
        ThreadEvent::BackwardBegin,
        ThreadEvent::Block(BlockReason::Futex),
        ThreadEvent::UnblockAfterLaunches,
        ThreadEvent::GpuSyncEnter,
        ThreadEvent::GpuSyncLeave,
    ];
    match rng.u8(0..8) {
        0 => rng.choice(of_step).unwrap(),
        _ => rng.choice(of_run).unwrap(),
    }
}

fn event_of_any_thread(rng: &mut Rng) -> ThreadEvent {
    let reasons = [
        BlockReason::Io,
        BlockReason::Futex,
        BlockReason::Poll,
        BlockReason::Other,
        BlockReason::Request,
        BlockReason::Sleep,
    ];
    let reason = rng.choice(reasons).unwrap();
    let in_wait = event_in_wait(rng);
    rng.choice([
        ThreadEvent::GpuSyncEnter,
        ThreadEvent::GpuSyncLeave,
        ThreadEvent::CollectiveEnter,
        ThreadEvent::CollectiveLeave,
        ThreadEvent::Launch,
        ThreadEvent::CopyToDevice,
        ThreadEvent::Block(reason),
        ThreadEvent::Unblock,
        ThreadEvent::UnblockAfterLaunches,
        in_wait,
        ThreadEvent::OptimizerMarker,
        ThreadEvent::BackwardBegin,
        ThreadEvent::ForwardBegin,
        ThreadEvent::ZeroGradients,
        ThreadEvent::OtherWorkBegin,
        ThreadEvent::CompileBegin,
        ThreadEvent::CompileEnd,
        ThreadEvent::Fork,
        ThreadEvent::NotObserved,
        ThreadEvent::Preempt,
        ThreadEvent::Resume,
    ])
    .unwrap()
}

/// A time that is mostly a little later than the last one, sometimes earlier, or at a deadline, past it, or at the
/// deadline that follows. Times are whole microseconds, so that events often have the same time or that of a
/// deadline.
pub(crate) fn next_event_time(rng: &mut Rng, at_ns: u64) -> u64 {
    match rng.u8(0..10) {
        0 => at_ns - rng.u64(0..8) * 1_000,
        1 => at_ns + rng.u64(0..100) * 1_000,
        2 => {
            at_ns
                + rng
                    .choice([0, 5_000, 10_000, 20_000, 33_000, 40_000, 60_000])
                    .unwrap()
        }
        _ => at_ns + rng.u64(0..4) * 1_000,
    }
}

/// A time that is mostly later than the last one, sometimes earlier, and rarely much later.
pub(crate) fn any_time(rng: &mut Rng, round: u64) -> u64 {
    match rng.u8(0..20) {
        0 => rng.u64(0..round * 1_000_000),
        1 => rng.u64(0..1 << 58),
        _ => round * 1_000_000 + rng.u64(0..1_000_000),
    }
}

pub(crate) fn change_phase_inputs(
    rng: &mut Rng,
    task: &mut RawTaskState,
    config: &PhaseDetectorConfig,
    q16_threshold: u32,
) {
    let state = any_state(rng, config);
    task.last_gpu_sync_ns = state.last_gpu_sync_ns;
    task.cpu_burst_ns = state.cpu_burst_duration_ns;
    task.futex_waits = state.futex_wait_count;
    task.gpu_utilization = state.gpu_utilization;
    task.gpu_id = rng.choice([0, 1, NO_GPU]).unwrap();
    task.flags = if state.is_ml_process { TASK_IS_ML } else { 0 };
    task.flags |= if state.nccl_active {
        TASK_NCCL_ACTIVE
    } else {
        0
    };
    task.io_wait_q16 = match rng.u8(0..4) {
        0 => q16_threshold - 1 + rng.u32(0..3),
        1 => q16_threshold / 2 + rng.u32(0..2),
        2 => rng.choice([0, 1, 65535, 65536, 65537, u32::MAX]).unwrap(),
        _ => rng.u32(0..=65536),
    };
}

/// Changes everything that the class of a task depends on.
pub(crate) fn change_class_inputs(rng: &mut Rng, task: &mut RawTaskState) {
    let phase = WorkloadPhase::from_raw(rng.u8(0..WorkloadPhase::ALL.len() as u8));
    task.phase_word = PhaseWord::new(phase, rng.u16(..), rng.u64(0..1 << 40));
    let flags = [TASK_IS_ML, TASK_NCCL_ACTIVE, TASK_IS_LOADER];
    task.flags = flags.iter().filter(|_| rng.u8(0..3) > 0).sum();
    // Sampled threads have no GPU waits, which shall come up often too.
    if rng.u8(0..4) == 0 {
        task.flags |= TASK_IS_SAMPLED;
    }
    task.tracker.flags = rng.u16(..);
    task.tracker.deadline_ns = any_u64(rng, 1 << 30);
    if rng.u8(0..8) == 0 {
        task.class_word = ClassWord(any_u64(rng, 1 << 16));
    }
}

/// A configuration: the default one, one at the ends of what is allowed, a sensible one, or nonsense.
pub(crate) fn any_config(rng: &mut Rng) -> PhaseDetectorConfig {
    let nonsense = PhaseDetectorConfig {
        io_wait_threshold: any_f32(rng, 0.3),
        optimizer_burst_max_ns: any_u64(rng, 5_000_000),
        gpu_idle_threshold: rng.u8(..),
        gpu_active_threshold: rng.u8(..),
        phase_stability_count: rng.u32(..),
        nccl_detection_enabled: rng.bool(),
    };
    match rng.u8(0..5) {
        0 => nonsense,
        1 => PhaseDetectorConfig {
            io_wait_threshold: rng.choice([0.0, -0.0, 1.0]).unwrap(),
            ..Default::default()
        },
        2 => PhaseDetectorConfig {
            io_wait_threshold: rng.f32(),
            gpu_idle_threshold: rng.u8(0..50),
            gpu_active_threshold: rng.u8(51..=100),
            ..nonsense
        },
        _ => PhaseDetectorConfig {
            nccl_detection_enabled: rng.bool(),
            ..Default::default()
        },
    }
}

pub(crate) fn any_state(rng: &mut Rng, config: &PhaseDetectorConfig) -> ZernelTaskState {
    ZernelTaskState {
        is_ml_process: rng.u8(0..16) > 0,
        gpu_utilization: any_utilization(rng, config),
        last_gpu_sync_ns: any_u64(rng, 1),
        cpu_burst_duration_ns: any_u64(rng, config.optimizer_burst_max_ns),
        io_wait_fraction: any_f32(rng, config.io_wait_threshold),
        nccl_active: rng.bool(),
        futex_wait_count: rng.choice([0, 0, 0, 1, 2, u32::MAX]).unwrap(),
        ..ZernelTaskState::new(rng.u32(..))
    }
}

/// A utilization around one of the thresholds, at an end of its range, or anywhere.
pub(crate) fn any_utilization(rng: &mut Rng, config: &PhaseDetectorConfig) -> u8 {
    let edges = [config.gpu_idle_threshold, config.gpu_active_threshold];
    let edge = rng.choice(edges).unwrap();
    match rng.u8(0..4) {
        0 => edge.wrapping_sub(1).wrapping_add(rng.u8(0..3)),
        1 => rng.choice([0, 100, 255]).unwrap(),
        _ => rng.u8(0..=100),
    }
}

pub(crate) fn any_u64(rng: &mut Rng, edge: u64) -> u64 {
    match rng.u8(0..4) {
        0 => edge.wrapping_sub(1).wrapping_add(rng.u64(0..3)),
        1 => rng.choice([0, 0, 1, u64::MAX]).unwrap(),
        2 => rng.u64(0..=edge),
        _ => rng.u64(..),
    }
}

/// An I/O share around the threshold or its half, a special value, a value from 0 to 1, or any bit pattern.
pub(crate) fn any_f32(rng: &mut Rng, edge: f32) -> f32 {
    let neighbours = |value: f32| {
        let bits = value.to_bits();
        [
            bits.wrapping_sub(1),
            bits,
            bits.wrapping_add(1),
            bits ^ (1 << 31),
        ]
        .map(f32::from_bits)
    };
    match rng.u8(0..5) {
        0 => rng.choice(neighbours(edge)).unwrap(),
        1 => rng.choice(neighbours(edge / 2.0)).unwrap(),
        2 => rng
            .choice([
                0.0,
                -0.0,
                f32::NAN,
                -f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::from_bits(1),
            ])
            .unwrap(),
        3 => rng.f32(),
        _ => f32::from_bits(rng.u32(..)),
    }
}
