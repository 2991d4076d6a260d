//! The systemd unit: that it grants what is needed and nothing else, and that systemd understands it.

use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use zernel_softgpu::install::Prologue;
use zernel_testkit::daemon::{Daemon, zernel_command};
use zernel_testkit::target::Stage;
use zernel_testkit::{Need, StoppedThread};

use crate::users::{copy_for_all_users, pids_in_list, start_launching_target_of};
use crate::{exported_launches, start_launching_target};

const OBSERVER_UNIT: &str = include_str!("../../../../deploy/zernel.service");
const SCHEDULER_UNIT: &str = include_str!("../../../../deploy/zernel-sched.service");
/// Neither root nor the user of an observed process.
const DAEMON_UID: u32 = 65533;
/// The user of an observed process.
const OBSERVED_UID: u32 = 65532;

/// The words of a setting of the unit.
fn unit_setting(name: &str) -> Vec<&'static str> {
    let values = OBSERVER_UNIT
        .lines()
        .filter_map(|line| line.split_once('='));
    let mut values = values.filter(|(key, _)| *key == name);
    let (_, value) = values.next().expect("the unit sets it");
    assert_eq!(values.next(), None, "{name} is set twice");
    value.split_whitespace().collect()
}

fn unit_capabilities() -> Vec<&'static str> {
    unit_setting("AmbientCapabilities")
}

/// A command that runs a program as the unit does: as its own user, with only these capabilities.
fn command_confined_as_unit(program: &Path, capabilities: &[&str]) -> Command {
    let held: String = capabilities
        .iter()
        .map(|name| name.strip_prefix("CAP_").expect("a capability"))
        .map(|name| format!(",+{}", name.to_lowercase()))
        .collect();
    let mut command = Command::new("setpriv");
    command
        .args([
            format!("--reuid={DAEMON_UID}"),
            format!("--regid={DAEMON_UID}"),
        ])
        .args(["--clear-groups", "--no-new-privs"])
        .args(["inh-caps", "ambient-caps", "bounding-set"].map(|set| format!("--{set}=-all{held}")))
        .arg(program)
        .arg("observe");
    command
}

pub(crate) fn the_unit_grants_the_needed_capabilities() {
    let mut bounds = unit_setting("CapabilityBoundingSet");
    bounds.sort_unstable();
    let mut granted = unit_capabilities();
    granted.sort_unstable();
    assert_eq!(bounds, granted, "none can be gained that is not held");
    assert_eq!(unit_setting("NoNewPrivileges"), ["yes"]);

    let stage = Stage::new(Prologue::Push);
    let zernel = copy_for_all_users(&stage, env!("CARGO_BIN_EXE_zernel").as_ref(), "zernel");
    let runtime = stage.path().join("run");
    fs::create_dir(&runtime).expect("ours");
    chown(&runtime, Some(DAEMON_UID), Some(DAEMON_UID)).expect("we are root");
    let socket = runtime.join("observe.sock");
    let daemon = Daemon::start_as(
        command_confined_as_unit(&zernel, &unit_capabilities()),
        &stage,
        &socket,
    );
    let other = start_launching_target_of(OBSERVED_UID, &stage, 20);
    let root = start_launching_target(&stage, 10);
    for (target, launches) in [(&other, 20), (&root, 10)] {
        let pid = target.pid();
        daemon.wait_for_metrics_line(&exported_launches(pid, launches));
        daemon.wait_for_metrics_line(&format!("zernel_process_complete{{pid=\"{pid}\"}} 1"));
        daemon.wait_for_metrics_line(&format!(
            "zernel_gpu_memory_used_bytes{{pid=\"{pid}\",gpu_id=\"0\"}} 5000"
        ));
    }
}

/// The shell script of a setting of the unit, with another directory of the socket.
fn script_of_unit(name: &str, runtime: &Path) -> String {
    let lines = OBSERVER_UNIT
        .lines()
        .filter_map(|line| line.split_once('='));
    let mut lines = lines.filter(|(key, _)| *key == name);
    let (_, line) = lines.next().expect("the unit sets it");
    let script = line.strip_prefix("-+/bin/sh -c '").expect("a script");
    let script = script.strip_suffix('\'').expect("a script");
    script.replace("/run/zernel", runtime.to_str().expect("text"))
}

/// The service has no privilege to create a bpffs. The daemon's probes are detached when the directory of its links is
/// removed, although the daemon was killed.
pub(crate) fn the_unit_detaches_the_probes_of_a_killed_daemon() {
    let stage = Stage::new(Prologue::Push);
    let zernel = copy_for_all_users(&stage, env!("CARGO_BIN_EXE_zernel").as_ref(), "zernel");
    let runtime = stage.path().join("run");
    fs::create_dir(&runtime).expect("ours");
    chown(&runtime, Some(DAEMON_UID), Some(DAEMON_UID)).expect("we are root");
    let start = script_of_unit("ExecStartPre", &runtime);
    let daemon = command_confined_as_unit(&zernel, &unit_capabilities());
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c"])
        .arg(format!(
            "mount -t bpf bpf /sys/fs/bpf && {start} && exec \"$@\""
        ))
        .args(["sh".as_ref(), daemon.get_program()])
        .args(daemon.get_args());
    let daemon = Daemon::start_as(command, &stage, &runtime.join("observe.sock"));
    let target = start_launching_target(&stage, 5);
    daemon.wait_for_metrics_line(&exported_launches(target.pid(), 5));
    // The daemon's mounts stay as long as its mount namespace is open.
    let mounts = File::open(format!("/proc/{}/ns/mnt", daemon.pid())).expect("it runs");
    let objects = daemon.kernel_objects();
    daemon.end_by_signal(Signal::KILL);
    assert!(
        objects.attached_links() > 0,
        "its pins keep the probes attached"
    );
    let mounts = format!("/proc/{}/fd/{}", std::process::id(), mounts.as_raw_fd());
    let stop = script_of_unit("ExecStopPost", &runtime);
    let mut command = Command::new("nsenter");
    command.arg(format!("--mount={mounts}"));
    // Removing the directory fails, because the pinned task states stay for the next daemon.
    let _ = command
        .args(["sh", "-c", &stop])
        .status()
        .expect("nsenter runs");
    objects.wait_until_freed();
}

/// Observes for a moment with these capabilities.
fn observe_with_capabilities(program: &Path, capabilities: &[&str]) -> Output {
    let mut command = command_confined_as_unit(program, capabilities);
    command.args(["--ledger", "--for", "0.1"]);
    command.output().expect("setpriv runs")
}

pub(crate) fn each_capability_is_needed() {
    let stage = Stage::new(Prologue::Push);
    let zernel = copy_for_all_users(&stage, env!("CARGO_BIN_EXE_zernel").as_ref(), "zernel");
    let target = start_launching_target(&stage, 1);
    let output = observe_with_capabilities(&zernel, &unit_capabilities());
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    let ledger: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(pids_in_list(&ledger["processes"]).contains(&u64::from(target.pid())));
    for lacking in unit_capabilities() {
        let rest: Vec<_> = unit_capabilities()
            .into_iter()
            .filter(|name| *name != lacking)
            .collect();
        let output = observe_with_capabilities(&zernel, &rest);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(1),
            "without {lacking}: {printed}"
        );
        assert!(printed.contains(lacking), "{printed}");
    }
}

/// Receives the messages of a daemon until `time` is over.
fn receive_messages(manager: &UnixDatagram, time: Duration) -> Vec<String> {
    let end = Instant::now() + time;
    let mut messages = Vec::new();
    let mut message = [0; 64];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return messages;
        }
        manager.set_read_timeout(Some(left)).expect("a time");
        if let Ok(length) = manager.recv(&mut message) {
            messages.push(String::from_utf8_lossy(&message[..length]).into_owned());
        }
    }
}

/// A daemon whose observer stalls no longer notifies the service manager, which then restarts it.
pub(crate) fn the_watchdog_is_notified_while_the_observer_publishes() {
    let stage = Stage::new(Prologue::Push);
    let socket = stage.path().join("notify");
    let manager = UnixDatagram::bind(&socket).expect("ours");
    let mut command = zernel_command(crate::ZERNEL_PATH);
    command.env("NOTIFY_SOCKET", &socket);
    command.env("WATCHDOG_USEC", "200000");
    let daemon = Daemon::start_as(command, &stage, &stage.path().join("observe.sock"));
    let first = receive_messages(&manager, Duration::from_secs(3));
    assert_eq!(first[0], "READY=1");
    assert!(first.len() > 5, "{first:?}");
    assert!(first[1..].iter().all(|it| it == "WATCHDOG=1"), "{first:?}");
    let stopped = StoppedThread::stop_named(daemon.pid(), "observer").expect("root may stop it");
    daemon.wait_for_health("HTTP/1.1 503");
    receive_messages(&manager, Duration::from_millis(200));
    assert!(receive_messages(&manager, Duration::from_secs(2)).is_empty());
    drop(stopped);
    daemon.wait_for_health("HTTP/1.1 200");
    assert!(!receive_messages(&manager, Duration::from_secs(2)).is_empty());
}

/// The need for the tool that reads units.
pub(crate) fn systemd_need() -> Need {
    Need {
        name: "systemd",
        check: || match Command::new("systemd-analyze").arg("--version").output() {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("systemd-analyze does not run: {error}")),
        },
    }
}

/// Writes the unit to a folder, with the program of this build.
fn write_observer_unit(folder: &Path) -> PathBuf {
    write_unit(folder, "zernel.service", OBSERVER_UNIT)
}

fn write_unit(folder: &Path, name: &str, text: &str) -> PathBuf {
    let unit = folder.join(name);
    // systemd-analyze checks that the program exists.
    let here = text.replace("/usr/bin/zernel", env!("CARGO_BIN_EXE_zernel"));
    fs::write(&unit, here).expect("ours");
    fs::set_permissions(&unit, Permissions::from_mode(0o644)).expect("ours");
    unit
}

/// The documented score is that of systemd 252. Other versions of systemd may weigh settings differently, so a
/// difference of one point is allowed.
pub(crate) fn the_unit_has_the_documented_exposure_score() {
    const SECURITY_DOCUMENT: &str = include_str!("../../../../docs/security.md");
    let (_, rest) = SECURITY_DOCUMENT
        .split_once("exposure level is ")
        .expect("it is documented");
    let documented: f64 = rest
        .split(' ')
        .next()
        .and_then(|score| score.parse().ok())
        .expect("a number");
    let folder = tempfile::tempdir().expect("a folder");
    let unit = write_observer_unit(folder.path());
    let mut command = Command::new("systemd-analyze");
    command.args(["security", "--offline=true"]).arg(unit);
    let output = command.output().expect("systemd-analyze runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let (_, rest) = printed.rsplit_once("zernel.service: ").expect("a score");
    let score: f64 = rest
        .split(' ')
        .next()
        .and_then(|score| score.parse().ok())
        .expect("a number");
    assert!(
        score <= documented + 1.0,
        "{score} instead of {documented}: {printed}"
    );
}

pub(crate) fn systemd_creates_the_user_of_the_unit() {
    let root = tempfile::tempdir().expect("a folder");
    fs::create_dir(root.path().join("etc")).expect("ours");
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/sysusers.d/zernel.conf"
    );
    let file = Path::new(file).canonicalize().expect("it is there");
    let text = fs::read_to_string(file).expect("it is there");
    let mut command = Command::new("systemd-sysusers");
    command.arg("--root").arg(root.path()).arg("--inline");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let output = command.args(lines).output().expect("systemd-sysusers runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    for name in ["etc/passwd", "etc/group"] {
        let accounts = fs::read_to_string(root.path().join(name)).expect("written");
        assert!(accounts.contains("zernel:"), "{accounts}");
    }
    assert_eq!(
        [unit_setting("User"), unit_setting("Group")],
        [["zernel"], ["zernel"]]
    );
}

pub(crate) fn systemd_understands_the_unit() {
    let folder = tempfile::tempdir().expect("a folder");
    let unit = write_observer_unit(folder.path());
    let mut command = Command::new("systemd-analyze");
    let output = command.args(["verify", "--man=no"]).arg(&unit).output();
    let output = output.expect("systemd-analyze runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    // systemd ignores settings that it does not know, and prints that it does.
    assert!(!printed.contains("zernel.service"), "{printed}");
}

pub(crate) fn systemd_understands_the_unit_of_the_scheduler() {
    let folder = tempfile::tempdir().expect("a folder");
    // The scheduler's unit refers to the observer's unit, so systemd must find both.
    write_observer_unit(folder.path());
    let unit = write_unit(folder.path(), "zernel-sched.service", SCHEDULER_UNIT);
    let mut command = Command::new("systemd-analyze");
    command.env("SYSTEMD_UNIT_PATH", format!("{}:", folder.path().display()));
    let output = command.args(["verify", "--man=no"]).arg(&unit).output();
    let output = output.expect("systemd-analyze runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    assert!(!printed.contains("zernel-sched.service"), "{printed}");
}
