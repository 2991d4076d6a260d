//! What was observed, as data.
//!
//! The observer fills these types; the daemon serves them, and `ps`, `hang`, the report and the live page read them.
//! Nothing in this crate reads a clock, a file or the kernel.
//!
//! | module | subject |
//! |---|---|
//! | [`aggregation`] | histograms, the metrics that every source has, Prometheus text |
//! | [`gpu`] | the GPUs of a machine, as their driver describes them |
//! | [`log_linear_buckets`] | the buckets of all histograms |
//! | [`identity`] | the user, job, rank, pod and container of a process |
//! | [`scheduler`] | what the scheduler has decided |
//! | [`snapshot`] | the state of all observed processes at one moment |

pub mod aggregation;
pub mod gpu;
pub mod identity;
pub mod log_linear_buckets;
pub mod scheduler;
pub mod snapshot;
