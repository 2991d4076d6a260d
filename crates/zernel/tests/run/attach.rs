//! Jobs that run already, and jobs that a daemon observes.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use zernel_testkit::copy_program;

use crate::daemon::JobDaemon;
use crate::job::TestJob;
use crate::{NOBODY_UID, decode_output, zernel_command};

pub(crate) fn a_running_job_is_reported() {
    let job = TestJob::new(2, 60_000);
    let mut running = job.start();
    job.wait_until_it_trains();
    let pid = running.0.id();
    let output = zernel_command()
        .args(["attach", &pid.to_string(), "--for", "3s", "--json", "-"])
        .output()
        .unwrap();
    let printed = decode_output(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ended"], Value::Null);
    assert_ranks_make_steps(&report, &printed);
    for rank in report["ranks"].as_array().unwrap() {
        assert_eq!(rank["still_running"], true, "{rank:#}");
        assert_eq!(rank["complete"], false, "{rank:#}");
        assert_eq!(rank["steps"]["warm_up"], 0, "{rank:#}");
        assert_eq!(rank["before_first_call_seconds"], Value::Null, "{rank:#}");
    }
    assert!(printed.starts_with("zernel attach"), "{printed}");
    let launcher = Pid::from_raw(pid.cast_signed()).unwrap();
    test_kill_process(launcher).expect("the job goes on");
    running.stop();
}

/// Whether two ranks were seen to make steps.
fn assert_ranks_make_steps(report: &Value, printed: &str) {
    let ranks = report["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 2, "{printed}");
    for rank in ranks {
        let steps = &rank["steps"];
        assert!(steps["count"].as_u64() > Some(10), "{rank:#}");
        assert!(steps["median_seconds"].as_f64() > Some(0.004), "{rank:#}");
        let training = rank["training"]["wall_seconds"].as_f64().unwrap();
        assert!(training > 0.0 && training <= rank["wall_seconds"].as_f64().unwrap());
    }
}

pub(crate) fn a_process_that_does_not_exist_is_refused() {
    for (pid, problem) in [("2147483646", "no process"), ("x", "invalid value")] {
        let output = zernel_command().args(["attach", pid]).output().unwrap();
        assert_ne!(output.status.code(), Some(0));
        let printed = decode_output(&output.stderr);
        assert!(printed.contains(problem), "{printed}");
    }
}

/// A signal ends observing, not the job. The report covers the time until then.
pub(crate) fn a_signal_ends_attaching_with_a_report() {
    let job = TestJob::new(2, 60_000);
    let mut running = job.start();
    job.wait_until_it_trains();
    // The start of observation is not visible from outside. A later signal gives more observed time.
    let saw_both = |seconds| {
        let attached = zernel_command()
            .args(["attach", &running.0.id().to_string(), "--json", "-"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_secs(seconds));
        kill_process(Pid::from_child(&attached), Signal::INT).unwrap();
        let output = attached.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["ranks"].as_array().unwrap().len() == 2
    };
    assert!([3, 6, 12].into_iter().any(saw_both));
    running.stop();
}

pub(crate) fn without_privilege_the_daemon_is_asked() {
    let others = TestJob::new(2, 60_000);
    let job = TestJob::new(2, 4000);
    for path in [job.directory(), &job.directory().join("lib")] {
        allow_access_to_all(path);
    }
    let binary = job.directory().join("zernel");
    copy_program(env!("CARGO_BIN_EXE_zernel"), &binary);
    let written = job.directory().join("report");
    fs::write(&written, "").unwrap();
    fs::set_permissions(&written, Permissions::from_mode(0o666)).unwrap();
    let daemon = JobDaemon::start(&job);
    allow_access_to_all(daemon.socket().parent().unwrap());
    let mut running = others.start();
    others.wait_until_it_trains();
    let output = Command::new(&binary)
        .arg("run")
        .arg("--json")
        .arg(&written)
        .arg("--socket")
        .arg(daemon.socket())
        .arg("--")
        .arg(&binary)
        .args(["workload", "run"])
        .arg(job.spec_path())
        .current_dir("/")
        .uid(NOBODY_UID)
        .gid(NOBODY_UID)
        .output()
        .unwrap();
    let printed = decode_output(&output.stderr);
    let report: Value = serde_json::from_slice(&fs::read(&written).unwrap())
        .unwrap_or_else(|error| panic!("{error}: {printed}"));
    assert_eq!(report["observing"]["by_daemon"], true, "{printed}");
    assert_eq!(output.status.code(), Some(0), "{printed}");
    assert_ranks_make_steps(&report, &printed);
    running.stop();
}

fn allow_access_to_all(path: &Path) {
    fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
}
