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
//! | [`twin`] | the kernel's copy of the phase rules, run on states of a test's choice |
//!
//! [`aggregation`] is part of `zernel-model` and re-exported here.

#[cfg(test)]
mod boundary;
pub mod capability;
mod child_task;
pub mod discovery;
pub mod metrics;
pub mod observer;
pub mod privilege;
pub mod probes;
pub mod twin;

pub use zernel_model::aggregation;
