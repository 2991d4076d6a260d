//! Observes while a command runs, and keeps what was seen of its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use procfs::process::Process;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};
use zernel_ebpf::observer::snapshot::{self, Snapshot};
use zernel_ebpf::observer::{self, ObserveError, Observer, Options, Whose};

use super::rank::Seen;
use super::record::Record;
use crate::client::Socket;

/// How often is looked who came: what lived shorter may be nobody's.
const LOOK: Duration = Duration::from_millis(200);
/// How many parents are asked for: deeper trees are loops.
const GENERATIONS: usize = 64;

/// A process for ever: its pid and when it started.
type Key = (u32, u64);

/// Whose processes are wanted: all that descend from this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Root {
    /// Ourselves; what was there before is not meant.
    Ourselves,
    /// A process that was there before, and is meant too.
    Other(u32),
}

/// Observing, if that is possible.
pub(super) enum Watch {
    Watching {
        stop: Arc<AtomicBool>,
        watching: Option<JoinHandle<Result<(), ObserveError>>>,
        looking: JoinHandle<Gathered>,
    },
    Refused(String),
}

/// What observing yielded.
pub(super) enum Outcome {
    Observed(Gathered),
    NotObserved(String),
}

/// Who observes.
enum Source {
    Ourselves(Arc<Mutex<Observer>>),
    Daemon(Socket),
}

/// All that was seen of the wanted processes.
#[derive(Default)]
pub(super) struct Gathered {
    pub(super) processes: Vec<Seen>,
    /// What a probed call costs.
    pub(super) call_cost_seconds: f64,
    pub(super) rung: String,
    /// Whether the daemon was asked.
    pub(super) by_daemon: bool,
    /// The functions that it called, and that were sampled at some time.
    pub(super) sampled: BTreeSet<String>,
    /// What makes the numbers less than they should be.
    pub(super) problems: Vec<String>,
}

/// The same while it is gathered.
struct Gathering {
    root: Root,
    /// When it began, in nanoseconds since boot.
    start_ns: u64,
    records: BTreeMap<Key, Record>,
    /// Whether a process is wanted.
    descents: BTreeMap<Key, Descent>,
    gathered: Gathered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Descent {
    Ours,
    Others,
    /// It was gone before it could be asked.
    Unknown,
}

impl Watch {
    /// Observes by itself, or else asks the daemon.
    pub(super) fn start(options: &Options, root: Root, socket: &Socket) -> Self {
        match Observer::start(options) {
            Ok(observer) => Self::by_ourselves(observer, root),
            Err(error) => match socket.snapshot() {
                Ok(_) => Self::by_daemon(socket.clone(), root),
                Err(daemon) => Self::Refused(format!("{error}; {daemon}")),
            },
        }
    }

    fn by_ourselves(observer: Observer, root: Root) -> Self {
        let observer = Arc::new(Mutex::new(observer));
        let stop = Arc::new(AtomicBool::new(false));
        let watching = thread::spawn({
            let (observer, stop) = (Arc::clone(&observer), Arc::clone(&stop));
            move || observer::run(&observer, &stop)
        });
        Self::looking_at(Source::Ourselves(observer), root, stop, Some(watching))
    }

    fn by_daemon(socket: Socket, root: Root) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        Self::looking_at(Source::Daemon(socket), root, stop, None)
    }

    fn looking_at(
        source: Source,
        root: Root,
        stop: Arc<AtomicBool>,
        watching: Option<JoinHandle<Result<(), ObserveError>>>,
    ) -> Self {
        let gathering = Gathering {
            root,
            start_ns: since_boot_ns(),
            records: BTreeMap::new(),
            descents: BTreeMap::new(),
            gathered: Gathered {
                by_daemon: matches!(source, Source::Daemon(_)),
                ..Gathered::default()
            },
        };
        let looking = thread::spawn({
            let stop = Arc::clone(&stop);
            move || gathering.look_until(&source, &stop)
        });
        Self::Watching {
            stop,
            watching,
            looking,
        }
    }

    /// Why nothing is observed.
    pub(super) fn refusal(&self) -> Option<&str> {
        match self {
            Self::Watching { .. } => None,
            Self::Refused(reason) => Some(reason),
        }
    }

    /// Ends observing.
    pub(super) fn finish(self) -> Outcome {
        let (stop, watching, looking) = match self {
            Self::Refused(reason) => return Outcome::NotObserved(reason),
            Self::Watching {
                stop,
                watching,
                looking,
            } => (stop, watching, looking),
        };
        stop.store(true, Ordering::Relaxed);
        looking.thread().unpark();
        let mut gathered = looking.join().unwrap_or_default();
        match watching.map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => gathered
                .problems
                .push(format!("observing broke off: {error}")),
            Some(Err(_)) => gathered.problems.push("observing broke off".to_owned()),
        }
        Outcome::Observed(gathered)
    }
}

impl Source {
    fn look(&self) -> Result<Snapshot, String> {
        match self {
            Self::Ourselves(observer) => {
                let mut observer = observer.lock().unwrap_or_else(PoisonError::into_inner);
                observer.read().map_err(|error| error.to_string())?;
                Ok(observer.observed(Whose::All))
            }
            Self::Daemon(socket) => socket.snapshot().map_err(|error| error.to_string()),
        }
    }
}

impl Gathering {
    fn look_until(mut self, source: &Source, stop: &AtomicBool) -> Gathered {
        loop {
            // Asked before looking: the last look is after the end.
            let is_last = stop.load(Ordering::Relaxed);
            match source.look() {
                Ok(snapshot) => self.take(&snapshot, is_last),
                Err(error) => {
                    self.gathered.problems.push(error);
                    return self.finish();
                }
            }
            if is_last {
                return self.finish();
            }
            thread::park_timeout(LOOK);
        }
    }

    fn take(&mut self, snapshot: &Snapshot, is_last: bool) {
        let now_ns = monotonic_ns();
        let asleep_ns = since_boot_ns().saturating_sub(now_ns);
        let gathered = &mut self.gathered;
        if is_last {
            gathered.call_cost_seconds = snapshot.call_cost_seconds;
            gathered.rung.clone_from(&snapshot.rung);
            gathered.problems.extend(snapshot.problems.iter().cloned());
        }
        for process in &snapshot.observed {
            let key = (process.pid, process.start_ns);
            let (root, start_ns) = (self.root, self.start_ns);
            let descent = self.descents.entry(key);
            let descent = descent.or_insert_with(|| descent_from(root, start_ns, process));
            if *descent == Descent::Ours {
                let record = self.records.entry(key);
                let record = record.or_insert_with(|| match root {
                    Root::Ourselves => Record::from_the_start(process, asleep_ns),
                    // It started while others were observed already: nothing of it is missing.
                    Root::Other(_) if process.start_ns >= start_ns => Record::default(),
                    Root::Other(_) => Record::from_now_on(process),
                });
                record.look(process, now_ns);
                let sampled = snapshot.sampled.iter();
                // Who has launched nothing may do so between windows.
                let is_unseen = process.is_trainer() && process.launches == 0;
                let called = sampled.filter(|name| is_unseen || process.calls.contains_key(*name));
                gathered.sampled.extend(called.cloned());
                // A process may change that at any time.
                if let Some(cpus) = cpus(process.pid).filter(|_| process.is_trainer()) {
                    record.cpus = cpus;
                }
            }
        }
    }

    fn finish(mut self) -> Gathered {
        let descents = self.descents.values();
        let unknown = descents.filter(|descent| **descent == Descent::Unknown);
        let unknown = unknown.count();
        if unknown > 0 {
            self.gathered.problems.push(format!(
                "{unknown} processes used CUDA and ended before it was seen whose they were"
            ));
        }
        let records = self.records.into_values();
        self.gathered.processes = records.map(Record::finish).collect();
        self.gathered
    }
}

/// Whether parent links lead from a process to the root.
fn descent_from(root: Root, start_ns: u64, process: &snapshot::Process) -> Descent {
    let root = match root {
        Root::Ourselves if process.start_ns < start_ns => return Descent::Others,
        Root::Ourselves => std::process::id(),
        Root::Other(pid) if process.pid == pid => return Descent::Ours,
        Root::Other(pid) => pid,
    };
    let known_parent = process.identity.as_ref().map(|identity| identity.parent);
    let Some(mut ancestor) = parent(process.pid).or(known_parent) else {
        return Descent::Unknown;
    };
    for _ in 0..GENERATIONS {
        if ancestor == root {
            return Descent::Ours;
        }
        match parent(ancestor) {
            Some(0) => return Descent::Others,
            Some(next) => ancestor = next,
            // It ended meanwhile, and its children have another parent now.
            None => match parent(process.pid) {
                Some(again) => ancestor = again,
                None => return Descent::Unknown,
            },
        }
    }
    Descent::Others
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
        let mut gathering = Gathering {
            root: Root::Other(std::process::id()),
            start_ns: 1000,
            records: BTreeMap::new(),
            descents: BTreeMap::new(),
            gathered: Gathered::default(),
        };
        let process = |start_ns| snapshot::Process {
            pid: std::process::id(),
            start_ns,
            first_seen_ns: 2000,
            complete: true,
            ..snapshot::Process::default()
        };
        let snapshot = Snapshot {
            observed: vec![process(999), process(1000)],
            ..Snapshot::default()
        };
        gathering.take(&snapshot, true);
        let seen = gathering.finish().processes;
        let complete: Vec<_> = seen.iter().map(|seen| seen.complete).collect();
        assert_eq!(complete, [Some(false), Some(true)]);
    }

    #[test]
    fn the_cpus_of_a_process_are_known() {
        let own = cpus(std::process::id()).expect("we are there");
        assert!(own.count() > 0);
        assert_eq!(cpus(u32::MAX), None);
    }
}
