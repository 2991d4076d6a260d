//! The identity of a process: user, job, rank, pod, container, and the devices that it was given.

use serde::{Deserialize, Serialize};

/// The identity of a process. A field is `None` if no source states its value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    /// Process id in the observer's pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot. Pid and start time together are unique.
    pub start_time: u64,
    /// Name of the main thread.
    pub comm: String,
    /// Effective user id.
    pub uid: u32,
    /// Pid of the parent.
    pub parent: u32,
    /// Path of the most specific cgroup; empty if it cannot be read.
    pub cgroup: String,
    /// The systemd service or scope.
    pub unit: Option<String>,
    /// Name of the job.
    pub job: Option<String>,
    /// Where the job's name comes from.
    pub job_source: Option<JobSource>,
    /// Rank among all processes of the job.
    pub rank: Option<u32>,
    /// Rank among the processes of the job on this machine.
    pub local_rank: Option<u32>,
    /// Number of ranks of the job.
    pub world_size: Option<u32>,
    /// Where the rank comes from.
    pub rank_source: Option<RankSource>,
    /// Pid of the ancestor that the rank was inherited from.
    pub rank_of: Option<u32>,
    /// Namespace of the Kubernetes pod.
    pub namespace: Option<String>,
    /// Name of the pod.
    pub pod: Option<String>,
    /// UID of the pod.
    pub pod_uid: Option<String>,
    /// Whether only root can have put the process into the cgroup of this pod. If false, a user may have given a cgroup the
    /// name of a pod.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pod_is_certain: bool,
    /// Id of the container.
    pub container: Option<String>,
    /// `CUDA_VISIBLE_DEVICES` at the start of the process. Empty differs from unset.
    pub cuda_visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER`.
    pub cuda_device_order: Option<String>,
    /// `NVIDIA_VISIBLE_DEVICES`: the devices requested from the container runtime.
    pub nvidia_visible_devices: Option<String>,
    /// `SLURM_STEP_GPUS`, or else `SLURM_JOB_GPUS`: the GPUs that Slurm assigned, by the machine's numbering.
    pub slurm_gpus: Option<String>,
    /// Whether the environment could be read. If the environment could not be read, variables whose field is `None` may
    /// still be set.
    pub environment_read: bool,
    /// ML frameworks and libraries that the process mapped when its identity was last read. `None` if its mappings
    /// could not be read.
    pub frameworks: Option<Vec<String>>,
}

/// Where a rank comes from, most trusted first.
///
/// torchrun precedes MPI and Slurm, because both start it once per node and it starts the ranks. MPI's launchers precede
/// Slurm for the same reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankSource {
    /// The call that created a communicator.
    Nccl,
    /// `RANK`, set by torchrun and compatible launchers.
    Torchrun,
    /// `OMPI_COMM_WORLD_RANK`.
    OpenMpi,
    /// `PMI_RANK`, set by MPICH, Intel MPI and others.
    Pmi,
    /// `SLURM_PROCID` in a step that srun started.
    Slurm,
}

/// Where the name of a job comes from, most trusted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobSource {
    /// Slurm's job id, from the cgroup or else from `SLURM_JOB_ID`.
    Slurm,
    /// `TORCHELASTIC_RUN_ID`.
    Torchrun,
    /// `MASTER_ADDR:MASTER_PORT`. Unique only while the job runs, and only on this machine if the address is a loopback
    /// address.
    Rendezvous,
}

/// A rank and the facts that come with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Rank among all processes of the job.
    pub rank: u32,
    /// Rank among the processes of the job on this machine.
    pub local_rank: Option<u32>,
    /// Number of ranks.
    pub world_size: Option<u32>,
    /// Where it comes from.
    pub source: RankSource,
}

impl Identity {
    /// Sets the rank, as one that was not inherited from an ancestor.
    pub fn set_rank(&mut self, rank: Rank) {
        self.rank = Some(rank.rank);
        self.local_rank = rank.local_rank;
        self.world_size = rank.world_size;
        self.rank_source = Some(rank.source);
        self.rank_of = None;
    }

    /// Adopts the rank that a process passed to NCCL when it created a communicator of `world_size` ranks.
    ///
    /// A job also creates smaller communicators, which number their members anew. So the rank in the largest communicator
    /// is adopted, and among equally large ones that of the first. It also replaces a rank from a launcher that names no
    /// world size. The local rank stays only if the rank stays the same.
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
}
