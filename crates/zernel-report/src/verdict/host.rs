//! Host-bound: the training threads run on CPUs, or wait for other threads of their process.

use super::inference::InferenceWork;
use super::next_step::NextStep;
use super::resource::{MIN_MENTIONED_SHARE, Resource, ResourceTime, sum_part_seconds};
use super::{Verdict, VerdictDescription};
use crate::times::{RankTimeParts, TimePart};

pub(super) static RESOURCE: Resource = Resource {
    key: "host",
    title: "host-bound",
    time_name: "host work",
    parts: &[
        (TimePart::Host, "running on CPUs"),
        (
            TimePart::OtherThreads,
            "waiting for other threads of its process",
        ),
    ],
    remedy: host_remedy,
    // A host that launches less leaves the GPU idle for less time, and no more than that can be saved.
    max_savable_seconds: |rank| rank.gpu_idle.unwrap_or(f64::INFINITY),
    next_steps,
    verdict: host_verdict,
};

/// Warm-up from which a job may have compiled its model already, in seconds.
const COMPILING_WARM_UP_SECONDS: f64 = 5.0;

/// The training threads run on CPUs, or wait for other threads of their process.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HostBound {
    time: ResourceTime,
    /// The part of `time` in which they waited for other threads.
    awaited_seconds: f64,
    gpu: GpuActivity,
    inference: Option<InferenceWork>,
    remedy: &'static str,
}

/// How busy the GPUs were while the training threads ran.
#[derive(Debug, Clone, Copy, PartialEq)]
enum GpuActivity {
    /// No rank used a GPU.
    Unused,
    /// NVML reported no utilization.
    NotReported,
    /// Share of the time in which they were busy, as NVML reports it.
    Busy(f64),
}

fn host_verdict(time: ResourceTime, ranks: &[RankTimeParts]) -> Verdict {
    let awaited_seconds = sum_part_seconds(ranks, TimePart::OtherThreads);
    let cause = largest_host_part(awaited_seconds, time.seconds);
    Verdict::Host(HostBound {
        time,
        awaited_seconds,
        gpu: GpuActivity::new(ranks),
        inference: InferenceWork::new(ranks),
        remedy: host_remedy(cause, ranks),
    })
}

/// The part that takes most of the host's time.
fn largest_host_part(awaited_seconds: f64, seconds: f64) -> TimePart {
    match 2.0 * awaited_seconds > seconds {
        true => TimePart::OtherThreads,
        false => TimePart::Host,
    }
}

/// CUDA graphs launch with one call what took many, so the idle time of the GPU bounds what they save. A compiler that fuses
/// kernels also shortens the GPU's work, so nothing measured here bounds what it saves.
fn next_steps(time: &ResourceTime, ranks: &[RankTimeParts]) -> Vec<NextStep> {
    let awaited_seconds = sum_part_seconds(ranks, TimePart::OtherThreads);
    if largest_host_part(awaited_seconds, time.seconds) == TimePart::OtherThreads {
        let what =
            "the other threads' work in a process of its own: threads of Python share one lock";
        let line = "multiprocessing.get_context(\"spawn\").Process(target=work).start()";
        let step = NextStep::with_max_saving(what, line, time.at_most_seconds);
        return vec![step.for_any_program()];
    }
    if !any_rank_uses_gpu(ranks) {
        return Vec::new();
    }
    let infers = ranks.iter().all(|rank| rank.only_infers);
    let compiles = ranks
        .iter()
        .any(|rank| rank.warm_up > COMPILING_WARM_UP_SECONDS);
    let graphs = match infers {
        true => "torch.compile(model, mode=\"reduce-overhead\")",
        false => "torch.cuda.make_graphed_callables(model, (sample_batch,))",
    };
    let mut steps = vec![NextStep::with_max_saving(
        "CUDA graphs: one launch instead of many",
        graphs,
        time.at_most_seconds,
    )];
    if !compiles && !infers {
        let what = "fused kernels: may save more than the idle time of the GPU; no bound is known";
        steps.push(NextStep::without_max_saving(
            what,
            "model = torch.compile(model)",
        ));
    }
    if infers {
        let what = "a larger batch per launch: more throughput, not less latency";
        steps.push(NextStep::without_max_saving(
            what,
            "model.generate(batch_of_prompts)",
        ));
    } else {
        let what = "one kernel for the whole optimizer step";
        let line = "torch.optim.AdamW(model.parameters(), fused=True)";
        steps.push(NextStep::with_max_saving(what, line, time.at_most_seconds));
    }
    steps
}

fn any_rank_uses_gpu(ranks: &[RankTimeParts]) -> bool {
    ranks.iter().any(|rank| rank.uses_gpu)
}

fn host_remedy(cause: TimePart, ranks: &[RankTimeParts]) -> &'static str {
    match any_rank_uses_gpu(ranks) {
        _ if cause == TimePart::OtherThreads => "less work in other threads of the process",
        true if ranks
            .iter()
            .all(|rank| rank.uses_framework_other_than_torch) =>
        {
            "CUDA graphs, fused kernels or larger batches (less host work per kernel)"
        }
        true => "CUDA graphs, torch.compile or larger batches (less host work per kernel)",
        false => "a GPU, or more or faster CPUs",
    }
}

impl GpuActivity {
    fn new(ranks: &[RankTimeParts]) -> Self {
        let shares: Vec<f64> = ranks
            .iter()
            .filter_map(|rank| rank.gpu_busy_share)
            .collect();
        match any_rank_uses_gpu(ranks) {
            true if shares.is_empty() => Self::NotReported,
            true => Self::Busy(shares.iter().sum::<f64>() / shares.len() as f64),
            false => Self::Unused,
        }
    }
}

impl HostBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let gpu = match self.gpu {
            GpuActivity::Unused => "and no rank used a GPU".to_owned(),
            GpuActivity::NotReported => "and hardly waited for the GPU".to_owned(),
            GpuActivity::Busy(share) => {
                let percent = 100.0 * share;
                format!("while the GPU was busy {percent:.0} % (NVML: any kernel, however small)")
            }
        };
        let inference = self
            .inference
            .map_or(String::new(), InferenceWork::describe);
        let share = self.time.share_text();
        let cause = largest_host_part(self.awaited_seconds, self.time.seconds);
        let awaited = self.awaited_seconds;
        let did = match awaited > MIN_MENTIONED_SHARE * self.time.seconds {
            true => format!(
                "training threads ran on CPUs, or waited while other threads of their process ran ({awaited:.1} s), for"
            ),
            false => "training threads ran on CPUs for".to_owned(),
        };
        let evidence = format!("{did} {share} {gpu}{inference}");
        (self.time).describe(&RESOURCE, cause, evidence, self.remedy)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::{RankTimes, TimePart};
    use crate::verdict::judge_ranks;
    use crate::verdict::tests::{
        assert_bound_of_cases, assert_verdict_json, json_bound_of, rank_waiting_for_gpu,
        remedy_of_verdict,
    };

    #[test]
    fn work_on_cpus_bounds_a_job() {
        assert_bound_of_cases(
            "host",
            &[(
                "launches all the time",
                RankTimes {
                    gpu_waits: 10.0,
                    training_cpu: 90.0,
                    ..rank_waiting_for_gpu()
                },
            )],
        );
    }

    /// A thread of the same Python program holds the global lock most of the time.
    #[test]
    fn waits_for_busy_threads_of_the_process_bound_a_job() {
        let starved = RankTimes {
            gpu_waits: 5.0,
            training_cpu: 15.0,
            other_cpu: 80.0,
            ..rank_waiting_for_gpu()
        };
        let description = judge_ranks(&[starved]).describe();
        assert_eq!(description.bound, "host");
        assert_eq!(description.cause, Some(TimePart::OtherThreads));
        let evidence = &description.evidence;
        assert!(
            evidence.contains("other threads of their process"),
            "{evidence}"
        );
        let [only] = &description.next_steps[..] else {
            panic!("{description:?}");
        };
        assert!(only.line.contains("Process("), "{}", only.line);
        // Busy threads that no training thread waits for are no cause.
        let beside = RankTimes {
            other_cpu: 300.0,
            ..rank_waiting_for_gpu()
        };
        assert_eq!(json_bound_of(&judge_ranks(&[beside])), "gpu");
        let never_idle = RankTimes {
            gpu_busy: Some(98.0),
            ..starved
        };
        assert_eq!(json_bound_of(&judge_ranks(&[never_idle])), "gpu");
        // Nothing ran meanwhile, so the cause of the waits is unknown.
        let asleep = RankTimes {
            other_cpu: 0.0,
            ..starved
        };
        assert_eq!(json_bound_of(&judge_ranks(&[asleep])), "cannot-tell");
    }

    #[test]
    fn a_job_without_a_gpu_gets_no_cuda_remedy() {
        let computes = RankTimes {
            wall: 100.0,
            training_cpu: 300.0,
            unknown: 10.0,
            ..RankTimes::default()
        };
        let verdict = judge_ranks(&[computes]);
        assert_eq!(json_bound_of(&verdict), "host");
        assert!(verdict.describe().evidence.contains("no rank used a GPU"));
        assert!(!remedy_of_verdict(&verdict).contains("CUDA"));
    }

    /// However much the host works, the GPU's idle time is all that less launching can save.
    #[test]
    fn the_gain_is_at_most_the_idle_time_of_the_gpu() {
        let launching = RankTimes {
            gpu_waits: 10.0,
            training_cpu: 90.0,
            gpu_busy: Some(87.0),
            ..rank_waiting_for_gpu()
        };
        let description = judge_ranks(&[launching]).describe();
        assert_eq!(description.bound, "host");
        assert_eq!(description.at_most_seconds, Some(13.0));
        let [graphs, compiler, _] = &description.next_steps[..] else {
            panic!("{description:?}");
        };
        assert_eq!(graphs.at_most_seconds, Some(13.0));
        assert!(compiler.line.contains("torch.compile") && compiler.at_most_seconds.is_none());
        // A job with a long warm-up may be compiled already.
        let compiled = RankTimes {
            warm_up: 40.0,
            ..launching
        };
        let description = judge_ranks(&[compiled]).describe();
        assert!(!format!("{:?}", description.next_steps).contains("torch.compile"));
    }

    /// What a job of another framework can do instead is not known.
    #[test]
    fn a_job_without_torch_gets_no_line_of_torch() {
        let launching = RankTimes {
            gpu_waits: 10.0,
            training_cpu: 90.0,
            gpu_busy: Some(30.0),
            uses_framework_other_than_torch: true,
            ..rank_waiting_for_gpu()
        };
        let beside_torch = RankTimes {
            uses_framework_other_than_torch: false,
            ..launching
        };
        let jax = judge_ranks(&[launching]);
        assert_eq!(json_bound_of(&jax), "host");
        assert!(jax.describe().next_steps.is_empty(), "{jax:?}");
        assert!(!remedy_of_verdict(&jax).contains("torch"));
        let both = judge_ranks(&[launching, beside_torch]);
        assert!(!both.describe().next_steps.is_empty(), "{both:?}");
        let waiting_for_threads = RankTimes {
            gpu_waits: 5.0,
            training_cpu: 15.0,
            other_cpu: 80.0,
            ..launching
        };
        assert_eq!(
            judge_ranks(&[waiting_for_threads])
                .describe()
                .next_steps
                .len(),
            1
        );
    }

    #[test]
    fn inference_gets_its_own_figures() {
        let decoding = RankTimes {
            gpu_waits: 10.0,
            gpu_wait_calls: 4000.0,
            training_cpu: 90.0,
            only_infers: true,
            ..rank_waiting_for_gpu()
        };
        let description = judge_ranks(&[decoding]).describe();
        assert_eq!(description.bound, "host");
        assert!(
            description.evidence.contains("100 launches and 20.5 ms"),
            "{}",
            description.evidence
        );
    }

    /// Without a GPU and a known optimizer all time is in phase Unknown.
    #[test]
    fn without_a_gpu_work_on_cpus_is_known() {
        let alone = RankTimes {
            wall: 100.0,
            unknown: 100.0,
            training_cpu: 95.0,
            ..RankTimes::default()
        };
        let verdict = judge_ranks(&[alone]);
        assert_eq!(
            json_bound_of(&verdict),
            "host",
            "{}",
            verdict.describe().evidence
        );
        let waiting = RankTimes {
            training_cpu: 12.0,
            communication: 80.0,
            peer_waits: 80.0,
            ..alone
        };
        let asleep = RankTimes {
            training_cpu: 12.0,
            ..alone
        };
        let verdict = judge_ranks(&[waiting, asleep]);
        assert_eq!(
            json_bound_of(&verdict),
            "straggler",
            "{}",
            verdict.describe().evidence
        );
        assert_eq!(verdict.describe().straggler, Some(1));
    }

    #[test]
    fn the_json_keeps_its_values() {
        let launching = RankTimes {
            gpu_waits: 10.0,
            training_cpu: 90.0,
            ..rank_waiting_for_gpu()
        };
        assert_verdict_json(&[launching], &json!(["host", "host", null, 0.82, 82.0]));
    }
}
