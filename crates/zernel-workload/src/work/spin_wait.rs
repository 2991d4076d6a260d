//! A task that spins and never blocks.

use super::{Work, WorkTypeInfo};
use crate::worker::{WorkFailure, Worker};

/// See [`WorkType::SpinWait`](super::WorkType::SpinWait).
pub(crate) struct SpinWait;

impl Work for SpinWait {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "spin_wait",
            does: "spins, never blocks, and counts a unit for about each microsecond",
            exercises: "tick preemption, fair shares between runnable tasks, load balancing",
        }
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        while worker.should_do_another_round() {
            worker.spin_about_a_microsecond();
            worker.count_round(1);
        }
        Ok(())
    }
}
