//! Observes while a command runs, and keeps what was seen of its processes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use procfs::process::Process;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};
use zernel_ebpf::observer::{Observer, ObserverThread, Options};
use zernel_model::snapshot::{ProcessSnapshot, Snapshot};
use zernel_report::{Observation, Record};

use crate::client::Socket;

/// How often is looked who came: what lived shorter may be nobody's.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(200);
/// How many parents are asked for: deeper trees are loops.
const MAX_ANCESTORS: usize = 64;

/// A process for ever: its pid and when it started.
type ProcessKey = (u32, u64);

/// Whose processes are wanted: all that descend from this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Root {
    /// Ourselves; what was there before is not meant.
    SpawnedCommand,
    /// A process that was there before, and is meant too.
    RunningProcess(u32),
}

/// ReportOptions, if that is possible.
pub(super) enum Recorder {
    /// A thread takes snapshots until `stop` is set.
    Running {
        stop: Arc<AtomicBool>,
        thread: JoinHandle<Observation>,
    },
    /// Nothing is observed, for this reason.
    Unavailable(String),
}

/// Where snapshots come from.
enum Source {
    Local(ObserverThread),
    Daemon(Socket),
}

/// What was observed so far.
struct Recording {
    root: Root,
    /// When it began, in nanoseconds since boot.
    start_ns: u64,
    records: BTreeMap<ProcessKey, Record>,
    /// Whether a process is wanted.
    ancestries: BTreeMap<ProcessKey, Ancestry>,
    observation: Observation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ancestry {
    Descendant,
    Foreign,
    /// It was gone before it could be asked.
    Unknown,
}

impl Recorder {
    /// Observes in this process, or else through the daemon.
    pub(super) fn start(options: &Options, root: Root, socket: &Socket) -> Self {
        let observer = Observer::start(options);
        match observer.and_then(|observer| ObserverThread::start(observer, SNAPSHOT_INTERVAL)) {
            Ok(observer) => Self::record_from(Source::Local(observer), root),
            Err(error) => match socket.snapshot() {
                Ok(_) => Self::record_from(Source::Daemon(socket.clone()), root),
                Err(daemon) => Self::Unavailable(format!("{error}; {daemon}")),
            },
        }
    }

    fn record_from(source: Source, root: Root) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let recording = Recording {
            root,
            start_ns: since_boot_ns(),
            records: BTreeMap::new(),
            ancestries: BTreeMap::new(),
            observation: Observation {
                by_daemon: matches!(source, Source::Daemon(_)),
                ..Observation::default()
            },
        };
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || recording.record_until(source, &stop)
        });
        Self::Running { stop, thread }
    }

    /// Why nothing is observed.
    pub(super) fn unavailable_reason(&self) -> Option<&str> {
        match self {
            Self::Running { .. } => None,
            Self::Unavailable(reason) => Some(reason),
        }
    }

    /// Stops observing. The error says why nothing was observed.
    pub(super) fn finish(self) -> Result<Observation, String> {
        match self {
            Self::Unavailable(reason) => Err(reason),
            Self::Running { stop, thread } => {
                stop.store(true, Ordering::Relaxed);
                thread.thread().unpark();
                Ok(thread.join().unwrap_or_default())
            }
        }
    }
}

impl Source {
    fn snapshot(&self) -> Result<Arc<Snapshot>, String> {
        match self {
            Self::Local(observer) => {
                (observer.refresh()).ok_or_else(|| "observing broke off".to_owned())
            }
            Self::Daemon(socket) => match socket.snapshot() {
                Ok(snapshot) => Ok(Arc::new(snapshot)),
                Err(error) => Err(error.to_string()),
            },
        }
    }

    /// Stops observing. An error says why it broke off before.
    fn stop(self) -> Option<String> {
        match self {
            Self::Local(observer) => {
                let error = observer.stop().err()?;
                Some(format!("observing broke off: {error}"))
            }
            Self::Daemon(_) => None,
        }
    }
}

impl Recording {
    fn record_until(mut self, source: Source, stop: &AtomicBool) -> Observation {
        loop {
            // Read before the look, so that the last look follows the end of the command.
            let is_last = stop.load(Ordering::Relaxed);
            match source.snapshot() {
                Ok(snapshot) => self.add_snapshot(&snapshot, is_last),
                Err(error) => {
                    let problem = source.stop().unwrap_or(error);
                    self.observation.problems.push(problem);
                    return self.finish();
                }
            }
            if is_last {
                self.observation.problems.extend(source.stop());
                return self.finish();
            }
            thread::park_timeout(SNAPSHOT_INTERVAL);
        }
    }

    fn add_snapshot(&mut self, snapshot: &Snapshot, is_last: bool) {
        let now_ns = monotonic_ns();
        let asleep_ns = since_boot_ns().saturating_sub(now_ns);
        let observation = &mut self.observation;
        if is_last {
            observation.call_cost_seconds = snapshot.call_cost_seconds;
            observation.rung.clone_from(&snapshot.rung);
            observation
                .problems
                .extend(snapshot.problems.iter().cloned());
        }
        for process in &snapshot.observed {
            let key = (process.pid, process.start_ns);
            let (root, start_ns) = (self.root, self.start_ns);
            let ancestry = self.ancestries.entry(key);
            let ancestry = ancestry.or_insert_with(|| ancestry_of(root, start_ns, process));
            if *ancestry == Ancestry::Descendant {
                let record = self.records.entry(key);
                let record = record.or_insert_with(|| match root {
                    Root::SpawnedCommand => Record::for_new_process(process, asleep_ns),
                    // It started while others were observed already: nothing of it is missing.
                    Root::RunningProcess(_) if process.start_ns >= start_ns => Record::default(),
                    Root::RunningProcess(_) => Record::for_running_process(process),
                });
                record.observe(process, now_ns);
                let sampled = snapshot.sampled.iter();
                // Who has launched nothing may do so between windows.
                let is_unseen = process.is_trainer() && process.cuda.launches == 0;
                let called =
                    sampled.filter(|name| is_unseen || process.calls.contains_key(name.as_str()));
                observation.sampled.extend(called.cloned());
                // A process may change that at any time.
                if let Some(cpus) = cpus(process.pid).filter(|_| process.is_trainer()) {
                    record.cpus = cpus;
                }
            }
        }
    }

    fn finish(mut self) -> Observation {
        let ancestries = self.ancestries.values();
        let unknown = ancestries.filter(|ancestry| **ancestry == Ancestry::Unknown);
        let unknown = unknown.count();
        if unknown > 0 {
            self.observation.problems.push(format!(
                "{unknown} processes used CUDA and ended before it was seen whose they were"
            ));
        }
        let records = self.records.into_values();
        self.observation.processes = records.map(Record::finish).collect();
        self.observation
    }
}

/// Whether parent links lead from a process to the root.
fn ancestry_of(root: Root, start_ns: u64, process: &ProcessSnapshot) -> Ancestry {
    let root = match root {
        Root::SpawnedCommand if process.start_ns < start_ns => return Ancestry::Foreign,
        Root::SpawnedCommand => std::process::id(),
        Root::RunningProcess(pid) if process.pid == pid => return Ancestry::Descendant,
        Root::RunningProcess(pid) => pid,
    };
    let known_parent = process.identity.as_ref().map(|identity| identity.parent);
    let Some(mut ancestor) = parent(process.pid).or(known_parent) else {
        return Ancestry::Unknown;
    };
    for _ in 0..MAX_ANCESTORS {
        if ancestor == root {
            return Ancestry::Descendant;
        }
        match parent(ancestor) {
            Some(0) => return Ancestry::Foreign,
            Some(next) => ancestor = next,
            // It ended meanwhile, and its children have another parent now.
            None => match parent(process.pid) {
                Some(again) => ancestor = again,
                None => return Ancestry::Unknown,
            },
        }
    }
    Ancestry::Foreign
}

fn parent(pid: u32) -> Option<u32> {
    let process = Process::new(i32::try_from(pid).ok()?).ok()?;
    Some(process.stat().ok()?.ppid.unsigned_abs())
}

/// The CPUs that a process may use.
fn cpus(pid: u32) -> Option<CpuSet> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    sched_getaffinity(Some(pid)).ok()
}

fn since_boot_ns() -> u64 {
    nanoseconds(rustix::time::ClockId::Boottime)
}

/// The clock of the probes.
fn monotonic_ns() -> u64 {
    nanoseconds(rustix::time::ClockId::Monotonic)
}

fn nanoseconds(clock: rustix::time::ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_starts_while_it_is_attached_nothing_is_missing() {
        let mut recording = Recording {
            root: Root::RunningProcess(std::process::id()),
            start_ns: 1000,
            records: BTreeMap::new(),
            ancestries: BTreeMap::new(),
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
        let processes = recording.finish().processes;
        let complete: Vec<_> = processes.iter().map(|process| process.complete).collect();
        assert_eq!(complete, [Some(false), Some(true)]);
    }

    #[test]
    fn the_cpus_of_a_process_are_known() {
        let own = cpus(std::process::id()).expect("we are there");
        assert!(own.count() > 0);
        assert_eq!(cpus(u32::MAX), None);
    }
}
