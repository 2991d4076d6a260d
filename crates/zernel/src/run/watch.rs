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
    /// A thread takes snapshots until `stop` is set.
    Watching {
        stop: Arc<AtomicBool>,
        looking: JoinHandle<Observation>,
    },
    /// Nothing is observed, for this reason.
    Refused(String),
}

/// Where snapshots come from.
enum Source {
    Ourselves(ObserverThread),
    Daemon(Socket),
}

/// What was observed so far.
struct Gathering {
    root: Root,
    /// When it began, in nanoseconds since boot.
    start_ns: u64,
    records: BTreeMap<Key, Record>,
    /// Whether a process is wanted.
    descents: BTreeMap<Key, Descent>,
    gathered: Observation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Descent {
    Ours,
    Others,
    /// It was gone before it could be asked.
    Unknown,
}

impl Watch {
    /// Observes in this process, or else through the daemon.
    pub(super) fn start(options: &Options, root: Root, socket: &Socket) -> Self {
        let observer = Observer::start(options);
        match observer.and_then(|observer| ObserverThread::start(observer, LOOK)) {
            Ok(observer) => Self::looking_at(Source::Ourselves(observer), root),
            Err(error) => match socket.snapshot() {
                Ok(_) => Self::looking_at(Source::Daemon(socket.clone()), root),
                Err(daemon) => Self::Refused(format!("{error}; {daemon}")),
            },
        }
    }

    fn looking_at(source: Source, root: Root) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let gathering = Gathering {
            root,
            start_ns: since_boot_ns(),
            records: BTreeMap::new(),
            descents: BTreeMap::new(),
            gathered: Observation {
                by_daemon: matches!(source, Source::Daemon(_)),
                ..Observation::default()
            },
        };
        let looking = thread::spawn({
            let stop = Arc::clone(&stop);
            move || gathering.look_until(source, &stop)
        });
        Self::Watching { stop, looking }
    }

    /// Why nothing is observed.
    pub(super) fn refusal(&self) -> Option<&str> {
        match self {
            Self::Watching { .. } => None,
            Self::Refused(reason) => Some(reason),
        }
    }

    /// Stops observing. The error says why nothing was observed.
    pub(super) fn finish(self) -> Result<Observation, String> {
        match self {
            Self::Refused(reason) => Err(reason),
            Self::Watching { stop, looking } => {
                stop.store(true, Ordering::Relaxed);
                looking.thread().unpark();
                Ok(looking.join().unwrap_or_default())
            }
        }
    }
}

impl Source {
    fn look(&self) -> Result<Arc<Snapshot>, String> {
        match self {
            Self::Ourselves(observer) => {
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
            Self::Ourselves(observer) => {
                let error = observer.stop().err()?;
                Some(format!("observing broke off: {error}"))
            }
            Self::Daemon(_) => None,
        }
    }
}

impl Gathering {
    fn look_until(mut self, source: Source, stop: &AtomicBool) -> Observation {
        loop {
            // Read before the look, so that the last look follows the end of the command.
            let is_last = stop.load(Ordering::Relaxed);
            match source.look() {
                Ok(snapshot) => self.take(&snapshot, is_last),
                Err(error) => {
                    let problem = source.stop().unwrap_or(error);
                    self.gathered.problems.push(problem);
                    return self.finish();
                }
            }
            if is_last {
                self.gathered.problems.extend(source.stop());
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
                let is_unseen = process.is_trainer() && process.probes.cuda_trace.launches == 0;
                let called =
                    sampled.filter(|name| is_unseen || process.calls.contains_key(name.as_str()));
                gathered.sampled.extend(called.cloned());
                // A process may change that at any time.
                if let Some(cpus) = cpus(process.pid).filter(|_| process.is_trainer()) {
                    record.cpus = cpus;
                }
            }
        }
    }

    fn finish(mut self) -> Observation {
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
fn descent_from(root: Root, start_ns: u64, process: &ProcessSnapshot) -> Descent {
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
            gathered: Observation::default(),
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
