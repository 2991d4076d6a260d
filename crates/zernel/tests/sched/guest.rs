//! What `zernel sched` does beside scheduling. Runs in a virtual machine, in the trial that starts and ends it.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use super::{ENDS_WITHIN, ZERNEL, start, stop, wait_for};

const NOBODY: u32 = 65534;

/// `--stats` prints lines, and another user sees the same with `--monitor`.
pub(super) fn statistics_are_printed() {
    let mut scheduler = start(&["--stats", "1"]);
    let mut monitor = Command::new(ZERNEL)
        .args(["sched", "--monitor", "1"])
        .uid(NOBODY)
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
        // The class of everybody is other: nobody observes.
        let words: Vec<&str> = printed[3].split_whitespace().collect();
        assert_eq!(words[..9], ["0", "-", "0%"].repeat(3), "{printed:?}");
        let other_runs: u64 = words[9].parse().unwrap();
        assert!(other_runs > 0, "{printed:?}");
        assert!(words.contains(&"100%"), "{printed:?}");
    }
    stop(&mut scheduler);
    wait_for("disabled", ENDS_WITHIN);
    let output = Command::new(ZERNEL)
        .args(["sched", "--monitor", "1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no `zernel sched` runs"), "{text}");
}
