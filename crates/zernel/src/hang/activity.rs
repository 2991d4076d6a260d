//! What a process is doing, as far as the caller may see it.
//!
//! The thread that drives the steps is looked at first. Where it only waits for others of its own, it is
//! blockers what those are at too: other threads, and the processes that it has started, such as data loaders.
//! Everything read here may be gone the next moment, or hidden from the caller.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use procfs::process::{FDTarget, ProcState, Process, Stat, Syscall, Task};
use serde::Serialize;

use super::syscalls;
use zernel_report::text::shortened;

/// For how long threads are watched to see whether they run.
const SAMPLE_TIME: Duration = Duration::from_millis(200);
/// The share of that time on a CPU from which on a thread that sleeps now counts as running.
const BUSY_SHARE: f64 = 0.5;
/// Threads and children beyond these are not looked at.
const MOST_THREADS: usize = 1024;
const MOST_CHILDREN: usize = 64;

/// What a process is at.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Activity {
    pub(super) state: State,
    /// As part of a sentence whose subject is the process.
    pub(super) text: String,
    /// The thread that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tid: Option<i32>,
    /// The file that it reads or writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) path: Option<PathBuf>,
    /// What other threads and children do meanwhile, if that may be why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) meanwhile: Vec<String>,
}

/// The kinds of things a process can be at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    /// Somebody has stopped it.
    Stopped,
    /// In a call that reads or writes a file, or in the kernel where nothing can interrupt it.
    Io,
    OnCpu,
    /// It could run, and does not get a CPU.
    WaitsForCpu,
    /// For a lock, or for another thread in some other way.
    Lock,
    /// For something else: a socket, a pipe, a child, the time.
    Waits,
    /// It is not there any more.
    Ended,
    /// It is not visible from here.
    Hidden,
}

/// Target is looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) pid: u32,
    /// When it started, in clock ticks since boot.
    pub(super) start_time: Option<u64>,
    /// The thread that drives its steps.
    pub(super) step_thread: Option<u32>,
}

/// Says what a process is at. Takes [`SAMPLE_TIME`] at least, if it is not stopped.
pub(super) fn inspect(target: Target) -> Activity {
    let process = match open_process(target) {
        Ok(process) => process,
        Err(activity) => return activity,
    };
    let threads = sample_threads(&process);
    let is_wanted = |tid: i32| target.step_thread == u32::try_from(tid).ok();
    let driver = threads
        .iter()
        .find(|thread| is_wanted(thread.tid))
        .or_else(|| threads.iter().find(|thread| thread.tid == process.pid))
        .or(threads.first());
    let Some(driver) = driver else {
        return ended();
    };
    let mut activity = driver.activity();
    if matches!(activity.state, State::Lock | State::Waits) {
        let others = threads.iter().filter(|other| other.tid != driver.tid);
        activity.meanwhile = others.filter_map(Thread::blocker).collect();
        activity.meanwhile.extend(children(&process));
    }
    activity
}

/// Whether somebody has stopped a process.
pub(super) fn is_stopped(target: Target) -> bool {
    let state = open_process(target)
        .ok()
        .and_then(|process| process.stat().ok());
    let state = state.and_then(|stat| stat.state().ok());
    matches!(state, Some(ProcState::Stopped | ProcState::Tracing))
}

fn ended() -> Activity {
    Activity::new(State::Ended, "has ended by now")
}

fn open_process(target: Target) -> Result<Process, Activity> {
    let process = i32::try_from(target.pid)
        .ok()
        .and_then(|pid| Process::new(pid).ok());
    let stat = process.as_ref().and_then(|process| process.stat().ok());
    let (Some(process), Some(stat)) = (process, stat) else {
        return Err(Activity::new(
            State::Hidden,
            "is not to be seen from here: it has ended by now, or it is in another PID namespace than you",
        ));
    };
    if target
        .start_time
        .is_some_and(|start| start != stat.starttime)
    {
        let text =
            "cannot be looked at: its pid is another process here, in this PID namespace or by now";
        return Err(Activity::new(State::Hidden, text));
    }
    match stat.state() {
        Ok(ProcState::Zombie | ProcState::Dead) => Err(ended()),
        _ => Ok(process),
    }
}

/// A thread, watched for a moment.
#[derive(Debug)]
struct Thread {
    pid: i32,
    tid: i32,
    name: String,
    state: ProcState,
    /// The share of the time on a CPU.
    busy: f64,
    syscall: Option<i64>,
    /// The file that the system call is about.
    target: Option<FDTarget>,
    /// The function of the kernel that it sleeps in.
    place: Option<String>,
}

/// Looks at all threads of a process.
fn sample_threads(process: &Process) -> Vec<Thread> {
    let tasks: Vec<Task> = process.tasks().map_or_else(
        |_| Vec::new(),
        |tasks| tasks.filter_map(Result::ok).take(MOST_THREADS).collect(),
    );
    let on_cpu = |task: &Task| task.schedstat().ok().map(|stat| stat.sum_exec_runtime);
    let begin = Instant::now();
    let before: Vec<Option<u64>> = tasks.iter().map(on_cpu).collect();
    thread::sleep(SAMPLE_TIME);
    let watched = begin.elapsed();
    let tasks = tasks.iter().zip(before);
    tasks
        .filter_map(|(task, before)| {
            let ran = on_cpu(task)?.saturating_sub(before?);
            let busy = ran as f64 / watched.as_nanos() as f64;
            Thread::read(process, task, busy)
        })
        .collect()
}

impl Thread {
    fn read(process: &Process, task: &Task, busy: f64) -> Option<Self> {
        let stat: Stat = task.stat().ok()?;
        // Only those who may trace it are blockers.
        let (syscall, target) = match task.syscall() {
            Ok(Syscall::Blocked {
                syscall_number,
                argument_registers: [first, ..],
                ..
            }) => (Some(syscall_number), file(process, syscall_number, first)),
            _ => (None, None),
        };
        let place = fs::read_to_string(format!("/proc/{}/task/{}/wchan", task.pid, task.tid));
        Some(Self {
            pid: task.pid,
            tid: task.tid,
            state: stat.state().ok()?,
            name: shortened(&stat.comm, 15),
            busy,
            syscall,
            target,
            place: place.ok().filter(|place| place.len() > 1),
        })
    }

    fn activity(&self) -> Activity {
        let at = self.place_text();
        let (state, text) = match self.state {
            ProcState::Stopped => (
                State::Stopped,
                format!("is stopped: `kill -CONT {}` lets it go on", self.pid),
            ),
            ProcState::Tracing => (State::Stopped, "is stopped by a debugger".to_owned()),
            ProcState::Running if self.busy == 0.0 => (
                State::WaitsForCpu,
                "could run, and waits for a CPU".to_owned(),
            ),
            _ if self.state == ProcState::Running || self.busy >= BUSY_SHARE => (
                State::OnCpu,
                format!(
                    "is on CPU: its thread {} (tid {}) ran for {:.0} % of the last moment",
                    self.name,
                    self.tid,
                    100.0 * self.busy.min(1.0),
                ),
            ),
            _ if self.is_in_io() => (State::Io, format!("is in I/O: {}{at}", self.access())),
            _ => {
                let (state, what) = self.waits_for();
                (state, format!("{what}{at}"))
            }
        };
        let path = match &self.target {
            Some(FDTarget::Path(path)) if state == State::Io => Some(path.clone()),
            _ => None,
        };
        Activity {
            tid: Some(self.tid),
            path,
            ..Activity::new(state, text)
        }
    }

    /// What this thread does, if another one may wait for that.
    fn blocker(&self) -> Option<String> {
        let activity = self.activity();
        let is_blocker = matches!(activity.state, State::Io | State::OnCpu | State::Stopped);
        is_blocker.then(|| format!("thread {} (tid {}) {}", self.name, self.tid, activity.text))
    }

    fn is_in_io(&self) -> bool {
        if self.state == ProcState::Waiting {
            return true;
        }
        let place = self.place.as_deref().unwrap_or("");
        match &self.target {
            // Devices and named pipes have paths too, and nothing of a disk.
            Some(FDTarget::Path(path)) => !path.starts_with("/dev") && !place.contains("pipe"),
            Some(_) => false,
            None => self.syscall.is_some_and(syscalls::takes_a_path) || is_file_system_wait(place),
        }
    }

    /// The file access that does not return.
    fn access(&self) -> String {
        let call = self.syscall.and_then(syscalls::name);
        match (call, &self.target) {
            (Some(call), Some(FDTarget::Path(path))) => {
                let path = shortened(&path.to_string_lossy(), 200);
                format!("its {call} of {path} has not returned")
            }
            (Some(call), _) => format!("its {call} has not returned"),
            (None, _) => "it waits for a disk or a device".to_owned(),
        }
    }

    fn waits_for(&self) -> (State, &'static str) {
        if self.syscall.is_some_and(syscalls::is_futex) {
            return (State::Lock, LOCK);
        }
        let place = self.place.as_deref().unwrap_or("");
        let known = [
            ("futex", State::Lock, LOCK),
            ("locks_lock", State::Lock, "waits for a lock on a file"),
            (
                "poll",
                State::Waits,
                "waits for any of several files or sockets",
            ),
            (
                "select",
                State::Waits,
                "waits for any of several files or sockets",
            ),
            ("nanosleep", State::Waits, "sleeps for a while"),
            ("pipe", State::Waits, "waits for another process at a pipe"),
            (
                "unix",
                State::Waits,
                "waits for another process at a socket",
            ),
            ("tcp", State::Waits, "waits for the network"),
            ("sk_wait", State::Waits, "waits for the network"),
            ("wait", State::Waits, "waits for a child"),
        ];
        let found = known.iter().find(|(part, _, _)| place.contains(part));
        found.map_or((State::Waits, "sleeps"), |(_, state, what)| (*state, what))
    }

    fn place_text(&self) -> String {
        let place = self.place.as_ref();
        place.map_or(String::new(), |place| format!(" (in {place})"))
    }
}

const LOCK: &str = "waits for a lock, or for another thread in some other way";

/// Whether a function of the kernel waits for a file system to answer.
fn is_file_system_wait(place: &str) -> bool {
    let known = [
        "request_wait_answer",
        "fuse_",
        "nfs",
        "rpc_wait",
        "ceph_",
        "folio_wait",
        "io_schedule",
    ];
    known.iter().any(|part| place.contains(part))
}

/// What a system call's descriptor stands for. The file itself is not touched: it may be what hangs.
fn file(process: &Process, syscall: i64, first: u64) -> Option<FDTarget> {
    let descriptor = i32::try_from(first)
        .ok()
        .filter(|_| syscalls::takes_a_descriptor(syscall))?;
    Some(process.fd_from_fd(descriptor).ok()?.target)
}

/// What the children of a process do, if it may wait for that.
fn children(process: &Process) -> Vec<String> {
    let tasks = process.tasks().into_iter().flatten().filter_map(Result::ok);
    let pids = tasks.filter_map(|task| task.children().ok()).flatten();
    let children = pids.take(MOST_CHILDREN).filter_map(|pid| {
        let child = Process::new(i32::try_from(pid).ok()?).ok()?;
        let main = child.task_main_thread().ok()?;
        // Whether it runs would take a while to see, and a child that runs gets somewhere.
        let thread = Thread::read(&child, &main, 0.0)?;
        let activity = thread.activity();
        let is_blocker = matches!(activity.state, State::Io | State::Stopped);
        is_blocker.then(|| format!("its child {} (pid {pid}) {}", thread.name, activity.text))
    });
    children.collect()
}

impl Activity {
    pub(super) fn new(state: State, text: impl Into<String>) -> Self {
        Self {
            state,
            text: text.into(),
            tid: None,
            path: None,
            meanwhile: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    fn target(pid: u32) -> Target {
        Target {
            pid,
            start_time: None,
            step_thread: None,
        }
    }

    #[test]
    fn a_stopped_process_is_told_from_a_sleeping_and_an_ended_one() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        wait_for(pid, State::Waits);
        kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
        wait_for(pid, State::Stopped);
        assert!(is_stopped(target(pid)));
        child.kill().unwrap();
        wait_for(pid, State::Ended);
        child.wait().unwrap();
        assert_eq!(inspect(target(pid)).state, State::Hidden);
        assert!(!is_stopped(target(pid)));
    }

    #[test]
    fn a_busy_process_is_on_a_cpu() {
        let mut child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        wait_for(child.id(), State::OnCpu);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn what_a_child_is_stopped_in_is_told_of_its_parent() {
        let mut parent = Command::new("sh")
            .args(["-c", "sleep 61 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = std::io::BufReader::new(parent.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        let child: i32 = line.trim().parse().unwrap();
        let child = Pid::from_raw(child).unwrap();
        kill_process(child, Signal::STOP).unwrap();
        let blockers = || inspect(target(parent.id())).meanwhile.join(" ");
        let expected = format!("(pid {}) is stopped", child.as_raw_nonzero());
        assert!(
            (0..100).any(|_| blockers().contains(&expected)),
            "{}",
            blockers()
        );
        kill_process(child, Signal::KILL).unwrap();
        parent.wait().unwrap();
    }

    #[test]
    fn a_pid_of_another_process_is_not_described() {
        let other = Target {
            start_time: Some(1),
            ..target(std::process::id())
        };
        assert_eq!(inspect(other).state, State::Hidden);
    }

    /// A signal takes a moment, and so does a busy machine.
    fn wait_for(pid: u32, state: State) {
        let found = (0..300).any(|_| inspect(target(pid)).state == state);
        assert!(found, "{:?}", inspect(target(pid)));
    }
}
