//! The class of a thread: what a scheduler needs to know about it. The twin of `bpf/class.h`.
//!
//! | reason | class |
//! |---|---|
//! | it computes, is in a collective, or updates the model | [`Critical`](TaskClass::Critical) |
//! | it spins until the GPU is done | [`GpuWait`](TaskClass::GpuWait) |
//! | it wakes up from a block until the GPU is done | [`Critical`](TaskClass::Critical) |
//! | it gets its next batch, or loads data for a trainer | [`Feed`](TaskClass::Feed) |
//! | there is no evidence | [`Other`](TaskClass::Other) |
//!
//! A class describes a thread that is runnable. A blocked thread is not scheduled, so the class of a blocked thread is
//! the one that it will have when it wakes up.

use std::fmt;

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::shared::{RawTaskState, RawTracker, TASK_IS_LOADER, TASK_IS_ML, TASK_IS_SAMPLED};
use crate::task_state::WorkloadPhase;

/// Declares an enum with the numbers and names of its values.
macro_rules! numbered_enum {
    ($(#[$attribute:meta])* $name:ident { $($(#[$doc:meta])* $value:ident = $text:literal,)* }) => {
        $(#[$attribute])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(rename_all = "snake_case")]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* $value,)* }

        impl $name {
            /// Every value, ordered by number.
            pub const ALL: &'static [Self] = &[$(Self::$value,)*];

            /// The value with this number; the first one for an undefined number.
            #[must_use]
            pub fn from_raw(raw: u8) -> Self {
                Self::ALL.get(usize::from(raw)).copied().unwrap_or_default()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$value => $text,)* })
            }
        }
    };
}

numbered_enum! {
    /// What a scheduler should do with a thread.
    TaskClass {
        /// No step, batch or GPU is known to wait for the thread.
        #[default]
        Other = "other",
        /// A delay of the thread delays the step.
        Critical = "critical",
        /// A delay of the thread delays the next batch.
        Feed = "feed",
        /// It spins until the GPU is done.
        GpuWait = "GPU wait",
    }
}

numbered_enum! {
    /// What a thread is for.
    TaskRole {
        /// It belongs to no ML process, or it has exited.
        #[default]
        None = "none",
        /// It runs a training loop, or another loop that uses the GPU.
        Trainer = "trainer",
        /// Another thread of the same process.
        Helper = "helper",
        /// It loads data for a trainer, in that process or in another one.
        Loader = "loader",
    }
}

numbered_enum! {
    /// Why a thread has its class.
    ClassReason {
        /// There is no evidence.
        #[default]
        Unknown = "nothing known",
        /// It launches, copies or is in a backward pass.
        Computes = "computes",
        /// It is in a collective, or waits for one.
        Collective = "in a collective",
        /// It updates the model.
        Optimizer = "updates the model",
        /// It waits for the GPU.
        GpuSync = "waits for the GPU",
        /// It gets its next batch.
        Data = "gets its next batch",
        /// It loads data for a trainer.
        Loads = "loads data",
    }
}

crate::mirrors! {
    /// The types of this module that C code shares. A test compares them with the BTF of the BPF programs.
    pub const MIRRORS;
    flags {
        impl ClassWord: u64 = "zernel_class_flags", "ZERNEL_CLASS_" {
            /// Flag: in a call that waits for the GPU.
            IN_SYNC = 1 << 12,
            /// Flag: the thread is a trainer whose phase is known now.
            DRIVES_STEPS = 1 << 13,
            /// Flag: the thread was blocked when it left its CPU.
            BLOCKED = 1 << 14,
            /// Flag: the class follows from the sampled rule, because the calls of the thread are not probed.
            SAMPLED = 1 << 15,
        }
        impl ClassWord: u32 = "zernel_class_bits", "ZERNEL_CLASS_" {
            /// Bits of class, reason and role.
            FIELD_BITS = 4,
            /// Number of the lowest bit of the reason in the class word.
            REASON_SHIFT = 4,
            /// Number of the lowest bit of the role in the class word.
            ROLE_SHIFT = 8,
            /// Number of the lowest bit of the start time in the class word.
            SINCE_SHIFT = 16,
            /// The logarithm of the start's unit in nanoseconds.
            UNIT_SHIFT = 10,
        }
    }
    variants {
        enum TaskClass = "zernel_class" {
            Other = "ZERNEL_CLASS_OTHER",
            Critical = "ZERNEL_CLASS_CRITICAL",
            Feed = "ZERNEL_CLASS_FEED",
            GpuWait = "ZERNEL_CLASS_GPU_WAIT",
        } and {
            "ZERNEL_CLASSES" = TaskClass::ALL.len(),
        }
        enum TaskRole = "zernel_role" {
            None = "ZERNEL_ROLE_NONE",
            Trainer = "ZERNEL_ROLE_TRAINER",
            Helper = "ZERNEL_ROLE_HELPER",
            Loader = "ZERNEL_ROLE_LOADER",
        } and {
            "ZERNEL_ROLES" = TaskRole::ALL.len(),
        }
        enum ClassReason = "zernel_reason" {
            Unknown = "ZERNEL_REASON_UNKNOWN",
            Computes = "ZERNEL_REASON_COMPUTES",
            Collective = "ZERNEL_REASON_COLLECTIVE",
            Optimizer = "ZERNEL_REASON_OPTIMIZER",
            GpuSync = "ZERNEL_REASON_GPU_SYNC",
            Data = "ZERNEL_REASON_DATA",
            Loads = "ZERNEL_REASON_LOADS",
        } and {
            "ZERNEL_REASONS" = ClassReason::ALL.len(),
        }
    }
}

/// Class, reason, role, flags and start in one `u64`, written with one store.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct ClassWord(pub u64);

impl ClassWord {
    const FIELDS_MASK: u64 = (1 << Self::SINCE_SHIFT) - 1;
    const CLASS_AND_REASON_MASK: u64 = (1 << Self::ROLE_SHIFT) - 1;

    /// The class.
    #[must_use]
    pub fn class(self) -> TaskClass {
        TaskClass::from_raw(self.field(0))
    }

    /// Why the thread has this class.
    #[must_use]
    pub fn reason(self) -> ClassReason {
        ClassReason::from_raw(self.field(Self::REASON_SHIFT))
    }

    /// What the thread is for.
    #[must_use]
    pub fn role(self) -> TaskRole {
        TaskRole::from_raw(self.field(Self::ROLE_SHIFT))
    }

    /// Whether all of these flags are set.
    #[must_use]
    pub fn has_flags(self, flags: u64) -> bool {
        self.0 & flags == flags
    }

    /// Since when class and reason are these, rounded down to 1024 ns.
    #[must_use]
    pub fn since_ns(self) -> u64 {
        self.0 >> Self::SINCE_SHIFT << Self::UNIT_SHIFT
    }

    fn field(self, shift: u32) -> u8 {
        ((self.0 >> shift) & ((1 << Self::FIELD_BITS) - 1)) as u8
    }
}

/// Why a thread with this role has its class. A loader needs no evidence but its role.
#[must_use]
pub fn reason_of(role: TaskRole, phase: WorkloadPhase, in_sync: bool) -> ClassReason {
    match (role, phase) {
        (TaskRole::None, _) => ClassReason::Unknown,
        (TaskRole::Loader, _) => ClassReason::Loads,
        (_, WorkloadPhase::GpuCompute) if in_sync => ClassReason::GpuSync,
        (_, WorkloadPhase::GpuCompute) => ClassReason::Computes,
        (_, WorkloadPhase::NcclCollective) => ClassReason::Collective,
        (_, WorkloadPhase::OptimizerStep) => ClassReason::Optimizer,
        (_, WorkloadPhase::DataLoading) => ClassReason::Data,
        (_, WorkloadPhase::Unknown) => ClassReason::Unknown,
    }
}

/// The class of a thread that runs, is runnable, or wakes up from a block.
#[must_use]
pub fn class_for(reason: ClassReason, wakes_up: bool) -> TaskClass {
    match reason {
        ClassReason::Computes | ClassReason::Collective | ClassReason::Optimizer => {
            TaskClass::Critical
        }
        ClassReason::GpuSync if wakes_up => TaskClass::Critical,
        ClassReason::GpuSync => TaskClass::GpuWait,
        ClassReason::Data | ClassReason::Loads => TaskClass::Feed,
        ClassReason::Unknown => TaskClass::Other,
    }
}

impl RawTaskState {
    /// What the task is for.
    #[must_use]
    pub fn role(&self) -> TaskRole {
        if self.flags & TASK_IS_ML == 0 {
            TaskRole::None
        } else if self.flags & TASK_IS_LOADER != 0 {
            TaskRole::Loader
        } else if self.tracker.flags & RawTracker::TRAINING_THREAD != 0 {
            TaskRole::Trainer
        } else {
            TaskRole::Helper
        }
    }

    /// The class word at `now_ns`. After the deadline only the role is left.
    #[must_use]
    pub fn class_word_at(&self, now_ns: u64) -> ClassWord {
        match now_ns < self.class_until_ns {
            true => self.class_word,
            false => {
                let role = ((1 << ClassWord::FIELD_BITS) - 1) << ClassWord::ROLE_SHIFT;
                ClassWord(self.class_word.0 & role)
            }
        }
    }

    /// Sets class word and deadline as the kernel does after an event.
    pub fn publish_class(&mut self, now_ns: u64) {
        let fields = self.class_fields();
        let before = self.class_word.0;
        self.class_until_ns = match self.flags & TASK_IS_LOADER {
            0 => self.tracker.deadline_ns,
            _ => u64::MAX,
        };
        if before & ClassWord::FIELDS_MASK == fields {
            return;
        }
        let is_new = before == 0 || (before ^ fields) & ClassWord::CLASS_AND_REASON_MASK != 0;
        let since = match is_new {
            true => now_ns >> ClassWord::UNIT_SHIFT << ClassWord::SINCE_SHIFT,
            false => before & !ClassWord::FIELDS_MASK,
        };
        self.class_word = ClassWord(since | fields);
    }

    /// The lower bits of the class word.
    fn class_fields(&self) -> u64 {
        let phase = self.phase_word.phase();
        let role = self.role();
        let is_blocked = self.tracker.flags & RawTracker::IS_BLOCKED != 0;
        let is_sampled = self.flags & TASK_IS_SAMPLED != 0;
        // The sampled rule's GPU compute is a thread that was off its CPU while its GPU worked.
        let in_sync = match is_sampled {
            true => phase == WorkloadPhase::GpuCompute,
            false => self.tracker.flags & RawTracker::IN_SYNC != 0,
        };
        let reason = reason_of(role, phase, in_sync);
        let drives_steps = role == TaskRole::Trainer && phase != WorkloadPhase::Unknown;
        let mut fields = class_for(reason, is_sampled || is_blocked) as u64
            | ((reason as u64) << ClassWord::REASON_SHIFT)
            | ((role as u64) << ClassWord::ROLE_SHIFT);
        for (flag, is_set) in [
            (ClassWord::IN_SYNC, in_sync),
            (ClassWord::BLOCKED, is_blocked),
            (ClassWord::DRIVES_STEPS, drives_steps),
            (ClassWord::SAMPLED, is_sampled),
        ] {
            if is_set && role != TaskRole::None {
                fields |= flag;
            }
        }
        fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(phase: WorkloadPhase, tracker_flags: u16, flags: u8) -> RawTaskState {
        let bytes = [0; size_of::<RawTaskState>()];
        let mut state = RawTaskState::read_from_bytes(&bytes).unwrap();
        state.phase_word = crate::shared::PhaseWord::new(phase, 1, 1 << 20);
        state.flags = flags;
        state.tracker.flags = tracker_flags;
        state.tracker.deadline_ns = 5_000_000;
        state.publish_class(1 << 20);
        state
    }

    const TRAINER: u16 = RawTracker::TRAINING_THREAD;

    #[test]
    fn a_thread_that_blocks_for_the_gpu_wakes_up_critical() {
        let spins = TRAINER | RawTracker::IN_SYNC;
        let state = state(WorkloadPhase::GpuCompute, spins, TASK_IS_ML);
        assert_eq!(state.class_word.class(), TaskClass::GpuWait);
        assert!(
            state
                .class_word
                .has_flags(ClassWord::IN_SYNC | ClassWord::DRIVES_STEPS)
        );
        let mut blocked = state;
        blocked.tracker.flags |= RawTracker::IS_BLOCKED;
        blocked.publish_class(2 << 20);
        assert_eq!(blocked.class_word.class(), TaskClass::Critical);
        assert_eq!(blocked.class_word.reason(), ClassReason::GpuSync);
        assert_eq!(blocked.class_word.since_ns(), 2 << 20);
    }

    #[test]
    fn after_the_deadline_only_the_role_is_left() {
        let state = state(WorkloadPhase::OptimizerStep, TRAINER, TASK_IS_ML);
        let before = state.class_word_at(4_999_999);
        assert_eq!(before.class(), TaskClass::Critical);
        let after = state.class_word_at(5_000_000);
        assert_eq!(after.class(), TaskClass::Other);
        assert_eq!(after.reason(), ClassReason::Unknown);
        assert_eq!(after.role(), TaskRole::Trainer);
        assert!(!after.has_flags(ClassWord::DRIVES_STEPS));
    }

    #[test]
    fn a_loader_feeds_without_a_deadline() {
        let loader = TASK_IS_ML | TASK_IS_LOADER;
        let state = state(WorkloadPhase::Unknown, 0, loader);
        let word = state.class_word_at(u64::MAX - 1);
        assert_eq!(
            (word.class(), word.role()),
            (TaskClass::Feed, TaskRole::Loader)
        );
    }

    #[test]
    fn a_sampled_thread_that_waits_for_its_gpu_is_critical() {
        let sampled = TASK_IS_ML | TASK_IS_SAMPLED;
        let word = state(WorkloadPhase::GpuCompute, 0, sampled).class_word;
        assert_eq!(
            (word.class(), word.reason(), word.role()),
            (TaskClass::Critical, ClassReason::GpuSync, TaskRole::Helper)
        );
        assert!(word.has_flags(ClassWord::SAMPLED | ClassWord::IN_SYNC));
        let loads = state(WorkloadPhase::DataLoading, 0, sampled).class_word;
        assert_eq!(loads.class(), TaskClass::Feed);
        assert!(loads.has_flags(ClassWord::SAMPLED) && !loads.has_flags(ClassWord::IN_SYNC));
    }

    #[test]
    fn a_thread_of_no_ml_process_has_no_role() {
        let state = state(WorkloadPhase::GpuCompute, TRAINER, 0);
        assert_eq!(state.class_word.0 & ClassWord::FIELDS_MASK, 0);
    }
}
