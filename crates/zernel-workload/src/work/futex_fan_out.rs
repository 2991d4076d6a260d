//! One task that wakes many tasks, which then compute.

use std::sync::atomic::Ordering::Acquire;

use super::{Work, WorkTypeInfo};
use crate::clock::{self, us_to_ns};
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::FutexFanOut`](super::WorkType::FutexFanOut).
    #[derive(Eq)]
    pub struct FutexFanOut {
        /// Time between two rounds.
        pub interval_us: u64 = 2_000,
        /// CPU time that each woken worker uses in a round.
        pub compute_us: u64 = 200,
    }
}

impl Work for FutexFanOut {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "futex_fan_out",
            does: "the first worker wakes all others at once, each by its own futex; the woken workers compute; each worker counts a unit for each round",
            exercises: "a burst of wake-ups from one CPU, idle CPU search, load balancing of fresh work",
        }
    }

    fn team_size(&self, workers: usize) -> usize {
        if workers < 2 { 0 } else { workers }
    }

    fn min_team_size(&self) -> usize {
        2
    }

    fn futex_slot_count(&self, team_size: usize) -> usize {
        team_size
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let team = worker.team();
        let own = &team.slots[team.index];
        let mut seen = 0;
        while worker.should_do_another_round() {
            if team.index == 0 {
                team.slots[1..]
                    .iter()
                    .for_each(|slot| worker.post_to_slot(slot, 1));
                worker.count_round(1);
                worker.sleep_until_ns(clock::now_ns().saturating_add(us_to_ns(self.interval_us)));
            } else if worker.wait_while_slot_has(own, seen) {
                seen = own.word.load(Acquire);
                worker.burn_cpu_ns(us_to_ns(self.compute_us));
                worker.count_round(1);
            }
        }
        Ok(())
    }
}
