//! A spinning task that changes its own nice value.

use super::{Work, WorkTypeInfo};
use crate::worker::{FailingStep, WorkFailure, Worker};
use rustix::process::{getpriority_process, setpriority_process};

/// See [`WorkType::NiceSweep`](super::WorkType::NiceSweep).
pub(crate) struct NiceSweep;

/// CPU time that the worker uses at each nice value, in microseconds.
const CPU_US_PER_NICE_VALUE: u64 = 500;
const MAX_NICE: i32 = 19;

impl Work for NiceSweep {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "nice_sweep",
            does: "spins at each nice value that it may have in turn, from its own up to 19 and (where allowed) from -20 again, and counts a unit for each nice value",
            exercises: "reweighting of a running task, and the fair shares that follow from it",
        }
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let own = getpriority_process(None).map_err(FailingStep::SetNice.as_failure())?;
        // To lower a nice value takes a privilege; without it the worker goes up to 19 and stays there.
        let lowest = if setpriority_process(None, -20).is_ok() {
            -20
        } else {
            own
        };
        let mut nice = lowest;
        while worker.should_do_another_round() {
            if setpriority_process(None, nice).is_err() {
                nice = MAX_NICE;
            }
            worker.burn_cpu_ns(crate::clock::us_to_ns(CPU_US_PER_NICE_VALUE));
            worker.count_round(1);
            nice = if nice >= MAX_NICE { lowest } else { nice + 1 };
        }
        Ok(())
    }
}
