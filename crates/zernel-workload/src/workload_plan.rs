//! The layout of a checked configuration: which work, which process or thread, and which shared memory each worker has.
//!
//! The plan is complete before the first worker exists, and a forked worker only reads it. Values that follow from a
//! worker's group are not stored per worker, because every fork copies the page tables of this memory.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::ops::Range;
use std::time::Duration;

use crate::config::{CloneMode, WorkSpec, WorkloadConfig, check_comm};
use crate::error::{Error, Result};
use crate::topology::CpuSet;
use crate::work::WorkType;
use crate::worker_settings::Settings;

/// The place of one worker in its group and team.
#[derive(Debug)]
pub(crate) struct WorkerPlan {
    pub(crate) group_index: usize,
    pub(crate) team_number: usize,
    pub(crate) team_index: usize,
    pub(crate) trace: Range<usize>,
}

/// What all workers of a group have in common.
#[derive(Debug)]
pub(crate) struct GroupPlan {
    pub(crate) name: String,
    pub(crate) work: WorkType,
    pub(crate) settings: Settings,
    pub(crate) workers: Range<usize>,
    team_size: usize,
    first_team_number: usize,
    first_slot_index: usize,
    first_trace_entry: usize,
    trace_entries_of_team: usize,
}

impl GroupPlan {
    fn team_count(&self) -> usize {
        self.workers.len().div_ceil(self.team_size)
    }

    fn team_plan(&self, number: usize) -> TeamPlan {
        let work = self.work.as_work();
        let slots = work.futex_slot_count(self.team_size);
        let first_slot_index = self.first_slot_index + number * slots;
        TeamPlan {
            size: self.team_size,
            slots: first_slot_index..first_slot_index + slots,
            pipes: work.pipes(self.team_size),
        }
    }

    fn worker_plan(&self, group_index: usize) -> WorkerPlan {
        let (team, team_index) = (group_index / self.team_size, group_index % self.team_size);
        WorkerPlan {
            group_index,
            team_number: self.first_team_number + team,
            team_index,
            trace: self.trace_range(team, team_index),
        }
    }

    fn trace_range(&self, team: usize, team_index: usize) -> Range<usize> {
        if self.trace_entries_of_team == 0 {
            return 0..0;
        }
        let entries = |index| self.work.as_work().trace_capacity(index);
        let first = self.first_trace_entry
            + team * self.trace_entries_of_team
            + (0..team_index).map(entries).sum::<usize>();
        first..first + entries(team_index)
    }
}

/// The slots and pipes that the workers of one team share.
#[derive(Debug)]
pub(crate) struct TeamPlan {
    pub(crate) size: usize,
    pub(crate) slots: Range<usize>,
    pub(crate) pipes: usize,
}

/// A child process of the caller: a single worker, or a container of many.
#[derive(Debug)]
pub(crate) struct ProcessPlan {
    pub(crate) workers: Range<usize>,
    pub(crate) container: Option<Box<ContainerPlan>>,
}

/// Settings of the leader of a container.
#[derive(Debug, Clone)]
pub(crate) struct ContainerPlan {
    pub(crate) pcomm: CString,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
}

/// The layout of the whole workload. Workers in processes come first, in the order of the processes; workers that are
/// threads come after them.
#[derive(Debug, Default)]
pub(crate) struct WorkloadPlan {
    pub(crate) groups: Vec<GroupPlan>,
    /// Number of workers of the workload.
    pub(crate) workers: usize,
    pub(crate) processes: Vec<ProcessPlan>,
    pub(crate) threads: Range<usize>,
    pub(crate) slots: usize,
    pub(crate) trace_capacity: usize,
    pub(crate) stop_grace: Duration,
}

impl WorkloadPlan {
    /// Lays out a configuration: its groups, processes and threads.
    pub(crate) fn new(config: &WorkloadConfig) -> Result<Self> {
        let specs = config.named_specs();
        specs.iter().try_for_each(WorkSpec::check)?;
        let mut plan = Self {
            stop_grace: config.stop_grace,
            ..Self::default()
        };
        let mut containers = BTreeSet::new();
        for spec in &specs {
            match &spec.pcomm {
                Some(pcomm) if containers.insert(pcomm.clone()) => {
                    let members = specs
                        .iter()
                        .filter(|other| other.pcomm.as_ref() == Some(pcomm));
                    plan.add_container(pcomm, None, None, members);
                }
                Some(_) => {}
                None if config.clone_mode == CloneMode::Fork => plan.add_processes(spec),
                None => {}
            }
        }
        let first_thread = plan.workers;
        if config.clone_mode == CloneMode::Thread {
            specs
                .iter()
                .filter(|spec| spec.pcomm.is_none())
                .for_each(|spec| plan.add_group(spec));
        }
        plan.threads = first_thread..plan.workers;
        Ok(plan)
    }

    /// Lays out a workload that is one container.
    pub(crate) fn for_container(
        pcomm: &str,
        uid: Option<u32>,
        gid: Option<u32>,
        specs: &[WorkSpec],
    ) -> Result<Self> {
        check_comm(pcomm, "pcomm", Some(pcomm))?;
        let config = WorkloadConfig::from_specs(CloneMode::Fork, specs.to_vec());
        let specs = config
            .named_specs()
            .into_iter()
            .map(|spec| checked_container_member(spec, pcomm))
            .collect::<Result<Vec<_>>>()?;
        let mut plan = Self {
            stop_grace: config.stop_grace,
            ..Self::default()
        };
        plan.add_container(pcomm, uid, gid, specs.iter());
        plan.threads = plan.workers..plan.workers;
        Ok(plan)
    }

    fn add_container<'a>(
        &mut self,
        pcomm: &str,
        uid: Option<u32>,
        gid: Option<u32>,
        specs: impl Iterator<Item = &'a WorkSpec>,
    ) {
        let first = self.workers;
        specs.for_each(|spec| self.add_group(spec));
        let workers = first..self.workers;
        if !workers.is_empty() {
            let container = Some(Box::new(ContainerPlan {
                pcomm: checked_c_string(pcomm),
                uid,
                gid,
            }));
            self.processes.push(ProcessPlan { workers, container });
        }
    }

    fn add_processes(&mut self, spec: &WorkSpec) {
        let first = self.workers;
        self.add_group(spec);
        let single = |worker| ProcessPlan {
            workers: worker..worker + 1,
            container: None,
        };
        self.processes.reserve_exact(spec.workers);
        self.processes.extend((first..self.workers).map(single));
    }

    fn add_group(&mut self, spec: &WorkSpec) {
        let work = spec.work_type.as_work();
        let team_size = work.team_size(spec.workers).max(1);
        let teams = spec.workers.div_ceil(team_size);
        let trace_entries_of_team = (0..team_size.min(spec.workers))
            .map(|index| work.trace_capacity(index))
            .sum();
        let first_team_number = self
            .groups
            .last()
            .map_or(0, |group| group.first_team_number + group.team_count());
        self.groups.push(GroupPlan {
            name: spec.name.clone(),
            work: spec.work_type.clone(),
            settings: settings_of_spec(spec),
            workers: reserve_index_range(&mut self.workers, spec.workers),
            team_size,
            first_team_number,
            first_slot_index: reserve_index_range(
                &mut self.slots,
                teams * work.futex_slot_count(team_size),
            )
            .start,
            first_trace_entry: reserve_index_range(
                &mut self.trace_capacity,
                teams * trace_entries_of_team,
            )
            .start,
            trace_entries_of_team,
        });
    }

    /// The index of the process that hosts a worker; `None` if the worker is a thread of the caller.
    pub(crate) fn process_index_of_worker(&self, worker: usize) -> Option<usize> {
        let index = self
            .processes
            .partition_point(|process| process.workers.end <= worker);
        (index < self.processes.len()).then_some(index)
    }

    /// The group that a worker belongs to.
    pub(crate) fn group_of(&self, worker: usize) -> &GroupPlan {
        let group = self
            .groups
            .partition_point(|group| group.workers.end <= worker);
        &self.groups[group]
    }

    /// The place of a worker in its group and team.
    pub(crate) fn worker_plan(&self, worker: usize) -> WorkerPlan {
        let group = self.group_of(worker);
        group.worker_plan(worker - group.workers.start)
    }

    /// The slots and pipes of a team.
    pub(crate) fn team_plan(&self, team: usize) -> TeamPlan {
        let group = self
            .groups
            .partition_point(|group| group.first_team_number + group.team_count() <= team);
        let group = &self.groups[group];
        group.team_plan(team - group.first_team_number)
    }
}

fn checked_container_member(spec: WorkSpec, pcomm: &str) -> Result<WorkSpec> {
    if let Some(other) = spec.pcomm.as_ref().filter(|other| *other != pcomm) {
        let problem =
            format!("`{other}` is not the container `{pcomm}` that is to host it; leave it out");
        return Err(Error::invalid(&spec.name, "pcomm", problem));
    }
    let spec = spec.pcomm(pcomm);
    spec.check()?;
    Ok(spec)
}

fn reserve_index_range(used: &mut usize, count: usize) -> Range<usize> {
    let start = *used;
    *used += count;
    start..*used
}

fn settings_of_spec(spec: &WorkSpec) -> Settings {
    Settings {
        memory_policy: spec.memory_policy.clone(),
        affinity: spec.affinity.clone(),
        policy: spec.policy.clone(),
        nice: spec.nice,
        comm: spec.comm.as_deref().map(checked_c_string),
        gid: spec.gid,
        uid: spec.uid,
    }
}

/// Converts a name to a C string. The name was checked to contain no NUL byte.
fn checked_c_string(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

/// Converts a set of CPU numbers to the kernel's CPU mask.
pub(crate) fn cpu_mask(cpus: &CpuSet) -> rustix::thread::CpuSet {
    let mut mask = rustix::thread::CpuSet::new();
    cpus.iter()
        .filter(|cpu| **cpu < rustix::thread::CpuSet::MAX_CPU)
        .for_each(|cpu| mask.set(*cpu));
    mask
}
