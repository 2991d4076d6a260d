//! All `unsafe` code of this crate, in small modules: shared memory, processes, signals, threads and the system calls
//! that `rustix` does not wrap. Values that these functions return are safe to use.
//!
//! Code that runs in a forked worker calls only functions that are documented as *fork safe*: these neither allocate
//! nor take a lock, so they work in the child of a process with many threads.

pub(crate) mod cuda;
pub(crate) mod library;
pub(crate) mod memory;
pub(crate) mod nccl;
pub(crate) mod process;
pub(crate) mod sched;
pub(crate) mod signal;
pub(crate) mod thread;
