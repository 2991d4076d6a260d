//! A periodic task with a deadline per period, as cyclictest measures it.

use super::{Work, WorkTypeInfo};
use crate::clock::{self, us_to_ns};
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::TimerDeadline`](super::WorkType::TimerDeadline).
    #[derive(Eq)]
    pub struct TimerDeadline {
        /// Time between two wake-ups, at least 1.
        pub period_us: u64 = 1_000,
        /// CPU time that the worker uses in each period.
        pub compute_us: u64 = 50,
    }
}

impl Work for TimerDeadline {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "timer_deadline",
            does: "wakes at fixed moments, computes, and counts a unit for each period; its wake latency is the delay of its wake-ups",
            exercises: "absolute timers, wake-up preemption, latency of a periodic task under load",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        match self.period_us {
            0 => Err((
                "work.period_us",
                "a period of 0 never ends; use at least 1".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let period_ns = us_to_ns(self.period_us);
        let mut next_ns = clock::now_ns().saturating_add(period_ns);
        while worker.should_do_another_round() {
            worker.sleep_until_ns(next_ns);
            worker.burn_cpu_ns(us_to_ns(self.compute_us));
            worker.count_round(1);
            // Periods that the worker missed are skipped, not made up for.
            let behind_ns = clock::now_ns().saturating_sub(next_ns);
            next_ns = next_ns.saturating_add(period_ns * (1 + behind_ns / period_ns));
        }
        Ok(())
    }
}
