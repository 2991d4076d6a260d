//! Compares phases and verdicts of PyTorch loops with what the loops announce.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::sync::PoisonError;
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;
use serde_json::Value;
use zernel_testjob::{Bottleneck, Job, JobPart, JobPlan, LoadMethod};
use zernel_testkit::{Need, trial};

use crate::{MACHINE_LOCK, report_on_job, report_on_job_with_probes};

/// By how many points a share of the time may be off.
const MAX_SHARE_ERROR_POINTS: f64 = 3.0;

pub(crate) fn torch_trials(needs: &[Need]) -> [Trial; 10] {
    [
        trial("announced_phases_are_the_jobs_own", needs, || {
            drop(assert_phases_are_as_planned(announcing_plan(1)));
        }),
        trial("micro_batches_are_no_data_loading", needs, || {
            drop(assert_phases_are_as_planned(JobPlan {
                loaders: 1,
                load_us: 9_000,
                ..announcing_plan(4)
            }));
        }),
        trial(
            "a_loop_that_prepares_its_batches_is_input_bound",
            needs,
            || {
                let report = assert_phases_are_as_planned(JobPlan {
                    loaders: 0,
                    load_us: 12_000,
                    steps: 160,
                    ..announcing_plan(1)
                });
                assert_eq!(report["verdict"]["bound"], "input", "{report}");
                assert_eq!(report["verdict"]["cause"], "prepare", "{report}");
            },
        ),
        trial("updates_of_a_backward_pass_are_part_of_it", needs, || {
            drop(assert_phases_are_as_planned(JobPlan {
                updates_in_backward: true,
                ..announcing_plan(1)
            }));
        }),
        trial(
            "inference_has_no_optimizer_step",
            needs,
            inference_has_no_optimizer_step,
        ),
        trial(
            "tensors_without_layers_have_no_verdict",
            needs,
            tensors_without_layers_have_no_verdict,
        ),
        trial(
            "torch_without_probes_is_not_taken_for_other_work",
            needs,
            torch_without_probes_is_not_taken_for_other_work,
        ),
        trial(
            "reductions_through_the_cpu_are_communication",
            needs,
            reductions_through_the_cpu_are_communication,
        ),
        trial(
            "sleeping_loaders_need_more_workers",
            needs,
            sleeping_loaders_need_more_workers,
        ),
        trial("attach_and_run_agree", needs, attach_and_run_agree),
    ]
}

/// One rank of PyTorch without collectives.
fn announcing_plan(micro_batches_per_step: u32) -> JobPlan {
    JobPlan {
        ranks: 1,
        buckets: 0,
        announces_as_pytorch: true,
        micro_batches_per_step,
        launches: 10,
        launch_us: 60,
        kernel_us: 150,
        optimizer_launches: 20,
        steps: 400 / micro_batches_per_step,
        ..JobPlan::new(Bottleneck::Gpu, 4)
    }
}

fn only_rank(report: &Value) -> &Value {
    &report["ranks"].as_array().expect("ranks")[0]
}

/// Percentage of the training in a phase.
fn phase_percent(rank: &Value, phase: &str) -> f64 {
    let training = &rank["training"];
    let wall = training["wall_seconds"].as_f64().expect("training");
    100.0 * training["phases"][phase].as_f64().expect(phase) / wall
}

/// Compares the phases of a job with its own stamps. Returns the report.
fn assert_phases_are_as_planned(plan: JobPlan) -> Value {
    let job = Job::new(plan).unwrap();
    let (report, printed) = report_on_job(&job);
    let stamps = job.read_stamps(0).unwrap();
    let first = stamps.iter().find(|stamp| stamp.part == JobPart::Step);
    let begin_ns = first.expect("steps").start_ns;
    let seconds = |part: JobPart| {
        let own = stamps
            .iter()
            .filter(|stamp| stamp.part == part && stamp.start_ns >= begin_ns);
        own.map(|stamp| stamp.end_ns - stamp.start_ns).sum::<u64>() as f64
    };
    for (phase, part) in [
        ("data_loading", JobPart::Data),
        ("optimizer_step", JobPart::Update),
    ] {
        let truth = 100.0 * seconds(part) / seconds(JobPart::Step);
        let seen = phase_percent(only_rank(&report), phase);
        eprintln!("{phase}: {seen:.1} % of {truth:.1} %");
        assert!(
            (seen - truth).abs() <= MAX_SHARE_ERROR_POINTS,
            "{phase}: {printed}"
        );
    }
    assert_eq!(
        phase_percent(only_rank(&report), "nccl_collective"),
        0.0,
        "{printed}"
    );
    assert!(
        phase_percent(only_rank(&report), "unknown") < MAX_SHARE_ERROR_POINTS,
        "{printed}"
    );
    report
}

fn inference_has_no_optimizer_step() {
    let plan = JobPlan {
        ranks: 1,
        buckets: 0,
        only_infers: true,
        launches: 100,
        launch_us: 40,
        kernel_us: 3,
        steps: 600,
        ..JobPlan::new(Bottleneck::Host, 0)
    };
    let (report, printed) = report_on_job(&Job::new(plan).unwrap());
    let rank = only_rank(&report);
    for absent in ["optimizer_step", "nccl_collective", "data_loading"] {
        assert!(phase_percent(rank, absent) < 1.0, "{absent}: {printed}");
    }
    assert!(phase_percent(rank, "gpu_compute") > 90.0, "{printed}");
    let verdict = &report["verdict"];
    assert_eq!(verdict["bound"], "host", "{printed}");
    let evidence = verdict["evidence"].as_str().unwrap();
    assert!(evidence.contains("nothing shows training"), "{printed}");
}

/// A simulation that uses tensors of `PyTorch` launches and waits as inference does, and calls no layer of a model.
fn tensors_without_layers_have_no_verdict() {
    let verdict = |has_layers| {
        let plan = JobPlan {
            ranks: 1,
            buckets: 0,
            announces_as_pytorch: true,
            only_infers: true,
            has_layers,
            launches: 100,
            launch_us: 40,
            kernel_us: 3,
            steps: 600,
            ..JobPlan::new(Bottleneck::Host, 0)
        };
        let (report, printed) = report_on_job(&Job::new(plan).unwrap());
        let evidence = report["verdict"]["evidence"].as_str().unwrap().to_owned();
        (report["verdict"]["bound"].clone(), evidence, printed)
    };
    let (bound, evidence, printed) = verdict(true);
    assert_eq!(bound, "host", "{printed}");
    assert!(evidence.contains("nothing shows training"), "{printed}");
    let (bound, evidence, printed) = verdict(false);
    assert_eq!(bound, "cannot-tell", "{printed}");
    for part in ["no layer of a model", "host work", "100 launches"] {
        assert!(evidence.contains(part), "{printed}");
    }
}

/// A monolithic build of `PyTorch` is one library under another name. Its functions have no probes.
fn torch_without_probes_is_not_taken_for_other_work() {
    let job = Job::new(announcing_plan(1)).unwrap();
    let library = job.library_path("libtorch_cpu.so");
    let monolithic = job.library_path("libtorch.so");
    fs::rename(&library, &monolithic).unwrap();
    symlink(&monolithic, &library).unwrap();
    let (report, printed) = report_on_job_with_probes(&job, &["libcuda.so.1", "libnccl.so.2"]);
    assert_ne!(report["verdict"]["bound"], "cannot-tell", "{printed}");
    let evidence = report["verdict"]["evidence"].as_str().unwrap();
    assert!(!evidence.contains("nothing shows"), "{printed}");
    let rank = only_rank(&report);
    for unknown in ["layer_calls", "announcements"] {
        assert_eq!(rank[unknown], Value::Null, "{printed}");
    }
    let problems = report["problems"].as_array().unwrap();
    let is_reported = |problem: &Value| problem.as_str().unwrap().contains("were not observed");
    assert!(problems.iter().any(is_reported), "{printed}");
}

fn reductions_through_the_cpu_are_communication() {
    let plan = JobPlan {
        gloo_us: 15_000,
        ..announcing_plan(1)
    };
    let (report, printed) = report_on_job(&Job::new(plan).unwrap());
    assert_eq!(report["verdict"]["bound"], "communication", "{printed}");
    let rank = only_rank(&report);
    assert!(phase_percent(rank, "nccl_collective") > 50.0, "{printed}");
    let times = &rank["training"];
    let waits = times["peer_wait_seconds"].as_f64().unwrap();
    assert!(
        waits <= times["wall_seconds"].as_f64().unwrap(),
        "{printed}"
    );
}

fn sleeping_loaders_need_more_workers() {
    let plan = JobPlan {
        ranks: 1,
        buckets: 0,
        load_method: LoadMethod::Sleep,
        loaders: 1,
        load_us: 25_000,
        steps: 100,
        ..JobPlan::new(Bottleneck::LoaderCpu, 0)
    };
    let (report, printed) = report_on_job(&Job::new(plan).unwrap());
    let verdict = &report["verdict"];
    assert_eq!(verdict["bound"], "input", "{printed}");
    let first = &verdict["next_steps"][0];
    assert_eq!(first["what"], "more workers", "{printed}");
    assert!(printed.contains("num_workers=N"), "{printed}");
}

/// A job that is killed when the test ends.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn attach_and_run_agree() {
    let plan = JobPlan {
        ranks: 2,
        steps: 4_000,
        ..JobPlan::new(Bottleneck::LoaderCpu, 1)
    };
    let _machine = MACHINE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let job = Job::new(plan).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    job.set_job_environment_with_priority(&mut command);
    let running = KilledOnDrop(command.stdout(Stdio::null()).spawn().unwrap());
    thread::sleep(Duration::from_secs(2));
    for _ in 0..3 {
        let mut attach = Command::new(env!("CARGO_BIN_EXE_zernel"));
        attach.args(["attach", &running.0.id().to_string()]);
        attach.args(["--for", "4s", "--json", "-"]);
        // `zernel attach` gets the same priority as the job, because it would hardly run otherwise.
        job.set_job_environment_with_priority(&mut attach);
        let output = attach.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        assert_eq!(report["verdict"]["bound"], "input", "{printed}");
        for rank in report["ranks"].as_array().unwrap() {
            let times = &rank["training"];
            let waits = &times["data_waits"];
            let waited: f64 = ["prepare", "fetch", "sched", "other"]
                .iter()
                .map(|cause| waits[cause].as_f64().unwrap())
                .sum();
            let loading = phase_percent(rank, "data_loading");
            let wall = times["wall_seconds"].as_f64().unwrap();
            eprintln!("waits {waited:.2} s of {wall:.2} s, loading {loading:.1} %");
            assert!((100.0 * waited / wall - loading).abs() < 15.0, "{printed}");
        }
    }
}
