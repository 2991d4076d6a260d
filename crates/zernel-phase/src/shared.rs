//! The kernel's layout of the task state: the Rust mirror of the headers in `bpf/`.
//!
//! The C headers are the definition. The tests of `zernel-ebpf` compare size and offset of every
//! field with their BTF, and run the conversions of both sides on the same values.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::phase_detector::PhaseDetectorConfig;
use crate::task_state::{PhaseTimeAccumulator, WorkloadPhase, ZernelTaskState};
use crate::tracker::{BlockReason, ThreadEvent, TrackerConfig};

/// `gpu_id` of a task whose GPU is unknown.
pub const NO_GPU: u32 = u32::MAX;
/// Flag: the task belongs to an ML process.
pub const TASK_IS_ML: u8 = 1 << 0;
/// Flag: a NCCL collective is in progress.
pub const TASK_NCCL_ACTIVE: u8 = 1 << 1;

/// Tracker flag: the thread copies to the device, syncs or passes markers, so it is a training
/// thread.
pub const DRIVES_STEPS: u16 = 1 << 8;

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
    const PHASE_BITS: u32 = 4;
    const SEQUENCE_BITS: u32 = 12;
    const START_SHIFT: u32 = Self::PHASE_BITS + Self::SEQUENCE_BITS;
    const UNIT_SHIFT: u32 = 10;

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

/// `struct zernel_tracker`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // documented field by field in bpf/task_state.h
pub struct RawTracker {
    pub now_ns: u64,
    pub deadline_ns: u64,
    pub activity_until_ns: u64,
    pub sync_since_ns: u64,
    pub collective_since_ns: u64,
    pub call_shown_ns: u64,
    pub wait_since_ns: u64,
    pub wait_activity_until_ns: u64,
    pub undecided_since_ns: u64,
    pub last_marker_ns: u64,
    pub lost_leaves: u32,
    pub lost_enters: u32,
    pub late: u32,
    pub expired: u32,
    pub flags: u16,
    pub activity: u8,
    pub wait_activity: u8,
    pub reserved: [u8; 4],
}

/// `struct zernel_task_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // documented field by field in bpf/task_state.h
pub struct RawTaskState {
    pub phase_word: PhaseWord,
    pub last_gpu_sync_ns: u64,
    pub cpu_burst_ns: u64,
    pub phase_ns: [u64; WorkloadPhase::ALL.len()],
    pub pid: u32,
    pub tgid: u32,
    pub gpu_id: u32,
    pub futex_waits: u32,
    pub io_wait_q16: u32,
    pub streak: u32,
    pub candidate: u8,
    pub gpu_utilization: u8,
    pub flags: u8,
    pub reserved: [u8; 5],
    pub tracker: RawTracker,
}

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

/// Converts a fraction in units of 1/65536, capped at 1. The result is exact.
#[must_use]
pub fn fraction_from_q16(q16: u32) -> f32 {
    q16.min(1 << 16) as f32 / 65536.0
}

/// `struct zernel_phase_config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // documented in bpf/phase_rule.h
pub struct RawPhaseConfig {
    pub optimizer_burst_max_ns: u64,
    pub io_wait_threshold_f32: u32,
    pub io_wait_half_threshold_f32: u32,
    pub phase_stability_count: u32,
    pub gpu_idle_threshold: u8,
    pub gpu_active_threshold: u8,
    pub nccl_detection_enabled: u8,
    pub reserved: u8,
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

/// `struct zernel_tracker_config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // as in TrackerConfig
pub struct RawTrackerConfig {
    pub sync_max_ns: u64,
    pub collective_max_ns: u64,
    pub blocked_max_ns: u64,
    pub loading_max_ns: u64,
    pub launching_max_ns: u64,
    pub optimizer_max_ns: u64,
    pub optimizer_burst_max_ns: u64,
    pub optimizer_launch_max_ns: u64,
    pub short_wait_max_ns: u64,
}

impl From<&TrackerConfig> for RawTrackerConfig {
    fn from(config: &TrackerConfig) -> Self {
        Self {
            sync_max_ns: config.sync_max_ns,
            collective_max_ns: config.collective_max_ns,
            blocked_max_ns: config.blocked_max_ns,
            loading_max_ns: config.loading_max_ns,
            launching_max_ns: config.launching_max_ns,
            optimizer_max_ns: config.optimizer_max_ns,
            optimizer_burst_max_ns: config.optimizer_burst_max_ns,
            optimizer_launch_max_ns: config.optimizer_launch_max_ns,
            short_wait_max_ns: config.short_wait_max_ns,
        }
    }
}

/// Returns the number of an event in `enum zernel_event`.
#[must_use]
pub fn raw_event(event: ThreadEvent) -> u8 {
    match event {
        ThreadEvent::GpuSyncEnter => 0,
        ThreadEvent::GpuSyncLeave => 1,
        ThreadEvent::CollectiveEnter => 2,
        ThreadEvent::CollectiveLeave => 3,
        ThreadEvent::Launch => 4,
        ThreadEvent::CopyToDevice => 5,
        ThreadEvent::Block(BlockReason::Io) => 6,
        ThreadEvent::Block(BlockReason::Futex) => 7,
        ThreadEvent::Block(BlockReason::Poll) => 8,
        ThreadEvent::Block(BlockReason::Other) => 9,
        ThreadEvent::Unblock => 10,
        ThreadEvent::OptimizerMarker => 11,
    }
}

/// `struct zernel_phase_sample`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // documented in bpf/phase_rule.h
pub struct RawPhaseSample {
    pub last_gpu_sync_ns: u64,
    pub cpu_burst_ns: u64,
    pub io_wait_f32: u32,
    pub futex_waits: u32,
    pub gpu_utilization: u8,
    pub is_ml: u8,
    pub nccl_active: u8,
    pub reserved: [u8; 5],
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
