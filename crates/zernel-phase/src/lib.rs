//! What an ML task is doing, as pure values: no I/O, no clock, no `unsafe`.
//!
//! | module | subject |
//! |---|---|
//! | [`task_state`] | the state of one task, and the time it spent in each phase |
//! | [`phase_detector`] | the *sampled* rule: a phase from periodic samples, where no probe is attached |
//! | [`tracker`] | the *event* rule: exact phase intervals from a thread's own events |
//! | [`steps`] | the steps of a training loop, from what its process does |
//! | [`shared`] | the same state as the kernel lays it out, and the conversions |
//!
//! The sampled rule has a twin in C (`bpf/phase_rule.h`). Both are run on the same random states by
//! `zernel-ebpf`'s tests and must agree on every one.
#![forbid(unsafe_code)]

pub mod phase_detector;
mod recent_pids;
pub mod shared;
pub mod steps;
pub mod task_state;
pub mod tracker;

pub use phase_detector::{ConfigError, PhaseDetector, PhaseDetectorConfig, classify};
pub use task_state::{PhaseTimeAccumulator, WorkloadPhase, ZernelTaskState};
pub use tracker::{BlockReason, PhaseInterval, PhaseTracker, ThreadEvent, TrackerConfig};
