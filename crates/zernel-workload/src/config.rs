//! The configuration of a workload: groups of workers ([`WorkSpec`]) and how they are created
//! ([`WorkloadConfig`]).
//!
//! Every field is checked before the first worker exists. An error names the group and the field.

use std::time::Duration;

use crate::affinity::Affinity;
use crate::error::{Error, Result};
use crate::policy::{MemoryPolicy, SchedPolicy};
use crate::spec_keys::{spec_choice, spec_table};
use crate::topology::Topology;
use crate::work::WorkType;

/// The longest `comm` (thread name) that the kernel keeps, in bytes.
const MAX_COMM_BYTES: usize = 15;
/// Largest number of workers of a group. No pid space holds more.
const MAX_WORKERS: usize = 1 << 20;

spec_choice! {
    /// Whether workers are processes or threads.
    #[derive(Copy, Hash)]
    pub enum CloneMode, default Fork {
        /// One process per worker.
        Fork,
        /// One thread of the calling process per worker.
        Thread,
    }
}

spec_table! {
    /// A group of workers with the same work and the same settings.
    pub struct WorkSpec {
        /// Name of the group in errors and reports; unique.
        pub name: String = String::new(),
        shown as "group0, group1, …",
        /// Number of workers. The work type decides which numbers work.
        pub workers: usize = 1,
        /// What each worker does: the name of a work type, or its table of parameters.
        pub work_type as "work": WorkType = WorkType::SpinWait,
        /// The CPUs that the workers may use.
        pub affinity: Affinity = Affinity::Inherit,
        /// Scheduling policy; inherited when not set.
        pub policy: Option<SchedPolicy> = None,
        /// Nice value, -20 to 19; inherited when not set.
        pub nice: Option<i32> = None,
        /// NUMA memory policy; inherited when not set.
        pub memory_policy: Option<MemoryPolicy> = None,
        /// Thread name (`comm`) of each worker, 1 to 15 bytes; inherited when not set.
        pub comm: Option<String> = None,
        /// Process name, 1 to 15 bytes. The workers are threads of one process with this name,
        /// together with the workers of every group that has the same `pcomm`.
        pub pcomm: Option<String> = None,
        /// User id of the workers; inherited when not set.
        pub uid: Option<u32> = None,
        /// Group id of the workers; inherited when not set.
        pub gid: Option<u32> = None,
    }
}

impl WorkSpec {
    /// One spinning worker.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the name that errors and reports use.
    #[must_use]
    pub fn name(self, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..self
        }
    }

    /// Sets the number of workers.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    /// Sets what the workers do.
    #[must_use]
    pub fn work_type(self, work_type: WorkType) -> Self {
        Self { work_type, ..self }
    }

    /// Sets the CPUs that the workers may use.
    #[must_use]
    pub fn affinity(self, affinity: Affinity) -> Self {
        Self { affinity, ..self }
    }

    /// Sets the scheduling policy.
    #[must_use]
    pub fn policy(self, policy: SchedPolicy) -> Self {
        Self {
            policy: Some(policy),
            ..self
        }
    }

    /// Sets the nice value.
    #[must_use]
    pub fn nice(self, nice: i32) -> Self {
        Self {
            nice: Some(nice),
            ..self
        }
    }

    /// Sets the memory policy.
    #[must_use]
    pub fn memory_policy(self, policy: MemoryPolicy) -> Self {
        Self {
            memory_policy: Some(policy),
            ..self
        }
    }

    /// Sets the name of each worker's thread.
    #[must_use]
    pub fn comm(self, comm: impl Into<String>) -> Self {
        Self {
            comm: Some(comm.into()),
            ..self
        }
    }

    /// Hosts the workers in the container of this name.
    #[must_use]
    pub fn pcomm(self, pcomm: impl Into<String>) -> Self {
        Self {
            pcomm: Some(pcomm.into()),
            ..self
        }
    }

    /// Sets the user id of the workers.
    #[must_use]
    pub fn uid(self, uid: u32) -> Self {
        Self {
            uid: Some(uid),
            ..self
        }
    }

    /// Sets the group id of the workers.
    #[must_use]
    pub fn gid(self, gid: u32) -> Self {
        Self {
            gid: Some(gid),
            ..self
        }
    }

    /// Returns the group with a machine-dependent affinity replaced by CPUs of `topology`.
    pub fn resolve(&self, topology: &Topology) -> Result<Self> {
        let affinity = self.affinity.resolve_on_topology(self.workers, topology);
        let affinity =
            affinity.map_err(|problem| Error::invalid(&self.name, "affinity", problem))?;
        Ok(Self {
            affinity,
            ..self.clone()
        })
    }

    /// Checks every setting of the group before its first worker exists.
    pub(crate) fn check(&self) -> Result<()> {
        let invalid = |field| move |problem: String| Error::invalid(&self.name, field, problem);
        self.check_workers()?;
        self.affinity
            .check_for_workers(self.workers)
            .map_err(invalid("affinity"))?;
        if !self.affinity.is_resolved() {
            let problem = format!(
                "{:?} depends on the machine; call `resolve(&Topology::read()?)` on the configuration first",
                self.affinity
            );
            return Err(Error::invalid(&self.name, "affinity", problem));
        }
        self.policy
            .as_ref()
            .map_or(Ok(()), SchedPolicy::check_parameters)
            .map_err(invalid("policy"))?;
        self.memory_policy
            .as_ref()
            .map_or(Ok(()), MemoryPolicy::check_numa_nodes)
            .map_err(invalid("memory_policy"))?;
        if let Some(nice) = self.nice.filter(|nice| !(-20..=19).contains(nice)) {
            return Err(Error::invalid(
                &self.name,
                "nice",
                format!("{nice} is not between -20 and 19"),
            ));
        }
        check_comm(&self.name, "comm", self.comm.as_deref())?;
        check_comm(&self.name, "pcomm", self.pcomm.as_deref())?;
        self.check_container()
    }

    fn check_workers(&self) -> Result<()> {
        let invalid =
            |field: &'static str, problem: String| Err(Error::invalid(&self.name, field, problem));
        if self.workers > MAX_WORKERS {
            return invalid(
                "workers",
                format!(
                    "{} is more than {MAX_WORKERS}, the most a handle takes",
                    self.workers
                ),
            );
        }
        let work = self.work_type.as_work();
        if let Err((field, problem)) = work.check() {
            return invalid(field, problem);
        }
        let team = work.team_size(self.workers);
        if self.workers > 0 && (team == 0 || !self.workers.is_multiple_of(team)) {
            let team = if team == 0 {
                work.min_team_size()
            } else {
                team
            };
            return invalid(
                "workers",
                format!(
                    "{} does not work with `{}`; use a multiple of {team}",
                    self.workers,
                    self.work_type.name()
                ),
            );
        }
        Ok(())
    }

    fn check_container(&self) -> Result<()> {
        match (
            &self.pcomm,
            self.work_type.as_work().reason_refused_in_container(),
        ) {
            (Some(pcomm), Some(why)) => {
                let problem = format!(
                    "`{}` cannot run in the container `{pcomm}`: {why}",
                    self.work_type.name()
                );
                Err(Error::invalid(&self.name, "work", problem))
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a thread name that is too long for the kernel, empty, or contains a NUL byte.
pub(crate) fn check_comm(group: &str, field: &'static str, comm: Option<&str>) -> Result<()> {
    let Some(comm) = comm else { return Ok(()) };
    if comm.len() > MAX_COMM_BYTES {
        let problem = format!(
            "`{comm}` has {} bytes; the kernel keeps {MAX_COMM_BYTES}",
            comm.len()
        );
        return Err(Error::invalid(group, field, problem));
    }
    if comm.is_empty() || comm.contains('\0') {
        return Err(Error::invalid(
            group,
            field,
            "a name must not be empty or contain a NUL byte",
        ));
    }
    Ok(())
}

/// A workload: one or more groups, and how their workers are created.
///
/// Methods that set a field of a group (`workers`, `work_type`, …) change the first group.
/// [`group`](Self::group) adds another group.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkloadConfig {
    pub(crate) clone_mode: CloneMode,
    pub(crate) specs: Vec<WorkSpec>,
    pub(crate) stop_grace: Duration,
}

impl Default for WorkloadConfig {
    fn default() -> Self {
        Self::from_specs(CloneMode::default(), vec![WorkSpec::default()])
    }
}

impl WorkloadConfig {
    /// Default time that workers have to stop after the stop request.
    pub const DEFAULT_STOP_GRACE: Duration = Duration::from_millis(500);

    /// Makes the configuration of a workload with these groups.
    #[must_use]
    pub fn from_specs(clone_mode: CloneMode, specs: Vec<WorkSpec>) -> Self {
        Self {
            clone_mode,
            specs,
            stop_grace: Self::DEFAULT_STOP_GRACE,
        }
    }

    /// Sets whether workers are processes or threads.
    #[must_use]
    pub fn clone_mode(self, clone_mode: CloneMode) -> Self {
        Self { clone_mode, ..self }
    }

    /// Sets the time that workers have to stop after the stop request before the handle kills them (processes) or
    /// leaves them behind (threads). The time counts from the last worker that stopped: on a slow machine workers stop
    /// late one after the other, and none of them hangs.
    #[must_use]
    pub fn stop_grace(self, stop_grace: Duration) -> Self {
        Self { stop_grace, ..self }
    }

    /// Adds a group of workers.
    #[must_use]
    pub fn group(mut self, spec: WorkSpec) -> Self {
        self.specs.push(spec);
        self
    }

    /// Applies `change` to the first group.
    #[must_use]
    pub fn change_first_group(mut self, change: impl FnOnce(WorkSpec) -> WorkSpec) -> Self {
        let first = if self.specs.is_empty() {
            WorkSpec::default()
        } else {
            self.specs.remove(0)
        };
        self.specs.insert(0, change(first));
        self
    }

    /// Sets the first group's number of workers.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        self.change_first_group(|spec| spec.workers(workers))
    }

    /// Sets the work type of the first group.
    #[must_use]
    pub fn work_type(self, work_type: WorkType) -> Self {
        self.change_first_group(|spec| spec.work_type(work_type))
    }

    /// Sets the CPUs that the first group's workers may use.
    #[must_use]
    pub fn affinity(self, affinity: Affinity) -> Self {
        self.change_first_group(|spec| spec.affinity(affinity))
    }

    /// Sets the first group's scheduling policy.
    #[must_use]
    pub fn policy(self, policy: SchedPolicy) -> Self {
        self.change_first_group(|spec| spec.policy(policy))
    }

    /// Sets the first group's nice value.
    #[must_use]
    pub fn nice(self, nice: i32) -> Self {
        self.change_first_group(|spec| spec.nice(nice))
    }

    /// Returns the workload with machine-dependent affinities replaced by CPUs of `topology`.
    pub fn resolve(&self, topology: &Topology) -> Result<Self> {
        let specs = self
            .named_specs()
            .iter()
            .map(|spec| spec.resolve(topology))
            .collect::<Result<_>>()?;
        Ok(Self {
            specs,
            ..self.clone()
        })
    }

    /// The groups of the workload. A group without a name gets one: `group0`, `group1`, ….
    pub(crate) fn named_specs(&self) -> Vec<WorkSpec> {
        let named = |(number, spec): (usize, &WorkSpec)| {
            let name = if spec.name.is_empty() {
                format!("group{number}")
            } else {
                spec.name.clone()
            };
            spec.clone().name(name)
        };
        self.specs.iter().enumerate().map(named).collect()
    }
}
