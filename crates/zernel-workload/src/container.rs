//! A container: one process with a given name that runs many workers as threads.

use std::sync::atomic::{AtomicU32, Ordering};

use libc::pid_t;
use rustix::io::Errno;
use rustix::thread::set_name;

use crate::clock;
use crate::shared_state::{SharedState, command, wait_while_word_is, wake_all_waiters};
use crate::sys::signal::STOP_BIT;
use crate::sys::{process, thread};
use crate::team_pipes::TeamPipes;
use crate::worker_body;
use crate::worker_settings::{set_gid, set_uid};
use crate::workload_plan::{ContainerPlan, ProcessPlan, WorkloadPlan};

/// Size of the stack of a worker thread.
const WORKER_STACK_BYTES: usize = 256 << 10;
/// Time between two signals by which the leader interrupts workers that have not noticed a stop request.
const INTERRUPT_INTERVAL_NS: u64 = 10_000_000;

/// A futex word of the container's leader. Each worker that ends adds one to it, and `SIGUSR1` sets [`STOP_BIT`] in it.
/// There is one container per process.
static LEADER_SIGNAL_WORD: AtomicU32 = AtomicU32::new(0);

/// The futex word that `SIGUSR1` changes in the leader of a container.
pub(crate) fn signal_word() -> &'static AtomicU32 {
    &LEADER_SIGNAL_WORD
}

/// Runs the container's process and returns its exit code.
pub(crate) fn run_container(
    leader: &ContainerPlan,
    process: &ProcessPlan,
    plan: &WorkloadPlan,
    shared: &SharedState,
    pipes: &TeamPipes,
    caller: pid_t,
) -> i32 {
    let workers = process.workers.clone();
    let count = workers.len();
    let member = |number: usize| {
        let worker = workers.start + number;
        worker_body::apply_worker_settings(plan, shared, worker);
        worker_body::run_worker(
            plan,
            shared,
            worker,
            pipes.of_team(plan.worker_plan(worker).team_number),
        );
        LEADER_SIGNAL_WORD.fetch_add(1, Ordering::AcqRel);
        wake_all_waiters(&LEADER_SIGNAL_WORD);
    };
    let failed = |errno: Errno| {
        let word = &shared.header().container_errno;
        word.store(errno.raw_os_error(), Ordering::Release);
    };
    if let Err(errno) = set_name_and_ids_of_leader(leader) {
        failed(errno);
        return 1;
    }
    // The kernel clears the death signal when a process changes its user or group, so it is set again.
    if !process::die_with_parent(caller) {
        return 1;
    }
    let meanwhile = || wait_for_members(process, shared);
    thread::run_threads(count, WORKER_STACK_BYTES, &member, meanwhile, failed);
    0
}

fn set_name_and_ids_of_leader(leader: &ContainerPlan) -> Result<(), Errno> {
    set_name(&leader.pcomm)?;
    leader.gid.map_or(Ok(()), set_gid)?;
    leader.uid.map_or(Ok(()), set_uid)
}

/// Waits until every worker of the container has ended. Passes a stop request of the container on to its workers.
fn wait_for_members(process: &ProcessPlan, shared: &SharedState) {
    loop {
        let bell = LEADER_SIGNAL_WORD.load(Ordering::Acquire);
        if (bell & !STOP_BIT) as usize >= process.workers.len() {
            return;
        }
        let stopping = bell & STOP_BIT != 0;
        if stopping {
            stop_members(process, shared);
        }
        let until_ns = stopping.then(|| clock::now_ns() + INTERRUPT_INTERVAL_NS);
        wait_while_word_is(&LEADER_SIGNAL_WORD, bell, until_ns);
    }
}

fn stop_members(process: &ProcessPlan, shared: &SharedState) {
    let own_pid = rustix::process::getpid().as_raw_nonzero().get();
    for worker in process.workers.clone() {
        let record = shared.record(worker);
        record.command.fetch_or(command::STOP, Ordering::Release);
        wake_all_waiters(&record.command);
        let tid = record.tid.load(Ordering::Relaxed);
        if tid > 0 {
            process::send_signal_to_thread(own_pid, tid, libc::SIGUSR1);
        }
    }
}
