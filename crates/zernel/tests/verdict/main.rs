//! Compares the verdict of `zernel run` with the known bottlenecks of jobs, and with programs that do not train.

mod steps;
mod torch;
mod without_training;

use std::process::{Command, ExitCode, Output};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use zernel_ebpf::capability::Capability;
use zernel_testjob::{Bottleneck, Job, JobPlan, LoadMethod, SlownessCause, run_job_process};
use zernel_testkit::needs::bpf;
use zernel_testkit::{root, trial};

const SEED_COUNT: u64 = 5;

/// `ZERNEL_SEED=n` runs other jobs.
fn seeds_to_run() -> std::ops::Range<u64> {
    let first = std::env::var("ZERNEL_SEED").ok();
    let first = first.and_then(|seed| seed.parse().ok()).unwrap_or(0);
    first..first + SEED_COUNT
}

fn main() -> ExitCode {
    if let Some(code) = run_job_process() {
        return code.into();
    }
    let observing = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    let jobs = Bottleneck::ALL.into_iter().flat_map(|cause| {
        let name = move |seed| format!("{}_{seed}_is_found", cause.name().replace('-', "_"));
        seeds_to_run().map(move |seed| {
            trial(&name(seed), &observing, move || {
                assert_expected_verdict(JobPlan::new(cause, seed));
            })
        })
    });
    let more = [
        trial("a_job_with_pauses_gets_its_verdict", &observing, || {
            assert_expected_verdict(plan_with_pauses(&JobPlan::new(Bottleneck::Gpu, 0)));
        }),
        trial(
            "busy_background_threads_are_no_bottleneck",
            &observing,
            busy_background_threads_are_no_bottleneck,
        ),
        trial(
            "overlapping_collectives_are_mentioned",
            &observing,
            overlapping_collectives_are_mentioned,
        ),
    ];
    let other = without_training::trials_without_training(&observing).into_iter();
    let other = other.chain(steps::step_trials(&observing));
    let other = other.chain(torch::torch_trials(&observing));
    zernel_testkit::main(jobs.chain(more).chain(other))
}

/// The lock lets one job run at a time, because two jobs would delay each other.
static MACHINE_LOCK: Mutex<()> = Mutex::new(());

/// Runs a command with its report on stdout, as JSON.
fn report_on(prepare: impl FnOnce(&mut Command), command: &[&str]) -> (Value, Output) {
    let _machine = MACHINE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let mut run = Command::new(env!("CARGO_BIN_EXE_zernel"));
    run.args(["run", "--json", "-"]);
    prepare(&mut run);
    let output = run.arg("--").args(command).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout);
    let report = report.unwrap_or_else(|error| panic!("{error}: {printed}"));
    (report, output)
}

/// Runs a job alone on the machine.
fn report_on_job(job: &Job) -> (Value, String) {
    report_on_job_with_probes(job, &["libcuda.so.1", "libnccl.so.2", "libtorch_cpu.so"])
}

/// Runs a job alone on the machine. These libraries are probed before the job starts, because the tests are about the verdict.
fn report_on_job_with_probes(job: &Job, libraries: &[&str]) -> (Value, String) {
    let program = std::env::current_exe().unwrap();
    let attach = |run: &mut Command| {
        for library in libraries {
            run.arg("--library").arg(job.library_path(library));
        }
        job.set_job_environment_with_priority(run);
    };
    let (report, output) = report_on(attach, &[program.to_str().unwrap()]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}");
    let plan = job.plan();
    eprintln!("{} {}: {}", plan.cause.name(), plan.seed, report["verdict"]);
    (report, printed)
}

/// The phases of a rank are found although busy background threads leave no CPU idle.
fn busy_background_threads_are_no_bottleneck() {
    let report = assert_expected_verdict(JobPlan {
        busy_threads: 3,
        ..JobPlan::new(Bottleneck::Host, 0)
    });
    for rank in report["ranks"].as_array().unwrap() {
        let phases = &rank["training"]["phases"];
        let seconds = |phase: &str| phases[phase].as_f64().unwrap();
        assert!(seconds("gpu_compute") > seconds("data_loading"), "{phases}");
    }
}

fn assert_expected_verdict(plan: JobPlan) -> Value {
    let job = Job::new(plan).unwrap();
    let (report, printed) = report_on_job(&job);
    let verdict = &report["verdict"];
    let (bound, part) = expected_bottleneck(job.plan());
    assert_eq!(verdict["bound"], bound, "{printed}");
    assert_eq!(verdict["cause"], part, "{printed}");
    let slow = job.plan().slow.map(|slow| slow.rank);
    let straggler = verdict["straggler"].as_u64();
    assert_eq!(straggler, slow.map(u64::from), "{printed}");
    for rank in 0..job.plan().ranks {
        assert!(job.read_stamps(rank).unwrap().len() >= job.plan().steps as usize);
    }
    report
}

/// Returns the plan of the same job with evaluations, checkpoints and other pauses.
fn plan_with_pauses(plan: &JobPlan) -> JobPlan {
    JobPlan {
        steps: plan.steps / 2,
        micro_batches_per_step: 2,
        evaluate_every: 10,
        evaluate_batches: 5,
        checkpoint_every: 15,
        checkpoint_bytes: 1 << 20,
        warm_up_steps: 4,
        ..plan.clone()
    }
}

/// The work of a GPU during a wait is unknown, so the verdict must mention that it may be collectives.
fn overlapping_collectives_are_mentioned() {
    let plan = JobPlan {
        overlaps_reductions: true,
        ..JobPlan::new(Bottleneck::Communication, 0)
    };
    let (report, printed) = report_on_job(&Job::new(plan).unwrap());
    let verdict = &report["verdict"];
    assert_eq!(verdict["bound"], "gpu", "{printed}");
    let evidence = verdict["evidence"].as_str().unwrap();
    assert!(evidence.contains("may be collectives"), "{printed}");
    assert!(
        verdict["helps"].as_str().unwrap().contains("fewer bytes"),
        "{printed}"
    );
}

/// The expected bottleneck of a job, and its detail.
fn expected_bottleneck(plan: &JobPlan) -> (&'static str, &'static str) {
    let loading = |load| match load {
        LoadMethod::Burn => "prepare",
        LoadMethod::Disk | LoadMethod::Network => "fetch",
        LoadMethod::Sleep => "other-data",
    };
    match plan.cause {
        Bottleneck::LoaderCpu | Bottleneck::LoaderFetch => ("input", loading(plan.load_method)),
        Bottleneck::Gpu => ("gpu", "gpu"),
        Bottleneck::Communication => ("communication", "communication"),
        Bottleneck::CpuNoise => ("cpu-scheduler", "cpu-delay"),
        Bottleneck::Host => ("host", "host"),
        Bottleneck::Straggler => {
            let how = plan.slow.expect("a straggler").how;
            let part = match how {
                SlownessCause::SlowLoaderCpu => "prepare",
                SlownessCause::SlowStorage => "fetch",
                SlownessCause::SlowKernels => "gpu",
                SlownessCause::SlowLaunches => "host",
                SlownessCause::BusyCpu => "cpu-delay",
            };
            ("straggler", part)
        }
    }
}
