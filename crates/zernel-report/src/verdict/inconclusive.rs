//! Can't tell: the evidence does not point at one cause.

use super::inference::InferenceWork;
use super::job::{JobTimes, TotalTime};
use super::resource::{MIN_BOUNDING_SHARE, format_seconds_by_name, mentionable_resource_seconds};
use super::{Verdict, VerdictDescription};
use crate::times::{RankTimeParts, RankTimes};

/// Seconds that the longest rank must have been observed for. Anything shorter is start-up.
const MIN_OBSERVED_SECONDS: f64 = 1.0;
/// Largest share of unknown time that allows a verdict.
const MAX_UNKNOWN_SHARE: f64 = 0.5;

/// Why the evidence does not point at one cause.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Inconclusive {
    NotObserved,
    NoRanks,
    /// The job uses a GPU, and nothing shows machine learning.
    NoMachineLearning(NonTrainingGpuWork),
    TooShort {
        longest_seconds: f64,
    },
    MostlyUnknown {
        unknown_seconds: f64,
        total: TotalTime,
        /// Whether nothing shows that a rank trains.
        only_infers: bool,
    },
    /// Calls were not observed for most of the time.
    MostlyNotObserved {
        not_observed_seconds: f64,
        total: TotalTime,
    },
    /// The first steps, which are slow because a model is compiled, say, took longer than all others, and those are few.
    WarmingUp {
        total: TotalTime,
    },
    /// Compilations after the first steps took longer than all the rest.
    MostlyCompiling {
        compile_seconds: f64,
        total: TotalTime,
    },
    /// No resource has a dominant share.
    NothingDominates {
        /// The resources with a share worth mentioning, largest first.
        shares: Vec<(&'static str, f64)>,
        total: TotalTime,
    },
}

/// What a job does on a GPU if nothing shows machine learning. The figures are right for inference too.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NonTrainingGpuWork {
    maps_torch: bool,
    /// The resources with a share worth mentioning, largest first.
    shares: Vec<(&'static str, f64)>,
    total: TotalTime,
    work_between_waits: Option<InferenceWork>,
}

impl NonTrainingGpuWork {
    fn new(job: &JobTimes) -> Self {
        let is_long = job.total_time.wall_seconds >= MIN_OBSERVED_SECONDS;
        let shares = is_long.then(|| mentionable_resource_seconds(job, None));
        Self {
            maps_torch: job.ranks.iter().any(|rank| rank.maps_torch),
            shares: shares.unwrap_or_default(),
            total: job.total_time,
            work_between_waits: InferenceWork::new(&job.parts),
        }
    }

    fn describe(&self) -> String {
        let lacks = match self.maps_torch {
            true => "PyTorch is mapped, but no layer of a model, training step or collective",
            false => "no framework is mapped, and no training step, collective or loader",
        };
        let wall = self.total.wall_seconds;
        let shares = match self.shares.is_empty() {
            true => String::new(),
            false => format!("; of {wall:.1} s: {}", format_seconds_by_name(&self.shares)),
        };
        let between = self.work_between_waits;
        let figures = between.map_or(String::new(), |work| format!("; {}", work.figures_text()));
        format!(
            "the job uses a GPU, but nothing shows machine learning: {lacks} was \
             observed{shares}{figures}"
        )
    }
}

/// Rule: one of these holds.
///
/// - There are no ranks, or nothing shows that they do machine learning.
/// - They compiled for most of their time, or made only a few steps after a long warm-up.
/// - They ran for less than [`MIN_OBSERVED_SECONDS`].
/// - More than [`MAX_UNKNOWN_SHARE`] of their time is unknown or was not observed.
pub(super) fn judge_too_little_evidence(job: &JobTimes) -> Option<Verdict> {
    if job.ranks.is_empty() {
        return Some(Verdict::CannotTell(Inconclusive::NoRanks));
    }
    if job.ranks.iter().all(|rank| rank.uses_gpu_without_ml) {
        return Some(Verdict::CannotTell(Inconclusive::NoMachineLearning(
            NonTrainingGpuWork::new(job),
        )));
    }
    let total = job.total_time;
    let sum = |figure: fn(&RankTimes) -> f64| job.ranks.iter().map(figure).sum::<f64>();
    let compile_seconds = sum(|rank| rank.compile);
    if compile_seconds > total.wall_seconds {
        return Some(Verdict::CannotTell(Inconclusive::MostlyCompiling {
            compile_seconds,
            total,
        }));
    }
    let walls = job.ranks.iter().map(RankTimes::wall_without_compiling);
    let longest_seconds = walls.fold(0.0, f64::max);
    if longest_seconds < MIN_OBSERVED_SECONDS {
        let reason = Inconclusive::TooShort { longest_seconds };
        return Some(Verdict::CannotTell(reason));
    }
    let not_observed_seconds = sum(|rank| rank.not_observed);
    if not_observed_seconds > MAX_UNKNOWN_SHARE * total.wall_seconds {
        return Some(Verdict::CannotTell(Inconclusive::MostlyNotObserved {
            not_observed_seconds,
            total,
        }));
    }
    let has_few_steps = job
        .ranks
        .iter()
        .any(|rank| rank.has_few_steps_after_warm_up);
    if has_few_steps && total.warm_up_seconds > total.wall_seconds {
        return Some(Verdict::CannotTell(Inconclusive::WarmingUp { total }));
    }
    let known: f64 = job.parts.iter().map(RankTimeParts::total_seconds).sum();
    let unknown_seconds = total.wall_seconds - known;
    let reason = Inconclusive::MostlyUnknown {
        unknown_seconds,
        total,
        only_infers: job.ranks.iter().all(|rank| rank.only_infers),
    };
    (unknown_seconds > MAX_UNKNOWN_SHARE * total.wall_seconds)
        .then_some(Verdict::CannotTell(reason))
}

/// The verdict if no rule applies.
pub(super) fn no_dominant_resource_verdict(job: &JobTimes) -> Verdict {
    Verdict::CannotTell(Inconclusive::NothingDominates {
        shares: mentionable_resource_seconds(job, None),
        total: job.total_time,
    })
}

impl Inconclusive {
    pub(super) fn describe(&self) -> VerdictDescription {
        VerdictDescription {
            title: "can't tell",
            bound: "cannot-tell",
            cause: None,
            straggler: None,
            evidence: self.evidence(),
            helps: None,
            next_steps: Vec::new(),
            share: None,
            at_most_seconds: None,
        }
    }

    fn evidence(&self) -> String {
        match self {
            Self::NotObserved => "nothing was observed".to_owned(),
            Self::NoRanks => "no training process was observed".to_owned(),
            Self::NoMachineLearning(work) => work.describe(),
            Self::TooShort { longest_seconds } => format!(
                "no rank was observed for longer than {longest_seconds:.2} s; a verdict needs at least {MIN_OBSERVED_SECONDS} s"
            ),
            Self::MostlyUnknown {
                unknown_seconds,
                total,
                only_infers,
            } => {
                let requests = match only_infers {
                    true => "; nothing shows training, so the job may have waited for requests",
                    false => "",
                };
                let share = total.share_text(*unknown_seconds);
                format!("the cause of waiting is unknown for {share}{requests}")
            }
            Self::MostlyNotObserved {
                not_observed_seconds,
                total,
            } => format!(
                "calls were not observed for {}; the report shows why",
                total.share_text(*not_observed_seconds)
            ),
            Self::WarmingUp { total } => format!(
                "the first steps took {:.1} s, as when a model is compiled, and all later ones {:.1} s; \
                 observe for longer",
                total.warm_up_seconds, total.wall_seconds
            ),
            Self::MostlyCompiling {
                compile_seconds,
                total,
            } => format!(
                "the model was compiled for {compile_seconds:.1} s, and all other time was {:.1} s; observe for longer, or \
                 find out what is compiled again and again with TORCH_LOGS=recompiles",
                total.wall_seconds
            ),
            Self::NothingDominates { shares, total } => format!(
                "no resource took {:.0} % of {:.1} s: {}{}",
                100.0 * MIN_BOUNDING_SHARE,
                total.wall_seconds,
                format_seconds_by_name(shares),
                total.warm_up_text()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use zernel_model::snapshot::ProcessSnapshot;
    use zernel_phase::steps::{Step, StepMark};

    use crate::record::ProcessRecord;
    use crate::report::{Observation, Report};
    use crate::times::RankTimes;
    use crate::verdict::tests::{
        assert_bound_of_cases, assert_verdict_json, json_bound_of, rank_waiting_for_gpu,
    };
    use crate::verdict::{VerdictDescription, judge_ranks};

    #[test]
    fn little_or_mixed_evidence_gives_no_cause() {
        assert_bound_of_cases(
            "cannot-tell",
            &[
                (
                    "sleeps for an unknown reason",
                    RankTimes {
                        gpu_waits: 10.0,
                        training_cpu: 10.0,
                        ..rank_waiting_for_gpu()
                    },
                ),
                (
                    "mostly unknown",
                    RankTimes {
                        unknown: 90.0,
                        gpu_waits: 8.0,
                        training_cpu: 90.0,
                        ..rank_waiting_for_gpu()
                    },
                ),
                (
                    "a bit of everything",
                    RankTimes {
                        gpu_waits: 33.0,
                        peer_waits: 8.0,
                        communication: 8.0,
                        data_waits: 20.0,
                        data_prepare: 20.0,
                        data_fetch: 0.0,
                        data_cpu_delay: 0.0,
                        max_loader_busy_share: None,
                        run_delay: 15.0,
                        training_cpu: 25.0,
                        ..rank_waiting_for_gpu()
                    },
                ),
                (
                    "too short",
                    RankTimes {
                        wall: 0.3,
                        gpu_waits: 0.3,
                        ..rank_waiting_for_gpu()
                    },
                ),
            ],
        );
    }

    #[test]
    fn processes_that_do_not_train_have_no_verdict() {
        let verdict = judge_ranks(&[]);
        assert_eq!(json_bound_of(&verdict), "cannot-tell");
        assert!(
            verdict
                .describe()
                .evidence
                .contains("no training process was observed")
        );
        // A process that initialises CUDA and sleeps has only unknown time.
        let idle = RankTimes {
            wall: 60.0,
            unknown: 60.0,
            training_cpu: 0.1,
            ..RankTimes::default()
        };
        assert_eq!(json_bound_of(&judge_ranks(&[idle])), "cannot-tell");
    }

    /// A simulation launches and waits as training does.
    #[test]
    fn other_work_on_a_gpu_has_no_verdict() {
        let simulation = RankTimes {
            only_infers: true,
            uses_gpu_without_ml: true,
            ..rank_waiting_for_gpu()
        };
        let verdict = judge_ranks(&[simulation]);
        assert_eq!(json_bound_of(&verdict), "cannot-tell");
        let evidence = verdict.describe().evidence;
        assert!(evidence.contains("no framework is mapped"), "{evidence}");
        let uses_torch = RankTimes {
            maps_torch: true,
            gpu_wait_calls: 4000.0,
            ..simulation
        };
        let evidence = judge_ranks(&[uses_torch]).describe().evidence;
        for part in [
            "no layer of a model",
            "waits for the GPU 72.0 s",
            "100 launches",
        ] {
            assert!(evidence.contains(part), "{evidence}");
        }
        assert_eq!(
            json_bound_of(&judge_ranks(&[simulation, rank_waiting_for_gpu()])),
            "gpu"
        );
    }

    /// Waits that were seen while probes were attached say nothing of the time without them.
    #[test]
    fn a_verdict_needs_half_of_the_time_observed() {
        let waits = RankTimes {
            data_waits: 100.0,
            data_prepare: 100.0,
            ..rank_waiting_for_gpu()
        };
        let paused = RankTimes {
            not_observed: 94.0,
            ..waits
        };
        let verdict = judge_ranks(&[paused]);
        assert_eq!(json_bound_of(&verdict), "cannot-tell");
        let evidence = verdict.describe().evidence;
        assert!(evidence.contains("not observed for 94.0 s"), "{evidence}");
        let mostly_observed = RankTimes {
            not_observed: 20.0,
            ..waits
        };
        let verdict = judge_ranks(&[mostly_observed]);
        assert_eq!(json_bound_of(&verdict), "input");
        assert_eq!(verdict.describe().at_most_seconds, Some(80.0));
    }

    /// A run, part by part.
    #[derive(Clone, Copy)]
    enum RunPart {
        /// Time before the first step.
        StartUp { seconds: f64 },
        /// Steps that wait for the GPU.
        Steps { count: u64, seconds: f64 },
        /// A step that compiles, in which nothing waits for the GPU.
        Compiling { seconds: f64 },
        /// A step with an evaluation, which waits for the GPU too.
        Evaluation { seconds: f64 },
    }

    /// The verdict on a process that does this, observed from its start on.
    fn judge_run(run: &[RunPart]) -> VerdictDescription {
        let mut process = ProcessSnapshot {
            first_seen_ns: 1,
            ..ProcessSnapshot::default()
        };
        process.probes.cuda_trace.launches = 1000;
        process.steps.boundary = Some(StepMark::Optimizer);
        let mut record = ProcessRecord::for_new_process(&process, 0);
        for part in run {
            let (count, seconds, copies, waits) = match *part {
                RunPart::StartUp { seconds } => (0, seconds, 0, 0.0),
                RunPart::Steps { count, seconds } => (count, seconds, 1, 0.9),
                RunPart::Compiling { seconds } => (1, seconds, 1, 0.0),
                RunPart::Evaluation { seconds } => (1, seconds, 100, 0.9),
            };
            for _ in 0..count {
                let end_seconds = process.observed_seconds + seconds;
                process.steps.recent.push(Step {
                    begin_ns: (1e9 * process.observed_seconds) as u64,
                    end_ns: (1e9 * end_seconds) as u64,
                    launches: None,
                    marks: [1, 1, 0, 0, copies, 0, 0],
                    lacks_marks: false,
                });
                process.steps.count += 1;
                process.observed_seconds = end_seconds;
            }
            if count == 0 {
                process.observed_seconds += seconds;
            }
            process.probes.cuda_trace.gpu_wait_seconds += waits * count as f64 * seconds;
            record.add_sample(&process, (1e9 * process.observed_seconds) as u64);
        }
        let observation = Observation {
            processes: vec![record.into_report()],
            ..Observation::default()
        };
        let wall = Duration::from_secs_f64(process.observed_seconds);
        Report::new(Vec::new(), wall, None, Ok(observation))
            .verdict
            .describe()
    }

    const STEPS_OF_5_SECONDS: RunPart = RunPart::Steps {
        count: 100,
        seconds: 0.05,
    };

    #[test]
    fn steps_are_judged_after_a_longer_warm_up() {
        let description = judge_run(&[RunPart::Compiling { seconds: 16.0 }, STEPS_OF_5_SECONDS]);
        assert_eq!(description.bound, "gpu", "{description:?}");
        let evidence = description.evidence;
        assert!(evidence.contains("4.5 s of 5.0 s"), "{evidence}");
        assert!(
            evidence.ends_with("; the warm-up took 16.0 s and is left out"),
            "{evidence}"
        );
    }

    #[test]
    fn few_steps_after_a_warm_up_are_not_judged() {
        for (seconds, reason) in [(0.05, "longer than 0.15 s"), (3.0, "all later ones 6.0 s")] {
            let count = if seconds < 1.0 { 3 } else { 2 };
            let steps = RunPart::Steps { count, seconds };
            let description = judge_run(&[RunPart::Compiling { seconds: 16.0 }, steps]);
            assert_eq!(description.bound, "cannot-tell", "{description:?}");
            let evidence = description.evidence;
            assert!(evidence.contains(reason), "{evidence}");
        }
    }

    #[test]
    fn an_evaluation_or_start_up_longer_than_the_steps_hides_no_verdict() {
        let evaluation = [
            STEPS_OF_5_SECONDS,
            RunPart::Evaluation { seconds: 16.0 },
            STEPS_OF_5_SECONDS,
        ];
        let start_up = [RunPart::StartUp { seconds: 16.0 }, STEPS_OF_5_SECONDS];
        for run in [&evaluation[..], &start_up] {
            let description = judge_run(run);
            assert_eq!(description.bound, "gpu", "{description:?}");
            assert!(!description.evidence.contains("warm-up"));
        }
    }

    #[test]
    fn a_job_that_compiles_has_no_verdict_yet() {
        let compiling = RankTimes {
            training_cpu: 90.0,
            gpu_waits: 5.0,
            warm_up: 130.0,
            has_few_steps_after_warm_up: true,
            ..rank_waiting_for_gpu()
        };
        let description = judge_ranks(&[compiling]).describe();
        assert_eq!(description.bound, "cannot-tell");
        assert!(description.evidence.contains("compiled"), "{description:?}");
        assert!(description.next_steps.is_empty());
    }

    #[test]
    fn a_job_that_compiles_again_and_again_has_no_verdict() {
        let compiling = RankTimes {
            wall: 100.0,
            compile: 80.0,
            unknown: 80.0,
            training_cpu: 98.0,
            launches: 1.0,
            ..RankTimes::default()
        };
        let description = judge_ranks(&[compiling]).describe();
        assert_eq!(description.bound, "cannot-tell");
        let evidence = description.evidence;
        assert!(
            evidence.starts_with("the model was compiled for 80.0 s"),
            "{evidence}"
        );
    }

    /// Compilations are left out of the time that shares are of.
    #[test]
    fn a_job_that_compiled_for_a_while_has_the_verdict_of_the_rest() {
        let rest = RankTimes {
            gpu_busy: Some(90.0),
            ..rank_waiting_for_gpu()
        };
        let compiled = RankTimes {
            wall: rest.wall + 50.0,
            unknown: rest.unknown + 50.0,
            compile: 50.0,
            ..rest
        };
        let (compiled, rest) = (judge_ranks(&[compiled]), judge_ranks(&[rest]));
        assert_eq!(compiled.describe(), rest.describe());
        assert_eq!(json_bound_of(&rest), "gpu");
    }

    #[test]
    fn the_json_keeps_its_values() {
        assert_verdict_json(&[], &json!(["cannot-tell", null, null, null, null]));
    }
}
