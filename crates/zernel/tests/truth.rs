//! `zernel truth record` and `zernel truth score` on jobs of the software GPU, which label their own time.

use std::path::Path;
use std::process::{Command, ExitCode, Output};

use serde_json::Value;
use zernel_ebpf::capability::Capability;
use zernel_testjob::{Bottleneck, Job, JobPlan, run_job_process};
use zernel_testkit::needs::bpf;
use zernel_testkit::{root, trial};

fn main() -> ExitCode {
    if let Some(code) = run_job_process() {
        return code.into();
    }
    let observing = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    zernel_testkit::main([
        trial(
            "a_recorded_job_is_scored",
            &observing,
            a_recorded_job_is_scored,
        ),
        trial("exit_codes_are_passed_on", &observing, || {
            let folder = tempfile::tempdir().unwrap();
            let output = record_command(
                &folder.path().join("trace"),
                |_| {},
                &["sh", "-c", "exit 3"],
            );
            assert_eq!(output.status.code(), Some(3));
        }),
        trial(
            "a_file_that_is_no_trace_is_named",
            &[],
            a_file_that_is_no_trace_is_named,
        ),
        trial(
            "wrong_usage_does_not_run_the_command",
            &[],
            wrong_usage_does_not_run_the_command,
        ),
    ])
}

fn zernel_command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_zernel"))
}

fn record_command(trace: &Path, prepare: impl FnOnce(&mut Command), command: &[&str]) -> Output {
    let mut record = zernel_command();
    record.args(["truth", "record", "-o"]).arg(trace);
    prepare(&mut record);
    record.arg("--").args(command).output().unwrap()
}

/// The score of a trace, by the recorded phases or by a replay of its events.
fn score_trace(trace: &Path, stamps: &Path, options: &[&str]) -> Value {
    let mut score = zernel_command();
    score
        .args(["truth", "score", "--json"])
        .args(options)
        .arg(trace);
    for entry in std::fs::read_dir(stamps).unwrap() {
        score.arg(entry.unwrap().path());
    }
    let output = score.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn a_recorded_job_is_scored() {
    let job = Job::new(JobPlan::new(Bottleneck::Gpu, 1)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (trace, stamps) = (
        folder.path().join("run.trace.gz"),
        folder.path().join("stamps"),
    );
    std::fs::create_dir(&stamps).unwrap();
    let program = std::env::current_exe().unwrap();
    let prepare = |record: &mut Command| {
        // All calls are counted, so that a replay has the events and the settings of the kernel.
        record.args(["--budget", "none"]);
        for library in ["libcuda.so.1", "libnccl.so.2"] {
            record.arg("--library").arg(job.library_path(library));
        }
        job.set_job_environment_with_priority(record);
        record.env("ZERNEL_TRUTH", &stamps);
    };
    let output = record_command(&trace, prepare, &[program.to_str().unwrap()]);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("0 lost"), "{printed}");
    for options in [&[][..], &["--replay"]] {
        let report = score_trace(&trace, &stamps, options);
        assert_eq!(report["variant"], "testjob-gpu");
        assert_eq!(report["processes"], job.plan().ranks);
        assert_eq!(report["lost_events"], 0);
        let seconds = report["phases"]["seconds"].as_f64().unwrap();
        assert!(seconds > 0.5, "{report:#}");
        let categories = report["phases"]["categories"].as_array().unwrap();
        let gpu = categories.iter().find(|it| it["name"] == "GpuCompute");
        let f1 = gpu.unwrap()["f1"].as_f64().unwrap();
        assert!(f1 > 0.8, "{options:?}: {report:#}");
        assert_eq!(report["observed_share"], 1.0);
    }
    let recorded = score_trace(&trace, &stamps, &[]);
    let replayed = score_trace(&trace, &stamps, &["--replay"]);
    let share = |report: &Value| report["phases"]["unknown_share"].as_f64().unwrap();
    // The twins are equal, except that the kernel rounds boundaries down to 1024 ns.
    let difference = (share(&recorded) - share(&replayed)).abs();
    assert!(difference < 0.01, "{recorded:#} {replayed:#}");
}

fn a_file_that_is_no_trace_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other");
    std::fs::write(&path, "other").unwrap();
    let mut score = zernel_command();
    let output = score.args(["truth", "score"]).args([&path, &path]).output();
    let output = output.unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(printed.contains("other: it is not a trace"), "{printed}");
}

fn wrong_usage_does_not_run_the_command() {
    for arguments in [
        &["record"][..],
        &["record", "--pid", "1", "--", "true"],
        &["record", "--for", "1s", "--", "true"],
        &["score", "trace"],
    ] {
        let output = zernel_command()
            .arg("truth")
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}
