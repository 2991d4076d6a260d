//! Runs one worker, in its own process, in a container or in the caller's process: applies its settings,
//! reports ready, waits for the start, works, and writes its last numbers.

use std::sync::atomic::Ordering::{Relaxed, Release};

use rustix::thread::gettid;

use crate::shared_state::{RECORD_MAGIC, SharedState, WorkerStage, outcome};
use crate::worker::{TeamPipe, Worker, WorkerTeam};
use crate::workload_plan::WorkloadPlan;

/// Applies the worker's settings to the calling thread. Fork safe.
pub(crate) fn apply_worker_settings(plan: &WorkloadPlan, shared: &SharedState, worker: usize) {
    let index = plan.worker_plan(worker).group_index;
    let settings = &plan.group_of(worker).settings;
    settings.apply_to_thread(index, shared.record(worker));
}

/// Runs one worker in the calling thread: reports that it is ready, waits for the start, runs its work function and
/// writes its last numbers. Fork safe if the work function is.
pub(crate) fn run_worker(
    plan: &WorkloadPlan,
    shared: &SharedState,
    index: usize,
    pipes: &[TeamPipe],
) {
    let record = shared.record(index);
    record.tid.store(gettid().as_raw_nonzero().get(), Relaxed);
    record.magic.store(RECORD_MAGIC, Relaxed);
    shared.pass_stage(index, WorkerStage::Ready);
    shared.wait_for_start(index);

    let worker_plan = plan.worker_plan(index);
    let team_plan = plan.team_plan(worker_plan.team_number);
    let work = plan.group_of(index).work.as_work();
    let team = WorkerTeam {
        index: worker_plan.team_index,
        size: team_plan.size,
        members_are_independent: work.members_are_independent(team_plan.size),
        slots: shared.slots(&team_plan.slots),
        pipes,
    };
    let mut worker = Worker::begin_first_round(
        shared,
        index,
        worker_plan.group_index,
        team,
        shared.trace_entries(&worker_plan.trace),
    );
    let result = work.run_worker_rounds(&mut worker);
    worker.write_final_numbers();
    let ended = match result {
        Ok(()) => outcome::FINISHED,
        Err(failure) => {
            record.failed_step.store(failure.step as u32, Relaxed);
            record
                .failed_errno
                .store(failure.errno.raw_os_error(), Relaxed);
            outcome::FAILED
        }
    };
    record.outcome.store(ended, Release);
    shared.pass_stage(index, WorkerStage::Ended);
}
