//! Workers that are threads of the calling process.
//!
//! Each thread holds references to the plan and the shared memory. So a thread that does not stop can be
//! left behind without a use after free.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::shared_state::{SharedState, WorkerStage, outcome};
use crate::sys::{process, signal};
use crate::team_pipes::TeamPipes;
use crate::worker_body;
use crate::workload_plan::WorkloadPlan;

/// Size of the stack of a worker thread.
const WORKER_STACK_BYTES: usize = 256 << 10;

/// The workers of a handle that are threads of the calling process.
#[derive(Debug, Default)]
pub(crate) struct WorkerThreads {
    first_worker_index: usize,
    handles: Vec<JoinHandle<()>>,
}

impl WorkerThreads {
    /// Starts every worker of the plan that is a thread.
    pub(crate) fn spawn(plan: &Arc<WorkloadPlan>, shared: &Arc<SharedState>) -> Result<Self> {
        let mut threads = Self {
            first_worker_index: plan.threads.start,
            handles: Vec::with_capacity(plan.threads.len()),
        };
        if plan.threads.is_empty() {
            return Ok(threads);
        }
        signal::thread_interrupt_signal();
        let mut pipes = TeamPipes::default();
        let failed = |worker: usize, action, source| Error::Spawn {
            group: plan.group_of(worker).name.clone(),
            action,
            source,
            remedy: "use fewer workers, or raise `ulimit -n`, `ulimit -u` or kernel.threads-max",
        };
        if let Err(error) = pipes.open_for_teams_of(plan, &plan.threads) {
            return Err(failed(
                plan.threads.start,
                "open the pipes of the workers",
                error,
            ));
        }
        let pipes = Arc::new(pipes);
        for worker in plan.threads.clone() {
            match spawn_worker_thread(plan, shared, &pipes, worker) {
                Ok(handle) => threads.handles.push(handle),
                Err(error) => {
                    threads.abandon_unstarted(shared);
                    return Err(failed(worker, "start a thread", error));
                }
            }
        }
        Ok(threads)
    }

    /// The indices of the workers that are threads.
    pub(crate) fn worker_range(&self) -> Range<usize> {
        self.first_worker_index..self.first_worker_index + self.handles.len()
    }

    /// Interrupts the blocking call of a worker thread, by a signal.
    pub(crate) fn interrupt_worker(shared: &SharedState, worker: usize) {
        let tid = shared.record(worker).tid.load(Relaxed);
        if tid > 0 {
            let own_pid = rustix::process::getpid().as_raw_nonzero().get();
            process::send_signal_to_thread(own_pid, tid, signal::thread_interrupt_signal());
        }
    }

    /// Joins the threads of all workers that have exited, and detaches the threads of all others.
    pub(crate) fn join_exited(&mut self, shared: &SharedState) {
        for (number, handle) in self.handles.drain(..).enumerate() {
            if shared.has_passed(self.first_worker_index + number, WorkerStage::Exited) {
                let _ = handle.join();
            }
        }
    }

    fn abandon_unstarted(&mut self, shared: &SharedState) {
        shared.request_stop();
        shared.release_workers();
        self.handles.drain(..).for_each(|handle| {
            let _ = handle.join();
        });
    }
}

fn spawn_worker_thread(
    plan: &Arc<WorkloadPlan>,
    shared: &Arc<SharedState>,
    pipes: &Arc<TeamPipes>,
    worker: usize,
) -> std::io::Result<JoinHandle<()>> {
    let (plan, shared, pipes) = (Arc::clone(plan), Arc::clone(shared), Arc::clone(pipes));
    std::thread::Builder::new()
        .stack_size(WORKER_STACK_BYTES)
        .spawn(move || {
            signal::unblock_thread_interrupt();
            worker_body::apply_worker_settings(&plan, &shared, worker);
            let team = plan.worker_plan(worker).team_number;
            let body = || worker_body::run_worker(&plan, &shared, worker, pipes.of_team(team));
            if catch_unwind(AssertUnwindSafe(body)).is_err() {
                shared
                    .record(worker)
                    .outcome
                    .store(outcome::PANICKED, Release);
            }
            shared.pass_stage(worker, WorkerStage::Exited);
        })
}
