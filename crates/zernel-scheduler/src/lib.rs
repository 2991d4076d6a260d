//! CPU scheduling for ML workloads.
//!
//! What a scheduling decision looks at, [`task_state`] and [`phase_detector`], is implemented in
//! `zernel-phase` and named here; [`sched_ext`] says what the running kernel offers to act with.

pub mod sched_ext;

pub use zernel_phase::{phase_detector, task_state, tracker};
