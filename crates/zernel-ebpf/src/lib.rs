//! What the kernel can tell about ML processes.
//!
//! | module | subject |
//! |---|---|
//! | [`aggregation`] | what was observed, summed up: histograms, Prometheus text, live snapshots |
//! | [`capability`] | which kinds of BPF program and map this machine really accepts, found by trying |
//! | [`discovery`] | which processes map which ML libraries, from when on |
//! | [`gpu`] | the GPUs of this machine, and which of them a process means by which number |
//! | [`identity`] | who a process is: job, rank, pod, container |
//! | [`library`] | a shared library file, and where in it a probe may go |
//! | [`observer`] | watches ML processes: probes attached, read and governed |
//! | [`privilege`] | the capabilities that observing needs |
//! | [`probes`] | which functions are watched, and what is kept of their calls |
//! | [`twin`] | the kernel's copy of the phase rule, run on states of our choice |

pub mod aggregation;
#[cfg(test)]
mod boundary;
pub mod capability;
pub mod discovery;
pub mod gpu;
pub mod identity;
pub mod library;
pub mod observer;
pub mod privilege;
pub mod probes;
pub mod twin;
