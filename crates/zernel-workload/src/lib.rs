//! Reproducible scheduler workloads: worker tasks that block until started, and reports that
//! survive starvation and death.
//!
//! | module | subject |
//! |---|---|
//! | [`config`] | what to run: groups of workers, their settings |
//! | [`work`] | the types of work |
//! | [`spec_keys`] | the keys of a workload file: types, defaults, meanings |
//! | [`handle`] | spawn, place, start, watch, stop |
//! | [`spec`], [`cgroup`] | the same from a file, with cgroups |
//! | [`report`], [`exit_info`], [`histogram`] | what came of it |
//! | [`topology`], [`affinity`], [`policy`] | CPUs, scheduling and memory policies |
//!
//! Workers write their progress and statistics to shared memory while they run. So the handle can report a
//! worker that is starved, killed or hung. Start with [`handle::WorkloadHandle`].

pub mod affinity;
pub mod cgroup;
mod clock;
pub mod config;
mod container;
pub mod error;
pub mod exit_info;
pub mod handle;
pub mod histogram;
pub mod policy;
mod process_keeper;
mod procfs;
pub mod report;
mod shared_state;
pub mod spec;
pub mod spec_keys;
mod stop_workers;
mod sys;
mod team_pipes;
pub mod topology;
pub mod work;
mod worker;
mod worker_body;
pub mod worker_settings;
mod worker_threads;
mod workload_plan;

pub use affinity::Affinity;
pub use config::{CloneMode, WorkSpec, WorkloadConfig};
pub use error::{Error, Result};
pub use exit_info::WorkerExitInfo;
pub use handle::WorkloadHandle;
pub use histogram::Histogram;
pub use policy::{MemoryPolicy, SchedPolicy};
pub use report::{ReportTable, WorkerReport};
pub use spec::WorkloadSpec;
pub use topology::{CpuSet, Topology};
pub use work::WorkType;
pub use worker::Worker;
