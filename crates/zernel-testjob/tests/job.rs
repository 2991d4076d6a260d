//! A job does what its plan says, and says when.

use std::process::ExitCode;

use zernel_testjob::{Cause, Job, Load, Part, Plan, act};
use zernel_testkit::trial;

fn main() -> ExitCode {
    if let Some(code) = act() {
        return code.into();
    }
    zernel_testkit::main([
        trial("everything_in_a_plan_happens", &[], everything_happens),
        trial("collectives_may_overlap", &[], collectives_may_overlap),
        trial("a_rank_that_fails_ends_the_job", &[], failure_ends_the_job),
    ])
}

/// A job of a few short steps.
fn short(seed: u64) -> Plan {
    Plan {
        steps: 12,
        load: Load::Network,
        load_us: 2_000,
        ..Plan::new(Cause::Communication, seed)
    }
}

fn count(job: &Job, rank: u32, part: Part) -> usize {
    let stamps = job.stamps(rank).unwrap();
    stamps.iter().filter(|stamp| stamp.part == part).count()
}

fn everything_happens() {
    let plan = Plan {
        accumulate: 3,
        evaluate_every: 4,
        evaluate_batches: 2,
        checkpoint_every: 6,
        checkpoint_bytes: 300_000,
        warm_up_steps: 2,
        spins: true,
        ..short(1)
    };
    let job = Job::new(plan).unwrap();
    assert!(job.command().unwrap().status().unwrap().success());
    for rank in 0..2 {
        let parts = [
            (Part::WarmUp, 2),
            (Part::Step, 10),
            (Part::Evaluation, 3),
            (Part::Checkpoint, 2),
        ];
        for (part, expected) in parts {
            assert_eq!(count(&job, rank, part), expected, "{part:?}");
        }
        let mut stamps = job.stamps(rank).unwrap();
        // These lie within steps.
        stamps.retain(|stamp| !matches!(stamp.part, Part::Data | Part::Update));
        assert!(stamps.iter().all(|stamp| stamp.start_ns < stamp.end_ns));
        let in_order = stamps
            .windows(2)
            .all(|pair| pair[0].end_ns <= pair[1].start_ns);
        assert!(in_order, "{stamps:?}");
    }
}

fn collectives_may_overlap() {
    let job = Job::new(Plan {
        overlaps: true,
        ..short(2)
    });
    let job = job.unwrap();
    assert!(job.command().unwrap().status().unwrap().success());
    assert_eq!(count(&job, 1, Part::Step), 10);
}

fn failure_ends_the_job() {
    let job = Job::new(short(3)).unwrap();
    std::fs::remove_file(job.library("libnccl.so.2")).unwrap();
    let status = job.command().unwrap().status().unwrap();
    assert_eq!(status.code(), Some(1));
}
