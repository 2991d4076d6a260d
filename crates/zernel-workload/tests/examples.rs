//! The example specs of the repository run, with or without the software GPU.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use zernel_workload::WorkloadSpec;
use zernel_workload::work::{GpuBackend, MlTraining};
use zernel_workload::{ReportTable, WorkType};

fn example_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../examples")
        .join(name)
}

/// Runs a spec until every group has made progress.
fn run_until_progress(spec: &WorkloadSpec) {
    let outcome =
        spec.run(
            |progress| match progress.rounds.iter().all(|(_, rounds)| *rounds > 2) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            },
        );
    let outcome = outcome.unwrap();
    assert!(
        outcome.reports.iter().all(|report| report.completed),
        "{}",
        ReportTable(&outcome.reports)
    );
}

#[test]
fn the_batch_example_makes_progress() {
    run_until_progress(&WorkloadSpec::load(&example_path("mixed.toml")).unwrap());
}

#[test]
fn the_wake_up_example_makes_progress() {
    run_until_progress(&WorkloadSpec::load(&example_path("wakeups.toml")).unwrap());
}

#[test]
fn the_training_example_needs_no_software_gpu() {
    let text = std::fs::read_to_string(example_path("training.toml")).unwrap();
    let with_gpu = text
        .lines()
        .filter(|line| line.starts_with("gpu ="))
        .count();
    assert_eq!(with_gpu, 1);
    let without: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("gpu ="))
        .collect();
    let spec = WorkloadSpec::parse(&without.join("\n"), "training.toml").unwrap();
    let cpu_time = MlTraining::default().gpu;
    assert!(matches!(&spec.groups[0].work_type, WorkType::MlTraining(job) if job.gpu == cpu_time));
    assert_eq!(cpu_time, GpuBackend::CpuTime);
    run_until_progress(&spec);
}
