//! `zernel workload`, as a user meets it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn zernel(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zernel"));
    command.arg("workload").args(arguments);
    command
}

/// Runs a spec with this text.
fn run(text: &str, options: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("spec.toml");
    fs::write(&file, text).unwrap();
    let output = zernel(&["run", file.to_str().unwrap()])
        .args(options)
        .output();
    output.unwrap()
}

fn json(output: &Output) -> Value {
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{complaints}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const SPINNERS: &str = "
duration_ms = 100
[[group]]
name = 'spinners'
workers = 2
work = 'spin_wait'
";

#[test]
fn every_worker_is_reported() {
    let outcome = json(&run(SPINNERS, &["--json"]));
    let reports = outcome["reports"].as_array().unwrap();
    assert_eq!(reports.len(), 2);
    for report in reports {
        assert_eq!(report["group"], "spinners");
        assert_eq!(report["completed"], true);
        assert!(report["work_units"].as_u64().unwrap() > 0);
    }
    let table = run(SPINNERS, &[]);
    let text = String::from_utf8(table.stdout).unwrap();
    assert_eq!(text.matches("spinners").count(), 2, "{text}");
    assert_eq!(outcome["interrupted"], false);
    assert!(!text.contains("interrupted"), "{text}");
}

#[test]
fn a_spec_that_cannot_be_used_is_explained() {
    for (text, problem) in [
        (SPINNERS.replace("workers", "wrokers"), "wrokers"),
        (SPINNERS.replace("spin_wait", "spin_weight"), "spin_weight"),
        (String::new(), "group"),
        (SPINNERS.replace("= 2", "= 'two'"), "two"),
    ] {
        let output = run(&text, &[]);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        assert!(
            complaint.contains(problem),
            "{problem} is not in: {complaint}"
        );
        assert!(output.stdout.is_empty());
    }
    let nowhere = format!("{SPINNERS}affinity = {{ numa_node = 1000 }}\n");
    let output = run(&nowhere, &[]);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{complaint}");
    assert!(complaint.contains("NUMA node 1000"), "{complaint}");
    let missing = zernel(&["run", "/no/such/file.toml"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn an_interrupt_ends_it_early_with_reports() {
    let outcome = json(&interrupted(&["--json"]));
    assert_eq!(outcome["reports"].as_array().unwrap().len(), 2);
    assert_eq!(outcome["interrupted"], true);
    let table = String::from_utf8(interrupted(&[]).stdout).unwrap();
    assert!(
        table.lines().any(|line| line.starts_with("interrupted: ")),
        "{table}"
    );
}

/// What comes of a long run that is interrupted.
fn interrupted(options: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("spec.toml");
    fs::write(&file, SPINNERS.replace("= 100", "= 3600000")).unwrap();
    let child = zernel(&["run", file.to_str().unwrap()])
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    // Its second thread forks the workers; by then it listens.
    let threads = format!("/proc/{}/task", child.id());
    while fs::read_dir(&threads).map_or(0, Iterator::count) < 2 {
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(pid, Signal::INT).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn the_examples_can_be_used() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut examples = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        // The libraries of the software GPU are another command's to build.
        let text: String = text
            .lines()
            .filter(|line| !line.starts_with("gpu ="))
            .map(|line| match line.starts_with("duration_ms") {
                true => "duration_ms = 300\n".to_owned(),
                false => format!("{line}\n"),
            })
            .collect();
        let outcome = json(&run(&text, &["--json"]));
        for report in outcome["reports"].as_array().unwrap() {
            assert_eq!(report["completed"], true, "{report}");
        }
        examples += 1;
    }
    assert_eq!(examples, 4);
}

#[test]
fn every_type_of_work_is_explained() {
    let output = zernel(&["list"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for name in [
        "spin_wait",
        "ml_training",
        "thundering_herd",
        "cgroup_churn",
    ] {
        assert!(text.lines().any(|line| line == name), "{name}");
    }
}
