//! A task that goes through phases, again and again.

use serde::{Deserialize, Serialize};

use super::{About, Work};
use crate::clock::{self, us};
use crate::worker::{Failure, Worker};

/// One phase of a [`Sequence`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Phase {
    /// Use this much CPU time.
    ComputeUs(u64),
    /// Sleep this long.
    SleepUs(u64),
    /// Yield this often.
    Yield(u64),
}

/// See [`WorkType::Sequence`](super::WorkType::Sequence).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sequence {
    /// The phases, in order.
    pub phases: Vec<Phase>,
}

impl Default for Sequence {
    fn default() -> Self {
        Self {
            phases: vec![
                Phase::ComputeUs(1_000),
                Phase::Yield(10),
                Phase::SleepUs(1_000),
            ],
        }
    }
}

impl Work for Sequence {
    fn about(&self) -> About {
        About {
            name: "sequence",
            does: "goes through the given phases (compute, sleep, yield) in a loop, a unit for each phase",
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

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), Failure> {
        for phase in self.phases.iter().cycle() {
            if !worker.proceed() {
                break;
            }
            match *phase {
                Phase::ComputeUs(cpu) => worker.burn_ns(us(cpu)),
                Phase::SleepUs(span) => {
                    worker.sleep_until_ns(clock::now_ns().saturating_add(us(span)));
                }
                Phase::Yield(times) => {
                    (0..times)
                        .take_while(|_| worker.proceed())
                        .for_each(|_| rustix::thread::sched_yield());
                }
            }
            worker.done(1);
        }
        Ok(())
    }
}
