//! Bursts: an interactive task that computes a little and sleeps a little.

use serde::{Deserialize, Serialize};

use super::{About, Work};
use crate::clock::{self, us};
use crate::worker::{Failure, Worker};

/// See [`WorkType::Bursty`](super::WorkType::Bursty).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bursty {
    /// CPU time of a burst.
    pub burst_us: u64,
    /// Sleep between two bursts.
    pub sleep_us: u64,
}

impl Default for Bursty {
    fn default() -> Self {
        Self {
            burst_us: 2_000,
            sleep_us: 3_000,
        }
    }
}

impl Work for Bursty {
    fn about(&self) -> About {
        About {
            name: "bursty",
            does: "uses CPU time, sleeps, and counts a unit for each burst",
            exercises: "timer wake-ups, wake-up placement and preemption, lag of a task that sleeps",
        }
    }

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), Failure> {
        while worker.proceed() {
            worker.burn_ns(us(self.burst_us));
            worker.done(1);
            worker.sleep_until_ns(clock::now_ns().saturating_add(us(self.sleep_us)));
        }
        Ok(())
    }
}
