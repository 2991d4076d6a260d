//! `zernel lab run`, as a shell sees it.

use std::process::{Command, ExitCode, Output, Stdio};

use rustix::process::{Pid, Signal};
use zernel_testkit::{eventually, trial, vm};

fn main() -> ExitCode {
    let vm = vm::newest_kernel_need();
    zernel_testkit::main([
        trial(
            "a_vm_passes_on_output_and_exit_code",
            &[vm],
            a_vm_passes_on_output_and_exit_code,
        ),
        trial(
            "with_copies_files_into_the_vm",
            &[vm],
            with_copies_files_into_the_vm,
        ),
        trial("a_missing_file_is_named", &[vm], a_missing_file_is_named),
        trial(
            "output_before_a_timeout_is_kept",
            &[vm],
            output_before_a_timeout_is_kept,
        ),
        trial(
            "an_interrupt_leaves_no_temporary_folder",
            &[vm],
            an_interrupt_leaves_no_temporary_folder,
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

fn a_vm_passes_on_output_and_exit_code() {
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

fn with_copies_files_into_the_vm() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data");
    std::fs::write(&file, "from outside").unwrap();
    let file = file.to_str().unwrap();
    let script = format!("cat {file} && /bin/ls {file}");
    let with = ["--with", file, "--with", "/bin/cat", "--with", "/bin/ls"];
    let output = lab_run(&[&with[..], &["sh", "-c", &script]].concat());
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!("from outside{file}\n"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn a_missing_file_is_named() {
    let output = lab_run(&["--with", "/no/such/file", "true"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/file"));
}

fn output_before_a_timeout_is_kept() {
    let output = lab_run(&[
        "--timeout",
        "2",
        "sh",
        "-c",
        "echo printed; while :; do :; done",
    ]);
    assert_eq!(output.stdout, b"printed\n");
    assert_eq!(output.status.code(), Some(1));
}

fn an_interrupt_leaves_no_temporary_folder() {
    let folder = tempfile::tempdir().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_zernel"))
        .args(["lab", "run", "sleep", "1000"])
        .env("TMPDIR", folder.path())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    eventually("a run in progress has a folder", || files() > 0);
    assert_eq!(files(), 1, "a run in progress has one folder");
    let pid = Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(files(), 0);
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
