//! An interactive task that computes a little and sleeps a little.

use super::{Work, WorkTypeInfo};
use crate::clock::{self, us_to_ns};
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::Bursty`](super::WorkType::Bursty).
    #[derive(Eq)]
    pub struct Bursty {
        /// CPU time of a burst.
        pub burst_us: u64 = 2_000,
        /// Time that the worker sleeps between two bursts.
        pub sleep_us: u64 = 3_000,
    }
}

impl Work for Bursty {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "bursty",
            does: "uses CPU time, sleeps, and counts a unit for each burst",
            exercises: "timer wake-ups, wake-up placement and preemption, lag of a task that sleeps",
        }
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        while worker.should_do_another_round() {
            worker.burn_cpu_ns(us_to_ns(self.burst_us));
            worker.count_round(1);
            worker.sleep_until_ns(clock::now_ns().saturating_add(us_to_ns(self.sleep_us)));
        }
        Ok(())
    }
}
