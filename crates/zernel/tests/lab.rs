//! `zernel lab run`, as a shell sees it.

use std::process::{Command, ExitCode, Output};

use zernel_lab::KernelRequest;
use zernel_testkit::{Need, trial};

fn main() -> ExitCode {
    let vm = Need {
        name: "vm",
        check: || zernel_lab::available(&KernelRequest::SchedExt).map_err(|e| e.to_string()),
    };
    zernel_testkit::main([
        trial(
            "a_command_is_the_same_inside",
            &[vm],
            a_command_is_the_same_inside,
        ),
        trial(
            "a_bad_version_is_wrong_usage",
            &[],
            a_bad_version_is_wrong_usage,
        ),
        trial(
            "a_missing_program_is_named",
            &[vm],
            a_missing_program_is_named,
        ),
    ])
}

fn lab_run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_zernel"))
        .args(["lab", "run"])
        .args(arguments)
        .output()
        .unwrap()
}

fn a_command_is_the_same_inside() {
    let script = "echo out; echo err >&2; test -e /sys/kernel/sched_ext/state && exit 7";
    let output = lab_run(&["sh", "-c", script]);
    assert_eq!(output.stdout, b"out\n");
    assert!(
        output.stderr.ends_with(b"err\n"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(output.status.code(), Some(7));
}

fn a_bad_version_is_wrong_usage() {
    let output = lab_run(&["--kernel", "latest", "true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("latest"));
}

fn a_missing_program_is_named() {
    let output = lab_run(&["no-such-program"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no-such-program"));
}
