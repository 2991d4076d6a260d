//! A task that yields the CPU in a loop.

use super::{Work, WorkTypeInfo};
use crate::worker::{WorkFailure, Worker};

/// See [`WorkType::YieldHeavy`](super::WorkType::YieldHeavy).
pub(crate) struct YieldHeavy;

impl Work for YieldHeavy {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "yield_heavy",
            does: "calls sched_yield in a loop, and counts a unit for each call",
            exercises: "the yield path: pick_next_task without a wake-up, and what a yielding task is charged",
        }
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        while worker.should_do_another_round() {
            rustix::thread::sched_yield();
            worker.count_round(1);
        }
        Ok(())
    }
}
