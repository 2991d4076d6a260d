//! Boots a stock Debian kernel in QEMU with files of this machine, runs one command in it as root, and
//! returns its output and exit status. Nothing is installed and no disk image is built: all files of the
//! guest are in an initramfs made for that run.
//!
//! ```no_run
//! use zernel_lab::{KernelCache, KernelRequest, VmSpec};
//!
//! let kernel = KernelCache::from_environment()?.obtain(&KernelRequest::SchedExt)?;
//! let outcome = VmSpec::new(kernel).run("/bin/cat", ["/sys/kernel/sched_ext/state"])?;
//! assert_eq!(outcome.stdout, b"disabled\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | subject |
//! |---|---|
//! | [`kernel`] | which kernel: found in the cache, fetched with apt, or given by path |
//! | [`initramfs`] | which files: a list of what the guest sees, written as a cpio archive |
//! | [`scenario`], [`assertion`] | what runs in the machine, and what must hold |
//! | [`compare`] | many schedulers and seeds: a table, plots, which scheduler is better |
//! | [`scenario_run`] | one scenario under one scheduler: figures and a verdict |
//! | [`peers`] | public schedulers, built into the cache |
//! | [`vm`] | the run itself: QEMU, the command, its outcome |
//! | [`deterministic`] | runs that repeat to the last byte |
//! | [`account`] | where the CPU time of a run went |
#![forbid(unsafe_code)]

pub mod account;
mod apt;
pub mod assertion;
mod availability;
pub mod compare;
mod cpio;
pub mod deterministic;
mod entropy_program;
mod guest;
mod host;
pub mod initramfs;
pub mod kernel;
mod package;
pub mod peers;
mod program;
mod qemu;
mod run_cache;
pub mod scenario;
pub mod scenario_run;
mod software_gpu;
mod topology;
pub mod vm;

pub use account::{Account, CpuTimeReading};
pub use assertion::{Assertion, Finding, Verdict};
pub use availability::{Unavailable, available};
pub use compare::SchedulerComparison;
pub use deterministic::{Determinism, Deterministic, Difference, Digest, Ticks};
pub use initramfs::{Initramfs, InitramfsError};
pub use kernel::{
    AvailableKernel, Kernel, KernelCache, KernelError, KernelRequest, KernelVersion,
    SchedulerSupport,
};
pub use scenario::plan::Scheduler;
pub use scenario::{Control, Scenario, ScenarioError};
pub use scenario_run::{GuestAnswer, RunResult, ScenarioRun};
pub use topology::{BadTopology, CpuTopology};
pub use vm::{Accelerator, CommandOutcome, CommandStatus, Remains, VmError, VmSpec};
