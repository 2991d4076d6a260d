//! Errors before a workload runs, with remedies.

use std::io;

/// Why a workload could not be read, created or placed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of a group has a value that cannot work. Nothing was started.
    #[error("group `{group}`, field `{field}`: {problem}")]
    Invalid {
        /// The group's name.
        group: String,
        /// The field.
        field: &'static str,
        /// What is wrong with the field, and what would be right.
        problem: String,
    },
    /// The kernel refused to create a worker. The workers created before it have been ended.
    #[error("group `{group}`: cannot {action}: {source}; {remedy}")]
    Spawn {
        /// The group's name.
        group: String,
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A worker did not become ready. All workers have been ended.
    #[error("group `{group}`, worker {worker}: {problem}")]
    NotReady {
        /// The group's name.
        group: String,
        /// The worker's index in the handle.
        worker: usize,
        /// What it did instead.
        problem: String,
    },
    /// The index names no worker.
    #[error(
        "there is no worker {index}: the handle has {workers}, counted from 0 in the order of worker_pids()"
    )]
    NoSuchWorker {
        /// The index asked for.
        index: usize,
        /// How many there are.
        workers: usize,
    },
    /// The affinity of a whole container cannot be set.
    #[error(
        "worker {index} is the container `{pcomm}`: setting its affinity would pin only the idle leader; \
         put the CPUs in `WorkSpec::affinity` of its groups"
    )]
    ContainerAffinity {
        /// The index asked for.
        index: usize,
        /// The container's name.
        pcomm: String,
    },
    /// The affinity of one worker was refused by the kernel.
    #[error(
        "worker {index} (tid {tid}): cannot set its affinity to CPUs {cpus}: {source}; choose CPUs that are online and in its cpuset"
    )]
    SetAffinity {
        /// The index asked for.
        index: usize,
        /// Its thread id.
        tid: i32,
        /// The CPUs asked for.
        cpus: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Thread workers cannot be moved by process.
    #[error(
        "{threads} of the workers are threads of the calling process: writing them to cgroup.procs would move the \
         caller itself; write worker_pids() to cgroup.threads of a threaded cgroup instead"
    )]
    ThreadsInCgroupProcs {
        /// How many there are.
        threads: usize,
    },
    /// The machine's topology does not have what an affinity asks for, or could not be read.
    #[error("cannot read the CPU topology at {path}: {problem}")]
    Topology {
        /// The file or folder.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A spec file could not be read or understood.
    #[error("{file}: {problem}")]
    SpecFile {
        /// The file.
        file: String,
        /// What is wrong, with the place.
        problem: String,
    },
}

impl Error {
    /// An [`Invalid`](Self::Invalid) error.
    pub(crate) fn invalid(group: &str, field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid {
            group: group.to_owned(),
            field,
            problem: problem.into(),
        }
    }
}

/// `Result` with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
