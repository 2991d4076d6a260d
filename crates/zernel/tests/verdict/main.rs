//! The verdict of `zernel run`, held against jobs whose bottleneck is known, and against programs that
//! have none.

mod other;
mod steps;

use std::process::{Command, ExitCode, Output};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde_json::Value;
use zernel_ebpf::capability::Capability;
use zernel_testjob::{Cause, Job, Load, Plan, Slowness, act};
use zernel_testkit::{Need, root, trial};

const SEEDS: u64 = 5;

fn main() -> ExitCode {
    if let Some(code) = act() {
        return code.into();
    }
    let observing = [root(), bpf()];
    let jobs = Cause::ALL.into_iter().flat_map(|cause| {
        let name = move |seed| format!("{}_{seed}_is_told", cause.name().replace('-', "_"));
        (0..SEEDS).map(move |seed| trial(&name(seed), &observing, move || is_told(cause, seed)))
    });
    zernel_testkit::main(
        jobs.chain(other::trials(&observing))
            .chain(steps::trials(&observing)),
    )
}

/// The need for a kernel that loads BPF programs for us.
fn bpf() -> Need {
    Need {
        name: "bpf",
        check: || {
            static CHECKED: OnceLock<Result<(), String>> = OnceLock::new();
            let check = || {
                let tried = Capability::BtfTracepoint.try_out();
                tried.map_err(|error| error.to_string())
            };
            CHECKED.get_or_init(check).clone()
        },
    }
}

/// One job at a time: two would hold each other up.
static MACHINE: Mutex<()> = Mutex::new(());

/// Runs a command with its report on stdout, as JSON.
fn report_on(prepare: impl FnOnce(&mut Command), command: &[&str]) -> (Value, Output) {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut run = Command::new(env!("CARGO_BIN_EXE_zernel"));
    run.args(["run", "--json", "-"]);
    prepare(&mut run);
    let output = run.arg("--").args(command).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout);
    let report = report.unwrap_or_else(|error| panic!("{error}: {said}"));
    (report, output)
}

fn is_told(cause: Cause, seed: u64) {
    let job = Job::new(Plan::new(cause, seed)).unwrap();
    let program = std::env::current_exe().unwrap();
    // Attached before it starts: this is about the verdict.
    let attach = |run: &mut Command| {
        for library in ["libcuda.so.1", "libnccl.so.2"] {
            run.arg("--library").arg(job.library(library));
        }
        job.alone(run);
    };
    let (report, output) = report_on(attach, &[program.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let verdict = &report["verdict"];
    eprintln!("{} {seed}: {verdict}", cause.name());
    let (bound, part) = expected(job.plan());
    assert_eq!(verdict["bound"], bound, "{said}");
    assert_eq!(verdict["cause"], part, "{said}");
    let slow = job.plan().slow.map(|slow| slow.rank);
    let straggler = verdict["straggler"].as_u64();
    assert_eq!(straggler, slow.map(u64::from), "{said}");
    for rank in 0..job.plan().ranks {
        assert!(job.stamps(rank).unwrap().len() >= job.plan().steps as usize);
    }
}

/// What bounds a job, and in what.
fn expected(plan: &Plan) -> (&'static str, &'static str) {
    let loading = |load| match load {
        Load::Burn => "prepare",
        Load::Disk | Load::Network => "fetch",
    };
    match plan.cause {
        Cause::LoaderCpu | Cause::LoaderFetch => ("input", loading(plan.load)),
        Cause::Gpu => ("gpu", "gpu"),
        Cause::Communication => ("communication", "communication"),
        Cause::CpuNoise => ("cpu-scheduler", "cpu-delay"),
        Cause::Host => ("host", "host"),
        Cause::Straggler => {
            let how = plan.slow.expect("a straggler").how;
            let part = match how {
                Slowness::Prepares => "prepare",
                Slowness::Fetches => "fetch",
                Slowness::Computes => "gpu",
                Slowness::Launches => "host",
                Slowness::Delayed => "cpu-delay",
            };
            ("straggler", part)
        }
    }
}
