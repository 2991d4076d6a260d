//! Workers that are threads of the calling process.
//!
//! Each thread holds references to the plan and the shared memory. So a thread that does not stop can be
//! left behind without a use after free.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::thread::JoinHandle;

use crate::body;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::shared::{Shared, Stage, outcome};
use crate::sys::{process, signal};
use crate::team_pipes::TeamPipes;

/// Size of the stack of a worker thread.
const STACK_BYTES: usize = 256 << 10;

/// The thread workers of a handle.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    first: usize,
    handles: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts every thread of the plan.
    pub(crate) fn spawn(plan: &Arc<Plan>, shared: &Arc<Shared>) -> Result<Self> {
        let mut threads = Self {
            first: plan.threads.start,
            handles: Vec::with_capacity(plan.threads.len()),
        };
        if plan.threads.is_empty() {
            return Ok(threads);
        }
        signal::thread_interrupt();
        let mut pipes = TeamPipes::default();
        let failed = |worker: usize, action, source| Error::Spawn {
            group: plan.group_of(worker).name.clone(),
            action,
            source,
            remedy: "use fewer workers, or raise `ulimit -n`, `ulimit -u` or kernel.threads-max",
        };
        if let Err(error) = pipes.open_for(plan, &plan.threads) {
            return Err(failed(
                plan.threads.start,
                "open the pipes of the workers",
                error,
            ));
        }
        let pipes = Arc::new(pipes);
        for worker in plan.threads.clone() {
            match spawn_one(plan, shared, &pipes, worker) {
                Ok(handle) => threads.handles.push(handle),
                Err(error) => {
                    threads.abandon_unstarted(shared);
                    return Err(failed(worker, "start a thread", error));
                }
            }
        }
        Ok(threads)
    }

    /// The workers that are threads.
    pub(crate) fn workers(&self) -> Range<usize> {
        self.first..self.first + self.handles.len()
    }

    /// Interrupts the blocking call of a worker.
    pub(crate) fn interrupt(shared: &Shared, worker: usize) {
        let tid = shared.record(worker).tid.load(Relaxed);
        if tid > 0 {
            let own_pid = rustix::process::getpid().as_raw_nonzero().get();
            process::kill_thread(own_pid, tid, signal::thread_interrupt());
        }
    }

    /// Joins the threads of all workers that have exited, and detaches the other threads.
    pub(crate) fn join_exited(&mut self, shared: &Shared) {
        for (number, handle) in self.handles.drain(..).enumerate() {
            if shared.has_passed(self.first + number, Stage::Exited) {
                let _ = handle.join();
            }
        }
    }

    fn abandon_unstarted(&mut self, shared: &Shared) {
        shared.request_stop();
        shared.start();
        self.handles.drain(..).for_each(|handle| {
            let _ = handle.join();
        });
    }
}

fn spawn_one(
    plan: &Arc<Plan>,
    shared: &Arc<Shared>,
    pipes: &Arc<TeamPipes>,
    worker: usize,
) -> std::io::Result<JoinHandle<()>> {
    let (plan, shared, pipes) = (Arc::clone(plan), Arc::clone(shared), Arc::clone(pipes));
    std::thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(move || {
            signal::unblock_thread_interrupt();
            body::set_up(&plan, &shared, worker);
            let team = plan.worker(worker).team_number;
            let body = || body::run(&plan, &shared, worker, pipes.of_team(team));
            if catch_unwind(AssertUnwindSafe(body)).is_err() {
                shared
                    .record(worker)
                    .outcome
                    .store(outcome::PANICKED, Release);
            }
            shared.advance(worker, Stage::Exited);
        })
}
