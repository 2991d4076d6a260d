//! Stops workers: requests the stop of all of them, then waits for all together. Starved workers get a higher priority,
//! hung workers are killed.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::{sched_getaffinity, sched_setaffinity};

use crate::clock;
use crate::exit_info::WorkerExitInfo;
use crate::handle::WorkloadHandle;
use crate::process_keeper::ProcessEnd;
use crate::procfs;
use crate::shared_state::{SharedState, WorkerPace, WorkerRecord, WorkerStage, outcome};
use crate::sys::process::{self, ChildEnd};
use crate::sys::sched::{self, SchedAttributes};
use crate::worker_threads::WorkerThreads;

const MILLISECOND_NS: u64 = 1_000_000;
/// Longest wait from the start until all workers have done a first round. A worker that takes longer is starved, and
/// its report must show that.
const FIRST_ROUNDS_TIMEOUT_NS: u64 = 5_000 * MILLISECOND_NS;
/// Time between two signals that interrupt workers that have not stopped.
const INTERRUPT_SIGNAL_INTERVAL_NS: u64 = 20 * MILLISECOND_NS;
/// Time that a killed process has to exit. Only a process that is stuck in the kernel takes longer.
const EXIT_AFTER_KILL_TIMEOUT_NS: u64 = 5_000 * MILLISECOND_NS;

/// Raises the calling thread's priority above its workers' while it signals them, if the kernel permits that.
/// Otherwise, among thousands of workers, it would wait for seconds whenever it loses the CPU.
struct RaisedCallerPriority {
    nice: Option<i32>,
}

impl RaisedCallerPriority {
    fn new() -> Self {
        let nice = getpriority_process(None).ok();
        Self {
            nice: nice.filter(|_| setpriority_process(None, -20).is_ok()),
        }
    }
}

impl Drop for RaisedCallerPriority {
    fn drop(&mut self) {
        // Dropping restores the old nice value. No privilege is needed to raise a nice value.
        let _ = self.nice.map(|nice| setpriority_process(None, nice));
    }
}

fn is_real_time(attributes: &SchedAttributes) -> bool {
    [libc::SCHED_FIFO, libc::SCHED_RR, libc::SCHED_DEADLINE].contains(&(attributes.policy as i32))
}

/// Releases all blocked workers.
pub(crate) fn start_workers(handle: &WorkloadHandle) {
    if handle.shared.is_started() {
        return;
    }
    // While workers are being woken, those that are awake yield. Otherwise each of them would use its time slice before
    // the caller could wake the next. The pace is set back last, when the caller no longer has a higher priority.
    handle.shared.set_pace(WorkerPace::YieldBeforeRound);
    let urgency = RaisedCallerPriority::new();
    handle.shared.release_workers();
    drop(urgency);
    handle.shared.set_pace(WorkerPace::FullSpeed);
}

/// Starts workers that were not started, waits until each worker has done a round, requests the stop of all, and waits
/// until all have exited.
pub(crate) fn stop_workers(handle: &mut WorkloadHandle) {
    let _urgency = RaisedCallerPriority::new();
    wait_for_first_rounds(&handle.shared);
    handle.shared.request_stop();
    let grace_ns = clock::duration_to_ns(handle.plan.stop_grace);
    if !wait_until_exited(handle, grace_ns) {
        handle
            .process_keeper
            .kill_processes(|process| has_unfinished_worker(handle, process));
        wait_until_exited(handle, EXIT_AFTER_KILL_TIMEOUT_NS);
    }
    handle.threads.join_exited(&handle.shared);
    handle.process_keeper.join_if_all_processes_exited();
}

/// Waits until each worker has done its first round. Workers that have done a round are held, so that the other workers
/// get the CPU. Members of a team yield but keep working, because other members wait for them.
fn wait_for_first_rounds(shared: &SharedState) {
    if shared.wait_until_all_passed(WorkerStage::FirstRoundDone, 0) {
        return;
    }
    shared.set_pace(WorkerPace::HoldUntilStop);
    shared.release_workers();
    let started_ns = shared.header().started_ns.load(Relaxed);
    shared.wait_until_all_passed(
        WorkerStage::FirstRoundDone,
        started_ns.saturating_add(FIRST_ROUNDS_TIMEOUT_NS),
    );
}

/// Ends every worker as fast as possible, for a handle that is dropped without reports.
pub(crate) fn kill_workers_without_reports(handle: &mut WorkloadHandle) {
    let _urgency = RaisedCallerPriority::new();
    handle.shared.request_stop();
    handle.process_keeper.kill_processes(|_| true);
    handle.shared.release_workers();
    let limit = if handle.threads.worker_range().is_empty() {
        EXIT_AFTER_KILL_TIMEOUT_NS
    } else {
        clock::duration_to_ns(handle.plan.stop_grace)
    };
    wait_until_exited(handle, limit);
    handle.threads.join_exited(&handle.shared);
    handle.process_keeper.join_if_all_processes_exited();
}

fn has_unfinished_worker(handle: &WorkloadHandle, process: usize) -> bool {
    handle.plan.processes[process]
        .workers
        .clone()
        .any(|worker| !handle.shared.has_passed(worker, WorkerStage::Exited))
}

/// Waits until all workers have exited; false if it gave up. It gives up when no worker has ended or exited for as many
/// rounds as fit into `quiet_limit_ns`. It counts rounds instead of time, because time in which the caller itself had
/// no CPU must not count against its workers.
///
/// While some workers end, no priority is raised: to raise priorities of thousands of workers in every round would take
/// the CPU time that they need to end.
fn wait_until_exited(handle: &WorkloadHandle, quiet_limit_ns: u64) -> bool {
    let shared = &handle.shared;
    let mut stragglers = RemainingWorkers::new(shared.worker_count());
    let progress =
        || shared.passed_count(WorkerStage::Ended) + shared.passed_count(WorkerStage::Exited);
    let mut before = progress();
    let mut quiet_rounds = 0;
    // Only workers that block are interrupted: workers that compute check their stop word anyway, and thousands of
    // signals would delay them.
    interrupt_workers(handle, |record| record.is_blocked.load(Relaxed) != 0);
    while !shared.wait_until_all_passed(
        WorkerStage::Exited,
        clock::now_ns() + INTERRUPT_SIGNAL_INTERVAL_NS,
    ) {
        let now = progress();
        if now > before {
            (before, quiet_rounds) = (now, 0);
            continue;
        }
        quiet_rounds += 1;
        stragglers.raise_priority_of_waiting(handle);
        if quiet_rounds > quiet_limit_ns.div_ceil(INTERRUPT_SIGNAL_INTERVAL_NS) {
            return false;
        }
        interrupt_workers(handle, |_| true);
    }
    true
}

/// Interrupts the blocking calls of the workers that have not exited and that `which` selects.
fn interrupt_workers(handle: &WorkloadHandle, which: impl Fn(&WorkerRecord) -> bool) {
    let shared = &handle.shared;
    let concerns = |worker: &usize| {
        !shared.has_passed(*worker, WorkerStage::Exited) && which(shared.record(*worker))
    };
    for (index, plan) in handle.plan.processes.iter().enumerate() {
        for worker in plan.workers.clone().filter(concerns) {
            let tid = shared.record(worker).tid.load(Relaxed);
            handle.process_keeper.with_pid_if_living(index, |pid| {
                process::send_signal_to_thread(pid, tid, libc::SIGUSR1);
            });
        }
    }
    for worker in handle.threads.worker_range().filter(concerns) {
        WorkerThreads::interrupt_worker(shared, worker);
    }
}

/// The CPU time that each worker had used at the last check, to find workers that get no CPU.
struct RemainingWorkers {
    cpu_ns: Vec<Option<u64>>,
}

impl RemainingWorkers {
    fn new(workers: usize) -> Self {
        Self {
            cpu_ns: vec![None; workers],
        }
    }

    /// Raises the priority of workers that got no CPU time since the last check: they are starved, not hung. Also
    /// refreshes their kernel counters.
    fn raise_priority_of_waiting(&mut self, handle: &WorkloadHandle) {
        for (index, plan) in handle.plan.processes.iter().enumerate() {
            for worker in plan.workers.clone() {
                handle.process_keeper.with_pid_if_living(index, |pid| {
                    self.raise_priority_if_waiting(handle, worker, pid);
                });
            }
        }
        let own_pid = rustix::process::getpid().as_raw_nonzero().get();
        handle
            .threads
            .worker_range()
            .for_each(|worker| self.raise_priority_if_waiting(handle, worker, own_pid));
    }

    fn raise_priority_if_waiting(&mut self, handle: &WorkloadHandle, worker: usize, pid: i32) {
        if handle.shared.has_passed(worker, WorkerStage::Exited) {
            return;
        }
        let record = handle.shared.record(worker);
        let tid = record.tid.load(Relaxed);
        if record.ended_ns.load(Relaxed) != 0 {
            // This worker was held or is about to exit, so its numbers are final and must not be refreshed.
            return raise_priority(tid);
        }
        procfs::read_counters(pid, tid, &record.kernel_counters);
        let cpu_ns = record.kernel_counters.cpu_ns.load(Relaxed);
        if self.cpu_ns[worker].replace(cpu_ns) == Some(cpu_ns) {
            raise_priority(tid);
        }
    }
}

/// Gives a thread without a real-time policy the highest priority that the kernel permits. Real-time threads keep
/// theirs.
fn raise_priority(tid: i32) {
    if !sched::read_sched_attributes(tid).is_ok_and(|attributes| !is_real_time(&attributes)) {
        return;
    }
    // If the kernel refuses, the thread keeps its priority.
    let _ = sched::set_sched_attributes(
        tid,
        SchedAttributes {
            policy: libc::SCHED_OTHER as u32,
            ..Default::default()
        },
    );
    let _ = setpriority_process(Pid::from_raw(tid), -20);
    let _ = sched_getaffinity(None).and_then(|cpus| sched_setaffinity(Pid::from_raw(tid), &cpus));
}

/// How a worker ended, unless it returned from its work function when it should.
pub(crate) fn exit_info(handle: &WorkloadHandle, worker: usize) -> Option<WorkerExitInfo> {
    let record = handle.shared.record(worker);
    match record.outcome.load(Acquire) {
        outcome::FINISHED => None,
        outcome::PANICKED => Some(WorkerExitInfo::Panicked),
        outcome::FAILED => Some(WorkerExitInfo::from_failed_record(record)),
        _ => Some(process_exit_info(handle, worker)),
    }
}

fn process_exit_info(handle: &WorkloadHandle, worker: usize) -> WorkerExitInfo {
    match handle
        .plan
        .process_index_of_worker(worker)
        .map(|process| handle.process_keeper.process_end(process))
    {
        None => WorkerExitInfo::LeftBehind,
        Some(None) => WorkerExitInfo::NotReaped,
        Some(Some(ProcessEnd::KilledByHandle)) => WorkerExitInfo::TimedOutKilled,
        Some(Some(ProcessEnd::OutOfMemory)) => WorkerExitInfo::OomKilled,
        Some(Some(ProcessEnd::ReapedElsewhere)) => WorkerExitInfo::StatusLost,
        Some(Some(ProcessEnd::Child(ChildEnd::Exited(code)))) => WorkerExitInfo::Exited { code },
        Some(Some(ProcessEnd::Child(ChildEnd::Signaled {
            signal,
            core_dumped,
        }))) => WorkerExitInfo::Signaled {
            signal,
            core_dumped,
        },
    }
}
