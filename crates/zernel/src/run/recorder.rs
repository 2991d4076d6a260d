//! Records the processes of a command while it runs: observes them, or asks the daemon that does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use procfs::process::Process;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};
use zernel_ebpf::observer::{Observer, ObserverOptions, ObserverThread};
use zernel_model::snapshot::{ProcessSnapshot, Snapshot};
use zernel_report::{Observation, ProcessRecord};

use super::cpu_limit::throttled_seconds_by_cgroup;
use crate::daemon_client::DaemonSocket;

/// Time between snapshots. The parents of a process with a shorter life may stay unknown.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(200);
/// Longest chain of parents that is followed. A longer chain would be a loop.
const MAX_FOLLOWED_PARENTS: usize = 64;

/// Identifies a process even if its pid is reused: pid and start time.
type ProcessKey = (u32, u64);

/// The root process: it and its descendants are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordedRoot {
    /// The root is the command that this program is about to start. Processes that started earlier do not count.
    SpawnedCommand,
    /// A process that runs already.
    RunningProcess(u32),
}

/// Records in a thread, if observing is possible.
pub(super) enum RunRecorder {
    /// A thread takes snapshots until `stop` is set.
    Running {
        stop: Arc<AtomicBool>,
        command: Arc<OnceLock<u32>>,
        uses_daemon: bool,
        thread: JoinHandle<Observation>,
    },
    /// Observing is not possible, and the text is the reason.
    Unavailable(String),
}

/// Where snapshots come from.
enum SnapshotSource {
    Local(ObserverThread),
    Daemon(DaemonSocket),
}

/// What was recorded of a run so far.
pub(crate) struct RunRecording {
    root: RecordedRoot,
    /// When recording began, in nanoseconds since boot.
    start_ns: u64,
    /// The pid of the command, set once the command has started.
    command: Arc<OnceLock<u32>>,
    records: BTreeMap<ProcessKey, ProcessRecord>,
    /// Whether a process descends from the root.
    ancestry_of_process: BTreeMap<ProcessKey, Ancestry>,
    observation: Observation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ancestry {
    Descendant,
    NotDescendant,
    /// The process exited before its parents were read.
    Unknown,
}

impl RunRecorder {
    /// Starts observing in this process, or through the daemon if that is not possible.
    pub(super) fn start(
        options: &ObserverOptions,
        root: RecordedRoot,
        socket: &DaemonSocket,
    ) -> Self {
        let observer = Observer::start(options);
        match observer.and_then(|observer| ObserverThread::start(observer, SNAPSHOT_INTERVAL)) {
            Ok(observer) => Self::start_recording_thread(SnapshotSource::Local(observer), root),
            Err(error) => match socket.latest_snapshot() {
                Ok(_) => Self::start_recording_thread(SnapshotSource::Daemon(socket.clone()), root),
                Err(daemon) => Self::Unavailable(format!("{error}; {daemon}")),
            },
        }
    }

    fn start_recording_thread(source: SnapshotSource, root: RecordedRoot) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut recording = RunRecording::new(root);
        let uses_daemon = matches!(source, SnapshotSource::Daemon(_));
        recording.observation.by_daemon = uses_daemon;
        let command = Arc::clone(&recording.command);
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || recording.record_until(source, &stop)
        });
        Self::Running {
            stop,
            command,
            uses_daemon,
            thread,
        }
    }

    /// Whether the daemon observes.
    pub(super) fn uses_daemon(&self) -> bool {
        matches!(
            self,
            Self::Running {
                uses_daemon: true,
                ..
            }
        )
    }

    /// Sets the pid of the command that was started.
    pub(super) fn set_command_pid(&self, pid: u32) {
        if let Self::Running { command, .. } = self {
            let _ = command.set(pid);
        }
    }

    /// Why observing is not possible.
    pub(super) fn unavailable_reason(&self) -> Option<&str> {
        match self {
            Self::Running { .. } => None,
            Self::Unavailable(reason) => Some(reason),
        }
    }

    /// Stops observing. The error is the reason why nothing was observed.
    pub(super) fn stop_and_collect(self) -> Result<Observation, String> {
        match self {
            Self::Unavailable(reason) => Err(reason),
            Self::Running { stop, thread, .. } => {
                stop.store(true, Ordering::Relaxed);
                thread.thread().unpark();
                Ok(thread.join().unwrap_or_default())
            }
        }
    }
}

impl SnapshotSource {
    fn take_snapshot(&self) -> Result<Arc<Snapshot>, String> {
        match self {
            Self::Local(observer) => {
                (observer.refresh_snapshot()).ok_or_else(|| "observing stopped early".to_owned())
            }
            Self::Daemon(socket) => match socket.latest_snapshot() {
                Ok(snapshot) => Ok(Arc::new(snapshot)),
                Err(error) => Err(error.to_string()),
            },
        }
    }

    /// Stops observing. Returns the reason if observing ended before the command did.
    fn stop(self) -> Option<String> {
        match self {
            Self::Local(observer) => {
                let error = observer.stop().err()?;
                Some(format!("observing stopped early: {error}"))
            }
            Self::Daemon(_) => None,
        }
    }
}

impl RunRecording {
    /// Begins to record the descendants of `root`.
    pub(crate) fn new(root: RecordedRoot) -> Self {
        Self {
            root,
            start_ns: boot_time_clock_ns(),
            command: Arc::default(),
            records: BTreeMap::new(),
            ancestry_of_process: BTreeMap::new(),
            observation: Observation::default(),
        }
    }

    fn record_until(mut self, source: SnapshotSource, stop: &AtomicBool) -> Observation {
        loop {
            // Read before the snapshot, so that the last snapshot follows the exit of the command.
            let is_last = stop.load(Ordering::Relaxed);
            match source.take_snapshot() {
                Ok(snapshot) => self.add_snapshot(&snapshot, is_last),
                Err(error) => {
                    let problem = source.stop().unwrap_or(error);
                    self.observation.problems.push(problem);
                    return self.into_observation();
                }
            }
            if is_last {
                self.observation.problems.extend(source.stop());
                return self.into_observation();
            }
            thread::park_timeout(SNAPSHOT_INTERVAL);
        }
    }

    /// Adds the processes and figures of a snapshot. The last snapshot has the overhead of the whole run.
    pub(crate) fn add_snapshot(&mut self, snapshot: &Snapshot, is_last: bool) {
        let now_ns = monotonic_ns();
        let asleep_ns = boot_time_clock_ns().saturating_sub(now_ns);
        if is_last {
            let observation = &mut self.observation;
            observation.call_cost_seconds = snapshot.call_cost_seconds;
            observation.rung.clone_from(&snapshot.rung);
            observation
                .problems
                .extend(snapshot.problems.iter().cloned());
        }
        for process in &snapshot.observed {
            self.add_process(process, snapshot, (now_ns, asleep_ns));
        }
    }

    /// Adds a process, if it descends from the root, at `now_ns` of the monotonic clock. `asleep_ns` is how far the
    /// boot-time clock is ahead of the monotonic one.
    fn add_process(
        &mut self,
        process: &ProcessSnapshot,
        snapshot: &Snapshot,
        (now_ns, asleep_ns): (u64, u64),
    ) {
        let key = (process.pid, process.start_ns);
        let (root, start_ns) = (self.root, self.start_ns);
        let parents = ParentLookup {
            snapshot,
            command: self.command.get().copied(),
        };
        let ancestry = self.ancestry_of_process.entry(key);
        let ancestry = ancestry.or_insert_with(|| parents.find_ancestry(process, root, start_ns));
        if *ancestry != Ancestry::Descendant {
            return;
        }
        let record = self.records.entry(key);
        let record = record.or_insert_with(|| match root {
            RecordedRoot::SpawnedCommand => ProcessRecord::for_new_process(process, asleep_ns),
            // A process that started after recording began was observed from its start.
            RecordedRoot::RunningProcess(_) if process.start_ns >= start_ns => {
                ProcessRecord::default()
            }
            RecordedRoot::RunningProcess(_) => ProcessRecord::for_running_process(process),
        });
        if process.is_trainer() {
            record.set_throttled_seconds(throttled_seconds_by_cgroup(process.pid));
        }
        record.add_sample(process, now_ns);
        // The affinity is read again for each snapshot, because a process can change it at any time.
        if let Some(cpus) = cpu_affinity_of(process.pid).filter(|_| process.is_trainer()) {
            record.cpus = cpus;
        }
        // A trainer without launches may launch between two sampling windows.
        let may_launch = process.is_trainer() && process.probes.cuda_trace.launches == 0;
        let sampled = snapshot.sampled.iter();
        let called = sampled.filter(|name| may_launch || process.calls.contains_key(name.as_str()));
        self.observation.sampled.extend(called.cloned());
    }

    /// Ends the recording.
    pub(crate) fn into_observation(mut self) -> Observation {
        let ancestries = self.ancestry_of_process.values();
        let unknown = ancestries.filter(|ancestry| **ancestry == Ancestry::Unknown);
        let unknown = unknown.count();
        if unknown > 0 {
            self.observation.problems.push(format!(
                "{unknown} processes used CUDA and exited before their parent was known"
            ));
        }
        let records = self.records.into_values();
        self.observation.processes = records.map(ProcessRecord::into_report).collect();
        self.observation
    }
}

/// Finds the parents of processes, including processes that have exited.
struct ParentLookup<'a> {
    snapshot: &'a Snapshot,
    command: Option<u32>,
}

impl ParentLookup<'_> {
    /// Follows the parents of a process up to the root.
    fn find_ancestry(
        &self,
        process: &ProcessSnapshot,
        root: RecordedRoot,
        start_ns: u64,
    ) -> Ancestry {
        let root = match root {
            RecordedRoot::SpawnedCommand if process.start_ns < start_ns => {
                return Ancestry::NotDescendant;
            }
            RecordedRoot::SpawnedCommand => std::process::id(),
            RecordedRoot::RunningProcess(pid) if process.pid == pid => return Ancestry::Descendant,
            RecordedRoot::RunningProcess(pid) => pid,
        };
        let mut ancestor = process.pid;
        for _ in 0..MAX_FOLLOWED_PARENTS {
            match parent_pid_of(ancestor).or_else(|| self.parent_pid_of_exited(ancestor)) {
                Some(0) => return Ancestry::NotDescendant,
                Some(next) if next == root => return Ancestry::Descendant,
                Some(next) => ancestor = next,
                // The parent has exited since the snapshot, so its children have another parent now.
                None => match parent_pid_of(process.pid) {
                    Some(_) => ancestor = process.pid,
                    None => return Ancestry::Unknown,
                },
            }
        }
        Ancestry::NotDescendant
    }

    /// The parent of a process that has exited: of the command, or of an observed process.
    fn parent_pid_of_exited(&self, pid: u32) -> Option<u32> {
        if self.command == Some(pid) {
            return Some(std::process::id());
        }
        let mut observed = self.snapshot.observed.iter();
        let process = observed.find(|process| process.pid == pid)?;
        Some(process.identity.as_ref()?.parent)
    }
}

fn parent_pid_of(pid: u32) -> Option<u32> {
    let process = Process::new(i32::try_from(pid).ok()?).ok()?;
    Some(process.stat().ok()?.ppid.unsigned_abs())
}

/// CPUs in the affinity mask of a process.
fn cpu_affinity_of(pid: u32) -> Option<CpuSet> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    sched_getaffinity(Some(pid)).ok()
}

fn boot_time_clock_ns() -> u64 {
    clock_ns(rustix::time::ClockId::Boottime)
}

/// The clock of the probes.
fn monotonic_ns() -> u64 {
    clock_ns(rustix::time::ClockId::Monotonic)
}

fn clock_ns(clock: rustix::time::ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use zernel_model::identity::Identity;

    use super::*;

    #[test]
    fn a_process_that_starts_while_attached_is_complete() {
        let mut recording = RunRecording {
            root: RecordedRoot::RunningProcess(std::process::id()),
            start_ns: 1000,
            command: Arc::default(),
            records: BTreeMap::new(),
            ancestry_of_process: BTreeMap::new(),
            observation: Observation::default(),
        };
        let process = |start_ns| ProcessSnapshot {
            pid: std::process::id(),
            start_ns,
            first_seen_ns: 2000,
            complete: true,
            ..ProcessSnapshot::default()
        };
        let snapshot = Snapshot {
            observed: vec![process(999), process(1000)],
            ..Snapshot::default()
        };
        recording.add_snapshot(&snapshot, true);
        let processes = recording.into_observation().processes;
        let complete: Vec<_> = processes.iter().map(|process| process.complete).collect();
        assert_eq!(complete, [Some(false), Some(true)]);
    }

    /// If no snapshot was taken while they ran, the parents of processes that have exited come from the last one.
    #[test]
    fn exited_descendants_of_the_command_are_known() {
        let (command, rank, loader, stranger) = (4_200_001, 4_200_002, 4_200_003, 4_200_004);
        let process = |pid, parent| ProcessSnapshot {
            pid,
            start_ns: u64::MAX,
            identity: Some(Identity {
                parent,
                ..Identity::default()
            }),
            ..ProcessSnapshot::default()
        };
        let snapshot = Snapshot {
            observed: vec![
                process(rank, command),
                process(loader, rank),
                process(stranger, 4_200_005),
            ],
            ..Snapshot::default()
        };
        let mut recording = RunRecording::new(RecordedRoot::SpawnedCommand);
        recording.command.set(command).expect("set once");
        recording.add_snapshot(&snapshot, true);
        let ancestries: Vec<Ancestry> = recording.ancestry_of_process.into_values().collect();
        let (known, unknown) = (Ancestry::Descendant, Ancestry::Unknown);
        assert_eq!(ancestries, [known, known, unknown]);
    }

    #[test]
    fn the_affinity_of_a_process_is_known() {
        let own = cpu_affinity_of(std::process::id()).expect("this process exists");
        assert!(own.count() > 0);
        assert_eq!(cpu_affinity_of(u32::MAX), None);
    }
}
