//! A task that repeats a list of phases.

use super::{Work, WorkTypeInfo};
use crate::clock::{self, us_to_ns};
use crate::spec_keys::{spec_choice, spec_table};
use crate::worker::{WorkFailure, Worker};

spec_choice! {
    /// One phase of a [`Sequence`].
    pub enum Phase {
        /// The worker uses CPU time, in microseconds.
        ComputeUs(u64),
        /// The worker sleeps, in microseconds.
        SleepUs(u64),
        /// The worker calls sched_yield this many times.
        Yield(u64),
    }
}

spec_table! {
    /// See [`WorkType::Sequence`](super::WorkType::Sequence).
    #[derive(Eq)]
    pub struct Sequence {
        /// The phases that the worker repeats, in order.
        pub phases: Vec<Phase> = vec![Phase::ComputeUs(1_000), Phase::Yield(10), Phase::SleepUs(1_000)],
    }
}

impl Work for Sequence {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "sequence",
            does: "goes through the given phases (compute, sleep, yield) in a loop, and counts a unit for each phase",
            exercises: "tasks that change their nature: what the scheduler has learned about them is soon wrong",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        match self.phases.is_empty() {
            true => Err((
                "work.phases",
                "no phase is given; give at least one".to_owned(),
            )),
            false => Ok(()),
        }
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        for phase in self.phases.iter().cycle() {
            if !worker.should_do_another_round() {
                break;
            }
            match *phase {
                Phase::ComputeUs(cpu) => worker.burn_cpu_ns(us_to_ns(cpu)),
                Phase::SleepUs(span) => {
                    worker.sleep_until_ns(clock::now_ns().saturating_add(us_to_ns(span)));
                }
                Phase::Yield(times) => {
                    (0..times)
                        .take_while(|_| worker.should_do_another_round())
                        .for_each(|_| rustix::thread::sched_yield());
                }
            }
            worker.count_round(1);
        }
        Ok(())
    }
}
