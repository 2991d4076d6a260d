//! CPU-scheduler-bound: threads are runnable without a CPU.

use super::resource::{Resource, ResourceTime, sum_of_part};
use super::{Verdict, VerdictDescription};
use crate::times::{RankTimeParts, TimePart};

pub(super) static RESOURCE: Resource = Resource {
    key: "cpu-scheduler",
    title: "CPU-scheduler-bound",
    time: "runnable without a CPU",
    parts: &[(
        TimePart::CpuDelay,
        "runnable without a CPU (with its loaders)",
    )],
    remedy: |_, _| REMEDY,
    most: |_| f64::INFINITY,
    next_steps: |_, _| Vec::new(),
    verdict: cpu_scheduler_verdict,
};

const REMEDY: &str = "fewer threads on these CPUs, or moving other processes off them";

/// Threads are runnable without a CPU.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CpuSchedulerBound {
    time: ResourceTime,
    /// Loaders that a rank waited for.
    loaders: f64,
    /// Training threads.
    ranks: f64,
}

fn cpu_scheduler_verdict(time: ResourceTime, ranks: &[RankTimeParts]) -> Verdict {
    let loaders: f64 = ranks.iter().map(|rank| rank.data_delay).sum();
    Verdict::CpuScheduler(CpuSchedulerBound {
        time,
        loaders,
        ranks: (sum_of_part(ranks, TimePart::CpuDelay) - loaders).max(0.0),
    })
}

impl CpuSchedulerBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let evidence = format!(
            "threads were runnable without a CPU for up to {}: loaders that a rank waited for {:.1} s, training \
             threads {:.1} s",
            self.time.share_text(),
            self.loaders,
            self.ranks
        );
        (self.time).describe(&RESOURCE, TimePart::CpuDelay, evidence, REMEDY)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::RankTimes;
    use crate::verdict::tests::{assert_bound, assert_json, gpu_rank, starved_rank};

    #[test]
    fn loaders_or_training_threads_without_a_cpu_bound_a_job() {
        assert_bound(
            "cpu-scheduler",
            &[
                (
                    "waits for loaders without a CPU",
                    RankTimes {
                        data_prepare: 5.0,
                        data_sched: 24.0,
                        ..starved_rank()
                    },
                ),
                (
                    "is runnable without a CPU",
                    RankTimes {
                        run_delay: 50.0,
                        gpu_waits: 38.0,
                        ..gpu_rank()
                    },
                ),
            ],
        );
    }

    #[test]
    fn the_json_keeps_its_values() {
        let delayed = RankTimes {
            run_delay: 50.0,
            gpu_waits: 38.0,
            ..gpu_rank()
        };
        assert_json(
            &[delayed],
            &json!(["cpu-scheduler", "cpu-delay", null, 0.505, 50.5]),
        );
    }
}
