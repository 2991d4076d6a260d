//! A job does what its plan says, and its stamps show when.

use std::process::ExitCode;

use zernel_testjob::{Bottleneck, Job, JobPart, JobPlan, LoadMethod, run_part_of_job};
use zernel_testkit::trial;

fn main() -> ExitCode {
    if let Some(code) = run_part_of_job() {
        return code.into();
    }
    zernel_testkit::main([
        trial(
            "everything_in_a_plan_happens",
            &[],
            everything_in_a_plan_happens,
        ),
        trial("collectives_may_overlap", &[], collectives_may_overlap),
        trial(
            "a_rank_that_fails_ends_the_job",
            &[],
            a_rank_that_fails_ends_the_job,
        ),
    ])
}

/// The plan of a job with a few short steps.
fn short_plan(seed: u64) -> JobPlan {
    JobPlan {
        steps: 12,
        load: LoadMethod::Network,
        load_us: 2_000,
        ..JobPlan::new(Bottleneck::Communication, seed)
    }
}

fn count_parts(job: &Job, rank: u32, part: JobPart) -> usize {
    let stamps = job.read_stamps(rank).unwrap();
    stamps.iter().filter(|stamp| stamp.part == part).count()
}

fn everything_in_a_plan_happens() {
    let plan = JobPlan {
        accumulate: 3,
        evaluate_every: 4,
        evaluate_batches: 2,
        checkpoint_every: 6,
        checkpoint_bytes: 300_000,
        warm_up_steps: 2,
        spins: true,
        ..short_plan(1)
    };
    let job = Job::new(plan).unwrap();
    assert!(job.job_command().unwrap().status().unwrap().success());
    for rank in 0..2 {
        let parts = [
            (JobPart::WarmUp, 2),
            (JobPart::Step, 10),
            (JobPart::Evaluation, 3),
            (JobPart::Checkpoint, 2),
        ];
        for (part, expected) in parts {
            assert_eq!(count_parts(&job, rank, part), expected, "{part:?}");
        }
        let mut stamps = job.read_stamps(rank).unwrap();
        // These parts lie within steps.
        stamps.retain(|stamp| !matches!(stamp.part, JobPart::Data | JobPart::Update));
        assert!(stamps.iter().all(|stamp| stamp.start_ns < stamp.end_ns));
        let in_order = stamps
            .windows(2)
            .all(|pair| pair[0].end_ns <= pair[1].start_ns);
        assert!(in_order, "{stamps:?}");
    }
}

fn collectives_may_overlap() {
    let job = Job::new(JobPlan {
        overlaps: true,
        ..short_plan(2)
    });
    let job = job.unwrap();
    assert!(job.job_command().unwrap().status().unwrap().success());
    assert_eq!(count_parts(&job, 1, JobPart::Step), 10);
}

fn a_rank_that_fails_ends_the_job() {
    let job = Job::new(short_plan(3)).unwrap();
    std::fs::remove_file(job.library_path("libnccl.so.2")).unwrap();
    let status = job.job_command().unwrap().status().unwrap();
    assert_eq!(status.code(), Some(1));
}
