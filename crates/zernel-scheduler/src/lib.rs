//! CPU scheduling for ML workloads.
//!
//! The inputs of a scheduling decision, [`task_state`], [`phase_detector`] and [`tracker`], are
//! re-exported from `zernel-phase`. [`sched_ext`] reads what the running kernel supports.

pub mod sched_ext;

pub use zernel_phase::{phase_detector, task_state, tracker};
