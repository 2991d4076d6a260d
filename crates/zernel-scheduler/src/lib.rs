//! CPU scheduling for ML workloads.
//!
//! [`scheduler`] loads a sched_ext scheduler, whose BPF half is `src/bpf/main.bpf.c`. [`sched_ext`] reads what the
//! running kernel supports. The inputs of a scheduling decision, [`task_state`], [`phase_detector`] and
//! [`tracker`], are re-exported from `zernel-phase`.

mod cache_topology;
mod cgroup_limits;
mod loaded_scheduler;
mod numa_topology;
mod reader_heartbeat;
pub mod sched_ext;
pub mod scheduler;
mod task_state_pins;
mod tenants;

pub use zernel_phase::{phase_detector, task_state, tracker};
