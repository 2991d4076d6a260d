//! The commands that ask a daemon.

use std::path::PathBuf;
use std::process::{Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use zernel_testkit::eventually;

use crate::job::{RunningChild, TestJob};
use crate::{decode_output, zernel_command};

/// A daemon on a socket of its own, which has attached to the job's libraries.
pub(crate) struct JobDaemon {
    directory: tempfile::TempDir,
    _running: RunningChild,
}

impl JobDaemon {
    pub(crate) fn start(job: &TestJob) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let child = zernel_command()
            .args([
                "observe",
                "--expose",
                "all",
                "--http",
                "127.0.0.1:0",
                "--websocket",
                "127.0.0.1:0",
            ])
            .arg("--socket")
            .arg(directory.path().join("observe.sock"))
            .arg("--library")
            .arg(job.library_path("libcuda.so.1"))
            .arg("--library")
            .arg(job.library_path("libnccl.so.2"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let daemon = Self {
            directory,
            _running: RunningChild(child),
        };
        // The daemon prints this line after it has begun to listen.
        eventually("the daemon serves", || {
            daemon.printed_output().contains("metrics on")
        });
        daemon
    }

    fn printed_output(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("observe.sock")
    }

    fn run_client_command(&self, arguments: &[&str]) -> Output {
        let mut command = zernel_command();
        command.args(arguments).arg("--socket").arg(self.socket());
        command.output().unwrap()
    }
}

pub(crate) fn ps_lists_trainers() {
    let job = TestJob::new(2, 60_000);
    let daemon = JobDaemon::start(&job);
    let mut running = job.start();
    job.wait_until_it_trains();
    let ranks_with_phase = || {
        let table = decode_output(&daemon.run_client_command(&["ps"]).stdout);
        let trainers = job.trainer_pids();
        let is_whole = |pid: &i32| {
            table.lines().any(|line| {
                let cells: Vec<&str> = line.split_whitespace().collect();
                cells[..2] == [pid.to_string(), job.name()]
                    && ["0", "1"].contains(&cells[2])
                    && cells[4] != "-"
            })
        };
        trainers.len() == 2 && trainers.iter().all(is_whole)
    };
    eventually("ps lists both ranks with a phase", ranks_with_phase);
    let listed = daemon.run_client_command(&["ps", "--json"]).stdout;
    let listed: Value = serde_json::from_slice(&listed).expect("JSON");
    let listed = listed.as_array().expect("a list").iter();
    let own = listed.filter(|trainer| trainer["job"] == job.name());
    let ranks: Vec<_> = own.map(|trainer| trainer["rank"].as_u64()).collect();
    assert_eq!(ranks, [Some(0), Some(1)]);
    running.stop();
}

pub(crate) fn hang_names_a_stopped_rank() {
    let job = TestJob::new(4, 600_000);
    let daemon = JobDaemon::start(&job);
    let _running = job.start();
    job.wait_until_it_trains();
    let name = job.name();
    let hang = |after: &str| daemon.run_client_command(&["hang", &name, "--after", after]);
    eventually("all ranks are observed", || {
        decode_output(&hang("30").stdout).contains("4 of 4 ranks are on this node")
    });
    assert_eq!(
        hang("30").status.code(),
        Some(0),
        "{}",
        decode_output(&hang("30").stdout)
    );
    let stopped = job.trainer_pids()[1];
    kill_process(Pid::from_raw(stopped).unwrap(), Signal::STOP).unwrap();
    eventually("a hang is reported", || hang("1").status.code() == Some(1));
    let printed = decode_output(&hang("1").stdout);
    let words: Vec<&str> = printed.split_whitespace().collect();
    let words = words.join(" ");
    assert!(words.contains(&format!("(pid {stopped})")), "{printed}");
    assert!(words.contains("it is stopped"), "{printed}");
    // No other rank is blamed.
    assert_eq!(words.matches("(pid ").count(), 1, "{printed}");
    kill_process(Pid::from_raw(stopped).unwrap(), Signal::CONT).unwrap();
    eventually("the hang is over", || hang("1").status.code() == Some(0));
}

pub(crate) fn ps_and_hang_report_a_missing_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("observe.sock");
    for (command, code) in [("ps", 1), ("hang", 2)] {
        let output = zernel_command()
            .arg(command)
            .arg("--socket")
            .arg(&socket)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(code));
        let printed = decode_output(&output.stderr);
        assert!(printed.contains("zernel observe"), "{printed}");
        assert!(output.stdout.is_empty());
    }
}
