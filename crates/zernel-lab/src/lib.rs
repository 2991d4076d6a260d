//! Boots a stock Debian kernel in QEMU with files of this machine, runs one command in it as root, and
//! returns its output and exit status. Nothing is installed and no disk image is built: all files of the
//! guest are in an initramfs made for that run.
//!
//! ```no_run
//! use zernel_lab::{KernelCache, KernelRequest, VmSpec};
//!
//! let kernel = KernelCache::from_environment()?.obtain_kernel(&KernelRequest::NewestWithSchedExt)?;
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
//! | [`peer_schedulers`] | public schedulers, built into the cache |
//! | [`vm`] | the run itself: QEMU, the command, its outcome |
//! | [`deterministic`] | runs that repeat to the last byte |
//! | [`cpu_time_account`] | where the CPU time of a run went |
#![forbid(unsafe_code)]

mod apt;
pub mod assertion;
mod availability;
pub mod compare;
mod cpio;
pub mod cpu_time_account;
pub mod deterministic;
mod entropy_program;
mod guest;
pub mod initramfs;
pub mod kernel;
mod kernel_package;
pub mod peer_schedulers;
mod program_dependencies;
mod program_search;
mod qemu;
mod run_cache;
pub mod scenario;
pub mod scenario_run;
mod software_gpu;
mod topology;
pub mod vm;

pub use assertion::{Assertion, Finding, Verdict};
pub use availability::{VmUnavailable, check_vm_available};
pub use compare::SchedulerComparison;
pub use cpu_time_account::{CpuTimeAccount, CpuTimeReading};
pub use deterministic::{
    DeterministicRunRecord, DeterministicSettings, RunDifference, RunDigest, TickAlignment,
};
pub use initramfs::{Initramfs, InitramfsError};
pub use kernel::{
    AvailableKernel, Kernel, KernelCache, KernelError, KernelRequest, KernelVersion,
    SchedulerSupport,
};
pub use scenario::plan::SchedulerChoice;
pub use scenario::{EevdfControl, Scenario, ScenarioError};
pub use scenario_run::{GuestAnswer, RunResult, ScenarioRun};
pub use topology::{BadCpuTopology, CpuTopology};
pub use vm::{Accelerator, CommandOutcome, CommandStatus, PartialOutput, VmError, VmSpec};
