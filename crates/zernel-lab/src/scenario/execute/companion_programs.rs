//! The programs that run beside the groups: the scheduler and the observer.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::now_ns;
use crate::scenario::cgroup;
use crate::scenario::figures::SchedulerFigures;
use crate::scenario::plan::{SCHEDULER_PROGRAM_PATH, SchedulerCommand};
use crate::scenario::task_sampler::TaskSampler;

const SCHED_EXT_STATE_PATH: &str = "/sys/kernel/sched_ext/state";
const LOADED_SCHEDULER_PATH: &str = "/sys/kernel/sched_ext/root/ops";
const SCHEDULER_LOG_PATH: &str = "/run/scheduler.log";
const OBSERVER_LOG_PATH: &str = "/run/observer.log";
/// The name of the observer in an account of CPU time.
const OBSERVER_NAME: &str = "observer";
/// The observer pins this BPF map when it is ready.
const HEARTBEAT_PATH: &str = "/sys/fs/bpf/zernel/heartbeat";
/// Time that a program has to become ready. The kernel takes seconds to verify a large BPF scheduler.
const READY_TIMEOUT: Duration = Duration::from_secs(20);
/// Time that a program has to exit after SIGINT.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two checks whether a program is ready or has exited.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Length of the end of a program's output that a result contains.
const MAX_OUTPUT_TAIL_BYTES: usize = 2000;

/// The running scheduler under test.
pub(super) struct RunningScheduler {
    child: Option<Child>,
    figures: SchedulerFigures,
}

impl RunningScheduler {
    /// Starts the scheduler and waits until the kernel has enabled it.
    pub(super) fn start(command: &SchedulerCommand, program: &Path) -> Result<Self, String> {
        let mut process = match command {
            SchedulerCommand::None => {
                return Ok(Self {
                    child: None,
                    figures: SchedulerFigures::default(),
                });
            }
            SchedulerCommand::LabScheduler(name) => {
                let mut process = Command::new(program);
                process.args(["lab", "scheduler", name]);
                process
            }
            SchedulerCommand::Zernel(arguments) => {
                let mut process = Command::new(program);
                process.arg("sched").args(arguments);
                process
            }
            SchedulerCommand::Program(arguments) => {
                let mut process = Command::new(SCHEDULER_PROGRAM_PATH);
                process.args(arguments);
                process
            }
        };
        if !Path::new(SCHED_EXT_STATE_PATH).exists() {
            return Err(format!(
                "this kernel has no sched_ext ({SCHED_EXT_STATE_PATH} is missing)"
            ));
        }
        let mut child = spawn_with_log(&mut process, SCHEDULER_LOG_PATH)?;
        let enabled = wait_until_ready(&mut child, || {
            read_trimmed(SCHED_EXT_STATE_PATH) == "enabled"
        });
        let mut scheduler = Self {
            child: Some(child),
            figures: SchedulerFigures {
                expected: true,
                ..SchedulerFigures::default()
            },
        };
        scheduler.figures.loaded = read_trimmed(LOADED_SCHEDULER_PATH);
        match enabled {
            true => Ok(scheduler),
            false => Err(format!(
                "the scheduler did not load; it printed:\n{}",
                scheduler.stop().output
            )),
        }
    }

    /// Records whether the scheduler is still loaded.
    pub(super) fn record_if_still_loaded(&mut self) {
        self.figures.at_end = read_trimmed(SCHED_EXT_STATE_PATH) == "enabled";
    }

    /// Ends the scheduler's program.
    pub(super) fn stop(&mut self) -> SchedulerFigures {
        if let Some(mut child) = self.child.take() {
            stop_process(&mut child);
            self.figures.output = last_bytes_of_log(SCHEDULER_LOG_PATH);
        }
        self.figures.clone()
    }
}

/// `zernel observe`, running in a cgroup of its own.
pub(super) struct ObserverProcess {
    child: Child,
    pid: i32,
    leaf_cgroup: PathBuf,
    task_sampler: TaskSampler,
}

impl ObserverProcess {
    /// Starts `zernel observe`. It exports hints to the map at a path if the scheduler reads hints.
    pub(super) fn start(program: &Path, hint_map_path: Option<&str>) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.arg("observe");
        if let Some(path) = hint_map_path {
            command.args(["--hints", path]);
        }
        let mut child = spawn_with_log(&mut command, OBSERVER_LOG_PATH)?;
        let pid = i32::try_from(child.id()).unwrap_or(0);
        let leaf_cgroup = cgroup::move_to_leaf_cgroup(None, OBSERVER_NAME, &[pid])
            .map_err(|error| error.to_string())?;
        match wait_until_ready(&mut child, || Path::new(HEARTBEAT_PATH).exists()) {
            true => Ok(Self {
                child,
                pid,
                leaf_cgroup,
                task_sampler: TaskSampler::default(),
            }),
            false => {
                stop_process(&mut child);
                Err(format!(
                    "the observer did not start; it printed:\n{}",
                    last_bytes_of_log(OBSERVER_LOG_PATH)
                ))
            }
        }
    }

    /// The name of the observer in an account of CPU time, and its cgroup.
    pub(super) fn name_and_cgroup(&self) -> (String, PathBuf) {
        (OBSERVER_NAME.to_owned(), self.leaf_cgroup.clone())
    }

    pub(super) fn sample_tasks(&mut self) {
        self.task_sampler.sample_threads(self.pid, now_ns());
    }

    /// The longest time for which one of its threads was runnable at every sample and did not run.
    pub(super) fn longest_wait_ns(&self) -> u64 {
        self.task_sampler.longest_wait_ns()
    }
}

impl Drop for ObserverProcess {
    fn drop(&mut self) {
        stop_process(&mut self.child);
    }
}

fn spawn_with_log(command: &mut Command, log_path: &str) -> Result<Child, String> {
    let start_error = |error| format!("cannot start {}: {error}", command.get_program().display());
    let file = File::create(log_path).map_err(start_error)?;
    let log_for_stderr = file.try_clone().map_err(start_error)?;
    let spawned = command
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(log_for_stderr)
        .spawn();
    spawned.map_err(|error| format!("cannot start {}: {error}", command.get_program().display()))
}

/// Waits until a program is ready; false if the program exited or took too long.
fn wait_until_ready(child: &mut Child, is_ready: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while !is_ready() {
        let ended = !matches!(child.try_wait(), Ok(None));
        if ended || begin.elapsed() > READY_TIMEOUT {
            return false;
        }
        thread::sleep(POLL_INTERVAL);
    }
    true
}

/// Asks a program to exit by SIGINT, and kills it if it does not.
fn stop_process(child: &mut Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, Signal::INT);
    }
    let begin = Instant::now();
    while matches!(child.try_wait(), Ok(None)) && begin.elapsed() < EXIT_TIMEOUT {
        thread::sleep(POLL_INTERVAL);
    }
    // The kill and the wait fail only if the program has already exited.
    let _ = child.kill();
    let _ = child.wait();
}

fn read_trimmed(path: &str) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn last_bytes_of_log(path: &str) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let start = bytes.len().saturating_sub(MAX_OUTPUT_TAIL_BYTES);
    String::from_utf8_lossy(&bytes[start..]).trim().to_owned()
}
