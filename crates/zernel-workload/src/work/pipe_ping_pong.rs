//! Two tasks that wake each other through a pair of pipes.

use super::{Work, WorkTypeInfo};
use crate::clock::us_to_ns;
use crate::spec_keys::spec_table;
use crate::worker::{FailingStep, WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::PipePingPong`](super::WorkType::PipePingPong).
    #[derive(Eq)]
    pub struct PipePingPong {
        /// CPU time used between receiving and answering.
        pub compute_us: u64 = 0,
    }
}

impl Work for PipePingPong {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "pipe_ping_pong",
            does: "passes a message to its partner through a pipe and waits for the answer, and counts a unit for each answer",
            exercises: "synchronous wake-ups (WF_SYNC), wake-up placement beside the waker, idle CPU selection",
        }
    }

    fn team_size(&self, _workers: usize) -> usize {
        2
    }

    fn pipes(&self, _team_size: usize) -> usize {
        2
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let team = worker.team();
        let [own, partner] = [&team.pipes[team.index], &team.pipes[1 - team.index]];
        if team.index == 0 {
            worker
                .send_through_pipe(partner)
                .map_err(FailingStep::UsePipe.as_failure())?;
        }
        while worker.should_do_another_round() {
            if !worker
                .receive_from_pipe(own)
                .map_err(FailingStep::UsePipe.as_failure())?
            {
                break;
            }
            worker.burn_cpu_ns(us_to_ns(self.compute_us));
            worker.count_round(1);
            worker
                .send_through_pipe(partner)
                .map_err(FailingStep::UsePipe.as_failure())?;
        }
        Ok(())
    }
}
