//! A task that forks short-lived children.

use super::{Work, WorkTypeInfo};
use crate::sys::process::fork_and_exit;
use crate::worker::{FailingStep, WorkFailure, Worker};

/// See [`WorkType::ForkExit`](super::WorkType::ForkExit).
pub(crate) struct ForkExit;

impl Work for ForkExit {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "fork_exit",
            does: "forks a child that exits at once, reaps it, and counts a unit for each child",
            exercises: "task creation, placement of new tasks, wake_up_new_task, exit and reaping",
        }
    }

    fn reason_refused_in_container(&self) -> Option<&'static str> {
        Some("a fork copies the locks that sibling threads hold at that moment")
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        while worker.should_do_another_round() {
            fork_and_exit().map_err(FailingStep::ForkChild.as_failure())?;
            worker.count_round(1);
        }
        Ok(())
    }
}
