//! Errors before a workload runs, with remedies.

use std::io;

/// Why a workload could not be read, created or placed in cgroups.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of a group has a value that cannot work. No worker was started.
    #[error("group `{group}`, field `{field}`: {problem}")]
    Invalid {
        /// The name of the group with the invalid field.
        group: String,
        /// The name of the invalid field.
        field: &'static str,
        /// What is wrong with the field, and what would be right.
        problem: String,
    },
    /// The kernel refused to create a worker. The workers created before it have been ended.
    #[error("group `{group}`: cannot {action}: {source}; {remedy}")]
    Spawn {
        /// The name of the group whose worker could not be created.
        group: String,
        /// What the handle tried to do, such as `fork a worker`.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
        /// What the user can do about the error.
        remedy: &'static str,
    },
    /// A worker did not become ready in time. All workers have been ended.
    #[error("group `{group}`, worker {worker}: {problem}")]
    NotReady {
        /// The name of the worker's group.
        group: String,
        /// The worker's index in the handle.
        worker: usize,
        /// What the worker did instead of becoming ready.
        problem: String,
    },
    /// The handle has no worker with this index.
    #[error(
        "there is no worker {index}: the handle has {workers}, counted from 0 in the order of worker_pids()"
    )]
    NoSuchWorker {
        /// The index that the caller passed.
        index: usize,
        /// Number of workers of the handle.
        workers: usize,
    },
    /// The affinity of a container cannot be set, because it would apply to its leader only.
    #[error(
        "worker {index} is the container `{pcomm}`: setting its affinity would pin only the idle leader; \
         put the CPUs in `WorkSpec::affinity` of its groups"
    )]
    ContainerAffinity {
        /// The index of the container in the handle.
        index: usize,
        /// The name of the container's process.
        pcomm: String,
    },
    /// The kernel refused the affinity of one worker.
    #[error(
        "worker {index} (tid {tid}): cannot set its affinity to CPUs {cpus}: {source}; choose CPUs that are online and in its cpuset"
    )]
    SetAffinity {
        /// The index of the worker in the handle.
        index: usize,
        /// The thread id of the worker.
        tid: i32,
        /// The CPUs that the caller asked for.
        cpus: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// Workers that are threads cannot be moved by `cgroup.procs`, which moves their whole process.
    #[error(
        "{threads} of the workers are threads of the calling process: writing them to cgroup.procs would move the \
         caller itself; write worker_pids() to cgroup.threads of a threaded cgroup instead"
    )]
    ThreadsInCgroupProcs {
        /// Number of workers that are threads of the calling process.
        threads: usize,
    },
    /// The CPU topology could not be read, or it lacks what an affinity asks for.
    #[error("cannot read the CPU topology at {path}: {problem}")]
    Topology {
        /// The file or folder of `/sys` that was read.
        path: String,
        /// What is wrong with the file or folder.
        problem: String,
    },
    /// A workload file could not be read or parsed.
    #[error("{file}: {problem}")]
    SpecFile {
        /// The path of the workload file.
        file: String,
        /// What is wrong with the workload file, and at which place.
        problem: String,
    },
}

impl Error {
    /// Makes an [`Invalid`](Self::Invalid) error.
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
