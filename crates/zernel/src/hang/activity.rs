//! What a process does, from /proc, as far as the caller may read it.
//!
//! The training thread comes first. If the process only waits for another thread or process, its other threads and
//! its children (such as data loaders) are described, too. A process may exit while it is read.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use procfs::process::{FDTarget, ProcState, Process, Stat, Syscall, Task};
use serde::Serialize;

use super::syscalls;
use zernel_report::text::shorten_text;

/// How long the CPU time of threads is measured.
const CPU_SAMPLE_TIME: Duration = Duration::from_millis(200);
/// A thread that was on a CPU for at least this share of the measured time counts as running, even if it sleeps at
/// the end.
const MIN_RUNNING_SHARE: f64 = 0.5;
/// The most threads of a process that are read.
const MAX_READ_THREADS: usize = 1024;
/// The most children of a process that are read.
const MAX_READ_CHILDREN: usize = 64;

/// What a process does.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ProcessActivity {
    pub(super) state: ProcessActivityKind,
    /// What the process does, as a predicate without a subject, such as "waits on a socket".
    pub(super) text: String,
    /// Thread id of the thread that `text` is about; `None` if it is about the whole process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tid: Option<i32>,
    /// The file that the thread reads or writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) path: Option<PathBuf>,
    /// What other threads and children of the process do, if the process may wait for that.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) meanwhile: Vec<String>,
}

/// What a process can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ProcessActivityKind {
    /// Stopped by a signal or a debugger.
    Stopped,
    /// In a system call on a file, or in uninterruptible sleep.
    Io,
    OnCpu,
    /// Runnable without a CPU.
    WaitsForCpu,
    /// Waiting for a lock or for another thread.
    Lock,
    /// Waiting for something else: a socket, a pipe, a child, a timer.
    Waits,
    /// Exited.
    Ended,
    /// The process is not visible to the caller.
    Hidden,
}

/// The process to inspect.
#[derive(Debug, Clone, Copy)]
pub(super) struct InspectedProcess {
    pub(super) pid: u32,
    /// Start time of the process, in clock ticks since boot.
    pub(super) start_time: Option<u64>,
    /// Its training thread.
    pub(super) step_thread: Option<u32>,
}

/// Inspects a process. Takes at least [`CPU_SAMPLE_TIME`].
pub(super) fn inspect_process(target: InspectedProcess) -> ProcessActivity {
    let process = match open_process(target) {
        Ok(process) => process,
        Err(activity) => return activity,
    };
    let threads = sample_threads(&process);
    let is_wanted = |tid: i32| target.step_thread == u32::try_from(tid).ok();
    let thread = threads
        .iter()
        .find(|thread| is_wanted(thread.tid))
        .or_else(|| threads.iter().find(|thread| thread.tid == process.pid))
        .or(threads.first());
    let Some(thread) = thread else {
        return ended_activity();
    };
    let mut activity = thread.describe_activity();
    if matches!(
        activity.state,
        ProcessActivityKind::Lock | ProcessActivityKind::Waits
    ) {
        let others = threads.iter().filter(|other| other.tid != thread.tid);
        activity.meanwhile = others
            .filter_map(SampledThread::blocking_activity)
            .collect();
        activity.meanwhile.extend(activities_of_children(&process));
    }
    activity
}

/// Whether a process is stopped by a signal or a debugger.
pub(super) fn is_stopped(target: InspectedProcess) -> bool {
    let state = open_process(target)
        .ok()
        .and_then(|process| process.stat().ok());
    let state = state.and_then(|stat| stat.state().ok());
    matches!(state, Some(ProcState::Stopped | ProcState::Tracing))
}

fn ended_activity() -> ProcessActivity {
    ProcessActivity::new(ProcessActivityKind::Ended, "has exited")
}

fn open_process(target: InspectedProcess) -> Result<Process, ProcessActivity> {
    let process = i32::try_from(target.pid)
        .ok()
        .and_then(|pid| Process::new(pid).ok());
    let stat = process.as_ref().and_then(|process| process.stat().ok());
    let (Some(process), Some(stat)) = (process, stat) else {
        return Err(ProcessActivity::new(
            ProcessActivityKind::Hidden,
            "is not visible: it has exited or is in another PID namespace",
        ));
    };
    if target
        .start_time
        .is_some_and(|start| start != stat.starttime)
    {
        let text = "cannot be inspected: its pid belongs to another process (pid reused, or another PID namespace)";
        return Err(ProcessActivity::new(ProcessActivityKind::Hidden, text));
    }
    match stat.state() {
        Ok(ProcState::Zombie | ProcState::Dead) => Err(ended_activity()),
        _ => Ok(process),
    }
}

/// A thread, measured for [`CPU_SAMPLE_TIME`].
#[derive(Debug)]
struct SampledThread {
    pid: i32,
    tid: i32,
    name: String,
    state: ProcState,
    /// Share of the measured time that the thread was on a CPU.
    busy_share: f64,
    syscall: Option<i64>,
    /// The file of the system call.
    target: Option<FDTarget>,
    /// The kernel function that the thread sleeps in (wchan).
    kernel_function: Option<String>,
}

/// Measures all threads of a process.
fn sample_threads(process: &Process) -> Vec<SampledThread> {
    let tasks: Vec<Task> = process.tasks().map_or_else(
        |_| Vec::new(),
        |tasks| {
            tasks
                .filter_map(Result::ok)
                .take(MAX_READ_THREADS)
                .collect()
        },
    );
    let on_cpu = |task: &Task| task.schedstat().ok().map(|stat| stat.sum_exec_runtime);
    let begin = Instant::now();
    let before: Vec<Option<u64>> = tasks.iter().map(on_cpu).collect();
    thread::sleep(CPU_SAMPLE_TIME);
    let watched = begin.elapsed();
    let tasks = tasks.iter().zip(before);
    tasks
        .filter_map(|(task, before)| {
            let ran = on_cpu(task)?.saturating_sub(before?);
            let busy = ran as f64 / watched.as_nanos() as f64;
            SampledThread::read(process, task, busy)
        })
        .collect()
}

impl SampledThread {
    fn read(process: &Process, task: &Task, busy: f64) -> Option<Self> {
        let stat: Stat = task.stat().ok()?;
        // Reading the system call needs the right to trace the process.
        let (syscall, target) = match task.syscall() {
            Ok(Syscall::Blocked {
                syscall_number,
                argument_registers: [first, ..],
                ..
            }) => (
                Some(syscall_number),
                file_of_system_call(process, syscall_number, first),
            ),
            _ => (None, None),
        };
        let place = fs::read_to_string(format!("/proc/{}/task/{}/wchan", task.pid, task.tid));
        Some(Self {
            pid: task.pid,
            tid: task.tid,
            state: stat.state().ok()?,
            name: shorten_text(&stat.comm, 15),
            busy_share: busy,
            syscall,
            target,
            kernel_function: place.ok().filter(|place| place.len() > 1),
        })
    }

    fn describe_activity(&self) -> ProcessActivity {
        let at = self.wait_function_text();
        let (state, text) = match self.state {
            ProcState::Stopped => (
                ProcessActivityKind::Stopped,
                format!("is stopped; `kill -CONT {}` resumes it", self.pid),
            ),
            ProcState::Tracing => (
                ProcessActivityKind::Stopped,
                "is stopped by a debugger".to_owned(),
            ),
            ProcState::Running if self.busy_share == 0.0 => (
                ProcessActivityKind::WaitsForCpu,
                "is runnable without a CPU".to_owned(),
            ),
            _ if self.state == ProcState::Running || self.busy_share >= MIN_RUNNING_SHARE => (
                ProcessActivityKind::OnCpu,
                format!(
                    "is on CPU: thread {} (tid {}) ran for {:.0} % of the last {:.1} s",
                    self.name,
                    self.tid,
                    100.0 * self.busy_share.min(1.0),
                    CPU_SAMPLE_TIME.as_secs_f64(),
                ),
            ),
            _ if self.is_in_io() => (
                ProcessActivityKind::Io,
                format!("is in I/O: {}{at}", self.unfinished_file_access()),
            ),
            _ => {
                let (state, what) = self.kind_and_reason_of_wait();
                (state, format!("{what}{at}"))
            }
        };
        let path = match &self.target {
            Some(FDTarget::Path(path)) if state == ProcessActivityKind::Io => Some(path.clone()),
            _ => None,
        };
        ProcessActivity {
            tid: Some(self.tid),
            path,
            ..ProcessActivity::new(state, text)
        }
    }

    /// What this thread does, if another one may wait for it.
    fn blocking_activity(&self) -> Option<String> {
        let activity = self.describe_activity();
        let is_blocker = matches!(
            activity.state,
            ProcessActivityKind::Io | ProcessActivityKind::OnCpu | ProcessActivityKind::Stopped
        );
        is_blocker.then(|| format!("thread {} (tid {}) {}", self.name, self.tid, activity.text))
    }

    fn is_in_io(&self) -> bool {
        if self.state == ProcState::Waiting {
            return true;
        }
        let place = self.kernel_function.as_deref().unwrap_or("");
        match &self.target {
            // Devices and named pipes have paths, too, but are not on a disk.
            Some(FDTarget::Path(path)) => !path.starts_with("/dev") && !place.contains("pipe"),
            Some(_) => false,
            None => {
                self.syscall.is_some_and(syscalls::syscall_takes_path) || is_file_system_wait(place)
            }
        }
    }

    /// The file access that has not returned.
    fn unfinished_file_access(&self) -> String {
        let call = self.syscall.and_then(syscalls::file_syscall_name);
        match (call, &self.target) {
            (Some(call), Some(FDTarget::Path(path))) => {
                let path = shorten_text(&path.to_string_lossy(), 200);
                format!("its {call} of {path} has not returned")
            }
            (Some(call), _) => format!("its {call} has not returned"),
            (None, _) => "it waits for a disk or a device".to_owned(),
        }
    }

    fn kind_and_reason_of_wait(&self) -> (ProcessActivityKind, &'static str) {
        if self.syscall.is_some_and(syscalls::is_futex_syscall) {
            return (ProcessActivityKind::Lock, LOCK_WAIT_TEXT);
        }
        let place = self.kernel_function.as_deref().unwrap_or("");
        let known = [
            ("futex", ProcessActivityKind::Lock, LOCK_WAIT_TEXT),
            (
                "locks_lock",
                ProcessActivityKind::Lock,
                "waits for a lock on a file",
            ),
            (
                "poll",
                ProcessActivityKind::Waits,
                "waits for one of several files or sockets",
            ),
            (
                "select",
                ProcessActivityKind::Waits,
                "waits for one of several files or sockets",
            ),
            (
                "nanosleep",
                ProcessActivityKind::Waits,
                "sleeps until a timer expires",
            ),
            (
                "pipe",
                ProcessActivityKind::Waits,
                "waits on a pipe for another process",
            ),
            (
                "unix",
                ProcessActivityKind::Waits,
                "waits on a socket for another process",
            ),
            ("tcp", ProcessActivityKind::Waits, "waits for the network"),
            (
                "sk_wait",
                ProcessActivityKind::Waits,
                "waits for the network",
            ),
            (
                "wait",
                ProcessActivityKind::Waits,
                "waits for a child process",
            ),
        ];
        let found = known.iter().find(|(part, _, _)| place.contains(part));
        found.map_or(
            (ProcessActivityKind::Waits, "sleeps"),
            |(_, state, what)| (*state, what),
        )
    }

    fn wait_function_text(&self) -> String {
        let place = self.kernel_function.as_ref();
        place.map_or(String::new(), |place| format!(" (in {place})"))
    }
}

const LOCK_WAIT_TEXT: &str = "waits for a lock or for another thread";

/// Whether a kernel function waits for a file system.
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

/// The file of a system call's descriptor. Reads only the name of the file and does not access it, because an access
/// may hang.
fn file_of_system_call(process: &Process, syscall: i64, first: u64) -> Option<FDTarget> {
    let descriptor = i32::try_from(first)
        .ok()
        .filter(|_| syscalls::syscall_takes_descriptor(syscall))?;
    Some(process.fd_from_fd(descriptor).ok()?.target)
}

/// What the children of a process do, if the process may wait for that.
fn activities_of_children(process: &Process) -> Vec<String> {
    let tasks = process.tasks().into_iter().flatten().filter_map(Result::ok);
    let pids = tasks.filter_map(|task| task.children().ok()).flatten();
    let children = pids.take(MAX_READ_CHILDREN).filter_map(|pid| {
        let child = Process::new(i32::try_from(pid).ok()?).ok()?;
        let main = child.task_main_thread().ok()?;
        // A child that runs makes progress, so its CPU time is not measured.
        let thread = SampledThread::read(&child, &main, 0.0)?;
        let activity = thread.describe_activity();
        let is_blocker = matches!(
            activity.state,
            ProcessActivityKind::Io | ProcessActivityKind::Stopped
        );
        is_blocker.then(|| format!("its child {} (pid {pid}) {}", thread.name, activity.text))
    });
    children.collect()
}

impl ProcessActivity {
    pub(super) fn new(state: ProcessActivityKind, text: impl Into<String>) -> Self {
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

    fn target_with_pid(pid: u32) -> InspectedProcess {
        InspectedProcess {
            pid,
            start_time: None,
            step_thread: None,
        }
    }

    #[test]
    fn stopped_sleeping_and_exited_processes_differ() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        wait_for_state(pid, ProcessActivityKind::Waits);
        kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
        wait_for_state(pid, ProcessActivityKind::Stopped);
        assert!(is_stopped(target_with_pid(pid)));
        child.kill().unwrap();
        wait_for_state(pid, ProcessActivityKind::Ended);
        child.wait().unwrap();
        assert_eq!(
            inspect_process(target_with_pid(pid)).state,
            ProcessActivityKind::Hidden
        );
        assert!(!is_stopped(target_with_pid(pid)));
    }

    #[test]
    fn a_busy_process_is_on_a_cpu() {
        let mut child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        wait_for_state(child.id(), ProcessActivityKind::OnCpu);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_stopped_child_is_described_with_its_parent() {
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
        let blockers = || {
            inspect_process(target_with_pid(parent.id()))
                .meanwhile
                .join(" ")
        };
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
    fn a_reused_pid_is_not_described() {
        let other = InspectedProcess {
            start_time: Some(1),
            ..target_with_pid(std::process::id())
        };
        assert_eq!(inspect_process(other).state, ProcessActivityKind::Hidden);
    }

    /// Tries again, because a signal takes a moment to stop a process.
    fn wait_for_state(pid: u32, state: ProcessActivityKind) {
        let found = (0..300).any(|_| inspect_process(target_with_pid(pid)).state == state);
        assert!(found, "{:?}", inspect_process(target_with_pid(pid)));
    }
}
