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
mod text;

pub use cgroup::Cgroup;
pub use environment::{JobSource, RankSource};

use std::io;

use environment::{Environment, Rank};
use procfs::process::{Process, Stat};
use procfs::{ProcError, ProcResult};
use serde::{Deserialize, Serialize};
use text::{NAME_BYTES, clean};
use thiserror::Error;

/// How far up a rank is looked for: a trainer, a launcher or two, shells between them.
const ANCESTORS: usize = 8;

/// Who a process is. What is not known is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    /// Process id, as this process's namespace counts.
    pub pid: u32,
    /// When it started, in clock ticks since boot. With the pid it names one process for ever.
    pub start_time: u64,
    /// The name of its main thread.
    pub comm: String,
    /// Its effective user.
    pub uid: u32,
    /// Pid of its parent.
    pub parent: u32,
    /// Path of its most telling cgroup; empty if it cannot be read.
    pub cgroup: String,
    /// The systemd service or scope it runs in.
    pub unit: Option<String>,
    /// The job's name.
    pub job: Option<String>,
    /// Who told it.
    pub job_source: Option<JobSource>,
    /// Its number among all processes of the job.
    pub rank: Option<u32>,
    /// Its number among those on this machine.
    pub local_rank: Option<u32>,
    /// How many ranks there are.
    pub world_size: Option<u32>,
    /// Who told the rank.
    pub rank_source: Option<RankSource>,
    /// The ancestor whose rank it is, if it is not its own.
    pub rank_of: Option<u32>,
    /// Namespace of the Kubernetes pod.
    pub namespace: Option<String>,
    /// Name of the pod.
    pub pod: Option<String>,
    /// UID of the pod.
    pub pod_uid: Option<String>,
    /// Id of the container.
    pub container: Option<String>,
    /// `CUDA_VISIBLE_DEVICES`, as it was at the start; empty is not unset.
    pub cuda_visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER`.
    pub cuda_device_order: Option<String>,
    /// `NVIDIA_VISIBLE_DEVICES`: what the container runtime was asked for.
    pub nvidia_visible_devices: Option<String>,
    /// `SLURM_STEP_GPUS`, or else `SLURM_JOB_GPUS`: what Slurm gave, counted as the machine does.
    pub slurm_gpus: Option<String>,
    /// Whether the environment could be read; if not, nothing above says that a variable is not set.
    pub environment_read: bool,
}

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
        match is_gone(&source) {
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
    let mut identity = Identity::new(
        &stat,
        process.uid()?,
        cgroup,
        environment.as_ref(),
        &machine_name(),
    );
    if identity.rank.is_none() {
        identity.inherit(&process);
    }
    // All of the above was read of one process only if it was there to the end.
    match process.stat()?.starttime == stat.starttime {
        true => Ok(identity),
        false => Err(ProcError::NotFound(None)),
    }
}

impl Identity {
    fn new(
        stat: &Stat,
        uid: u32,
        cgroup: Cgroup,
        environment: Option<&Environment>,
        machine: &str,
    ) -> Self {
        let nothing = Environment::default();
        let variables = environment.unwrap_or(&nothing);
        let job = variables.job(cgroup.slurm_job.as_deref());
        let (job, job_source) = job.unzip();
        let mut identity = Self {
            pid: stat.pid.unsigned_abs(),
            start_time: stat.starttime,
            comm: clean(stat.comm.as_bytes(), NAME_BYTES),
            uid,
            parent: stat.ppid.unsigned_abs(),
            cgroup: cgroup.path,
            unit: cgroup.unit,
            job,
            job_source,
            rank: None,
            local_rank: None,
            world_size: None,
            rank_source: None,
            rank_of: None,
            namespace: variables.get("POD_NAMESPACE"),
            pod: variables.pod(cgroup.pod_uid.is_some(), machine),
            pod_uid: cgroup.pod_uid,
            container: cgroup.container,
            cuda_visible_devices: variables.list("CUDA_VISIBLE_DEVICES"),
            cuda_device_order: variables.get("CUDA_DEVICE_ORDER"),
            nvidia_visible_devices: variables.list("NVIDIA_VISIBLE_DEVICES"),
            slurm_gpus: variables
                .get("SLURM_STEP_GPUS")
                .or_else(|| variables.get("SLURM_JOB_GPUS")),
            environment_read: environment.is_some(),
        };
        if let Some(rank) = variables.rank() {
            identity.set_rank(rank);
        }
        identity
    }

    fn set_rank(&mut self, rank: Rank) {
        self.rank = Some(rank.rank);
        self.local_rank = rank.local_rank;
        self.world_size = rank.world_size;
        self.rank_source = Some(rank.source);
        self.rank_of = None;
    }

    /// With what the process said when it made a communicator of `world_size` ranks.
    ///
    /// A job makes smaller communicators too, in which it counts anew. So the larger world is right,
    /// and of equal ones the one told first; a launcher's rank without a world gives way. The rank on
    /// this machine stays with the rank it came with.
    #[must_use]
    pub fn with_rank(mut self, rank: u32, world_size: u32) -> Self {
        if rank < world_size && self.world_size.is_none_or(|known| known < world_size) {
            self.set_rank(Rank {
                rank,
                local_rank: self.local_rank.filter(|_| self.rank == Some(rank)),
                world_size: Some(world_size),
                source: RankSource::Nccl,
            });
        }
        self
    }

    /// Whether the process is still there: not gone, and its pid not given to another.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        open(self.pid).is_ok_and(|(_, stat)| stat.starttime == self.start_time)
    }

    /// Takes over the rank, and if need be the job, of the nearest ancestor with a rank.
    fn inherit(&mut self, process: &Process) {
        let mut parent = parent_of(process);
        for _ in 0..ANCESTORS {
            let Some(ancestor) = parent.take() else {
                return;
            };
            // Another user's process has nothing to say of this one.
            if ancestor.uid().ok() != Some(self.uid) {
                return;
            }
            if let Some(environment) = read_environment(&ancestor)
                && let Some(rank) = environment.rank()
            {
                self.set_rank(rank);
                self.rank_of = Some(ancestor.pid.unsigned_abs());
                if self.job.is_none() {
                    (self.job, self.job_source) = environment.job(None).unzip();
                }
                return;
            }
            parent = parent_of(&ancestor);
        }
    }
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
            Ok(Cgroup::choose(paths).unwrap_or_default())
        }
        Err(error) if is_gone(&error) => Err(error),
        Err(_) => Ok(Cgroup::default()),
    }
}

/// The environment, or nothing: it is somebody else's, or a zombie's or the kernel's, who have none.
fn read_environment(process: &Process) -> Option<Environment> {
    Environment::read(process).ok()
}

fn is_gone(error: &ProcError) -> bool {
    match error {
        ProcError::NotFound(_) => true,
        ProcError::Io(error, _) => {
            error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
        }
        _ => false,
    }
}

fn machine_name() -> String {
    let names = rustix::system::uname();
    names.nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
