//! A ring of tasks in which each wakes the next.

use std::sync::atomic::Ordering::Acquire;

use super::{Work, WorkTypeInfo};
use crate::clock::us_to_ns;
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::WakeChain`](super::WorkType::WakeChain).
    #[derive(Eq)]
    pub struct WakeChain {
        /// CPU time that each worker uses before it wakes the next.
        pub compute_us: u64 = 20,
    }
}

impl Work for WakeChain {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "wake_chain",
            does: "waits for its predecessor in a ring, computes, wakes its successor, and counts a unit for each time around the ring",
            exercises: "wakers that block at once, a critical path through many tasks, cache-affine placement",
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
        let next = &team.slots[(team.index + 1) % team.size];
        let mut seen = 0;
        if team.index == 0 {
            worker.post_to_slot(own, 1);
        }
        while worker.should_do_another_round() {
            if worker.wait_while_slot_has(own, seen) {
                seen = own.word.load(Acquire);
                worker.burn_cpu_ns(us_to_ns(self.compute_us));
                worker.count_round(1);
                worker.post_to_slot(next, 1);
            }
        }
        Ok(())
    }
}
