//! A checked configuration laid out: which worker does what, in which process or thread, with which
//! shared memory.
//!
//! Made completely before the first worker exists: a forked worker only reads it. What there is one
//! of per worker is kept small, because every fork copies the page tables of it all.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::ops::Range;
use std::time::Duration;

use crate::config::{CloneMode, WorkSpec, WorkloadConfig, check_comm};
use crate::error::{Error, Result};
use crate::settings::Settings;
use crate::topology::CpuSet;
use crate::work::WorkType;

/// One worker.
#[derive(Debug)]
pub(crate) struct WorkerPlan {
    pub(crate) group: usize,
    pub(crate) group_index: usize,
    pub(crate) team: usize,
    pub(crate) team_index: usize,
    pub(crate) trace: Range<usize>,
}

/// What the workers of a group have in common.
#[derive(Debug)]
pub(crate) struct GroupPlan {
    pub(crate) name: String,
    pub(crate) work: WorkType,
    pub(crate) settings: Settings,
}

/// Workers that work together.
#[derive(Debug)]
pub(crate) struct TeamPlan {
    pub(crate) size: usize,
    pub(crate) slots: Range<usize>,
    pub(crate) pipes: usize,
}

/// A child process: a single worker, or a container of many.
#[derive(Debug)]
pub(crate) struct ProcessPlan {
    pub(crate) workers: Range<usize>,
    pub(crate) container: Option<Box<Container>>,
}

/// What is particular about a container's leader.
#[derive(Debug, Clone)]
pub(crate) struct Container {
    pub(crate) pcomm: CString,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
}

/// The whole workload. Workers in processes come first, in the order of the processes; then those
/// that are threads.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) groups: Vec<GroupPlan>,
    pub(crate) teams: Vec<TeamPlan>,
    pub(crate) workers: Vec<WorkerPlan>,
    pub(crate) processes: Vec<ProcessPlan>,
    pub(crate) threads: Range<usize>,
    pub(crate) slots: usize,
    pub(crate) trace_entries: usize,
    pub(crate) stop_grace: Duration,
}

impl Plan {
    /// Lays out a configuration.
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
        let first_thread = plan.workers.len();
        if config.clone_mode == CloneMode::Thread {
            specs
                .iter()
                .filter(|spec| spec.pcomm.is_none())
                .for_each(|spec| plan.add_group(spec));
        }
        plan.threads = first_thread..plan.workers.len();
        Ok(plan)
    }

    /// Lays out one container.
    pub(crate) fn container(
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
            .map(|spec| member_of(spec, pcomm))
            .collect::<Result<Vec<_>>>()?;
        let mut plan = Self {
            stop_grace: config.stop_grace,
            ..Self::default()
        };
        plan.add_container(pcomm, uid, gid, specs.iter());
        plan.threads = plan.workers.len()..plan.workers.len();
        Ok(plan)
    }

    fn add_container<'a>(
        &mut self,
        pcomm: &str,
        uid: Option<u32>,
        gid: Option<u32>,
        specs: impl Iterator<Item = &'a WorkSpec>,
    ) {
        let first = self.workers.len();
        specs.for_each(|spec| self.add_group(spec));
        let workers = first..self.workers.len();
        if !workers.is_empty() {
            let container = Some(Box::new(Container {
                pcomm: c_string(pcomm),
                uid,
                gid,
            }));
            self.processes.push(ProcessPlan { workers, container });
        }
    }

    fn add_processes(&mut self, spec: &WorkSpec) {
        let first = self.workers.len();
        self.add_group(spec);
        let single = |worker| ProcessPlan {
            workers: worker..worker + 1,
            container: None,
        };
        self.processes.reserve_exact(spec.workers);
        self.processes
            .extend((first..self.workers.len()).map(single));
    }

    fn add_group(&mut self, spec: &WorkSpec) {
        let work = spec.work_type.as_work();
        let team_size = work.team_size(spec.workers).max(1);
        let group = self.groups.len();
        self.groups.push(GroupPlan {
            name: spec.name.clone(),
            work: spec.work_type.clone(),
            settings: settings(spec),
        });
        self.workers.reserve_exact(spec.workers);
        self.teams.reserve_exact(spec.workers / team_size);
        for worker in 0..spec.workers {
            if worker % team_size == 0 {
                let slots = take(&mut self.slots, work.slots(team_size));
                self.teams.push(TeamPlan {
                    size: team_size,
                    slots,
                    pipes: work.pipes(team_size),
                });
            }
            let team_index = worker % team_size;
            self.workers.push(WorkerPlan {
                group,
                group_index: worker,
                team: self.teams.len() - 1,
                team_index,
                trace: take(&mut self.trace_entries, work.trace_entries(team_index)),
            });
        }
    }

    /// The process that hosts a worker; `None` if it is a thread of the caller.
    pub(crate) fn process_of(&self, worker: usize) -> Option<usize> {
        let index = self
            .processes
            .partition_point(|process| process.workers.end <= worker);
        (index < self.processes.len()).then_some(index)
    }

    /// The group that a worker belongs to.
    pub(crate) fn group_of(&self, worker: usize) -> &GroupPlan {
        &self.groups[self.workers[worker].group]
    }
}

fn member_of(spec: WorkSpec, pcomm: &str) -> Result<WorkSpec> {
    if let Some(other) = spec.pcomm.as_ref().filter(|other| *other != pcomm) {
        let problem =
            format!("`{other}` is not the container `{pcomm}` that is to host it; leave it out");
        return Err(Error::invalid(&spec.name, "pcomm", problem));
    }
    let spec = spec.pcomm(pcomm);
    spec.check()?;
    Ok(spec)
}

fn take(used: &mut usize, count: usize) -> Range<usize> {
    let start = *used;
    *used += count;
    start..*used
}

fn settings(spec: &WorkSpec) -> Settings {
    Settings {
        memory_policy: spec.memory_policy.clone(),
        affinity: spec.affinity.clone(),
        policy: spec.policy.clone(),
        nice: spec.nice,
        comm: spec.comm.as_deref().map(c_string),
        gid: spec.gid,
        uid: spec.uid,
    }
}

/// A name that was checked to hold no NUL byte.
fn c_string(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

/// A CPU set as the kernel takes it.
pub(crate) fn cpu_mask(cpus: &CpuSet) -> rustix::thread::CpuSet {
    let mut mask = rustix::thread::CpuSet::new();
    cpus.iter()
        .filter(|cpu| **cpu < rustix::thread::CpuSet::MAX_CPU)
        .for_each(|cpu| mask.set(*cpu));
    mask
}
