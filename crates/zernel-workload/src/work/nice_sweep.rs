//! A spinning task that changes its own weight.

use super::{Work, WorkTypeInfo};
use crate::worker::{FailingStep, WorkFailure, Worker};
use rustix::process::{getpriority_process, setpriority_process};

/// See the module.
pub(crate) struct NiceSweep;

/// Microseconds of CPU time at each nice value.
const CPU_US_PER_NICE_VALUE: u64 = 500;
const MAX_NICE: i32 = 19;

impl Work for NiceSweep {
    fn about(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "nice_sweep",
            does: "spins while it steps through the nice values it may have, from its own up to 19 and (where allowed) back from -20, a unit for each",
            exercises: "reweighting of a running task, and the fair shares that follow from it",
        }
    }

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let own = getpriority_process(None).map_err(FailingStep::SetNice.as_failure())?;
        // Going down takes a privilege; without it the sweep ends at 19 and stays there.
        let lowest = if setpriority_process(None, -20).is_ok() {
            -20
        } else {
            own
        };
        let mut nice = lowest;
        while worker.proceed() {
            if setpriority_process(None, nice).is_err() {
                nice = MAX_NICE;
            }
            worker.burn_ns(crate::clock::us_to_ns(CPU_US_PER_NICE_VALUE));
            worker.done(1);
            nice = if nice >= MAX_NICE { lowest } else { nice + 1 };
        }
        Ok(())
    }
}
