//! The kernel's layout of the task state: the Rust mirror of the headers in `bpf/`.
//!
//! The C headers are the definition. The tests of `zernel-ebpf` compare every type here with their BTF, and run the
//! conversions of both sides on the same values.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::class::{self, ClassWord};
use crate::mirror::{EnumMirror, StructMirror};
use crate::phase_detector::PhaseDetectorConfig;
use crate::task_state::{PhaseTimeAccumulator, WorkloadPhase, ZernelTaskState};
use crate::tracker::{BlockReason, ThreadEvent, TrackerConfig};

/// Phase, sequence number and start of a phase in one `u64`.
///
/// One store writes all three, so a reader on another CPU never sees a partial update. The start is
/// in units of 1024 ns. Kernel and userspace both round phase boundaries down to that unit, so the
/// times of all phases still add up.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct PhaseWord(pub u64);

impl PhaseWord {
    /// Packs the three values. The sequence number wraps at 4096.
    #[must_use]
    pub fn new(phase: WorkloadPhase, sequence: u16, start_ns: u64) -> Self {
        let sequence = u64::from(sequence) & ((1 << Self::SEQUENCE_BITS) - 1);
        let start = start_ns >> Self::UNIT_SHIFT << Self::START_SHIFT;
        Self(start | (sequence << Self::PHASE_BITS) | phase as u64)
    }

    /// Returns the phase, or [`WorkloadPhase::Unknown`] for undefined bits.
    #[must_use]
    pub fn phase(self) -> WorkloadPhase {
        WorkloadPhase::from_raw((self.0 & ((1 << Self::PHASE_BITS) - 1)) as u8)
    }

    /// Returns the sequence number, which grows by one at every phase change, modulo 4096.
    #[must_use]
    pub fn sequence(self) -> u16 {
        ((self.0 >> Self::PHASE_BITS) & ((1 << Self::SEQUENCE_BITS) - 1)) as u16
    }

    /// Returns the start of the phase, rounded down to 1024 ns.
    #[must_use]
    pub fn start_ns(self) -> u64 {
        self.0 >> Self::START_SHIFT << Self::UNIT_SHIFT
    }
}

crate::mirrors! {
    /// The types of this module that C code shares. A test compares them with the BTF of the BPF programs.
    pub const MIRRORS;
    structs {
        /// `struct zernel_tracker`.
        pub struct RawTracker = "zernel_tracker" {
            now_ns: u64,
            deadline_ns: u64,
            activity_until_ns: u64,
            sync_since_ns: u64,
            collective_since_ns: u64,
            last_call_evidence_ns: u64,
            wait_since_ns: u64,
            wait_until_ns: u64,
            activity_until_ns_before_wait: u64,
            undecided_since_ns: u64,
            last_marker_ns: u64,
            update_end_ns: u64,
            queued_since_ns: u64,
            last_own_event_ns: u64,
            lost_leave_events: u32,
            lost_enter_events: u32,
            late_events: u32,
            expired_phases: u32,
            flags: u16,
            activity: u8,
            activity_before_wait: u8,
            sees_update_ends: u8,
            copies_to_host: u8,
            reserved: [u8; 2],
        }

        /// `struct zernel_task_state`.
        pub struct RawTaskState = "zernel_task_state" {
            phase_word: PhaseWord,
            class_word: ClassWord,
            class_until_ns: u64,
            last_gpu_sync_ns: u64,
            cpu_burst_ns: u64,
            phase_ns: [u64; WorkloadPhase::ALL.len()],
            pid: u32,
            tgid: u32,
            trainer: u32,
            gpu_id: u32,
            futex_waits: u32,
            io_wait_q16: u32,
            candidate_streak: u32,
            candidate_phase: u8,
            gpu_utilization: u8,
            flags: u8,
            reserved: u8,
            tracker: RawTracker,
        }

        /// `struct zernel_heartbeat`.
        pub struct Heartbeat = "zernel_heartbeat" {
            last_beat_ns: u64,
            owner_pid: u32,
            layout_hash: u32,
            since_ns: u64,
        }

        /// `struct zernel_phase_config`.
        pub struct RawPhaseConfig = "zernel_phase_config" {
            optimizer_burst_max_ns: u64,
            io_wait_threshold_f32: u32,
            io_wait_half_threshold_f32: u32,
            phase_stability_count: u32,
            gpu_idle_threshold: u8,
            gpu_active_threshold: u8,
            nccl_detection_enabled: u8,
            reserved: u8,
        }

        /// `struct zernel_phase_sample`.
        pub struct RawPhaseSample = "zernel_phase_sample" {
            last_gpu_sync_ns: u64,
            cpu_burst_ns: u64,
            io_wait_f32: u32,
            futex_waits: u32,
            gpu_utilization: u8,
            is_ml: u8,
            nccl_active: u8,
            reserved: [u8; 5],
        }
    }
    constants {
        pub u32 = "zernel_heart", "ZERNEL_" {
            /// Index of the heartbeat of the process that writes task states.
            HEART_OBSERVER = 0,
            /// Index of the heartbeat of a process that reads them.
            HEART_READER = 1,
            /// Number of heartbeats.
            HEARTS = 2,
        }
        pub u32 = "zernel_gpu", "ZERNEL_" {
            /// `gpu_id` of a task whose GPU is unknown.
            NO_GPU = u32::MAX,
        }
        pub u32 = "zernel_q16", "ZERNEL_" {
            /// A whole, in the kernel's units of 1/65536.
            Q16_ONE = 1 << 16,
        }
        pub u8 = "zernel_task_flags", "ZERNEL_" {
            /// Flag of a task: it belongs to an ML process.
            TASK_IS_ML = 1 << 0,
            /// Flag of a task: a NCCL collective is under way.
            TASK_NCCL_ACTIVE = 1 << 1,
            /// Flag of a task: it loads data for a trainer.
            TASK_IS_LOADER = 1 << 2,
            /// Flag of a task: its phase is that of the sampled rule, because its calls are not probed.
            TASK_IS_SAMPLED = 1 << 3,
        }
    }
    flags {
        impl RawTracker: u16 = "zernel_tracker_flags", "ZERNEL_" {
            /// Flag: the thread is in a GPU sync.
            IN_SYNC = 1 << 0,
            /// Flag: nothing but a collective was enqueued since the last sync.
            COLLECTIVE_QUEUED = 1 << 2,
            /// Flag: the thread is blocked.
            IS_BLOCKED = 1 << 5,
            /// Flag: if the thread copies next, it got data since a time before.
            UNDECIDED = 1 << 7,
            /// Flag: the thread copies, syncs or marks, so it is a training thread.
            TRAINING_THREAD = 1 << 8,
            /// Flag: the thread announces when it gets a batch.
            ANNOUNCES_DATA = 1 << 9,
            /// Flag: the thread announces its optimizer steps.
            ANNOUNCES_UPDATES = 1 << 10,
            /// Flag: if an optimizer step follows, it began when the backward pass ended.
            MAY_UPDATE = 1 << 11,
        }
        impl PhaseWord: u32 = "zernel_word_bits", "ZERNEL_WORD_" {
            /// Bits of the phase.
            PHASE_BITS = 4,
            /// Bits of the sequence.
            SEQUENCE_BITS = 12,
            /// The first bit of the start.
            START_SHIFT = Self::PHASE_BITS + Self::SEQUENCE_BITS,
            /// The logarithm of the start's unit in nanoseconds.
            UNIT_SHIFT = 10,
        }
    }
    variants {
        enum WorkloadPhase = "zernel_phase" {
            Unknown = "ZERNEL_UNKNOWN",
            DataLoading = "ZERNEL_DATA_LOADING",
            GpuCompute = "ZERNEL_GPU_COMPUTE",
            NcclCollective = "ZERNEL_NCCL_COLLECTIVE",
            OptimizerStep = "ZERNEL_OPTIMIZER_STEP",
        } and {
            "ZERNEL_PHASES" = WorkloadPhase::ALL.len(),
        }
    }
}

/// The mirror of `struct zernel_tracker_config`.
pub const TRACKER_CONFIG_MIRROR: StructMirror = TrackerConfig::MIRROR;

/// Default directory of the pinned maps.
pub const PIN_DIRECTORY: &str = "/sys/fs/bpf/zernel";
/// Name of the pinned map of heartbeats.
pub const HEARTBEAT_PIN: &str = "heartbeat";
/// Begin of the name of a pinned map of task states. [`layout_hash`] follows, in eight hexadecimal digits.
pub const TASKS_PIN: &str = "tasks-";
/// A heart beats five times per second. Without a beat for this long, its process is dead.
pub const HEART_TIMEOUT_NS: u64 = 1_000_000_000;

impl Heartbeat {
    /// Whether the process beats at `now_ns`.
    #[must_use]
    pub fn is_alive(&self, now_ns: u64) -> bool {
        self.last_beat_ns != 0 && now_ns.saturating_sub(self.last_beat_ns) < HEART_TIMEOUT_NS
    }
}

/// A hash of the layout of a task state: names, sizes and offsets of its fields, and the values of its enums. Maps of
/// another layout have another name.
#[must_use]
pub fn layout_hash() -> u32 {
    let structs = MIRRORS.structs.iter();
    let structs = structs.filter(|it| ["zernel_tracker", "zernel_task_state"].contains(&it.c_name));
    let fields = structs.flat_map(|it| {
        let end = ("", it.size);
        it.fields.iter().copied().chain([end])
    });
    let enums = MIRRORS.enums.iter().chain(class::MIRRORS.enums);
    let values = enums.flat_map(|it| {
        it.values
            .iter()
            .map(|(name, value)| (*name, *value as usize))
    });
    fields
        .chain(values)
        .fold(FNV_BASIS, |hash, (name, number)| {
            let number = (number as u32).to_le_bytes();
            let bytes = name.bytes().chain(number);
            bytes.fold(hash, |hash, byte| {
                (hash ^ u32::from(byte)).wrapping_mul(FNV_PRIME)
            })
        })
}

// FNV-1a of 32 bits.
const FNV_BASIS: u32 = 0x811c_9dc5;
const FNV_PRIME: u32 = 0x0100_0193;

impl From<&RawTaskState> for ZernelTaskState {
    fn from(raw: &RawTaskState) -> Self {
        let mut phase_time_ns = PhaseTimeAccumulator::default();
        for (phase, ns) in WorkloadPhase::ALL.into_iter().zip(raw.phase_ns) {
            phase_time_ns.record(phase, ns);
        }
        Self {
            pid: raw.pid,
            is_ml_process: raw.flags & TASK_IS_ML != 0,
            current_phase: raw.phase_word.phase(),
            gpu_utilization: raw.gpu_utilization,
            last_gpu_sync_ns: raw.last_gpu_sync_ns,
            cpu_burst_duration_ns: raw.cpu_burst_ns,
            io_wait_fraction: fraction_from_q16(raw.io_wait_q16),
            nccl_active: raw.flags & TASK_NCCL_ACTIVE != 0,
            futex_wait_count: raw.futex_waits,
            gpu_id: (raw.gpu_id != NO_GPU).then_some(raw.gpu_id),
            phase_time_ns,
            phase_start_ns: raw.phase_word.start_ns(),
        }
    }
}

impl RawTaskState {
    /// Returns the current phase at `now_ns`, and the time in each phase. After its deadline a phase is unknown. A thread
    /// without events since then has not ended it itself.
    #[must_use]
    pub fn phases_at(&self, now_ns: u64) -> (WorkloadPhase, PhaseTimeAccumulator) {
        let mut times = PhaseTimeAccumulator::default();
        for (phase, ns) in WorkloadPhase::ALL.into_iter().zip(self.phase_ns) {
            times.record(phase, ns);
        }
        let current = self.phase_word.phase();
        let start_ns = self.phase_word.start_ns();
        let end_ns = now_ns.min(self.tracker.deadline_ns).max(start_ns);
        times.record(current, end_ns - start_ns);
        times.record(WorkloadPhase::Unknown, now_ns.saturating_sub(end_ns));
        match now_ns < self.tracker.deadline_ns {
            true => (current, times),
            false => (WorkloadPhase::Unknown, times),
        }
    }
}

/// Converts a fraction in units of 1/65536, capped at 1. The result is exact.
#[must_use]
pub fn fraction_from_q16(q16: u32) -> f32 {
    q16.min(Q16_ONE) as f32 / Q16_ONE as f32
}

impl From<&PhaseDetectorConfig> for RawPhaseConfig {
    fn from(config: &PhaseDetectorConfig) -> Self {
        Self {
            optimizer_burst_max_ns: config.optimizer_burst_max_ns,
            io_wait_threshold_f32: config.io_wait_threshold.to_bits(),
            io_wait_half_threshold_f32: (config.io_wait_threshold / 2.0).to_bits(),
            phase_stability_count: config.phase_stability_count,
            gpu_idle_threshold: config.gpu_idle_threshold,
            gpu_active_threshold: config.gpu_active_threshold,
            nccl_detection_enabled: config.nccl_detection_enabled.into(),
            reserved: 0,
        }
    }
}

/// How clearly the flags of a tracker show that its thread runs the training loop. A thread that announces optimizer steps
/// does. One that only announces batches may get them for another thread.
#[must_use]
pub fn training_loop_evidence(tracker_flags: u16) -> u8 {
    match tracker_flags {
        flags if flags & RawTracker::ANNOUNCES_UPDATES != 0 => 2,
        flags if flags & RawTracker::ANNOUNCES_DATA != 0 => 1,
        _ => 0,
    }
}

/// Numbers the events as `enum zernel_event` does.
macro_rules! number_events {
    ($($event:pat => $name:literal = $number:literal,)*) => {
        /// The number of an event in `enum zernel_event`.
        #[must_use]
        pub fn raw_event(event: ThreadEvent) -> u8 {
            match event { $($event => $number,)* }
        }

        /// The mirror of `enum zernel_event`.
        pub const EVENT_MIRROR: EnumMirror = EnumMirror {
            c_name: "zernel_event",
            values: &[$(($name, $number),)*],
            is_complete: true,
        };
    };
}

number_events! {
    ThreadEvent::GpuSyncEnter => "ZERNEL_GPU_SYNC_ENTER" = 0,
    ThreadEvent::GpuSyncLeave => "ZERNEL_GPU_SYNC_LEAVE" = 1,
    ThreadEvent::CollectiveEnter => "ZERNEL_COLLECTIVE_ENTER" = 2,
    ThreadEvent::CollectiveLeave => "ZERNEL_COLLECTIVE_LEAVE" = 3,
    ThreadEvent::Launch => "ZERNEL_LAUNCH" = 4,
    ThreadEvent::CopyToDevice => "ZERNEL_COPY_TO_DEVICE" = 5,
    ThreadEvent::Block(BlockReason::Io) => "ZERNEL_BLOCK_IO" = 6,
    ThreadEvent::Block(BlockReason::Futex) => "ZERNEL_BLOCK_FUTEX" = 7,
    ThreadEvent::Block(BlockReason::Poll) => "ZERNEL_BLOCK_POLL" = 8,
    ThreadEvent::Block(BlockReason::Other) => "ZERNEL_BLOCK_OTHER" = 9,
    ThreadEvent::Unblock => "ZERNEL_UNBLOCK" = 10,
    ThreadEvent::OptimizerMarker => "ZERNEL_OPTIMIZER_MARKER" = 11,
    ThreadEvent::UnblockAfterLaunches => "ZERNEL_UNBLOCK_AFTER_LAUNCHES" = 12,
    ThreadEvent::DataBegin => "ZERNEL_DATA_BEGIN" = 13,
    ThreadEvent::ForwardBegin => "ZERNEL_FORWARD_BEGIN" = 14,
    ThreadEvent::BackwardBegin => "ZERNEL_BACKWARD_BEGIN" = 15,
    ThreadEvent::OptimizerBegin => "ZERNEL_OPTIMIZER_BEGIN" = 16,
    ThreadEvent::ZeroGradients => "ZERNEL_ZERO_GRADIENTS" = 17,
    ThreadEvent::NotObserved => "ZERNEL_NOT_OBSERVED" = 18,
    ThreadEvent::Preempt => "ZERNEL_PREEMPT" = 19,
    ThreadEvent::Resume => "ZERNEL_RESUME" = 20,
    ThreadEvent::OtherWorkBegin => "ZERNEL_OTHER_WORK_BEGIN" = 21,
    ThreadEvent::UpdateEnd => "ZERNEL_UPDATE_END" = 22,
    ThreadEvent::Block(BlockReason::Request) => "ZERNEL_BLOCK_REQUEST" = 23,
    ThreadEvent::CompileBegin => "ZERNEL_COMPILE_BEGIN" = 24,
    ThreadEvent::CompileEnd => "ZERNEL_COMPILE_END" = 25,
    ThreadEvent::Fork => "ZERNEL_FORK" = 26,
    ThreadEvent::Block(BlockReason::Sleep) => "ZERNEL_BLOCK_SLEEP" = 27,
    ThreadEvent::AwaitedCompile => "ZERNEL_AWAITED_COMPILE" = 28,
    ThreadEvent::AwaitedCollective => "ZERNEL_AWAITED_COLLECTIVE" = 29,
    ThreadEvent::AwaitedData => "ZERNEL_AWAITED_DATA" = 30,
    ThreadEvent::CopyToHostEnter => "ZERNEL_COPY_TO_HOST_ENTER" = 31,
    ThreadEvent::CopyToHostLeave => "ZERNEL_COPY_TO_HOST_LEAVE" = 32,
}

impl From<&ZernelTaskState> for RawPhaseSample {
    fn from(state: &ZernelTaskState) -> Self {
        Self {
            last_gpu_sync_ns: state.last_gpu_sync_ns,
            cpu_burst_ns: state.cpu_burst_duration_ns,
            io_wait_f32: state.io_wait_fraction.to_bits(),
            futex_waits: state.futex_wait_count,
            gpu_utilization: state.gpu_utilization,
            is_ml: state.is_ml_process.into(),
            nccl_active: state.nccl_active.into(),
            reserved: [0; 5],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_zeroed_raw_task_converts_to_a_new_state_on_gpu_zero() {
        let raw = RawTaskState::read_from_bytes(&[0; size_of::<RawTaskState>()]).unwrap();
        let blank = ZernelTaskState {
            gpu_id: Some(0),
            ..ZernelTaskState::new(0)
        };
        assert_eq!(ZernelTaskState::from(&raw), blank);
        let unknown_gpu = RawTaskState {
            gpu_id: NO_GPU,
            ..raw
        };
        assert_eq!(ZernelTaskState::from(&unknown_gpu), ZernelTaskState::new(0));
    }

    #[test]
    fn undefined_phase_bits_read_as_unknown() {
        assert_eq!(PhaseWord(u64::MAX).phase(), WorkloadPhase::Unknown);
    }

    /// A thread that collects batches may announce more than the thread that trains on them.
    #[test]
    fn a_thread_that_announces_steps_runs_the_training_loop() {
        let trains = RawTracker::TRAINING_THREAD | RawTracker::ANNOUNCES_UPDATES;
        let collects = RawTracker::TRAINING_THREAD | RawTracker::ANNOUNCES_DATA;
        let evidence = [trains, collects, RawTracker::TRAINING_THREAD].map(training_loop_evidence);
        assert!(
            evidence.is_sorted_by(|more, less| more > less),
            "{evidence:?}"
        );
    }

    #[test]
    fn every_fixed_point_fraction_is_exact() {
        for q16 in 0..=(1 << 16) {
            assert_eq!(fraction_from_q16(q16) * 65536.0, q16 as f32);
        }
        assert_eq!(fraction_from_q16(u32::MAX), 1.0);
    }

    proptest! {
        #[test]
        fn a_phase_word_round_trips(phase in 0_u8..5, sequence: u16, start in 0_u64..1 << 58) {
            let phase = WorkloadPhase::from_raw(phase);
            let word = PhaseWord::new(phase, sequence, start);
            prop_assert_eq!(word.phase(), phase);
            prop_assert_eq!(word.sequence(), sequence % 4096);
            prop_assert_eq!(word.start_ns(), start / 1024 * 1024);
        }
    }
}
