//! CPU-scheduler-bound: threads are runnable without a CPU.

use super::resource::{Resource, ResourceTime, sum_part_seconds};
use super::{Verdict, VerdictDescription};
use crate::times::{RankTimeParts, TimePart};

pub(super) static RESOURCE: Resource = Resource {
    key: "cpu-scheduler",
    title: "CPU-scheduler-bound",
    time_name: "runnable without a CPU",
    parts: &[(
        TimePart::CpuDelay,
        "runnable without a CPU (with its loaders)",
    )],
    remedy: |_, _| REMEDY,
    max_savable_seconds: |_| f64::INFINITY,
    next_steps: |_, _| Vec::new(),
    verdict: cpu_scheduler_verdict,
};

const REMEDY: &str = "fewer threads on these CPUs, or moving other processes off them";

/// Threads are runnable without a CPU.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CpuSchedulerBound {
    time: ResourceTime,
    /// Loaders that a rank waited for.
    loader_delay_seconds: f64,
    /// Training threads.
    training_delay_seconds: f64,
}

fn cpu_scheduler_verdict(time: ResourceTime, ranks: &[RankTimeParts]) -> Verdict {
    let loaders: f64 = ranks.iter().map(|rank| rank.loader_cpu_delay).sum();
    Verdict::CpuScheduler(CpuSchedulerBound {
        time,
        loader_delay_seconds: loaders,
        training_delay_seconds: (sum_part_seconds(ranks, TimePart::CpuDelay) - loaders).max(0.0),
    })
}

impl CpuSchedulerBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let evidence = format!(
            "threads were runnable without a CPU for up to {}: loaders that a rank waited for {:.1} s, training \
             threads {:.1} s",
            self.time.share_text(),
            self.loader_delay_seconds,
            self.training_delay_seconds
        );
        (self.time).describe(&RESOURCE, TimePart::CpuDelay, evidence, REMEDY)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::RankTimes;
    use crate::verdict::tests::{
        assert_bound_of_cases, assert_verdict_json, rank_waiting_for_gpu, rank_waiting_for_loaders,
    };

    #[test]
    fn loaders_or_training_threads_without_a_cpu_bound_a_job() {
        assert_bound_of_cases(
            "cpu-scheduler",
            &[
                (
                    "waits for loaders without a CPU",
                    RankTimes {
                        data_prepare: 5.0,
                        data_cpu_delay: 24.0,
                        ..rank_waiting_for_loaders()
                    },
                ),
                (
                    "is runnable without a CPU",
                    RankTimes {
                        run_delay: 50.0,
                        gpu_waits: 38.0,
                        ..rank_waiting_for_gpu()
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
            ..rank_waiting_for_gpu()
        };
        assert_verdict_json(
            &[delayed],
            &json!(["cpu-scheduler", "cpu-delay", null, 0.505, 50.5]),
        );
    }
}
