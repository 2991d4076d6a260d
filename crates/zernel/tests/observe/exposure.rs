//! What the daemon shows over HTTP with and without its token.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use zernel_softgpu::install::Prologue;
use zernel_testkit::daemon::{Daemon, HttpAnswer, zernel_command};
use zernel_testkit::eventually;
use zernel_testkit::target::Stage;

use crate::users::pids_in_list;
use crate::{ZERNEL_PATH, exported_launches, start_launching_target};

/// Every path that shows figures.
const PATHS_WITH_FIGURES: [&str; 4] = [
    "/metrics",
    "/metrics/quantiles",
    "/api/v1/snapshot",
    "/api/v1/ledger",
];

/// Starts a daemon with a token file of its own, and with more options.
fn start_with_token_file(stage: &Stage, options: &[&str]) -> (Daemon, PathBuf) {
    let file = stage.path().join("token");
    let mut command = zernel_command(ZERNEL_PATH);
    command.args(options).arg("--token-file").arg(&file);
    let socket = stage.path().join("observe.sock");
    (Daemon::start_as(command, stage, &socket), file)
}

fn read_token(file: &Path) -> String {
    let text = fs::read_to_string(file).expect("the daemon wrote it");
    text.trim().to_owned()
}

fn status_line(answer: &HttpAnswer) -> &str {
    answer.head.split(' ').nth(1).expect("a status")
}

/// Waits until the daemon has seen the launches of a process.
fn wait_for_launches(daemon: &Daemon, token: &str, pid: u32, launches: u64) {
    let line = exported_launches(pid, launches);
    eventually("the launches are exported", || {
        let metrics = daemon.get_with_token("/metrics", token).body;
        metrics.lines().any(|exported| exported == line)
    });
}

pub(crate) fn processes_need_the_token() {
    let stage = Stage::new(Prologue::Push);
    let (daemon, file) = start_with_token_file(&stage, &[]);
    let token = read_token(&file);
    assert_eq!(token.len(), 64, "256 bits in hexadecimal");
    let mode = fs::metadata(&file).expect("a file").permissions().mode();
    assert_eq!(mode & 0o137, 0, "{mode:o}");
    let target = start_launching_target(&stage, 10);
    wait_for_launches(&daemon, &token, target.pid(), 10);

    for path in PATHS_WITH_FIGURES.into_iter().chain(["/", "/ws"]) {
        let refused = daemon.get(path);
        assert_eq!(status_line(&refused), "401", "{path}");
        let file = file.display().to_string();
        let lines = format!("    authorization:\n      credentials_file: {file}\n");
        assert!(refused.body.contains(&lines), "{}", refused.body);
        assert!(refused.body.contains("--expose all"), "{}", refused.body);
        let wrong = daemon.get_with_token(path, &token.replace(['0', '1', '2', '3'], "4"));
        assert_eq!(status_line(&wrong), "401", "{path}");
    }
    let health = daemon.get("/healthz");
    assert_eq!(health.body, r#"{"ok":true,"problem_count":0}"#);
    let snapshot = daemon
        .get_with_token("/api/v1/snapshot", &token)
        .body_as_json();
    assert!(pids_in_list(&snapshot["observed"]).contains(&u64::from(target.pid())));

    // The daemon reads the same token at its next start.
    daemon.end_by_signal(rustix::process::Signal::TERM);
    let (_daemon, file) = start_with_token_file(&stage, &["--expose", "token"]);
    assert_eq!(self::read_token(&file), token);
}

pub(crate) fn aggregates_name_no_process_or_cgroup() {
    let stage = Stage::new(Prologue::Push);
    let (daemon, file) = start_with_token_file(&stage, &["--expose", "aggregate"]);
    let token = read_token(&file);
    let target = start_launching_target(&stage, 10);
    wait_for_launches(&daemon, &token, target.pid(), 10);
    let snapshot = daemon
        .get_with_token("/api/v1/snapshot", &token)
        .body_as_json();
    let observed = snapshot["observed"].as_array().expect("a list").iter();
    let mut observed = observed.filter(|process| process["pid"] == target.pid());
    let identity = &observed.next().expect("it is observed")["identity"];
    let cgroup = identity["cgroup"].as_str().expect("a cgroup").to_owned();
    let pid = target.pid().to_string();

    for path in PATHS_WITH_FIGURES {
        let answer = daemon.get(path);
        assert_eq!(status_line(&answer), "200", "{path}");
        let body = &answer.body;
        let mut words =
            body.split(|character: char| !(character.is_alphanumeric() || character == '.'));
        assert!(words.all(|word| word != pid), "{path} has {pid}: {body}");
        for secret in ["pid=", "\"pid\"", "comm=", "uid", "target"] {
            assert!(!body.contains(secret), "{path} has {secret}: {body}");
        }
        let names_cgroup = cgroup.len() > 1 && answer.body.contains(&cgroup);
        assert!(!names_cgroup, "{path}: {}", answer.body);
    }
    let metrics = daemon.metrics_text();
    assert!(metrics.contains("zernel_observe_rung{"), "{metrics}");
    let count = metrics
        .lines()
        .find_map(|line| line.strip_prefix("zernel_observe_processes "));
    let count: f64 = count.and_then(|count| count.parse().ok()).expect("a count");
    assert!(count >= 1.0);
    assert!(daemon.get("/api/v1/snapshot").body_as_json()["cuda_latency_p50_us"].is_f64());
}

pub(crate) fn a_token_that_others_can_read_is_refused() {
    let stage = Stage::new(Prologue::Push);
    let file = stage.path().join("token");
    fs::write(&file, "0123456789abcdef\n").expect("ours");
    fs::set_permissions(&file, Permissions::from_mode(0o644)).expect("ours");
    let mut command = zernel_command(ZERNEL_PATH);
    let socket = stage.path().join("observe.sock");
    command
        .arg("--token-file")
        .arg(&file)
        .arg("--socket")
        .arg(socket);
    let any = "127.0.0.1:0";
    let output = command.args(["--http", any, "--websocket", any]).output();
    let output = output.expect("zernel runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    let is_named = printed.contains(&*file.to_string_lossy());
    assert!(is_named && printed.contains("chmod"), "{printed}");
}

pub(crate) fn a_token_file_with_expose_all_is_wrong_usage() {
    let mut command = zernel_command(ZERNEL_PATH);
    let output = command
        .args(["--expose", "all", "--token-file", "x"])
        .output();
    let output = output.expect("zernel runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(printed.contains("--token-file"), "{printed}");
}
