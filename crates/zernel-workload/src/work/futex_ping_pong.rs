//! Two tasks that wake each other through a futex.

use std::sync::atomic::Ordering::Acquire;

use super::{Work, WorkTypeInfo};
use crate::clock::us_to_ns;
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::FutexPingPong`](super::WorkType::FutexPingPong).
    #[derive(Eq)]
    pub struct FutexPingPong {
        /// CPU time used between waking up and answering.
        pub compute_us: u64 = 0,
    }
}

impl Work for FutexPingPong {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "futex_ping_pong",
            does: "hands the turn to its partner through a futex and waits for the turn to come back, and counts a unit for each turn",
            exercises: "one-to-one wake-ups without WF_SYNC, wake-up placement, sleep and wake cost",
        }
    }

    fn team_size(&self, _workers: usize) -> usize {
        2
    }

    fn futex_slot_count(&self, _team_size: usize) -> usize {
        1
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let team = worker.team();
        let turn = &team.slots[0];
        while worker.should_do_another_round() {
            let now = turn.word.load(Acquire);
            if now as usize % 2 != team.index {
                worker.wait_while_slot_has(turn, now);
                continue;
            }
            worker.burn_cpu_ns(us_to_ns(self.compute_us));
            worker.count_round(1);
            worker.post_to_slot(turn, 1);
        }
        Ok(())
    }
}
