//! What `zernel sched` does beside scheduling. These tests run in a virtual machine, in the trial that starts and
//! ends the scheduler.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zernel_testkit::eventually_within;

use super::{
    END_TIMEOUT, LOAD_TIMEOUT, ZERNEL_PATH, assert_start_is_refused, end_by_signal,
    sched_ext_state, start_scheduler, wait_for_sched_ext_state,
};

const NOBODY_UID: u32 = 65534;
pub(super) const STATISTICS_PATH: &str = "/run/zernel-sched/statistics.json";

/// `--stats` prints lines, and another user sees the same with `--monitor`.
pub(super) fn statistics_are_printed() {
    let mut scheduler = start_scheduler(&["--stats", "1"]);
    assert_start_is_refused("the scheduler zernel is loaded");
    let mut monitor = Command::new(ZERNEL_PATH)
        .args(["sched", "--monitor", "1"])
        .uid(NOBODY_UID)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = |output: Box<dyn std::io::Read>| -> Vec<String> {
        let lines = BufReader::new(output).lines();
        lines.take(4).map(Result::unwrap).collect()
    };
    let of_monitor = lines(Box::new(monitor.stdout.take().unwrap()));
    let of_stats = lines(Box::new(scheduler.stdout.take().unwrap()));
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    for printed in [of_monitor, of_stats] {
        assert!(printed[1].contains("PREEMPT/S"), "{printed:?}");
        // All tasks are of class other: nothing is observed.
        let words: Vec<&str> = printed[3].split_whitespace().collect();
        assert_eq!(words[..9], ["0", "-", "0%"].repeat(3), "{printed:?}");
        let other_runs: u64 = words[9].parse().unwrap();
        assert!(other_runs > 0, "{printed:?}");
        assert!(words.contains(&"100%"), "{printed:?}");
    }
    assert!(end_by_signal(&mut scheduler, Signal::INT).success());
    wait_for_sched_ext_state("disabled", END_TIMEOUT);
    let output = Command::new(ZERNEL_PATH)
        .args(["sched", "--monitor", "1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no `zernel sched` runs"), "{text}");
}

/// Collects what a child prints to stderr, in a text that can be read while the child runs.
pub(super) fn collect_stderr(child: &mut Child) -> Arc<Mutex<String>> {
    let collected = Arc::new(Mutex::new(String::new()));
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let target = Arc::clone(&collected);
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let mut text = target.lock().unwrap();
            *text += &line;
            *text += "\n";
        }
    });
    collected
}

pub(super) fn wait_for_text(collected: &Mutex<String>, wanted: &str) {
    let begin = Instant::now();
    while !collected.lock().unwrap().contains(wanted) {
        let text = collected.lock().unwrap().clone();
        assert!(begin.elapsed() < LOAD_TIMEOUT, "no `{wanted}` in:\n{text}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A changed file is applied on SIGHUP or by itself, and one with a mistake is not. A scheduler that was unloaded with
/// SysRq is not loaded again.
pub(super) fn a_changed_configuration_is_applied() {
    let file = "/tmp/sched.toml";
    fs::write(file, "slice_us = 2000\n").unwrap();
    let mut scheduler = start_scheduler(&["--config", file, "--restart", "5"]);
    let printed = collect_stderr(&mut scheduler);
    let published = |wanted: &str| {
        eventually_within(END_TIMEOUT, wanted, || {
            fs::read_to_string(STATISTICS_PATH).is_ok_and(|text| text.contains(wanted))
        });
    };
    published("\"slice_us\":2000");
    fs::write(file, "slice_us = 4000\nguarantee = 0.2\n").unwrap();
    let pid = Pid::from_raw(scheduler.id().cast_signed()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    wait_for_text(&printed, "slice 4000 µs, privilege nobody, guarantee 0.2");
    published("\"slice_us\":4000");
    fs::write(file, "\nslice = 1\n").unwrap();
    wait_for_text(&printed, "line 2");
    wait_for_text(&printed, "the configuration stays as it was");
    published("\"guarantee\":0.2");
    fs::write(file, "privilege = \"all\"\nlend = true\n").unwrap();
    wait_for_text(&printed, "privilege all");
    published("\"privilege\":\"all\"");
    published("\"lend\":true");
    assert_eq!(sched_ext_state(), "enabled");
    fs::write("/proc/sysrq-trigger", "S").unwrap();
    let status = scheduler.wait().unwrap();
    wait_for_text(&printed, "the scheduler was unloaded from outside");
    assert_eq!(status.code(), Some(1));
    wait_for_sched_ext_state("disabled", END_TIMEOUT);
    let output = Command::new(ZERNEL_PATH)
        .args(["sched", "--config", "/tmp/nowhere.toml"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
}

/// A cgroup without the cpu controller is refused. A privileged cgroup that is removed and created again is
/// privileged again.
pub(super) fn a_recreated_cgroup_is_privileged_again() {
    let parent = Path::new("/sys/fs/cgroup/jobs");
    let cgroup = parent.join("training");
    let privilege = format!("cgroup={}", cgroup.display());
    let enable_cpu_below = |folder: &Path| {
        fs::write(folder.join("cgroup.subtree_control"), "+cpu").unwrap();
    };
    fs::create_dir_all(&cgroup).unwrap();
    enable_cpu_below(Path::new("/sys/fs/cgroup"));
    let output = Command::new(ZERNEL_PATH)
        .args(["sched", "--privilege", &privilege])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("has no cpu controller"), "{text}");

    enable_cpu_below(parent);
    let mut scheduler = start_scheduler(&["--privilege", &privilege]);
    let printed = collect_stderr(&mut scheduler);
    fs::remove_dir(&cgroup).unwrap();
    wait_for_text(
        &printed,
        "no thread goes first: /sys/fs/cgroup/jobs/training: No such file",
    );
    fs::create_dir(&cgroup).unwrap();
    wait_for_text(
        &printed,
        "privileged again: cgroup=/sys/fs/cgroup/jobs/training",
    );
    assert!(end_by_signal(&mut scheduler, Signal::TERM).success());
    wait_for_sched_ext_state("disabled", END_TIMEOUT);
    fs::remove_dir(&cgroup).unwrap();
    fs::remove_dir(parent).unwrap();
}

/// With `--replace` the loaded scheduler ends, and the next one is loaded. Killed, it is unloaded.
pub(super) fn replace_loads_the_newer_scheduler() {
    let mut older = start_scheduler(&[]);
    eventually_within(END_TIMEOUT, "statistics are published", || {
        fs::exists(STATISTICS_PATH).unwrap()
    });
    assert_start_is_refused("take its place with `zernel sched --replace`");
    let mut newer = Command::new(ZERNEL_PATH)
        .args(["sched", "--replace"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let printed = collect_stderr(&mut newer);
    let pid = older.id();
    wait_for_text(&printed, &format!("replaced `zernel sched` (pid {pid})"));
    assert!(older.wait().unwrap().success());
    assert_eq!(sched_ext_state(), "enabled");
    assert!(!end_by_signal(&mut newer, Signal::KILL).success());
    wait_for_sched_ext_state("disabled", END_TIMEOUT);
}

/// Keeps every task of the scheduler from running until the kernel ejects it.
fn cause_ejection() {
    let set_policy = |policy, sched_priority| {
        let parameters = libc::sched_param { sched_priority };
        // SAFETY: the pointer is valid for the call.
        let result = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
        assert_eq!(result, 0, "root may change its policy");
    };
    set_policy(libc::SCHED_FIFO, 1);
    let begin = Instant::now();
    while sched_ext_state() == "enabled" && begin.elapsed() < Duration::from_secs(20) {}
    set_policy(libc::SCHED_OTHER, 0);
    assert_ne!(
        sched_ext_state(),
        "enabled",
        "the kernel did not eject the scheduler"
    );
}

/// After the second ejection the scheduler is not loaded a third time.
pub(super) fn the_scheduler_is_not_loaded_after_two_ejections() {
    let mut scheduler = start_scheduler(&["--restart", "1", "--watchdog-ms", "500"]);
    let printed = collect_stderr(&mut scheduler);
    cause_ejection();
    wait_for_text(&printed, "the kernel ejected the scheduler: ");
    wait_for_sched_ext_state("enabled", LOAD_TIMEOUT);
    cause_ejection();
    let status = scheduler.wait().unwrap();
    wait_for_text(&printed, "ejected the scheduler 2 times");
    assert_eq!(status.code(), Some(1));
    wait_for_sched_ext_state("disabled", END_TIMEOUT);
}

/// `zernel run --sched` schedules while its command runs, and passes its exit code on.
pub(super) fn run_sched_schedules_while_its_command_runs() {
    // The command finds the scheduler loaded.
    let output = Command::new(ZERNEL_PATH)
        .args(["run", "--sched", "--", ZERNEL_PATH, "sched"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("the scheduler zernel is loaded"), "{text}");
    assert!(text.contains("the scheduler is unloaded"), "{text}");
    assert_eq!(sched_ext_state(), "disabled");
}
