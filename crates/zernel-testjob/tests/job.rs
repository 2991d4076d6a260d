//! A job does what its plan says, and its stamps show when.

use std::process::ExitCode;

use zernel_testjob::{Bottleneck, Job, JobPart, JobPlan, LoadMethod, run_job_process};
use zernel_testkit::trial;

fn main() -> ExitCode {
    if let Some(code) = run_job_process() {
        return code.into();
    }
    zernel_testkit::main([
        trial(
            "job_runs_all_parts_of_its_plan",
            &[],
            job_runs_all_parts_of_its_plan,
        ),
        trial(
            "overlapped_collectives_complete_all_steps",
            &[],
            overlapped_collectives_complete_all_steps,
        ),
        trial("failing_rank_ends_job", &[], failing_rank_ends_job),
    ])
}

/// The plan of a job with a few short steps.
fn short_job_plan(seed: u64) -> JobPlan {
    JobPlan {
        steps: 12,
        load_method: LoadMethod::Network,
        load_us: 2_000,
        ..JobPlan::new(Bottleneck::Communication, seed)
    }
}

fn count_parts(job: &Job, rank: u32, part: JobPart) -> usize {
    let stamps = job.read_stamps(rank).unwrap();
    stamps.iter().filter(|stamp| stamp.part == part).count()
}

fn job_runs_all_parts_of_its_plan() {
    let plan = JobPlan {
        micro_batches_per_step: 3,
        evaluate_every: 4,
        evaluate_batches: 2,
        checkpoint_every: 6,
        checkpoint_bytes: 300_000,
        warm_up_steps: 2,
        spins_for_gpu: true,
        ..short_job_plan(1)
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

fn overlapped_collectives_complete_all_steps() {
    let job = Job::new(JobPlan {
        overlaps_reductions: true,
        ..short_job_plan(2)
    });
    let job = job.unwrap();
    assert!(job.job_command().unwrap().status().unwrap().success());
    assert_eq!(count_parts(&job, 1, JobPart::Step), 10);
}

fn failing_rank_ends_job() {
    let job = Job::new(short_job_plan(3)).unwrap();
    std::fs::remove_file(job.library_path("libnccl.so.2")).unwrap();
    let status = job.job_command().unwrap().status().unwrap();
    assert_eq!(status.code(), Some(1));
}
