//! Spinning: a task that never blocks.

use super::{Work, WorkTypeInfo};
use crate::worker::{WorkFailure, Worker};

/// See the module.
pub(crate) struct SpinWait;

impl Work for SpinWait {
    fn about(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "spin_wait",
            does: "spins for about a microsecond per unit and never blocks",
            exercises: "tick preemption, fair shares between runnable tasks, load balancing",
        }
    }

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        while worker.proceed() {
            worker.spin();
            worker.done(1);
        }
        Ok(())
    }
}
