//! Users without privilege.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use rustix::process::Uid;
use rustix::thread::set_thread_uid;
use serde_json::Value;
use zernel_softgpu::config;
use zernel_softgpu::install::Prologue;
use zernel_testkit::copy_program;
use zernel_testkit::daemon::{Daemon, HttpAnswer, request_on_stream};
use zernel_testkit::target::{Stage, Target};

use crate::{exported_launches, start_launching_target};

const NOBODY_UID: u32 = 65534;

/// A copy of a program that every user can get to.
pub(crate) fn copy_for_all_users(stage: &Stage, program: &Path, name: &str) -> PathBuf {
    fs::set_permissions(stage.path(), Permissions::from_mode(0o755)).expect("ours");
    let copy = stage.path().join(name);
    copy_program(program, &copy);
    fs::set_permissions(&copy, Permissions::from_mode(0o755)).expect("ours");
    copy
}

/// A target of another user, with a state of its own. Trials run at the same time and observe each other's targets, so
/// each has a user of its own.
pub(crate) fn start_launching_target_of(user: u32, stage: &Stage, rounds: u64) -> Target {
    let program = copy_for_all_users(stage, &std::env::current_exe().expect("we run"), "target");
    let node = stage.path().join("node-of-user");
    fs::create_dir(&node).expect("ours");
    fs::set_permissions(&node, Permissions::from_mode(0o700)).expect("ours");
    chown(&node, Some(user), Some(user)).expect("we are root");
    let mut command = stage.target_command_of(&program, "launches", rounds);
    command
        .env_remove(config::LOG_VARIABLE)
        .env(config::DIRECTORY_VARIABLE, node);
    let mut target = Target::start(command.uid(user).gid(user));
    target.run_part();
    target
}

/// Asks as another user. The kernel keeps the user id per thread, so a thread suffices to ask as another user.
fn request_as_user(user: u32, daemon: &Daemon, path: &str) -> HttpAnswer {
    let socket = daemon.socket.clone();
    let connect = thread::spawn(move || {
        set_thread_uid(Uid::from_raw(user)).expect("we are root");
        UnixStream::connect(socket).expect("every user may")
    });
    request_on_stream(connect.join().expect("connected"), path, "*/*")
}

pub(crate) fn pids_in_list(list: &Value) -> Vec<u64> {
    let list = list.as_array().expect("a list").iter();
    list.map(|process| process["pid"].as_u64().expect("a pid"))
        .collect()
}

pub(crate) fn users_see_their_own_processes() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(crate::ZERNEL_PATH, &stage);
    let root = start_launching_target(&stage, 10);
    let nobody = start_launching_target_of(NOBODY_UID, &stage, 20);
    daemon.wait_for_metrics_line(&exported_launches(root.pid(), 10));
    daemon.wait_for_metrics_line(&exported_launches(nobody.pid(), 20));
    let (of_root, of_nobody) = (u64::from(root.pid()), u64::from(nobody.pid()));

    let metrics = request_as_user(NOBODY_UID, &daemon, "/metrics").body;
    assert!(metrics.contains(&exported_launches(nobody.pid(), 20)));
    assert!(!metrics.contains(&format!("pid=\"{of_root}\"")));
    let quantiles = request_as_user(NOBODY_UID, &daemon, "/metrics/quantiles").body;
    assert!(!quantiles.contains(&format!("pid=\"{of_root}\"")));
    let snapshot = request_as_user(NOBODY_UID, &daemon, "/api/v1/snapshot").body_as_json();
    assert_eq!(pids_in_list(&snapshot["observed"]), [of_nobody]);
    let ledger = request_as_user(NOBODY_UID, &daemon, "/api/v1/ledger").body_as_json();
    assert_eq!(pids_in_list(&ledger["processes"]), [of_nobody]);
    assert_eq!(ledger["files"], Value::Null);

    let metrics = request_as_user(0, &daemon, "/metrics").body;
    assert!(metrics.contains(&exported_launches(nobody.pid(), 20)));
    assert!(metrics.contains(&exported_launches(root.pid(), 10)));
    let ledger = request_as_user(0, &daemon, "/api/v1/ledger").body_as_json();
    let listed = pids_in_list(&ledger["processes"]);
    assert!(listed.contains(&of_root) && listed.contains(&of_nobody));
}

pub(crate) fn missing_privilege_is_reported() {
    let stage = Stage::new(Prologue::Push);
    let zernel = copy_for_all_users(&stage, env!("CARGO_BIN_EXE_zernel").as_ref(), "zernel");
    let mut command = Command::new(zernel);
    let output = command
        .arg("observe")
        .uid(NOBODY_UID)
        .gid(NOBODY_UID)
        .output();
    let output = output.expect("zernel runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(
        printed.contains("root") && printed.contains("CAP_BPF"),
        "{printed}"
    );
}
