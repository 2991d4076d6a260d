//! Helpers that tests of several crates use.
//!
//! Trials, needs, waiting, copies of programs, fuzzing, benchmarks and the commands of the documents come without features. The feature `softgpu` adds processes
//! on the software GPU, `daemon` adds a `zernel observe` process, `vm` adds virtual machines, `fuse` a file system
//! that stops answering.

pub mod allocation;
pub mod bench;
#[cfg(feature = "softgpu")]
pub mod communicator;
#[cfg(feature = "daemon")]
pub mod daemon;
pub mod documented;
pub mod elf_builder;
pub mod fuzz;
pub mod needs;
mod pod_cgroup;
mod program_copy;
#[cfg(feature = "fuse")]
mod stalling_fs;
#[cfg(feature = "daemon")]
mod stopped_thread;
#[cfg(feature = "softgpu")]
pub mod target;
mod trial;
#[cfg(feature = "vm")]
pub mod vm;
mod wait;

pub use needs::{Need, root};
pub use pod_cgroup::{NO_KUBELET_NEED, PodCgroup};
pub use program_copy::copy_program;
#[cfg(feature = "fuse")]
pub use stalling_fs::StallingFs;
#[cfg(feature = "daemon")]
pub use stopped_thread::StoppedThread;
pub use trial::{REQUIRE_VARIABLE, main, trial};
pub use wait::{eventually, eventually_ok, eventually_within};

#[cfg(feature = "softgpu")]
#[doc(hidden)] // for the macros of `target`
pub use libloading;
