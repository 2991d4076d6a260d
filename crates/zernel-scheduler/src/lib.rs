//! CPU scheduling for ML workloads.
//!
//! [`scheduler`] loads a sched_ext scheduler, whose BPF half is `src/bpf/main.bpf.c`. [`sched_ext`] reads what the
//! running kernel supports. The inputs of a scheduling decision, [`task_state`], [`phase_detector`] and
//! [`tracker`], are re-exported from `zernel-phase`.

mod cgroup_limits;
mod loaded_scheduler;
mod reader_heart;
pub mod sched_ext;
pub mod scheduler;
mod task_state_pins;
mod tenants;
mod topology;

pub use zernel_phase::{phase_detector, task_state, tracker};
