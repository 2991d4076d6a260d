//! Detects the phase and the training steps of ML tasks. Pure values: no I/O, no clock, no
//! `unsafe`.
//!
//! | module | content |
//! |---|---|
//! | [`task_state`] | the state of one task and the time it spent in each phase |
//! | [`phase_detector`] | the *sampled* rule: a phase from periodic samples, without probes |
//! | [`tracker`] | the *event* rule: exact phase intervals from the events of a thread |
//! | [`steps`] | the steps of a training loop, from the marks that its process makes |
//! | [`class`] | the class of a thread, for a scheduler |
//! | [`shared`] | the kernel's layout of the task state, and the conversions |
//! | [`mirror`] | declares Rust mirrors of C types, for comparison with BTF |
//!
//! The rules are also implemented in C (`bpf/phase_rule.h`, `bpf/phase_tracker.h`, `bpf/class.h`). The
//! tests of `zernel-ebpf` run both versions on the same random states and require equal results.
#![forbid(unsafe_code)]

pub mod class;
pub mod mirror;
pub mod phase_detector;
mod recent_pids;
pub mod shared;
pub mod steps;
pub mod task_state;
pub mod tracker;

pub use class::{ClassReason, ClassWord, TaskClass, TaskRole};
pub use phase_detector::{ConfigError, PhaseDetector, PhaseDetectorConfig, classify};
pub use task_state::{PhaseTimeAccumulator, WorkloadPhase, ZernelTaskState};
pub use tracker::{BlockReason, PhaseInterval, PhaseTracker, ThreadEvent, TrackerConfig};
