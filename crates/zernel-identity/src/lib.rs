//! Who a process is, for people and dashboards: its job, rank, pod, container and the devices it may
//! use.
//!
//! [`identify`] asks `/proc` once: the cgroup, which root decides on, and a few named variables of the
//! environment, which the process itself decides on and which is not trusted further than a label
//! (see [`RankSource`] and [`JobSource`] for which of them count). Processes without a rank of their
//! own, such as data loaders started with a clean environment, have the rank of their nearest
//! ancestor with one. A process that gives itself a rank shows it to nobody until it makes a
//! communicator; then [`Identity::with_rank`] takes it over.

mod cgroup;
mod environment;
pub mod gpu;
mod printable_text;

pub use cgroup::Cgroup;
pub use zernel_model::identity::{Identity, JobSource, RankSource};

use std::io;

use environment::Environment;
use printable_text::{MAX_NAME_BYTES, to_printable};
use procfs::process::{Process, Stat};
use procfs::{ProcError, ProcResult};
use thiserror::Error;

/// How far up a rank is looked for: a trainer, a launcher or two, shells between them.
const MAX_ANCESTORS: usize = 8;

/// Why a process could not be identified.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// It is gone; perhaps its pid belongs to another process by now.
    #[error("there is no process {pid} any more")]
    NotFound {
        /// Its pid.
        pid: u32,
    },
    /// `/proc` does not tell.
    #[error("cannot read who process {pid} is; look at how /proc is mounted (hidepid): {source}")]
    Unreadable {
        /// Its pid.
        pid: u32,
        /// What `/proc` said.
        source: ProcError,
    },
}

impl IdentityError {
    /// The kind, as of other failures of the operating system.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::NotFound { .. } => io::ErrorKind::NotFound,
            Self::Unreadable { source, .. } => match source {
                ProcError::PermissionDenied(_) => io::ErrorKind::PermissionDenied,
                ProcError::Io(error, _) => error.kind(),
                _ => io::ErrorKind::Other,
            },
        }
    }

    fn new(pid: u32, source: ProcError) -> Self {
        match is_not_found(&source) {
            true => Self::NotFound { pid },
            false => Self::Unreadable { pid, source },
        }
    }
}

/// Says who process `pid` is. Works without privilege for one's own processes; of others the
/// environment stays unread.
pub fn identify(pid: u32) -> Result<Identity, IdentityError> {
    try_identify(pid).map_err(|error| IdentityError::new(pid, error))
}

fn try_identify(pid: u32) -> ProcResult<Identity> {
    let (process, stat) = open(pid)?;
    let cgroup = read_cgroup(&process)?;
    let environment = read_environment(&process);
    let mut identity = assemble(
        &stat,
        process.uid()?,
        cgroup,
        environment.as_ref(),
        &host_name(),
    );
    if identity.rank.is_none() {
        inherit_rank(&mut identity, &process);
    }
    // All of the above was read of one process only if it was there to the end.
    match process.stat()?.starttime == stat.starttime {
        true => Ok(identity),
        false => Err(ProcError::NotFound(None)),
    }
}

/// An identity from what `/proc` holds of a process itself.
fn assemble(
    stat: &Stat,
    uid: u32,
    cgroup: Cgroup,
    environment: Option<&Environment>,
    host_name: &str,
) -> Identity {
    let empty = Environment::default();
    let variables = environment.unwrap_or(&empty);
    let job = variables.job(cgroup.slurm_job.as_deref());
    let (job, job_source) = job.unzip();
    let mut identity = Identity {
        pid: stat.pid.unsigned_abs(),
        start_time: stat.starttime,
        comm: to_printable(stat.comm.as_bytes(), MAX_NAME_BYTES),
        uid,
        parent: stat.ppid.unsigned_abs(),
        cgroup: cgroup.path,
        unit: cgroup.unit,
        job,
        job_source,
        namespace: variables.get("POD_NAMESPACE"),
        pod: variables.pod(cgroup.pod_uid.is_some(), host_name),
        pod_uid: cgroup.pod_uid,
        container: cgroup.container,
        cuda_visible_devices: variables.get_raw("CUDA_VISIBLE_DEVICES"),
        cuda_device_order: variables.get("CUDA_DEVICE_ORDER"),
        nvidia_visible_devices: variables.get_raw("NVIDIA_VISIBLE_DEVICES"),
        slurm_gpus: variables
            .get("SLURM_STEP_GPUS")
            .or_else(|| variables.get("SLURM_JOB_GPUS")),
        environment_read: environment.is_some(),
        ..Identity::default()
    };
    if let Some(rank) = variables.rank() {
        identity.set_rank(rank);
    }
    identity
}

/// Adopts the rank, and the job if there is none, of the nearest ancestor with a rank.
fn inherit_rank(identity: &mut Identity, process: &Process) {
    let mut parent = parent_of(process);
    for _ in 0..MAX_ANCESTORS {
        let Some(ancestor) = parent.take() else {
            return;
        };
        // Another user's process says nothing about this one.
        if ancestor.uid().ok() != Some(identity.uid) {
            return;
        }
        if let Some(environment) = read_environment(&ancestor)
            && let Some(rank) = environment.rank()
        {
            identity.set_rank(rank);
            identity.rank_of = Some(ancestor.pid.unsigned_abs());
            if identity.job.is_none() {
                (identity.job, identity.job_source) = environment.job(None).unzip();
            }
            return;
        }
        parent = parent_of(&ancestor);
    }
}

/// Whether the process still runs: not exited, and its pid not reused.
#[must_use]
pub fn is_alive(identity: &Identity) -> bool {
    open(identity.pid).is_ok_and(|(_, stat)| stat.starttime == identity.start_time)
}

fn open(pid: u32) -> ProcResult<(Process, Stat)> {
    let pid = i32::try_from(pid).map_err(|_| ProcError::NotFound(None))?;
    let process = Process::new(pid)?;
    let stat = process.stat()?;
    Ok((process, stat))
}

/// The parent, if it is one that may have given something on: not the kernel, not the first process.
fn parent_of(child: &Process) -> Option<Process> {
    let before = child.stat().ok()?;
    if before.ppid <= 1 {
        return None;
    }
    let parent = Process::new(before.ppid).ok()?;
    // Opened by its number, it might be a later process. It is not, if the child still calls it its
    // parent: a child is given to another parent before its parent's number is free.
    let still = child.stat().ok()?.ppid == before.ppid;
    still.then_some(parent)
}

/// The most telling cgroup. Of one whose name is no text nothing is known.
fn read_cgroup(process: &Process) -> ProcResult<Cgroup> {
    match process.cgroups() {
        Ok(cgroups) => {
            let paths = cgroups.0.iter().map(|line| line.pathname.as_str());
            Ok(Cgroup::most_specific(paths).unwrap_or_default())
        }
        Err(error) if is_not_found(&error) => Err(error),
        Err(_) => Ok(Cgroup::default()),
    }
}

/// The environment, or nothing: it is somebody else's, or a zombie's or the kernel's, who have none.
fn read_environment(process: &Process) -> Option<Environment> {
    Environment::read(process).ok()
}

fn is_not_found(error: &ProcError) -> bool {
    match error {
        ProcError::NotFound(_) => true,
        ProcError::Io(error, _) => {
            error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
        }
        _ => false,
    }
}

fn host_name() -> String {
    let names = rustix::system::uname();
    names.nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
