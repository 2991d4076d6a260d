//! Yielding: a task that offers the CPU all the time.

use super::{Work, WorkTypeInfo};
use crate::worker::{WorkFailure, Worker};

/// See the module.
pub(crate) struct YieldHeavy;

impl Work for YieldHeavy {
    fn about(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "yield_heavy",
            does: "calls sched_yield once per unit",
            exercises: "the yield path: pick_next_task without a wake-up, and what a yielding task is charged",
        }
    }

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        while worker.proceed() {
            rustix::thread::sched_yield();
            worker.done(1);
        }
        Ok(())
    }
}
