//! GPU-bound: the ranks wait for their GPUs.

use super::inference::InferenceWork;
use super::resource::{MIN_MENTIONED_SHARE, Resource, ResourceTime};
use super::{Verdict, VerdictDescription};
use crate::times::{RankTimeParts, TimePart};

pub(super) static RESOURCE: Resource = Resource {
    key: "gpu",
    title: "GPU-bound",
    time_name: "waits for the GPU",
    parts: &[(TimePart::Gpu, "waiting for its GPU")],
    remedy: |_, _| FASTER_GPU_REMEDY,
    // A GPU that took no time would save the time in which it was busy.
    max_savable_seconds: |rank| rank.gpu_busy.unwrap_or(f64::INFINITY),
    next_steps: |_, _| Vec::new(),
    verdict: gpu_verdict,
};

const FASTER_GPU_REMEDY: &str = "faster kernels or GPUs";
const FASTER_GPU_OR_FEWER_BYTES_REMEDY: &str =
    "faster kernels or GPUs, or fewer bytes in collectives; a GPU profile shows which";

/// The ranks wait for their GPUs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GpuBound {
    time: ResourceTime,
    /// Waits for the GPU in which collectives may have run.
    possible_collective_seconds: f64,
    /// Host work that counts as waiting, because the ranks wait for their GPUs longer than the GPUs are idle, or the GPUs
    /// are almost never idle.
    host_ahead_seconds: f64,
    /// Time in which their GPUs were idle.
    gpu_idle_seconds: f64,
    inference: Option<InferenceWork>,
}

fn gpu_verdict(time: ResourceTime, ranks: &[RankTimeParts]) -> Verdict {
    Verdict::Gpu(GpuBound {
        time,
        possible_collective_seconds: ranks
            .iter()
            .map(|rank| rank.gpu_waits_with_collectives)
            .sum(),
        host_ahead_seconds: ranks.iter().map(|rank| rank.host_work_ahead_of_gpu).sum(),
        gpu_idle_seconds: ranks.iter().filter_map(|rank| rank.gpu_idle).sum(),
        inference: InferenceWork::new(ranks),
    })
}

impl GpuBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let (seconds, collectives, ahead) = (
            self.time.seconds,
            self.possible_collective_seconds,
            self.host_ahead_seconds,
        );
        let collectives_text = match collectives > MIN_MENTIONED_SHARE * seconds {
            true => format!(", of which up to {collectives:.1} s may be collectives"),
            false => String::new(),
        };
        let ahead_text = match ahead > 0.0 {
            true => format!(
                "; this includes {ahead:.1} s of host work, because the GPU was idle for {:.1} s only (NVML)",
                self.gpu_idle_seconds
            ),
            false => String::new(),
        };
        let share = self.time.share_text();
        let inference = self
            .inference
            .map_or(String::new(), InferenceWork::describe);
        let evidence =
            format!("waits for the GPU took {share}{collectives_text}{ahead_text}{inference}");
        let remedy = match 2.0 * collectives > seconds {
            true => FASTER_GPU_OR_FEWER_BYTES_REMEDY,
            false => FASTER_GPU_REMEDY,
        };
        self.time
            .describe(&RESOURCE, TimePart::Gpu, evidence, remedy)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::times::RankTimes;
    use crate::verdict::judge_ranks;
    use crate::verdict::tests::{
        assert_bound_of_cases, assert_verdict_json, json_bound_of, rank_waiting_for_gpu,
        rank_waiting_for_loaders, remedy_of_verdict,
    };

    #[test]
    fn long_waits_for_the_gpu_bound_a_job() {
        assert_bound_of_cases(
            "gpu",
            &[
                ("waits for its GPU", rank_waiting_for_gpu()),
                (
                    "waits for loaders that rest, and longer for the GPU",
                    RankTimes {
                        max_loader_busy_share: Some(0.3),
                        ..rank_waiting_for_loaders()
                    },
                ),
                (
                    "waits in launches, because the queue is full",
                    RankTimes {
                        gpu_waits: 10.0,
                        launching: 70.0,
                        training_cpu: 90.0,
                        ..rank_waiting_for_gpu()
                    },
                ),
                (
                    "spins while it waits",
                    RankTimes {
                        training_cpu: 99.0,
                        ..rank_waiting_for_gpu()
                    },
                ),
            ],
        );
    }

    #[test]
    fn waits_for_the_gpu_and_for_collectives_count_once() {
        let parts = RankTimeParts::new(&rank_waiting_for_gpu());
        assert_eq!(parts.seconds_in(TimePart::Gpu), 72.0);
        assert_eq!(parts.seconds_in(TimePart::Communication), 8.0);
        let overlaps = RankTimes {
            communication: 0.0,
            peer_waits: 0.0,
            until_sync: 70.0,
            ..rank_waiting_for_gpu()
        };
        let verdict = judge_ranks(&[overlaps; 2]);
        assert_eq!(json_bound_of(&verdict), "gpu");
        assert!(remedy_of_verdict(&verdict).contains("fewer bytes"));
        assert!(
            verdict.describe().evidence.contains("may be collectives"),
            "{}",
            verdict.describe().evidence
        );
    }

    #[test]
    fn a_gpu_that_is_never_idle_bounds_the_job() {
        let works = RankTimes {
            gpu_waits: 5.0,
            training_cpu: 100.0,
            ..rank_waiting_for_gpu()
        };
        assert_eq!(json_bound_of(&judge_ranks(&[works])), "host");
        let is_ahead = RankTimes {
            gpu_busy: Some(97.0),
            ..works
        };
        let verdict = judge_ranks(&[is_ahead]);
        assert_eq!(json_bound_of(&verdict), "gpu");
        assert!(
            verdict.describe().evidence.contains("NVML"),
            "{}",
            verdict.describe().evidence
        );
        let has_gaps = RankTimes {
            gpu_busy: Some(70.0),
            ..works
        };
        assert_eq!(json_bound_of(&judge_ranks(&[has_gaps])), "host");
        // It waits for the GPU for longer than the GPU is idle.
        let waits = RankTimes {
            gpu_waits: 40.0,
            ..has_gaps
        };
        let verdict = judge_ranks(&[waits]);
        assert_eq!(json_bound_of(&verdict), "gpu");
        // The host work that counts as waiting would remain without the GPU's work.
        assert_eq!(verdict.describe().at_most_seconds, Some(70.0));
        let waits_less = RankTimes {
            gpu_waits: 20.0,
            ..has_gaps
        };
        assert_eq!(json_bound_of(&judge_ranks(&[waits_less])), "host");
    }

    #[test]
    fn the_json_keeps_its_values() {
        assert_verdict_json(
            &[rank_waiting_for_gpu()],
            &json!(["gpu", "gpu", null, 0.72, 72.0]),
        );
    }
}
