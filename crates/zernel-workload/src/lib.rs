//! Reproducible scheduler workloads: worker tasks that block until started, and reports that
//! survive starvation and death.
//!
//! | module | subject |
//! |---|---|
//! | [`config`] | what to run: groups of workers, their settings |
//! | [`work`] | the types of work |
//! | [`keys`] | the keys of a spec file: types, defaults, meanings |
//! | [`handle`] | spawn, place, start, watch, stop |
//! | [`spec`], [`cgroup`] | the same from a file, with cgroups |
//! | [`report`], [`exit`], [`histogram`] | what came of it |
//! | [`topology`], [`affinity`], [`policy`] | CPUs, scheduling and memory policies |
//!
//! Workers write their progress and statistics to shared memory while they run. So the handle can report a
//! worker that is starved, killed or hung. Start with [`handle::WorkloadHandle`].

pub mod affinity;
mod body;
pub mod cgroup;
mod clock;
pub mod config;
mod container;
pub mod error;
pub mod exit;
pub mod handle;
pub mod histogram;
mod keeper;
pub mod keys;
mod plan;
pub mod policy;
mod procfs;
pub mod report;
pub mod settings;
mod shared;
pub mod spec;
mod stop;
mod sys;
mod team_pipes;
mod threads;
pub mod topology;
pub mod work;
mod worker;

pub use affinity::Affinity;
pub use config::{CloneMode, WorkSpec, WorkloadConfig};
pub use error::{Error, Result};
pub use exit::WorkerExitInfo;
pub use handle::WorkloadHandle;
pub use histogram::Histogram;
pub use policy::{MemoryPolicy, SchedPolicy};
pub use report::{ReportTable, WorkerReport};
pub use spec::WorkloadSpec;
pub use topology::{CpuSet, Topology};
pub use work::WorkType;
pub use worker::Worker;
