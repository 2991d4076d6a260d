//! Identifies a process for users and dashboards: job, rank, pod, container, visible GPUs and ML frameworks.
//!
//! [`identify`] reads `/proc` once. The cgroup of a process is trusted, because only root can change it. A few
//! environment variables are used too; the process controls its variables, so they are only labels (see
//! [`RankSource`] and [`JobSource`] for their precedence). A process without a rank, such as a data loader started
//! with an empty environment, inherits the rank of its nearest ancestor that has one. A program that sets its own
//! rank does not show it in `/proc`; [`Identity::with_rank`] adopts the rank when the program creates a communicator.

mod cgroup;
mod environment;
mod frameworks;
#[cfg(test)]
mod fuzz;
pub mod gpu;
mod mapped_regions;
mod peer;
mod printable_text;
mod subordinate_uids;
mod tenant;

pub use cgroup::Cgroup;
pub use mapped_regions::{MappedRegion, read_mapped_regions, visit_mapped_regions};
pub use peer::{PeerHandle, PeerProcess};
pub use subordinate_uids::{SubordinateRange, SubordinateUids};
pub use tenant::{Tenant, TenantParent, tenant_parents, tenant_with_cgroup};
pub use zernel_model::identity::{Identity, JobSource, RankSource};

use std::io;

use environment::Environment;
use frameworks::read_frameworks;
use printable_text::{MAX_NAME_BYTES, to_printable};
use procfs::process::{Process, Stat};
use procfs::{ProcError, ProcResult};
use thiserror::Error;

/// Number of ancestors searched for a rank: a trainer, one or two launchers, and shells between
/// them.
const MAX_SEARCHED_ANCESTORS: usize = 8;

/// The reason why a process could not be identified.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// The process has exited. The pid of the process may have been reused.
    #[error("process {pid} has exited")]
    NotFound {
        /// Pid of the process.
        pid: u32,
    },
    /// `/proc` could not be read.
    #[error("cannot identify process {pid}: {source}; check the hidepid option of /proc")]
    Unreadable {
        /// Pid of the process.
        pid: u32,
        /// The error from `/proc`.
        source: ProcError,
    },
}

impl IdentityError {
    /// Returns the kind of I/O error that describes this error best.
    #[must_use]
    pub fn error_kind(&self) -> io::ErrorKind {
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

/// Identifies process `pid`.
///
/// Needs no privilege for processes of the same user. Without privilege, the environments of other users' processes
/// are not read.
pub fn identify(pid: u32) -> Result<Identity, IdentityError> {
    try_identify(pid).map_err(|error| IdentityError::new(pid, error))
}

/// The identity of a process that exited before [`identify`] could read it, from what the kernel knows of every process.
#[must_use]
pub fn identify_exited(pid: u32, start_time: u64, comm: &[u8], uid: u32, parent: u32) -> Identity {
    let length = comm.iter().position(|byte| *byte == 0);
    Identity {
        pid,
        start_time,
        comm: to_printable(&comm[..length.unwrap_or(comm.len())], MAX_NAME_BYTES),
        uid,
        parent,
        ..Identity::default()
    }
}

fn try_identify(pid: u32) -> ProcResult<Identity> {
    let (process, stat) = open_process(pid)?;
    let cgroup = read_cgroup(&process)?;
    let environment = read_environment(&process);
    let mut identity = identity_from_proc(
        &stat,
        process.uid()?,
        cgroup,
        environment.as_ref(),
        &host_name(),
    );
    identity.frameworks = read_frameworks(&process);
    if identity.rank.is_none() {
        inherit_rank(&mut identity, &process);
    }
    // All values belong to one process only if its pid was not reused during the reads.
    match process.stat()?.starttime == stat.starttime {
        true => Ok(identity),
        false => Err(ProcError::NotFound(None)),
    }
}

/// The user who runs a process: its real user id. The owner of `/proc/PID` may be root instead of this user.
pub fn uid_of(pid: u32) -> Result<u32, IdentityError> {
    let read = || Ok(open_process(pid)?.0.status()?.ruid);
    read().map_err(|error| IdentityError::new(pid, error))
}

/// Builds an identity from the process's own entries in `/proc`.
fn identity_from_proc(
    stat: &Stat,
    uid: u32,
    cgroup: Cgroup,
    environment: Option<&Environment>,
    host_name: &str,
) -> Identity {
    let empty = Environment::default();
    let variables = environment.unwrap_or(&empty);
    let job = variables.find_job(cgroup.slurm_job.as_deref());
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
        namespace: variables.get_nonempty("POD_NAMESPACE"),
        pod: variables.find_pod(cgroup.pod_uid.is_some(), host_name),
        pod_uid: cgroup.pod_uid,
        pod_is_certain: cgroup.is_pod_certain,
        container: cgroup.container,
        cuda_visible_devices: variables.get_raw("CUDA_VISIBLE_DEVICES"),
        cuda_device_order: variables.get_nonempty("CUDA_DEVICE_ORDER"),
        nvidia_visible_devices: variables.get_raw("NVIDIA_VISIBLE_DEVICES"),
        slurm_gpus: variables
            .get_nonempty("SLURM_STEP_GPUS")
            .or_else(|| variables.get_nonempty("SLURM_JOB_GPUS")),
        environment_read: environment.is_some(),
        ..Identity::default()
    };
    if let Some(rank) = variables.find_rank() {
        identity.set_rank(rank);
    }
    identity
}

/// Adopts the rank of the nearest ancestor that has one, and its job if the process has none.
fn inherit_rank(identity: &mut Identity, process: &Process) {
    let mut parent = parent_of(process);
    for _ in 0..MAX_SEARCHED_ANCESTORS {
        let Some(ancestor) = parent.take() else {
            return;
        };
        // An ancestor of another user says nothing about the rank of this process.
        if ancestor.uid().ok() != Some(identity.uid) {
            return;
        }
        if let Some(environment) = read_environment(&ancestor)
            && let Some(rank) = environment.find_rank()
        {
            identity.set_rank(rank);
            identity.rank_of = Some(ancestor.pid.unsigned_abs());
            if identity.job.is_none() {
                (identity.job, identity.job_source) = environment.find_job(None).unzip();
            }
            return;
        }
        parent = parent_of(&ancestor);
    }
}

/// Whether the process still runs: not exited, and its pid not reused.
#[must_use]
pub fn is_alive(identity: &Identity) -> bool {
    open_process(identity.pid).is_ok_and(|(_, stat)| stat.starttime == identity.start_time)
}

fn open_process(pid: u32) -> ProcResult<(Process, Stat)> {
    let pid = i32::try_from(pid).map_err(|_| ProcError::NotFound(None))?;
    let process = Process::new(pid)?;
    let stat = process.stat()?;
    Ok((process, stat))
}

/// Returns the parent, unless it is the kernel or the init process.
fn parent_of(child: &Process) -> Option<Process> {
    let before = child.stat().ok()?;
    if before.ppid <= 1 {
        return None;
    }
    let parent = Process::new(before.ppid).ok()?;
    // The parent's pid may have been reused before the process was opened. If the child still has the same parent,
    // the pid was not reused: a child is reparented before the pid of its parent is freed.
    let still = child.stat().ok()?.ppid == before.ppid;
    still.then_some(parent)
}

/// Returns the most specific cgroup, or an empty one if the paths are not valid text.
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

/// Returns the environment; `None` for processes of other users, zombies and kernel threads.
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
