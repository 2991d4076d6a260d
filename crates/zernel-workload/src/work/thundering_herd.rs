//! Many tasks that wait on one word and are all woken at once.

use std::sync::atomic::Ordering::Acquire;

use super::{Work, WorkTypeInfo};
use crate::clock::{self, us_to_ns};
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::ThunderingHerd`](super::WorkType::ThunderingHerd).
    #[derive(Eq)]
    pub struct ThunderingHerd {
        /// Time between two wake-ups of all workers.
        pub interval_us: u64 = 5_000,
        /// CPU time that each woken worker uses.
        pub compute_us: u64 = 50,
    }
}

impl Work for ThunderingHerd {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "thundering_herd",
            does: "all workers but the first wait on one futex, and the first wakes them with one call; each worker counts a unit for each such wake-up",
            exercises: "a wake queue of many tasks, run-queue lock contention, fairness among equals that wake together",
        }
    }

    fn team_size(&self, workers: usize) -> usize {
        if workers < 2 { 0 } else { workers }
    }

    fn min_team_size(&self) -> usize {
        2
    }

    fn futex_slot_count(&self, _team_size: usize) -> usize {
        1
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let team = worker.team();
        let gate = &team.slots[0];
        let mut seen = 0;
        while worker.should_do_another_round() {
            if team.index == 0 {
                worker.post_to_all_waiters(gate);
                worker.count_round(1);
                worker.sleep_until_ns(clock::now_ns().saturating_add(us_to_ns(self.interval_us)));
            } else if worker.wait_while_slot_has(gate, seen) {
                seen = gate.word.load(Acquire);
                worker.burn_cpu_ns(us_to_ns(self.compute_us));
                worker.count_round(1);
            }
        }
        Ok(())
    }
}
