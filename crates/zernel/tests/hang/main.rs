//! `zernel hang` on four ranks on the software GPU, one of which stops taking part.

mod dead_disk;
mod ranks;

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use dead_disk::DeadDisk;
use procfs::process::Process;
use ranks::{COLLECTIVES_BEFORE_FAULT, ObservedJob, RANK_ROLES, only_finding};
use rustix::process::Signal;
use serde_json::{Value, json};
use zernel_ebpf::capability::Capability;
use zernel_softgpu::install::Prologue;
use zernel_testkit::needs::bpf;
use zernel_testkit::target::{self, Stage};
use zernel_testkit::{communicator, copy_program, eventually, root, trial};

fn main() -> ExitCode {
    if let Some(code) = target::run_role(RANK_ROLES) {
        return code;
    }
    let needs = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    let trials: &[(&str, fn())] = &[
        ("a_stopped_rank_is_named", a_stopped_rank_is_named),
        ("a_rank_on_a_cpu_is_named", a_rank_on_a_cpu_is_named),
        ("a_rank_at_a_lock_is_named", a_rank_at_a_lock_is_named),
        (
            "a_rank_in_another_operation_is_named",
            a_rank_in_another_operation_is_named,
        ),
        ("a_rank_that_exited_is_named", a_rank_that_exited_is_named),
        ("a_killed_rank_is_named", a_killed_rank_is_named),
        ("a_running_job_does_not_hang", a_running_job_does_not_hang),
        ("a_slow_job_does_not_hang", a_slow_job_does_not_hang),
        (
            "a_slow_rank_is_late_and_does_not_hang",
            a_slow_rank_is_late_and_does_not_hang,
        ),
        ("other_users_see_no_ranks", other_users_see_no_ranks),
        (
            "a_rank_of_another_pid_namespace_is_named",
            a_rank_of_another_pid_namespace_is_named,
        ),
        (
            "only_the_selected_job_is_reported",
            only_the_selected_job_is_reported,
        ),
        (
            "a_rank_that_does_not_join_is_named",
            a_rank_that_does_not_join_is_named,
        ),
        (
            "a_rank_missing_from_a_split_is_named",
            a_rank_missing_from_a_split_is_named,
        ),
    ];
    let trials = trials.iter().map(|(name, test)| trial(name, &needs, test));
    let needs = [needs[0], needs[1], dead_disk::fuse_need()];
    zernel_testkit::main(trials.chain([
        trial(
            "a_rank_at_a_dead_disk_is_named",
            &needs,
            a_rank_at_a_dead_disk_is_named,
        ),
        trial(
            "a_child_at_a_dead_disk_is_named",
            &needs,
            a_child_at_a_dead_disk_is_named,
        ),
    ]))
}

fn a_stopped_rank_is_named() {
    let job = ObservedJob::start("none");
    job.wait_for_collective(COLLECTIVES_BEFORE_FAULT);
    job.signal_faulty_rank(Signal::STOP);
    let report = job.wait_for_a_hang();
    let found = only_finding(&job, &report);
    assert_eq!(found["doing"]["state"], "stopped");
    job.signal_faulty_rank(Signal::CONT);
    job.wait_until_reported(|report| report["verdict"] == "nothing-hangs");
}

fn a_rank_on_a_cpu_is_named() {
    let job = ObservedJob::start("spin");
    let report = job.wait_for_a_hang();
    let found = only_finding(&job, &report);
    assert_eq!(found["problem"], "behind");
    assert_eq!(found["next"], COLLECTIVES_BEFORE_FAULT + 1);
    assert_eq!(found["leaders"], 3);
    assert_eq!(found["sequence"], COLLECTIVES_BEFORE_FAULT);
    assert_eq!(found["op"], "AllReduce");
    assert_eq!(found["bytes"], 4000);
    assert_eq!(found["doing"]["tid"], job.faulty_rank_pid());
    // On a busy machine the rank may be without a CPU now and then.
    job.wait_until_reported(|report| only_finding(&job, report)["doing"]["state"] == "on-cpu");
}

fn a_rank_at_a_lock_is_named() {
    let job = ObservedJob::start("lock");
    let report = job.wait_for_a_hang();
    let found = only_finding(&job, &report);
    assert_eq!(found["doing"]["state"], "lock", "{found:#}");
}

/// Checks the report of a job with one rank that uses a disk that does not answer.
fn check_activity_at_a_dead_disk(fault: &str, check: impl Fn(&Value)) {
    let stage = Stage::new(Prologue::Push);
    let directory = stage.path().join("disk");
    fs::create_dir(&directory).expect("our directory");
    // Dropped after the disk: a process that reads from it cannot be killed before the disk is unmounted.
    let job;
    let disk = DeadDisk::mount(&directory);
    let file = disk.file_path();
    job = ObservedJob::start_with(stage, fault, |command| {
        command.env(ranks::READ_FILE_VARIABLE, &file);
    });
    disk.wait_until_file_is_read();
    let report = job.wait_for_a_hang();
    check(&only_finding(&job, &report)["doing"]);
}

fn a_rank_at_a_dead_disk_is_named() {
    check_activity_at_a_dead_disk("read", |doing| {
        assert_eq!(doing["state"], "io", "{doing:#}");
        let path = doing["path"].as_str().expect("a path");
        assert!(path.ends_with("disk/batch"), "{path}");
    });
}

/// A child of the rank reads from the disk, as a loader does.
fn a_child_at_a_dead_disk_is_named() {
    check_activity_at_a_dead_disk("wait for a reader", |doing| {
        assert_eq!(doing["state"], "waits", "{doing:#}");
        let child = doing["meanwhile"][0].as_str().expect("a sentence");
        assert!(child.starts_with("its child cat"), "{child}");
        assert!(
            child.contains("is in I/O") && child.contains("disk/batch"),
            "{child}"
        );
    });
}

fn a_rank_in_another_operation_is_named() {
    let job = ObservedJob::start("broadcast");
    let report = job.wait_for_a_hang();
    let found = only_finding(&job, &report);
    assert_eq!(found["problem"], "different");
    assert_eq!(found["sequence"], COLLECTIVES_BEFORE_FAULT + 1);
    assert_eq!(found["own"], "Broadcast");
    assert_eq!(found["others"], "AllReduce");
}

fn a_rank_that_exited_is_named() {
    let job = ObservedJob::start("exit");
    let report = job.wait_for_a_hang();
    let found = only_finding(&job, &report);
    assert_eq!(found["problem"], "gone");
    assert_eq!(found["doing"]["state"], "ended");
    let text = found["doing"]["text"].as_str().expect("a text");
    assert!(text.contains("exited with code 3"), "{text}");
}

fn a_killed_rank_is_named() {
    let job = ObservedJob::start("none");
    job.wait_for_collective(COLLECTIVES_BEFORE_FAULT);
    job.signal_faulty_rank(Signal::KILL);
    let report = job.wait_for_a_hang();
    let found = only_finding(&job, &report);
    assert_eq!(found["problem"], "gone");
    let text = found["doing"]["text"].as_str().expect("a text");
    assert!(text.contains("SIGKILL"), "{text}");
}

fn a_running_job_does_not_hang() {
    let job = ObservedJob::start("none");
    job.wait_for_collective(COLLECTIVES_BEFORE_FAULT);
    for _ in 0..20 {
        let output = job.run_zernel_hang(&[]);
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{printed}");
        assert!(
            printed.contains("4 of 4 ranks are on this node"),
            "{printed}"
        );
        assert!(printed.contains("no rank hangs"), "{printed}");
        assert!(!printed.contains("HANG"), "{printed}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Ranks that take three seconds for a step, together.
fn a_slow_job_does_not_hang() {
    let job = ObservedJob::start_with(Stage::new(Prologue::Push), "none", |command| {
        command.env(ranks::STEP_MS_VARIABLE, "3000");
    });
    job.wait_for_collective(1);
    while job.hang_report().1["communicators"][0]["members"][0]["sequence"].as_u64() < Some(4) {
        let (code, report) = job.hang_report();
        assert_eq!(code, Some(0), "{report:#}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// A rank that took twelve seconds once may do so again.
fn a_slow_rank_is_late_and_does_not_hang() {
    let job = ObservedJob::start("sleep");
    let report = job.wait_for_a_hang();
    // The rank never took this long before, so the report cannot know that it will join.
    let found = only_finding(&job, &report);
    assert_eq!(found["doing"]["state"], "waits", "{found:#}");
    job.wait_for_collective(2 * COLLECTIVES_BEFORE_FAULT);
    let mut was_late = false;
    eventually("the job goes on after the second sleep", || {
        let (code, report) = job.hang_report();
        assert_eq!(code, Some(0), "{report:#}");
        let communicator = &report["communicators"][0];
        let found = &communicator["findings"][0];
        was_late |= found["hangs"] == false && found["waited_seconds"].as_f64() > Some(5.0);
        communicator["members"][0]["sequence"].as_u64() > Some(3 * COLLECTIVES_BEFORE_FAULT + 1)
    });
    assert!(was_late);
}

const NOBODY_UID: u32 = 65534;

/// Users see only their own ranks, running or exited.
fn other_users_see_no_ranks() {
    let job = ObservedJob::start("none");
    job.wait_for_collective(1);
    job.signal_faulty_rank(Signal::KILL);
    job.wait_until_reported(|report| {
        !report["communicators"][0]["members"][2]["ended_seconds_ago"].is_null()
    });
    let open = || Permissions::from_mode(0o755);
    fs::set_permissions(job.stage().path(), open()).expect("ours");
    let copy = job.stage().path().join("zernel");
    copy_program(env!("CARGO_BIN_EXE_zernel"), &copy);
    fs::set_permissions(&copy, open()).expect("ours");
    let output = Command::new(copy)
        .args(["hang", "--json", "--socket"])
        .arg(job.socket())
        .uid(NOBODY_UID)
        .gid(NOBODY_UID)
        .output()
        .expect("zernel runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["verdict"], "nothing-hangs");
    assert_eq!(report["communicators"], json!([]));
    assert_eq!(report["pids_without_communicator"], json!([]));
}

/// Reported pids are those of the initial pid namespace, not those of a container.
fn a_rank_of_another_pid_namespace_is_named() {
    let job = ObservedJob::start_in_a_pid_namespace("spin");
    let report = job.wait_for_a_hang();
    let findings = &report["communicators"][0]["findings"];
    assert_eq!(findings.as_array().map(Vec::len), Some(1), "{report:#}");
    assert_eq!(findings[0]["rank"], ranks::FAULTY_RANK);
    let pid = findings[0]["pid"].as_i64().expect("a pid");
    let process = Process::new(pid as i32).expect("a process here");
    let environment = process.environ().expect("ours");
    let rank = environment.get(OsStr::new(communicator::RANK_VARIABLE));
    assert_eq!(rank, Some(&ranks::FAULTY_RANK.to_string().into()));
    assert_eq!(
        process.status().expect("ours").nspid.map(|pids| pids.len()),
        Some(2)
    );
    job.wait_until_reported(|report| {
        report["communicators"][0]["findings"][0]["doing"]["state"] == "on-cpu"
    });
}

/// Only the selected job is reported. A job that does not exist is an error.
fn only_the_selected_job_is_reported() {
    let job = ObservedJob::start("exit");
    job.wait_for_a_hang();
    let ask = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zernel"));
        command
            .arg("hang")
            .args(arguments)
            .arg("--socket")
            .arg(job.socket());
        command.output().expect("zernel runs")
    };
    assert_eq!(ask(&[&job.job_name()]).status.code(), Some(1));
    let other = ask(&["no-such-job"]);
    assert_eq!(other.status.code(), Some(2));
    let printed = String::from_utf8_lossy(&other.stdout).into_owned();
    assert!(
        printed.contains("no process of job no-such-job"),
        "{printed}"
    );
}

/// All ranks of a communicator wait for each other in a split, also those of different colours.
fn a_rank_missing_from_a_split_is_named() {
    let job = ObservedJob::start("no part");
    let found = |report: &Value| {
        let communicators = report["communicators"].as_array().cloned();
        let mut communicators = communicators.unwrap_or_default().into_iter();
        communicators.find_map(|made| made["findings"].get(0).cloned())
    };
    job.wait_until_reported(|report| found(report).is_some());
    let found = found(&job.hang_report().1).expect("it does not join later");
    assert_eq!(found["problem"], "not-joined");
    assert_eq!(found["pid"], job.faulty_rank_pid());
}

/// Programs start at different times, so a rank that does not join is late for a minute, unless `--after` is
/// given.
fn a_rank_that_does_not_join_is_named() {
    let job = ObservedJob::start("absent");
    job.wait_until_reported(|report| {
        report["communicators"][0]["findings"][0]["waited_seconds"].is_f64()
    });
    let (code, report) = job.hang_report();
    assert_eq!(code, Some(0), "{report:#}");
    let findings = &report["communicators"][0]["findings"];
    assert_eq!(findings[0]["problem"], "not-joined");
    assert_eq!(findings[0]["pid"], job.faulty_rank_pid());
    assert_eq!(findings[0]["rank"], ranks::FAULTY_RANK);
    let output = job.run_zernel_hang(&["--after", "1"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(
        printed.contains("has not joined the communicator"),
        "{printed}"
    );
}
