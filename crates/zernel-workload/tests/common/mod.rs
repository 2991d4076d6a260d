//! Shared code of the test programs. Trials that check or end a whole process run a helper: the test program
//! again, with the helper's name in an environment variable.
#![allow(dead_code)] // not every test program uses everything

use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use zernel_testkit::eventually;
use zernel_workload::{CloneMode, WorkloadConfig, WorkloadHandle};

/// The variable with the name of the helper.
const HELPER_VARIABLE: &str = "ZERNEL_WORKLOAD_HELPER";
pub(crate) const CLONE_MODES: [CloneMode; 2] = [CloneMode::Fork, CloneMode::Thread];

pub(crate) fn helper_command(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(HELPER_VARIABLE, name);
    command
}

/// Runs a helper to its end, which must be a success.
pub(crate) fn run_helper(name: &str) {
    let output = helper_command(name).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{text}", output.status);
}

pub(crate) fn spinner_config(mode: CloneMode, workers: usize) -> WorkloadConfig {
    WorkloadConfig::default().workers(workers).clone_mode(mode)
}

pub(crate) fn wait_for_progress(handle: &WorkloadHandle) {
    eventually("progress of every worker", || {
        handle.snapshot_iterations().iter().all(|count| *count > 0)
    });
}

pub(crate) fn send_signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

pub(crate) fn process_exists(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// The name of the helper, if this program was started as one. Ctrl-C ends a helper even if the shell that
/// started the tests ignores it.
pub(crate) fn requested_helper() -> Option<String> {
    let name = std::env::var(HELPER_VARIABLE).ok()?;
    // SAFETY: sets a disposition before the helper does anything else.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    Some(name)
}
