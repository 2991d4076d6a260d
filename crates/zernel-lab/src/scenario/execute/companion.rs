//! The programs that run beside the groups: the scheduler and the observer.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::scenario::cgroup;
use crate::scenario::figures::SchedulerFigures;
use crate::scenario::plan::{SCHEDULER, SchedulerCommand};

const STATE: &str = "/sys/kernel/sched_ext/state";
const LOADED: &str = "/sys/kernel/sched_ext/root/ops";
const SCHEDULER_LOG: &str = "/run/scheduler.log";
const OBSERVER_LOG: &str = "/run/observer.log";
/// The observer's name in an account.
const OBSERVER: &str = "observer";
/// The observer pins this when it is ready.
const HEARTBEAT: &str = "/sys/fs/bpf/zernel/heartbeat";
/// Time that a program has to become ready. A large BPF scheduler takes seconds to verify.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// Time that a program has to end after SIGINT.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Time between two checks.
const POLL: Duration = Duration::from_millis(20);
/// The part of a program's output that a result carries.
const OUTPUT_BYTES: usize = 2000;

/// The scheduler under test.
pub(super) struct RunningScheduler {
    child: Option<Child>,
    figures: SchedulerFigures,
}

impl RunningScheduler {
    /// Starts it and waits until the kernel has enabled it.
    pub(super) fn start(command: &SchedulerCommand, program: &Path) -> Result<Self, String> {
        let mut process = match command {
            SchedulerCommand::None => {
                return Ok(Self {
                    child: None,
                    figures: SchedulerFigures::default(),
                });
            }
            SchedulerCommand::Own(name) => {
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
                let mut process = Command::new(SCHEDULER);
                process.args(arguments);
                process
            }
        };
        if !Path::new(STATE).exists() {
            return Err(format!("this kernel has no sched_ext ({STATE} is missing)"));
        }
        let mut child = spawn(&mut process, SCHEDULER_LOG)?;
        let enabled = wait_for(&mut child, || read(STATE) == "enabled");
        let mut scheduler = Self {
            child: Some(child),
            figures: SchedulerFigures {
                expected: true,
                ..SchedulerFigures::default()
            },
        };
        scheduler.figures.loaded = read(LOADED);
        match enabled {
            true => Ok(scheduler),
            false => Err(format!(
                "the scheduler did not load; it printed:\n{}",
                scheduler.stop().output
            )),
        }
    }

    /// Records whether it is still loaded.
    pub(super) fn look(&mut self) {
        self.figures.at_end = read(STATE) == "enabled";
    }

    /// Ends it.
    pub(super) fn stop(&mut self) -> SchedulerFigures {
        if let Some(mut child) = self.child.take() {
            end(&mut child);
            self.figures.output = tail(SCHEDULER_LOG);
        }
        self.figures.clone()
    }
}

/// `zernel observe`, in a cgroup of its own.
pub(super) struct Observer {
    child: Child,
    leaf: PathBuf,
}

impl Observer {
    /// Starts it, with hints at a path if the scheduler reads them.
    pub(super) fn start(program: &Path, hints: Option<&str>) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.arg("observe");
        if let Some(path) = hints {
            command.args(["--hints", path]);
        }
        let mut child = spawn(&mut command, OBSERVER_LOG)?;
        let pid = i32::try_from(child.id()).unwrap_or(0);
        let leaf = cgroup::place(None, OBSERVER, &[pid]).map_err(|error| error.to_string())?;
        match wait_for(&mut child, || Path::new(HEARTBEAT).exists()) {
            true => Ok(Self { child, leaf }),
            false => {
                end(&mut child);
                Err(format!(
                    "the observer did not start; it printed:\n{}",
                    tail(OBSERVER_LOG)
                ))
            }
        }
    }

    /// Its name in an account, and its cgroup.
    pub(super) fn part(&self) -> (String, PathBuf) {
        (OBSERVER.to_owned(), self.leaf.clone())
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn spawn(command: &mut Command, log: &str) -> Result<Child, String> {
    let failed = |error| format!("cannot start {}: {error}", command.get_program().display());
    let file = File::create(log).map_err(failed)?;
    let copy = file.try_clone().map_err(failed)?;
    let spawned = command
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(copy)
        .spawn();
    spawned.map_err(|error| format!("cannot start {}: {error}", command.get_program().display()))
}

/// Waits until a program is ready; false when it ended or took too long.
fn wait_for(child: &mut Child, is_ready: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while !is_ready() {
        let ended = !matches!(child.try_wait(), Ok(None));
        if ended || begin.elapsed() > READY_WITHIN {
            return false;
        }
        thread::sleep(POLL);
    }
    true
}

/// Asks a program to end, and kills it if it does not.
fn end(child: &mut Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, Signal::INT);
    }
    let begin = Instant::now();
    while matches!(child.try_wait(), Ok(None)) && begin.elapsed() < END_WITHIN {
        thread::sleep(POLL);
    }
    // Both fail only when it has ended.
    let _ = child.kill();
    let _ = child.wait();
}

fn read(path: &str) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn tail(path: &str) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let start = bytes.len().saturating_sub(OUTPUT_BYTES);
    String::from_utf8_lossy(&bytes[start..]).trim().to_owned()
}
