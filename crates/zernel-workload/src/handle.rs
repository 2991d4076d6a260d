//! The handle on spawned workers.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use libc::pid_t;
use rustix::process::{DumpableBehavior, Pid, dumpable_behavior, set_dumpable_behavior};
use rustix::thread::sched_setaffinity;

use crate::clock;
use crate::config::{WorkSpec, WorkloadConfig};
use crate::error::{Error, Result};
use crate::exit_info::WorkerExitInfo;
use crate::histogram::Histogram;
use crate::process_keeper::ProcessKeeper;
use crate::report::WorkerReport;
use crate::shared_state::{SharedState, WorkerStage};
use crate::stop_workers;
use crate::topology::{CpuSet, format_cpu_list};
use crate::worker_threads::WorkerThreads;
use crate::workload_plan::{WorkloadPlan, cpu_mask};

/// Time that the next worker may take to become ready.
const NEXT_WORKER_READY_TIMEOUT_NS: u64 = 2_000_000_000;

/// A handle on worker tasks that wait for [`start`](Self::start), so that they can be placed in
/// cgroups first.
///
/// ```
/// use std::time::Duration;
/// use zernel_workload::{CloneMode, WorkType, WorkloadConfig, WorkloadHandle};
///
/// # fn main() -> zernel_workload::Result<()> {
/// let config = WorkloadConfig::default().workers(2).work_type(WorkType::SpinWait).clone_mode(CloneMode::Fork);
/// let mut handle = WorkloadHandle::spawn(&config)?;
/// println!("place {:?} where they belong", handle.worker_pids());
/// handle.start();
/// std::thread::sleep(Duration::from_millis(20));
/// for report in handle.stop_and_collect() {
///     assert!(report.completed && report.work_units > 0);
/// }
/// # Ok(())
/// # }
/// ```
///
/// Dropping a handle kills its worker processes and stops its worker threads. Workers also end with the calling
/// process, even if it is killed, but not with the thread that spawned them.
///
/// The calling process must neither ignore `SIGCHLD` nor reap children that it did not start: the exit status of a
/// worker would be lost.
#[derive(Debug)]
pub struct WorkloadHandle {
    pub(crate) plan: Arc<WorkloadPlan>,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) process_keeper: ProcessKeeper,
    pub(crate) threads: WorkerThreads,
}

impl WorkloadHandle {
    /// Creates the workers, blocked. When this function returns, each worker has applied its settings and published its
    /// tid.
    pub fn spawn(config: &WorkloadConfig) -> Result<Self> {
        Self::from_plan(WorkloadPlan::new(config)?)
    }

    /// Creates one process whose leader is named `pcomm` and hosts every worker of every spec as a
    /// thread.
    ///
    /// The leader sets `container_uid` and `container_gid` before the first thread starts. If the kernel refuses one of
    /// them, the container is not created. Without workers no process is forked.
    pub fn spawn_pcomm_cgroup(
        pcomm: &str,
        container_uid: Option<u32>,
        container_gid: Option<u32>,
        specs: &[WorkSpec],
    ) -> Result<Self> {
        Self::from_plan(WorkloadPlan::for_container(
            pcomm,
            container_uid,
            container_gid,
            specs,
        )?)
    }

    fn from_plan(plan: WorkloadPlan) -> Result<Self> {
        let shared = SharedState::new(plan.workers, plan.slots, plan.trace_capacity).map_err(
            |source| Error::Spawn {
                group: plan
                    .groups
                    .first()
                    .map_or_else(String::new, |group| group.name.clone()),
                action: "map the memory that the workers share",
                source,
                remedy: "use fewer workers, or raise the memory limit of the cgroup or `ulimit -v`",
            },
        )?;
        let (plan, shared) = (Arc::new(plan), Arc::new(shared));
        let process_keeper = ProcessKeeper::spawn(&plan, &shared)?;
        let mut handle = Self {
            plan,
            shared,
            process_keeper,
            threads: WorkerThreads::default(),
        };
        let was_dumpable = dumpable_behavior() == Ok(DumpableBehavior::Dumpable);
        handle.threads = WorkerThreads::spawn(&handle.plan, &handle.shared)?;
        let ready = handle.wait_until_ready();
        // The handle restores the calling process's dumpable flag. A thread that changes its uid or gid clears the flag
        // for the whole process.
        if was_dumpable {
            let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
        }
        ready.map(|()| handle)
    }

    fn wait_until_ready(&self) -> Result<()> {
        let mut ready = self.shared.passed_count(WorkerStage::Ready);
        while !self.shared.wait_until_all_passed(
            WorkerStage::Ready,
            clock::now_ns() + NEXT_WORKER_READY_TIMEOUT_NS,
        ) {
            let now_ready = self.shared.passed_count(WorkerStage::Ready);
            if now_ready == ready {
                return Err(self.not_ready_error());
            }
            ready = now_ready;
        }
        let exited = (0..self.shared.worker_count())
            .find(|worker| self.shared.has_passed(*worker, WorkerStage::Exited));
        exited.map_or(Ok(()), |worker| Err(self.early_death_error(worker)))
    }

    fn not_ready_error(&self) -> Error {
        let late = (0..self.shared.worker_count())
            .find(|worker| !self.shared.has_passed(*worker, WorkerStage::Ready));
        let worker = late.unwrap_or(0);
        Error::NotReady {
            group: self.plan.group_of(worker).name.clone(),
            worker,
            problem:
                "it did not become ready within 2 s; is the machine overloaded or out of memory?"
                    .to_owned(),
        }
    }

    fn early_death_error(&self, worker: usize) -> Error {
        let errno = self.shared.header().container_errno.load(Relaxed);
        let how = match errno {
            0 => stop_workers::exit_info(self, worker).map_or_else(
                || "it ended".to_owned(),
                |info: WorkerExitInfo| info.to_string(),
            ),
            errno => format!(
                "its container could not be set up: {}; check container_uid and container_gid",
                std::io::Error::from_raw_os_error(errno)
            ),
        };
        Error::NotReady {
            group: self.plan.group_of(worker).name.clone(),
            worker,
            problem: format!("not ready: {how}"),
        }
    }

    /// The kernel's thread ids of the workers in the order of creation: processes first (a container counts once, by
    /// its leader), then threads. Valid before [`start`](Self::start).
    #[must_use]
    pub fn worker_pids(&self) -> Vec<pid_t> {
        let tid = |worker: usize| self.shared.record(worker).tid.load(Relaxed);
        self.process_keeper
            .pids()
            .into_iter()
            .chain(self.threads.worker_range().map(tid))
            .collect()
    }

    /// The pid of the process that a worker runs in.
    pub(crate) fn process_pid_of_worker(&self, worker: usize) -> pid_t {
        match self.plan.process_index_of_worker(worker) {
            Some(process) => self.process_keeper.pid_of(process),
            None => rustix::process::getpid().as_raw_nonzero().get(),
        }
    }

    /// The pids of the workers that may be written to `cgroup.procs`. Returns an error if any worker is a thread of the
    /// caller.
    pub fn worker_pids_for_cgroup_procs(&self) -> Result<Vec<pid_t>> {
        match self.threads.worker_range().len() {
            0 => Ok(self.process_keeper.pids()),
            threads => Err(Error::ThreadsInCgroupProcs { threads }),
        }
    }

    /// Releases all blocked workers. Later calls do nothing.
    pub fn start(&mut self) {
        stop_workers::start_workers(self);
    }

    /// Sets the CPUs that one worker may use. `index` is the worker's place in [`worker_pids`](Self::worker_pids).
    pub fn set_affinity(&self, index: usize, cpus: &CpuSet) -> Result<()> {
        let pids = self.worker_pids();
        let Some(&tid) = pids.get(index) else {
            return Err(Error::NoSuchWorker {
                index,
                workers: pids.len(),
            });
        };
        if let Some(container) = self
            .plan
            .processes
            .get(index)
            .and_then(|process| process.container.as_ref())
        {
            let pcomm = container.pcomm.to_string_lossy().into_owned();
            return Err(Error::ContainerAffinity { index, pcomm });
        }
        sched_setaffinity(Pid::from_raw(tid), &cpu_mask(cpus)).map_err(|errno| Error::SetAffinity {
            index,
            tid,
            cpus: format_cpu_list(cpus),
            source: errno.into(),
        })
    }

    /// The progress counter of each worker, read while the workers run: workers in processes first, in the order of the
    /// processes, then threads of the caller.
    #[must_use]
    pub fn snapshot_iterations(&self) -> Vec<u64> {
        self.shared
            .counters()
            .iter()
            .map(|counters| counters.iterations.load(Relaxed))
            .collect()
    }

    /// The wake-up latencies of each worker so far, in the order of [`snapshot_iterations`](Self::snapshot_iterations).
    #[must_use]
    pub fn snapshot_wake_latency(&self) -> Vec<Histogram> {
        (0..self.shared.worker_count())
            .map(|worker| self.shared.record(worker).wake_latency.snapshot())
            .collect()
    }

    /// Stops all workers and returns a report on each, in the order of
    /// [`snapshot_iterations`](Self::snapshot_iterations).
    ///
    /// Workers that were never started are started first. The call waits until each worker has done a round or ended,
    /// at most 5 s after the start. Then it requests the stop of all workers and collects their reports. A worker that
    /// does not stop within the grace period is killed (a process) or left behind (a thread).
    #[must_use]
    pub fn stop_and_collect(mut self) -> Vec<WorkerReport> {
        stop_workers::stop_workers(&mut self);
        (0..self.shared.worker_count())
            .map(|worker| WorkerReport::of_worker(&self, worker))
            .collect()
    }
}

impl Drop for WorkloadHandle {
    fn drop(&mut self) {
        stop_workers::kill_workers_without_reports(self);
    }
}
