//! The supervisor: a thread of the handle that forks the worker processes, watches them and reaps them.
//!
//! The kernel's death signal is tied to the *thread* that forked. The supervisor thread lives as long as its children.
//! So workers outlive the thread that called `spawn`, and die with the process, even if the process is killed or
//! orphans have a subreaper. As the parent, the supervisor waits for its own children only: it does not reap other
//! children of the caller, needs no file descriptor per worker, and notices a dead worker at once.

use std::io;
use std::sync::atomic::Ordering::Acquire;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use libc::pid_t;

use crate::container;
use crate::error::{Error, Result};
use crate::procfs;
use crate::shared_state::{SharedState, WorkerStage, outcome};
use crate::sys::process::{self, ChildEnd};
use crate::sys::signal;
use crate::team_pipes::TeamPipes;
use crate::worker_body;
use crate::workload_plan::{ProcessPlan, WorkloadPlan};

/// Size of the stack of the supervisor thread, on which forked workers run too.
const KEEPER_STACK_BYTES: usize = 2 << 20;

/// Pause between two checks for ended processes, for each remaining process. A check takes time for each remaining
/// process, so one check per ended process would take quadratic time.
const REAP_PAUSE_PER_PROCESS: Duration = Duration::from_micros(1);

/// How a worker process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    /// The process ended by itself or by a signal; the kernel reported this status.
    Child(ChildEnd),
    /// The handle killed the process.
    KilledByHandle,
    /// The kernel's OOM killer killed the process.
    OutOfMemory,
    /// Other code in the calling process reaped the process, and took its status.
    ReapedElsewhere,
}

/// A worker process, and how it ended.
#[derive(Debug)]
struct KeptProcess {
    pid: pid_t,
    /// Whether the handle has killed the process.
    is_killed: bool,
    /// `None` until the process is reaped. Until then its pid is not reused and may be signalled.
    end: Option<ProcessEnd>,
}

#[derive(Debug, Default)]
struct ProcessTable {
    processes: Vec<KeptProcess>,
    oom_kills: u64,
}

/// The worker processes of a handle, and the supervisor thread that forks and reaps them.
#[derive(Debug)]
pub(crate) struct ProcessKeeper {
    table: Arc<Mutex<ProcessTable>>,
    thread: Option<JoinHandle<()>>,
}

impl ProcessKeeper {
    /// Starts the supervisor thread, which forks every process of the plan.
    pub(crate) fn spawn(plan: &Arc<WorkloadPlan>, shared: &Arc<SharedState>) -> Result<Self> {
        if plan.processes.is_empty() {
            return Ok(Self {
                table: Arc::default(),
                thread: None,
            });
        }
        let table = Arc::new(Mutex::new(ProcessTable {
            processes: Vec::with_capacity(plan.processes.len()),
            oom_kills: procfs::system_oom_kills(),
        }));
        let (sender, forked) = sync_channel(1);
        let duty = KeeperTask {
            plan: Arc::clone(plan),
            shared: Arc::clone(shared),
            table: Arc::clone(&table),
        };
        let thread = std::thread::Builder::new()
            .name("zernel-keeper".to_owned())
            .stack_size(KEEPER_STACK_BYTES)
            .spawn(move || duty.run(&sender))
            .map_err(|error| spawn_error(plan, 0, "start the thread that forks workers", error))?;
        let mut keeper = Self {
            table,
            thread: Some(thread),
        };
        let ended_early = || Err((0, io::Error::other("the forking thread ended early")));
        match forked.recv().unwrap_or_else(|_| ended_early()) {
            Ok(()) => Ok(keeper),
            Err((process, error)) => {
                keeper.join_if_all_processes_exited();
                Err(spawn_error(plan, process, "fork a worker", error))
            }
        }
    }

    /// The pids of the worker processes, in the order of the plan.
    pub(crate) fn pids(&self) -> Vec<pid_t> {
        lock_table(&self.table)
            .processes
            .iter()
            .map(|process| process.pid)
            .collect()
    }

    /// The pid of one worker process; 0 if the plan has no such process.
    pub(crate) fn pid_of(&self, process: usize) -> pid_t {
        let table = lock_table(&self.table);
        table
            .processes
            .get(process)
            .map_or(0, |process| process.pid)
    }

    /// How a worker process ended; `None` while it has not ended.
    pub(crate) fn process_end(&self, process: usize) -> Option<ProcessEnd> {
        lock_table(&self.table)
            .processes
            .get(process)
            .and_then(|process| process.end)
    }

    /// Calls `act` with the pid of a worker process unless the process has exited. The pid cannot be reused meanwhile.
    pub(crate) fn with_pid_if_living(&self, process: usize, act: impl FnOnce(pid_t)) {
        let table = lock_table(&self.table);
        if let Some(process) = table
            .processes
            .get(process)
            .filter(|process| process.end.is_none())
        {
            act(process.pid);
        }
    }

    /// Kills every process that `which` selects, and records that the handle killed it. A process that had already
    /// ended keeps the status with which it ended.
    pub(crate) fn kill_processes(&self, which: impl Fn(usize) -> bool) {
        let mut table = lock_table(&self.table);
        for (index, process) in table.processes.iter_mut().enumerate() {
            if process.end.is_none() && which(index) && !process::has_child_ended(process.pid) {
                process.is_killed = true;
                process::send_signal(process.pid, libc::SIGKILL);
            }
        }
    }

    /// Joins the supervisor thread if all its processes have exited. Otherwise the thread keeps running and reaps the
    /// remaining processes.
    pub(crate) fn join_if_all_processes_exited(&mut self) {
        let all_exited = lock_table(&self.table)
            .processes
            .iter()
            .all(|process| process.end.is_some());
        if let Some(thread) = self.thread.take().filter(|_| all_exited) {
            let _ = thread.join();
        }
    }
}

fn spawn_error(
    plan: &WorkloadPlan,
    process: usize,
    action: &'static str,
    source: io::Error,
) -> Error {
    let worker = plan
        .processes
        .get(process)
        .map_or(0, |process| process.workers.start);
    Error::Spawn {
        group: plan.group_of(worker).name.clone(),
        action,
        source,
        remedy: "use fewer workers, or raise `ulimit -u`, kernel.pid_max or the pids limit of the cgroup",
    }
}

fn lock_table(table: &Mutex<ProcessTable>) -> MutexGuard<'_, ProcessTable> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the supervisor thread works on: the plan of the processes that it forks, and the table in which it records
/// their ends.
struct KeeperTask {
    plan: Arc<WorkloadPlan>,
    shared: Arc<SharedState>,
    table: Arc<Mutex<ProcessTable>>,
}

impl KeeperTask {
    fn run(&self, forked: &SyncSender<std::result::Result<(), (usize, io::Error)>>) {
        signal::block_all_signals();
        let caller = rustix::process::getpid().as_raw_nonzero().get();
        let caught = signal::signals_with_handlers();
        let mut pipes = TeamPipes::default();
        for (index, process) in self.plan.processes.iter().enumerate() {
            let pid = pipes
                .open_for_teams_of(&self.plan, &process.workers)
                .and_then(|()| process::fork(|| self.run_child(process, &pipes, &caught, caller)));
            match pid {
                Ok(pid) => self.add_process(pid),
                Err(error) => {
                    self.kill_and_reap_all();
                    let _ = forked.send(Err((index, error)));
                    return;
                }
            }
        }
        drop(pipes);
        let _ = forked.send(Ok(()));
        self.reap_all();
    }

    fn add_process(&self, pid: pid_t) {
        let mut table = lock_table(&self.table);
        table.processes.push(KeptProcess {
            pid,
            is_killed: false,
            end: None,
        });
    }

    /// Runs the workers of one process in the forked child, and returns its exit code. Fork safe if the work function
    /// is.
    fn run_child(
        &self,
        process: &ProcessPlan,
        pipes: &TeamPipes,
        caught: &[i32],
        caller: pid_t,
    ) -> i32 {
        let stop_word = match &process.container {
            None => &self.shared.record(process.workers.start).command,
            Some(_) => container::signal_word(),
        };
        signal::set_up_worker_signals(caught, stop_word, || {
            if !process::die_with_parent(caller) {
                return 1;
            }
            match &process.container {
                None => self.run_single_worker(process.workers.start, pipes, caller),
                Some(leader) => container::run_container(
                    leader,
                    process,
                    &self.plan,
                    &self.shared,
                    pipes,
                    caller,
                ),
            }
        })
    }

    fn run_single_worker(&self, worker: usize, pipes: &TeamPipes, caller: pid_t) -> i32 {
        worker_body::apply_worker_settings(&self.plan, &self.shared, worker);
        // The kernel clears the death signal when a process changes its user or group, so it is set again.
        if !process::die_with_parent(caller) {
            return 1;
        }
        worker_body::run_worker(
            &self.plan,
            &self.shared,
            worker,
            pipes.of_team(self.plan.worker_plan(worker).team_number),
        );
        0
    }

    fn kill_and_reap_all(&self) {
        lock_table(&self.table)
            .processes
            .iter()
            .for_each(|process| process::send_signal(process.pid, libc::SIGKILL));
        self.reap_all();
    }

    fn reap_all(&self) {
        while let Ok(pid) = process::wait_own_child() {
            let mut table = lock_table(&self.table);
            let index = table
                .processes
                .iter()
                .position(|process| process.pid == pid && process.end.is_none());
            let Some(index) = index else {
                // This thread has a child that is not a worker. It is reaped so that the next wait does not find it
                // again.
                drop(process::reap_child(pid));
                continue;
            };
            let more_may_follow = self.is_expected_to_end(&table, index);
            self.reap_process(&mut table, index);
            self.reap_finished(&mut table);
            let left = table.living_count();
            drop(table);
            if more_may_follow {
                std::thread::sleep(REAP_PAUSE_PER_PROCESS.saturating_mul(left));
            }
        }
        let mut table = lock_table(&self.table);
        for (index, process) in table.processes.iter_mut().enumerate() {
            if process.end.is_none() {
                process.end = Some(ProcessEnd::ReapedElsewhere);
                self.mark_workers_exited(index);
            }
        }
    }

    /// Reaps the processes that have ended and were expected to end. A wait for any child makes the kernel search all
    /// children, so each process is waited for by its pid.
    fn reap_finished(&self, table: &mut ProcessTable) {
        for index in 0..table.processes.len() {
            let process = &table.processes[index];
            if process.end.is_none()
                && self.is_expected_to_end(table, index)
                && process::has_child_ended(process.pid)
            {
                self.reap_process(table, index);
            }
        }
    }

    /// Whether a process is expected to end: its first worker has ended, or the handle has killed it.
    fn is_expected_to_end(&self, table: &ProcessTable, index: usize) -> bool {
        let first_worker = self.plan.processes[index].workers.start;
        let outcome = self.shared.record(first_worker).outcome.load(Acquire);
        outcome != outcome::NOT_ENDED || table.processes[index].is_killed
    }

    fn reap_process(&self, table: &mut ProcessTable, index: usize) {
        let KeptProcess {
            pid,
            is_killed: killed,
            ..
        } = table.processes[index];
        self.save_kernel_counters(pid, index);
        let may_be_oom = self.may_be_oom_victim(pid, index);
        let end = match process::reap_child(pid) {
            Ok(ChildEnd::Signaled {
                signal: libc::SIGKILL,
                ..
            }) if killed => ProcessEnd::KilledByHandle,
            Ok(ChildEnd::Signaled {
                signal: libc::SIGKILL,
                ..
            }) if may_be_oom && table.oom_kill_happened() => ProcessEnd::OutOfMemory,
            Ok(end) => ProcessEnd::Child(end),
            Err(_) => ProcessEnd::ReapedElsewhere,
        };
        table.processes[index].end = Some(end);
        self.mark_workers_exited(index);
    }

    /// Reads the kernel's counters of a dead worker that could not write its last numbers. The kernel keeps the
    /// counters until the process is reaped.
    fn save_kernel_counters(&self, pid: pid_t, index: usize) {
        let process = &self.plan.processes[index];
        let record = self.shared.record(process.workers.start);
        if process.container.is_none() && record.ended_ns.load(Acquire) == 0 {
            procfs::read_counters(pid, pid, &record.kernel_counters);
        }
    }

    /// Whether the OOM killer may have killed an ended process: one of its workers had not ended, and the cgroup of the
    /// process counts an OOM kill or cannot be read.
    fn may_be_oom_victim(&self, pid: pid_t, index: usize) -> bool {
        let mut workers = self.plan.processes[index].workers.clone();
        workers.any(|worker| self.shared.record(worker).outcome.load(Acquire) == outcome::NOT_ENDED)
            && procfs::cgroup_oom_kills(pid) != Some(0)
    }

    fn mark_workers_exited(&self, index: usize) {
        self.plan.processes[index]
            .workers
            .clone()
            .for_each(|worker| self.shared.pass_stage(worker, WorkerStage::Exited));
    }
}

impl ProcessTable {
    /// Number of worker processes that are not reaped yet.
    fn living_count(&self) -> u32 {
        let living = |process: &&KeptProcess| process.end.is_none();
        self.processes.iter().filter(living).count() as u32
    }

    /// Whether the OOM killer has killed a process since the last call. The kernel counts the kills of the whole
    /// machine, so the victim may be another process, and a worker may have been killed by hand.
    fn oom_kill_happened(&mut self) -> bool {
        let before = std::mem::replace(&mut self.oom_kills, procfs::system_oom_kills());
        self.oom_kills > before
    }
}
