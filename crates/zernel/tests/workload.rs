//! The command `zernel workload`.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_workload::WorkType;

fn zernel_command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zernel"));
    command.arg("workload").args(arguments);
    command
}

/// Runs a workload file with this text.
fn run_workload_file(text: &str, options: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("spec.toml");
    fs::write(&file, text).unwrap();
    let output = zernel_command(&["run", file.to_str().unwrap()])
        .args(options)
        .output();
    output.unwrap()
}

fn parse_json(output: &Output) -> Value {
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{complaints}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const SPINNERS_SPEC: &str = "
duration_ms = 100
[[group]]
name = 'spinners'
workers = 2
work = 'spin_wait'
";

#[test]
fn every_worker_is_reported() {
    let outcome = parse_json(&run_workload_file(SPINNERS_SPEC, &["--json"]));
    let reports = outcome["reports"].as_array().unwrap();
    assert_eq!(reports.len(), 2);
    for report in reports {
        assert_eq!(report["group"], "spinners");
        assert_eq!(report["completed"], true);
        assert!(report["work_units"].as_u64().unwrap() > 0);
    }
    let table = run_workload_file(SPINNERS_SPEC, &[]);
    let text = String::from_utf8(table.stdout).unwrap();
    assert_eq!(text.matches("spinners").count(), 2, "{text}");
    assert_eq!(outcome["interrupted"], false);
    assert!(!text.contains("interrupted"), "{text}");
}

#[test]
fn a_spec_that_cannot_be_used_is_explained() {
    for (text, problem) in [
        (SPINNERS_SPEC.replace("workers", "wrokers"), "wrokers"),
        (
            SPINNERS_SPEC.replace("spin_wait", "spin_weight"),
            "spin_weight",
        ),
        (String::new(), "there is no [[group]]; add one"),
        (
            SPINNERS_SPEC.replace("workers = 2", "workers = 0"),
            "every group has `workers = 0`; set `workers`",
        ),
        (SPINNERS_SPEC.replace("= 2", "= 'two'"), "two"),
    ] {
        let output = run_workload_file(&text, &[]);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        assert!(
            complaint.contains(problem),
            "{problem} is not in: {complaint}"
        );
        assert!(complaint.contains("/spec.toml: "), "{complaint}");
        assert!(output.stdout.is_empty());
    }
    let nowhere = format!("{SPINNERS_SPEC}affinity = {{ numa_node = 1000 }}\n");
    let output = run_workload_file(&nowhere, &[]);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{complaint}");
    assert!(complaint.contains("NUMA node 1000"), "{complaint}");
    let missing = zernel_command(&["run", "/no/such/file.toml"])
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn an_interrupt_ends_a_workload_with_reports() {
    let outcome = parse_json(&interrupt_long_run(&["--json"]));
    assert_eq!(outcome["reports"].as_array().unwrap().len(), 2);
    assert_eq!(outcome["interrupted"], true);
    let table = String::from_utf8(interrupt_long_run(&[]).stdout).unwrap();
    assert!(
        table.lines().any(|line| line.starts_with("interrupted: ")),
        "{table}"
    );
}

/// Starts a long run and interrupts it.
fn interrupt_long_run(options: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("spec.toml");
    fs::write(&file, SPINNERS_SPEC.replace("= 100", "= 3600000")).unwrap();
    let child = zernel_command(&["run", file.to_str().unwrap()])
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    // The second thread of the command forks the workers. The signal handler exists by then.
    let threads = format!("/proc/{}/task", child.id());
    while fs::read_dir(&threads).map_or(0, Iterator::count) < 2 {
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(pid, Signal::INT).unwrap();
    child.wait_with_output().unwrap()
}

/// The workloads among the examples of the repository: name and text.
fn example_workloads() -> Vec<(OsString, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let specs = entries.filter(|entry| entry.path().extension().is_some_and(|it| it == "toml"));
    let examples: Vec<_> = specs
        .map(|entry| (entry.file_name(), fs::read_to_string(entry.path()).unwrap()))
        .collect();
    assert_eq!(examples.len(), 4);
    examples
}

/// Returns the same example with a shorter run time.
fn shorten_example(example: &str) -> String {
    let lines = example.lines().map(|line| match line {
        line if line.starts_with("duration_ms") => "duration_ms = 300",
        line => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn all_workers_completed(outcome: &Value) -> bool {
    let reports = outcome["reports"].as_array().unwrap();
    reports.iter().all(|report| report["completed"] == true)
}

#[test]
fn the_examples_run_without_the_software_gpu() {
    for (name, text) in example_workloads() {
        let lines = text.lines().filter(|line| !line.starts_with("gpu ="));
        let text = shorten_example(&lines.collect::<Vec<_>>().join("\n"));
        let outcome = parse_json(&run_workload_file(&text, &["--json"]));
        assert!(all_workers_completed(&outcome), "{name:?}: {outcome:#}");
    }
}

#[test]
fn the_examples_run_from_any_folder() {
    // A repository after `make softgpu`, as far as the examples use it.
    let repository = tempfile::tempdir().unwrap();
    install_libraries(&repository.path().join("target/softgpu"), Prologue::Push).unwrap();
    let folder = repository.path().join("examples");
    fs::create_dir(&folder).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut with_gpu = 0;
    for (name, text) in example_workloads() {
        let file = folder.join(&name);
        fs::write(&file, shorten_example(&text)).unwrap();
        with_gpu += usize::from(text.contains("libcuda.so.1"));
        let run = zernel_command(&["run", "--json"])
            .arg(&file)
            .current_dir(&elsewhere)
            .output();
        let outcome = parse_json(&run.unwrap());
        assert!(all_workers_completed(&outcome), "{name:?}: {outcome:#}");
    }
    assert_eq!(with_gpu, 2);
}

#[test]
fn every_work_type_is_listed_with_its_parameters() {
    let output = zernel_command(&["list"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for work in WorkType::all() {
        let is_listed = text.lines().any(|line| line == work.name());
        assert!(is_listed, "{} is not in {text}", work.name());
        for key in work.parameters() {
            let is_row = |line: &str| line.trim_start().starts_with(&format!("{} ", key.name));
            assert!(text.lines().any(is_row), "{} is not in {text}", key.name);
        }
    }
    let burst = text.lines().find(|line| line.contains("burst_us")).unwrap();
    let words: Vec<&str> = burst.split_whitespace().collect();
    assert_eq!(
        words,
        [
            "burst_us", "integer", "2000", "CPU", "time", "of", "a", "burst."
        ]
    );
    assert!(text.contains("{ driver = path }"), "{text}");
}

#[test]
fn work_types_are_listed_as_json() {
    let list = parse_json(&zernel_command(&["list", "--json"]).output().unwrap());
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), WorkType::all().len());
    for (listed, work) in list.iter().zip(WorkType::all()) {
        assert_eq!(listed["name"], work.name());
        let parameters = listed["parameters"].as_array().unwrap();
        assert_eq!(parameters.len(), work.parameters().len());
        for parameter in parameters {
            for field in ["name", "type", "default", "meaning"] {
                assert!(parameter[field].is_string(), "{field}: {parameter}");
            }
        }
    }
}

#[test]
fn a_spec_that_is_not_a_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("spec.toml");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let output = zernel_command(&["run", fifo.to_str().unwrap()])
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(printed.contains("not a regular file"), "{printed}");
}

#[test]
fn a_spec_may_come_from_stdin_and_a_signal_ends_the_wait_for_it() {
    let start = || {
        let mut command = zernel_command(&["run", "--json", "-"]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut child = start();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, SPINNERS_SPEC.as_bytes()).unwrap();
    drop(input);
    let outcome = parse_json(&child.wait_with_output().unwrap());
    assert_eq!(outcome["reports"].as_array().unwrap().len(), 2);

    let mut waiting = start();
    let stdin = format!("/proc/{}/wchan", waiting.id());
    // Waits until the command waits in the read of the pipe.
    zernel_testkit::eventually("it reads stdin", || {
        fs::read_to_string(&stdin).is_ok_and(|place| place.contains("pipe_read"))
    });
    kill_process(Pid::from_child(&waiting), Signal::TERM).unwrap();
    let status = waiting.wait().unwrap();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(15)
    );
}

#[test]
fn names_from_a_file_do_not_control_the_terminal() {
    let hostile = SPINNERS_SPEC.replace("'spinners'", r#""spin\u001b]0;title\u0007""#);
    let output = run_workload_file(&hostile, &[]);
    assert!(!output.stdout.contains(&0x1b), "{output:?}");
    let output = run_workload_file("duration_ms = \x1b[2J", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!output.stderr.contains(&0x1b), "{output:?}");
}
