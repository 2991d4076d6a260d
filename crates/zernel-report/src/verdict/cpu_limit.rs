//! Throttled: threads wait because their cgroup has used up its CPU limit.

use super::next_step::NextStep;
use super::resource::{Resource, ResourceTime};
use super::{Verdict, VerdictDescription};
use crate::times::TimePart;

pub(super) static RESOURCE: Resource = Resource {
    key: "throttled",
    title: "throttled",
    time_name: "throttled by the CPU limit",
    parts: &[(
        TimePart::Throttled,
        "throttled by the CPU limit of its cgroup",
    )],
    remedy: |_, _| REMEDY,
    max_savable_seconds: |_| f64::INFINITY,
    next_steps: |time, _| {
        let line = "cpu.max of the cgroup (cpu.cfs_quota_us on cgroup v1), resources.limits.cpu of the pod";
        let higher = NextStep::with_max_saving("a higher CPU limit", line, time.at_most_seconds);
        vec![higher.for_any_program()]
    },
    verdict: |time, _| Verdict::CpuLimit(CpuLimitBound { time }),
};

const REMEDY: &str =
    "a higher CPU limit of the cgroup, or fewer threads and loaders than its limit of CPUs";

/// Threads wait because their cgroup has used up its CPU limit.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CpuLimitBound {
    time: ResourceTime,
}

impl CpuLimitBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let evidence = format!(
            "threads were runnable without a CPU, because the CPU limit of their cgroup was used up, for {}",
            self.time.share_text()
        );
        (self.time).describe(&RESOURCE, TimePart::Throttled, evidence, REMEDY)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::RankTimes;
    use crate::verdict::tests::{assert_bound_of_cases, assert_verdict_json, rank_waiting_for_gpu};

    fn throttled_rank() -> RankTimes {
        RankTimes {
            run_delay: 50.0,
            throttled: 90.0,
            gpu_waits: 38.0,
            ..rank_waiting_for_gpu()
        }
    }

    /// Throttling is summed over CPUs, so it may exceed the time that threads waited.
    #[test]
    fn a_used_up_cpu_limit_bounds_a_job() {
        assert_bound_of_cases("throttled", &[("is throttled", throttled_rank())]);
        let seldom = RankTimes {
            throttled: 10.0,
            ..throttled_rank()
        };
        assert_bound_of_cases("cpu-scheduler", &[("is seldom throttled", seldom)]);
    }

    #[test]
    fn the_json_keeps_its_values() {
        assert_verdict_json(
            &[throttled_rank()],
            &json!(["throttled", "throttled", null, 0.505, 50.5]),
        );
    }
}
