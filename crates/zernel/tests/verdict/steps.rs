//! Compares the steps that `zernel run` finds with those that the ranks record.

use libtest_mimic::Trial;
use serde_json::Value;
use zernel_testjob::{Bottleneck, Job, JobPart, JobPlan, PartStamp};
use zernel_testkit::{Need, trial};

use crate::report_on_job;

type PlanChange = fn(&mut JobPlan);

/// Loops of all kinds, each with what is special about it.
const LOOP_KINDS: [(&str, PlanChange); 6] = [
    ("plain", |_| {}),
    ("accumulating", |plan| {
        plan.micro_batches_per_step = 4;
        plan.steps = 40;
    }),
    ("evaluating", |plan| {
        plan.evaluate_every = 25;
        plan.evaluate_batches = 20;
    }),
    ("checkpointing", |plan| {
        plan.checkpoint_every = 25;
        plan.checkpoint_bytes = 128 << 20;
    }),
    ("overlapping", |plan| plan.overlaps_reductions = true),
    // No gradients are reduced: only batches separate steps.
    ("alone", |plan| {
        plan.ranks = 1;
        plan.buckets = 0;
    }),
];

pub(crate) fn step_trials(needs: &[Need]) -> Vec<Trial> {
    LOOP_KINDS
        .into_iter()
        .map(|(name, change)| {
            let name = format!("steps_of_a_loop_that_is_{name}");
            trial(&name, needs, move || assert_steps_are_found(change))
        })
        .collect()
}

fn assert_steps_are_found(change: PlanChange) {
    let mut plan = JobPlan::new(Bottleneck::Gpu, 7);
    plan.kernel_us = 1000;
    plan.jitter = 0.1;
    plan.launches = 10;
    plan.steps = 120;
    change(&mut plan);
    let job = Job::new(plan).unwrap();
    let (report, printed) = report_on_job(&job);
    let ranks = report["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), job.plan().ranks as usize, "{printed}");
    for (number, rank) in ranks.iter().enumerate() {
        let stamps = job.read_stamps(number as u32).unwrap();
        assert_steps_agree_with_stamps(&rank["steps"], &stamps, &printed);
        assert_launches(rank, job.plan(), &printed);
    }
}

/// Launches per step and launches in all are within 5 % of the truth. The launches of an evaluation count as far as
/// they were seen: while launches are sampled, windows miss most of them.
fn assert_launches(rank: &Value, plan: &JobPlan, printed: &str) {
    let number = |key: &str| rank[key].as_f64().expect("a number");
    let (launches, error) = (number("launches"), number("launches_error"));
    let per_step = number("launches_per_step");
    let all = f64::from(plan.launches_per_rank());
    let mut without_evaluation = plan.clone();
    without_evaluation.evaluate_every = 0;
    let in_steps = f64::from(without_evaluation.launches_per_rank());
    let truth = in_steps / f64::from(plan.steps);
    eprintln!(
        "{launches} ± {error} launches of {in_steps} to {all}, {per_step} per step of {truth}"
    );
    assert!(launches >= 0.95 * in_steps, "{in_steps}: {printed}");
    assert!(launches <= 1.05 * all, "{all}: {printed}");
    assert!(per_step >= 0.95 * truth, "{truth}: {printed}");
    assert!(
        per_step <= 1.05 * all / f64::from(plan.steps),
        "{all}: {printed}"
    );
    assert!(error < 0.25 * launches, "{printed}");
}

fn assert_steps_agree_with_stamps(found: &Value, stamps: &[PartStamp], printed: &str) {
    let is_step = |stamp: &&PartStamp| matches!(stamp.part, JobPart::Step | JobPart::WarmUp);
    let steps = stamps.iter().filter(is_step).count();
    assert_eq!(found["count"].as_u64(), Some(steps as u64), "{printed}");
    let usual = stamps.iter().filter(|stamp| stamp.part == JobPart::Step);
    let mut usual: Vec<u64> = usual.map(|stamp| stamp.end_ns - stamp.start_ns).collect();
    usual.sort_unstable();
    let truth = usual[usual.len() / 2] as f64 / 1e9;
    let median = found["median_seconds"].as_f64().unwrap();
    eprintln!("median {median} of {truth}, {found}");
    assert!(
        (median - truth).abs() <= 0.02 * truth,
        "{median} of {truth}: {printed}"
    );
    // The time between steps is not counted as steps.
    let is_between =
        |stamp: &&PartStamp| matches!(stamp.part, JobPart::Evaluation | JobPart::Checkpoint);
    let between = stamps.iter().filter(is_between);
    let between: Vec<u64> = between.map(|stamp| stamp.end_ns - stamp.start_ns).collect();
    let pauses = found["pauses"].as_array().unwrap().len();
    assert_eq!(pauses, between.len().min(5), "{printed}");
    let paused = between.iter().sum::<u64>() as f64 / 1e9;
    let seen = found["pause_seconds"].as_f64().unwrap();
    // A rank that waits for the checkpoint of another has a longer pause than its own.
    assert!(seen >= 0.9 * paused - 0.01, "{seen} of {paused}: {printed}");
}
