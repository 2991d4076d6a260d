//! Observes while a command runs, and keeps what was seen of its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use procfs::process::Process;
use zernel_ebpf::observer::{self, ObserveError, ObservedProcess, Observer, Options};

use super::rank::Seen;

/// How often is looked who came: what lived shorter may be nobody's.
const LOOK: Duration = Duration::from_millis(200);
/// How many parents are asked for: deeper trees are loops.
const GENERATIONS: usize = 64;

/// A process for ever: its pid and when it started.
type Key = (u32, u64);

/// Observing, if that is possible.
pub(super) enum Watch {
    Watching {
        stop: Arc<AtomicBool>,
        watching: JoinHandle<Result<(), ObserveError>>,
        looking: JoinHandle<Gathered>,
    },
    Refused(String),
}

/// What observing yielded.
pub(super) enum Outcome {
    Observed(Gathered),
    NotObserved(String),
}

/// All that was seen of the command's processes.
#[derive(Default)]
pub(super) struct Gathered {
    pub(super) processes: Vec<Seen>,
    /// What a probed call costs, in nanoseconds.
    pub(super) ns_per_call: f64,
    pub(super) rung: &'static str,
    /// The functions that were sampled at some time.
    pub(super) sampled: BTreeSet<&'static str>,
    /// What makes the numbers less than they should be.
    pub(super) problems: Vec<String>,
    /// When the command had not started yet, in nanoseconds since boot.
    start_ns: u64,
    kept: BTreeMap<Key, Seen>,
    /// Whether a process descends from this one.
    ours: BTreeMap<Key, Descent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Descent {
    Ours,
    Others,
    /// It was gone before it could be asked.
    Unknown,
}

impl Watch {
    pub(super) fn start(options: &Options) -> Self {
        let observer = match Observer::start(options) {
            Ok(observer) => Arc::new(Mutex::new(observer)),
            Err(error) => return Self::Refused(error.to_string()),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let start_ns = since_boot_ns();
        let watching = thread::spawn({
            let (observer, stop) = (Arc::clone(&observer), Arc::clone(&stop));
            move || observer::run(&observer, &stop)
        });
        let looking = thread::spawn({
            let stop = Arc::clone(&stop);
            move || look_until(&observer, &stop, start_ns)
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

    /// Ends observing; the command has ended.
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
        match watching.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => gathered
                .problems
                .push(format!("observing broke off: {error}")),
            Err(_) => gathered.problems.push("observing broke off".to_owned()),
        }
        Outcome::Observed(gathered)
    }
}

fn look_until(observer: &Mutex<Observer>, stop: &AtomicBool, start_ns: u64) -> Gathered {
    let mut gathered = Gathered {
        start_ns,
        ..Gathered::default()
    };
    loop {
        // Asked before looking: the last look is after the end.
        let is_last = stop.load(Ordering::Relaxed);
        let mut observer = observer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = observer.read() {
            gathered.problems.push(error.to_string());
            return gathered.finish(&observer);
        }
        if gathered.look(&observer) {
            // What it had started before it was known belongs to it: its loaders, perhaps.
            if let Err(error) = observer.adopt() {
                gathered.problems.push(error.to_string());
            }
        }
        if is_last {
            return gathered.finish(&observer);
        }
        drop(observer);
        thread::park_timeout(LOOK);
    }
}

impl Gathered {
    /// Says whether one of the command's processes is new.
    fn look(&mut self, observer: &Observer) -> bool {
        let mut is_new = false;
        self.sampled.extend(observer.sampled());
        for process in observer.processes() {
            let key = (process.pid, process.start_ns);
            let descent = self.ours.entry(key).or_insert_with(|| {
                if process.start_ns < self.start_ns {
                    return Descent::Others;
                }
                descent(process)
            });
            if *descent == Descent::Ours {
                is_new |= self.kept.insert(key, Seen::new(process)).is_none();
            }
        }
        is_new
    }

    fn finish(mut self, observer: &Observer) -> Self {
        self.ns_per_call = observer.cost().ns_per_call;
        self.rung = observer.rung().name();
        self.problems.extend(observer.problems());
        let descents = self.ours.values();
        let unknown = descents
            .filter(|descent| **descent == Descent::Unknown)
            .count();
        if unknown > 0 {
            self.problems.push(format!(
                "{unknown} processes used CUDA and ended before it was seen whose they were"
            ));
        }
        self.processes = std::mem::take(&mut self.kept).into_values().collect();
        self
    }
}

/// Whether parent links lead from a process to this one.
fn descent(process: &ObservedProcess) -> Descent {
    let own = std::process::id();
    let known_parent = process.identity.as_ref().map(|identity| identity.parent);
    let Some(mut ancestor) = parent(process.pid).or(known_parent) else {
        return Descent::Unknown;
    };
    for _ in 0..GENERATIONS {
        if ancestor == own {
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

fn since_boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn parent(pid: u32) -> Option<u32> {
    let process = Process::new(i32::try_from(pid).ok()?).ok()?;
    Some(process.stat().ok()?.ppid.unsigned_abs())
}
