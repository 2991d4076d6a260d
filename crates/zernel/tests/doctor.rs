//! `zernel doctor` on the machine that runs the tests, as root and as nobody.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Output, Stdio};

use serde_json::Value;
use zernel_ebpf::capability::Capability;
use zernel_lab::{CommandStatus, VmSpec};
use zernel_testkit::needs::bpf;
use zernel_testkit::{copy_program, root, trial, vm};

const ZERNEL_PATH: &str = env!("CARGO_BIN_EXE_zernel");
const NOBODY_UID: u32 = 65534;

fn main() -> ExitCode {
    let bpf = bpf(|| Capability::BtfTracepoint.try_out());
    let (newest, oldest) = (vm::newest_kernel_need(), vm::oldest_kernel_need());
    zernel_testkit::main([
        trial("root_can_observe", &[root(), bpf], root_can_observe),
        trial(
            "an_unprivileged_user_cannot_observe_and_learns_why",
            &[root()],
            an_unprivileged_user_cannot_observe_and_learns_why,
        ),
        trial(
            "a_kernel_with_sched_ext_is_recognised",
            &[newest],
            a_kernel_with_sched_ext_is_recognised,
        ),
        trial(
            "an_old_kernel_attaches_by_perf_events",
            &[oldest],
            an_old_kernel_attaches_by_perf_events,
        ),
        trial(
            "every_row_that_is_not_ok_has_a_consequence",
            &[],
            every_row_that_is_not_ok_has_a_consequence,
        ),
        trial(
            "a_table_has_no_colour_in_a_pipe",
            &[],
            a_table_has_no_colour_in_a_pipe,
        ),
        trial(
            "a_closed_stdout_pipe_is_no_error",
            &[],
            a_closed_stdout_pipe_is_no_error,
        ),
        trial(
            "wrong_usage_exits_with_two",
            &[],
            wrong_usage_exits_with_two,
        ),
    ])
}

fn doctor_json() -> Value {
    parse_report(
        &Command::new(ZERNEL_PATH)
            .args(["doctor", "--json"])
            .output()
            .unwrap(),
    )
}

fn parse_report(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(stderr, "", "the doctor says everything on stdout");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn rows_of_report(report: &Value) -> Vec<Value> {
    let sections = report["sections"].as_array().unwrap();
    let rows = sections
        .iter()
        .flat_map(|section| section["rows"].as_array().unwrap());
    rows.cloned().collect()
}

fn status_of_row(report: &Value, name: &str) -> String {
    let row = rows_of_report(report)
        .into_iter()
        .find(|row| row["name"] == name);
    row.unwrap_or_else(|| panic!("no row {name}"))["status"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// The verdict of the report agrees with its rows.
fn root_can_observe() {
    let output = Command::new(ZERNEL_PATH)
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let report = parse_report(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    assert_eq!(report["observe"]["possible"], true);
    assert_eq!(status_of_row(&report, "tp_btf"), "ok");
    let rung = report["observe"]["rung"].as_str().unwrap();
    assert_eq!(status_of_row(&report, rung), "ok");
    // No remedy asks for root: this process has all that is needed.
    for row in rows_of_report(&report) {
        let remedy = row["remedy"].as_str().unwrap_or_default();
        assert!(!remedy.contains("root"), "{row:#}");
    }
}

fn an_unprivileged_user_cannot_observe_and_learns_why() {
    // A folder that the user nobody can reach, wherever the build is.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("zernel");
    copy_program(ZERNEL_PATH, &program);

    let output = Command::new(program)
        .args(["doctor", "--json"])
        .uid(NOBODY_UID)
        .gid(NOBODY_UID)
        .current_dir("/")
        .output()
        .unwrap();
    let report = parse_report(&output);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report["observe"]["possible"], false);
    assert_eq!(status_of_row(&report, "privilege"), "missing");
    for row in rows_of_report(&report) {
        if row["name"] == "tp_btf" {
            assert!(row["remedy"].as_str().unwrap().contains("root"), "{row}");
        }
    }
}

/// The report of `zernel doctor` from a virtual machine with this kernel.
fn doctor_report_from_vm(kernel: &str) -> Value {
    let outcome = VmSpec::new(vm::obtain_kernel_of_version(kernel).unwrap())
        .run(ZERNEL_PATH, ["doctor", "--json"]);
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    let complaints = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!(outcome.status, CommandStatus::Exited(0), "{complaints}");
    serde_json::from_slice(&outcome.stdout).unwrap()
}

fn a_kernel_with_sched_ext_is_recognised() {
    let report = doctor_report_from_vm("sched_ext");
    for name in [
        "sched_ext",
        "cgroup v2",
        "bpffs",
        "tracefs",
        "fentry",
        "kprobe",
        "tracepoint",
    ] {
        assert_eq!(status_of_row(&report, name), "ok", "{name}");
    }
    assert_eq!(report["observe"]["rung"], "uprobe.session");
    assert_eq!(status_of_row(&report, "NVIDIA GPUs"), "missing");
}

fn an_old_kernel_attaches_by_perf_events() {
    let report = doctor_report_from_vm("6.1");
    assert_eq!(report["observe"]["possible"], true);
    assert_eq!(report["observe"]["rung"], "uprobe (perf event)");
    assert_eq!(status_of_row(&report, "uprobe.multi"), "missing");
    assert_eq!(status_of_row(&report, "sched_ext"), "missing");
}

fn every_row_that_is_not_ok_has_a_consequence() {
    let report = doctor_json();
    for row in rows_of_report(&report) {
        let fine = row["status"] == "ok";
        assert_eq!(row["consequence"].is_string(), !fine, "{row}");
    }
    // The table has the same rows as the JSON report.
    let table = Command::new(ZERNEL_PATH).arg("doctor").output().unwrap();
    let text = String::from_utf8(table.stdout).unwrap();
    for row in rows_of_report(&report) {
        assert!(text.contains(row["name"].as_str().unwrap()), "{row}");
    }
}

fn a_table_has_no_colour_in_a_pipe() {
    let mut command = Command::new(ZERNEL_PATH);
    command.arg("doctor").env_remove("CLICOLOR_FORCE");
    assert!(!command.output().unwrap().stdout.contains(&0x1b));
}

fn a_closed_stdout_pipe_is_no_error() {
    for arguments in [&["doctor"][..], &["doctor", "--json"]] {
        let heard = Command::new(ZERNEL_PATH).args(arguments).output().unwrap();
        let mut child = Command::new(ZERNEL_PATH)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut complaint = String::new();
        let mut stderr = child.stderr.take().unwrap();
        stderr.read_to_string(&mut complaint).unwrap();
        assert_eq!(complaint, "");
        assert_eq!(child.wait().unwrap().code(), heard.status.code());
    }
}

fn wrong_usage_exits_with_two() {
    let output = Command::new(ZERNEL_PATH)
        .args(["doctor", "--jason"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("--json"),
        "suggests the right one"
    );
}
