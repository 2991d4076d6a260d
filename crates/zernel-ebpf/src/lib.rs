//! Observes ML processes through eBPF.
//!
//! | module | subject |
//! |---|---|
//! | [`capability`] | which kinds of BPF program and map this machine accepts, found by trying |
//! | [`discovery`] | which processes map which ML libraries |
//! | [`metrics`] | a snapshot as metrics text |
//! | [`observer`] | attaches probes, reads what they count, bounds what they cost, publishes snapshots |
//! | [`privilege`] | the capabilities that observing needs |
//! | [`probes`] | the probed functions, and what is kept of their calls |
//! | [`quarantine`] | files that were being read when the daemon died |
//! | [`task_reader`] | the task states that an observer has pinned, as a scheduler reads them |
//! | [`twin`] | the kernel's copy of the phase rules, run on states of a test's choice |
//!
//! Private modules handle files that belong to other users: `child_task` runs work on their files in child processes,
//! `foreign_file` holds a file without asking its file system, `overlay_layers` finds the file systems below an overlay,
//! `probe_link` detaches probes without a wait, `tenant_shares` divides tables among users.
//!
//! `zernel-ebpf` re-exports [`aggregation`] from `zernel-model`.

#[cfg(test)]
mod boundary;
pub mod capability;
mod child_task;
pub mod discovery;
mod foreign_file;
pub mod metrics;
pub mod observer;
mod overlay_layers;
pub mod privilege;
mod probe_link;
pub mod probes;
pub mod quarantine;
pub mod task_reader;
mod tenant_shares;
pub mod twin;

pub use zernel_model::aggregation;
