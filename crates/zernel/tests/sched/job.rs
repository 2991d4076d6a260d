//! `zernel sched` and `zernel run --sched` beside an observer and training. Runs in a virtual machine.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use zernel_phase::shared::{HEARTBEAT_PIN, PIN_DIRECTORY};
use zernel_testkit::eventually_within;

use super::guest::{STATISTICS_PATH, collect_stderr, wait_for_text};
use super::{
    BUSYBOX_PATH, END_TIMEOUT, LOAD_TIMEOUT, ZERNEL_PATH, end_by_signal, sched_ext_state,
    start_scheduler, stop_scheduler, wait_for_sched_ext_state,
};

const TRAINING_FILE: &str = "/tmp/training.toml";
/// Trains until Ctrl-C, and exits with 7 then.
const INTERRUPTED_SCRIPT: &str = concat!(
    "trap 'kill -INT $!; wait $!; exit 7' INT; ",
    env!("CARGO_BIN_EXE_zernel"),
    " workload run /tmp/training.toml & wait $!"
);
const TRAINING_SPEC: &str = r#"
duration_ms = 600000

[[group]]
name = "training"
workers = 3
pcomm = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, backward_us = 1000, gpu_us = 1500 }

[[group]]
name = "noise"
workers = 2
work = "spin_wait"
"#;

/// Starts an observer and waits until it answers.
fn start_observer() -> Child {
    let observer = Command::new(ZERNEL_PATH)
        .arg("observe")
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually_within(LOAD_TIMEOUT, "the observer answers", || {
        let output = Command::new(ZERNEL_PATH).arg("ps").output().unwrap();
        output.status.success()
    });
    observer
}

/// Starts a scheduler and an observer after it. The observer writes the maps that the scheduler pinned. A command gets no
/// privilege of its own beside a loaded scheduler, which stays as root configured it.
fn observe_beside_a_scheduler() -> Child {
    let mut scheduler = start_scheduler(&["--privilege", "all"]);
    let printed = collect_stderr(&mut scheduler);
    wait_for_text(&printed, "no observer runs, so no thread goes first");
    let observer = start_observer();
    wait_for_text(&printed, "an observer runs; critical threads go first");
    metrics_show_the_scheduler();
    let output = Command::new(ZERNEL_PATH)
        .args(["run", "--sched", "--", ZERNEL_PATH, "--version"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("root chose its privilege: all"), "{text}");
    assert_eq!(sched_ext_state(), "enabled");
    stop_scheduler(&mut scheduler);
    wait_for_sched_ext_state("disabled", END_TIMEOUT);
    observer
}

/// While a scheduler reads the task states, an observer that ends leaves the maps to the next one.
fn assert_pins_outlive_observer(observer: &mut Child) {
    stop_scheduler(observer);
    let pin = Path::new(PIN_DIRECTORY).join(HEARTBEAT_PIN);
    assert!(pin.exists(), "the observer removed {}", pin.display());
}

/// The metrics of a running observer contain those of the running scheduler.
fn metrics_show_the_scheduler() {
    eventually_within(END_TIMEOUT, "the metrics show the scheduler", || {
        let mut daemon = UnixStream::connect("/run/zernel/observe.sock").unwrap();
        daemon
            .write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            .unwrap();
        let mut text = String::new();
        daemon.read_to_string(&mut text).unwrap();
        [
            "\nzernel_sched_loaded 1\n",
            "\nzernel_sched_guarantee_ratio 0.5\n",
            "\nzernel_sched_events_total{event=\"queued\"} ",
            "\nzernel_sched_wake_to_run_seconds_count{class=\"other\"} ",
            "\nzernel_sched_tenant_run_seconds_total{cgroup=\"/\"} ",
            "\nzernel_sched_tenant_debt_seconds{cgroup=\"/\"} ",
        ]
        .iter()
        .all(|line| text.contains(line))
    });
}

/// The observer ends beside a scheduler, which reports that no observer runs.
pub(super) fn a_missing_observer_is_reported() {
    let mut observer = observe_beside_a_scheduler();
    let mut scheduler = start_scheduler(&["--privilege", "all"]);
    let printed = collect_stderr(&mut scheduler);
    assert_pins_outlive_observer(&mut observer);
    wait_for_text(&printed, "no observer runs, so no thread goes first");
    stop_scheduler(&mut scheduler);
    wait_for_sched_ext_state("disabled", END_TIMEOUT);
}

/// With training beside spinners, `--ab` prints a ratio with its interval, and `zernel run --sched` privileges its command
/// until Ctrl-C ends both. The exit code is that of the command.
pub(super) fn jobs_are_compared_and_privileged() {
    fs::write(TRAINING_FILE, TRAINING_SPEC).unwrap();
    let mut observer = observe_beside_a_scheduler();
    let mut training = Command::new(ZERNEL_PATH)
        .args(["workload", "run", TRAINING_FILE])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually_within(LOAD_TIMEOUT, "training is observed", || {
        let output = Command::new(ZERNEL_PATH).arg("ps").output().unwrap();
        String::from_utf8_lossy(&output.stdout).contains("trainer")
    });
    ab_prints_a_ratio();
    assert!(end_by_signal(&mut training, Signal::INT).success());

    let mut run = Command::new(ZERNEL_PATH)
        .args([
            "run",
            "--sched",
            "--",
            BUSYBOX_PATH,
            "sh",
            "-c",
            INTERRUPTED_SCRIPT,
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let printed = collect_stderr(&mut run);
    let privilege = format!("\"privilege\":\"run={}\"", run.id());
    eventually_within(LOAD_TIMEOUT, "the command is privileged", || {
        let text = fs::read_to_string(STATISTICS_PATH).unwrap_or_default();
        text.contains(&privilege) && !text.contains("\"critical\":{\"runs\":0,")
    });
    assert_eq!(sched_ext_state(), "enabled");
    privilege_outlives_drifting_clocks();
    assert_pins_outlive_observer(&mut observer);
    let status = end_by_signal(&mut run, Signal::INT);
    wait_for_text(&printed, "critical threads: preempting");
    wait_for_text(&printed, "the scheduler is unloaded");
    assert_eq!(status.code(), Some(7), "{}", printed.lock().unwrap());
    assert_eq!(sched_ext_state(), "disabled");
}

/// The clock of the observer's heart is adjusted, and that of the scheduler is not, so they drift apart: here by a tenth. When
/// they are further apart than a dead heart is noticed, critical threads still run as such.
fn privilege_outlives_drifting_clocks() {
    let critical_runs = || {
        let text = fs::read_to_string(STATISTICS_PATH).unwrap_or_default();
        let (_, runs) = text.split_once("\"critical\":{\"runs\":")?;
        runs.split_once(',')?.0.parse::<u64>().ok()
    };
    set_clock_tick(9000);
    thread::sleep(Duration::from_secs(15));
    set_clock_tick(10000);
    let before = critical_runs();
    assert!(before.is_some());
    eventually_within(END_TIMEOUT, "critical threads run", || {
        critical_runs() > before
    });
}

/// Sets by how many microseconds the clocks of programs advance per hundredth of a second.
fn set_clock_tick(tick: u32) {
    let status = Command::new(BUSYBOX_PATH)
        .args(["adjtimex", "-q", "-t", &tick.to_string()])
        .status();
    assert!(status.unwrap().success());
}

/// Two pairs of blocks.
fn ab_prints_a_ratio() {
    let output = Command::new(ZERNEL_PATH)
        .args(["sched", "--privilege", "all", "--ab", "8s", "--block", "2s"])
        .output()
        .unwrap();
    let progress = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{progress}{text}");
    assert!(
        progress.contains("2 pairs of blocks, 2 s each"),
        "{progress}"
    );
    let ratio = text.strip_prefix("steps/s with the scheduler: ");
    let ratio = ratio.and_then(|rest| rest.split(' ').next());
    let ratio: f64 = ratio.expect("a ratio").parse().unwrap();
    assert!(ratio > 0.0 && ratio.is_finite(), "{text}");
    assert!(text.contains(", 2 pairs)"), "{progress}{text}");
    assert_eq!(sched_ext_state(), "disabled");
}
