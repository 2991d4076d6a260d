//! Watches ML processes: attaches the probes, reads what they keep, and governs what they cost.
//!
//! | part | subject |
//! |---|---|
//! | `kernel`, `batch` | the loaded programs and the maps shared with them |
//! | `files` | the library files that probes are attached to |
//! | `changes` | tells when one of them is written to or removed |
//! | `process` | what is known of one process |
//! | `step_marks` | what tells its steps apart |
//! | `governor`, `alarm` | what observing costs, and how it is kept within a budget |
//! | `off` | when no probe is on at all |
//! | `estimate` | launches per step and calls of sampled functions, with their intervals |
//! | `thread` | the thread that owns an [`Observer`] and publishes snapshots |
//! | `describe` | what is known, as a snapshot |

mod alarm;
mod batch;
mod changes;
mod describe;
mod durations;
mod estimate;
mod files;
mod governor;
mod kernel;
mod mapped;
mod off;
mod process;
mod shared_state;
mod step_marks;
mod thread;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use changes::Changes;
pub use estimate::Interval;
use files::AttachedFile;
pub use files::Watch;
use governor::Governor;
pub use governor::{Cost, GovernorOptions, ProcessCost};
pub(crate) use kernel::Kernel;
#[cfg(test)]
pub(crate) use kernel::OBJECT;
pub use kernel::Rung;
use off::{Off, Rests};
pub use process::{CallCount, ObservedProcess, Phases, Seen};
pub use thread::{ObserverRequests, ObserverThread, Published};
use zernel_model::identity::Identity;
use zernel_model::snapshot::{RefusedFile, SharedHistogram};
use zernel_phase::shared::RawTaskState;
use zernel_phase::tracker::TrackerConfig;

use crate::capability::reason;
use crate::discovery::{self, Discovery, Event, ProcessKey};
use crate::probes::nccl::ExitedRanks;
use crate::probes::{self, ExitedRank, Family, SYMBOLS, layout};
use zernel_elf::LibraryKind;
use zernel_identity::gpu::{GpuFacts, Gpus};

/// Why nothing can be observed.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// The programs do not load.
    #[error("the kernel does not load the probes ({}); `zernel doctor` says what is missing", reason(.0))]
    Load(#[source] libbpf_rs::Error),
    /// A map cannot be read.
    #[error("what the probes keep cannot be read ({})", reason(.0))]
    Read(#[source] libbpf_rs::Error),
    /// Events cannot be waited for.
    #[error("events cannot be waited for ({0}); the limit on open files may be too low")]
    Wait(#[from] rustix::io::Errno),
    /// A thread that borrowed the observer panicked.
    #[error("the observer was lent to a thread that panicked")]
    NotReturned,
    /// Processes cannot be found.
    #[error(transparent)]
    Discovery(#[from] discovery::Error),
}

/// How to observe.
#[derive(Debug, Clone)]
pub struct Options {
    /// The ways to attach that may be tried, best first.
    pub rungs: Vec<Rung>,
    /// Libraries to attach to at once, before any process uses them.
    pub libraries: Vec<PathBuf>,
    /// How long a process that has ended is still told of.
    pub grace: Duration,
    /// What observing may cost.
    pub governor: GovernorOptions,
    /// Where in a bpffs the states of tasks are pinned, for a scheduler.
    pub pins: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rungs: Rung::LADDER.to_vec(),
            libraries: Vec::new(),
            grace: Duration::from_secs(60),
            governor: GovernorOptions::default(),
            pins: shared_state::DIRECTORY.into(),
        }
    }
}

impl Options {
    /// Everything is counted, whatever it costs, with these libraries attached from the start.
    pub fn exact(libraries: impl IntoIterator<Item = PathBuf>) -> Self {
        Self {
            libraries: libraries.into_iter().collect(),
            governor: GovernorOptions::EXACT,
            ..Self::default()
        }
    }
}

/// What the kernel had no room for, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[allow(missing_docs)] // documented in bpf/losses.h
pub struct Losses {
    pub processes: u64,
    pub histograms: u64,
    pub calls: u64,
    pub allocations: u64,
    pub memory_accounts: u64,
    pub communicators: u64,
    pub threads: u64,
    pub contexts: u64,
    pub collectives: u64,
}

impl Losses {
    /// The causes by name.
    #[must_use]
    pub fn by_cause(&self) -> [(&'static str, u64); 9] {
        [
            ("processes", self.processes),
            ("histograms", self.histograms),
            ("calls", self.calls),
            ("allocations", self.allocations),
            ("memory_accounts", self.memory_accounts),
            ("communicators", self.communicators),
            ("threads", self.threads),
            ("contexts", self.contexts),
            ("collectives", self.collectives),
        ]
    }
}

/// In how many rounds the identities of all processes are read anew: 20 s at two rounds per second.
const IDENTITY_ROUNDS: usize = 40;

/// The library files that a process maps.
#[derive(Debug, Clone)]
struct MappedFiles {
    /// Identity of the process when it mapped the first one. A process may exit before the next round reads it.
    identity: Option<Identity>,
    /// Numbers of the files.
    files: BTreeSet<u64>,
}

impl MappedFiles {
    fn new(process: ProcessKey, files: BTreeSet<u64>) -> Self {
        Self {
            identity: process::identify_life(process.pid, process.start_ns),
            files,
        }
    }

    /// User of the process.
    fn uid(&self) -> Option<u32> {
        self.identity.as_ref().map(|identity| identity.uid)
    }
}

/// The probes, attached. Dropping it detaches everything.
pub struct Observer {
    files: Vec<AttachedFile>,
    refused: Arc<Vec<RefusedFile>>,
    changes: Changes,
    /// Readable when there are events of processes, changes of files or alarms.
    events: OwnedFd,
    is_alarmed: bool,
    /// Which files a process maps, by their place in `files`.
    maps: BTreeMap<ProcessKey, MappedFiles>,
    /// Identities of processes that exited or executed another program since the last round.
    exited_identities: BTreeMap<ProcessKey, Identity>,
    /// Those that mapped the driver when observing began.
    found_running: BTreeSet<ProcessKey>,
    processes: BTreeMap<u32, ObservedProcess>,
    /// Those that have ended, until their grace is over.
    ended: Vec<ObservedProcess>,
    /// How long the collectives of those took whose grace is over, by user.
    past: BTreeMap<(Option<u32>, Family), SharedHistogram>,
    /// Ranks that have ended, as long as others may wait for them.
    exited_ranks: ExitedRanks,
    /// The kernel's places of those that have ended, until nobody writes there any more.
    retired: BTreeSet<u32>,
    /// Whether processes were taken in whose children were not.
    has_new_ones: bool,
    discovery: Discovery,
    governor: Governor,
    gpus: Gpus,
    gpu_facts: Vec<GpuFacts>,
    grace: Duration,
    /// The kernel's place of the process whose identity is read next.
    next_identity: u32,
    next_file: u64,
    /// Why all probes are off, if they are.
    off: Option<Off>,
    rests: Rests,
    kernel: Kernel,
}

impl Observer {
    /// Loads the probes, attaches to what is there, and measures what a probe costs.
    pub fn start(options: &Options) -> Result<Self, ObserveError> {
        // First, because it says which privilege is lacking.
        let discovery = Discovery::start()?;
        let tracker = TrackerConfig::default();
        let kernel = Kernel::load(&options.rungs, &tracker, &options.pins);
        let kernel = kernel.map_err(ObserveError::Load)?;
        let governor = Governor::calibrated(&kernel, options.governor);
        kernel.forget_ourselves().map_err(ObserveError::Read)?;
        let gpus = Gpus::open();
        let changes = Changes::new()?;
        let mut observer = Self {
            files: Vec::new(),
            refused: Arc::default(),
            events: any([
                discovery.file_descriptor(),
                changes.as_fd(),
                kernel.alarm.as_fd(),
            ])?,
            is_alarmed: false,
            changes,
            maps: BTreeMap::new(),
            exited_identities: BTreeMap::new(),
            found_running: BTreeSet::new(),
            processes: BTreeMap::new(),
            ended: Vec::new(),
            past: BTreeMap::new(),
            exited_ranks: ExitedRanks::default(),
            retired: BTreeSet::new(),
            has_new_ones: false,
            discovery,
            governor,
            gpu_facts: gpus.facts(),
            gpus,
            grace: options.grace,
            next_identity: 0,
            next_file: 0,
            off: None,
            rests: Rests::new(options.governor.rest),
            kernel,
        };
        for path in &options.libraries {
            observer.watch_named_file(path);
        }
        for kind in [LibraryKind::Cuda, LibraryKind::Nccl] {
            for path in kind.installed() {
                observer.watch_file(kind, &path, &path);
            }
        }
        observer.scan()?;
        observer.found_running = observer.users_of_the_driver();
        Ok(observer)
    }

    fn users_of_the_driver(&self) -> BTreeSet<ProcessKey> {
        let files = self.files.iter();
        let drivers = files.filter(|file| file.kind == LibraryKind::Cuda);
        let drivers: BTreeSet<u64> = drivers.map(|file| file.number).collect();
        let mut users = self.maps.clone();
        users.retain(|_, mapped| !mapped.files.is_disjoint(&drivers));
        users.into_keys().collect()
    }

    /// How functions are attached to.
    #[must_use]
    pub fn rung(&self) -> Rung {
        self.kernel.rung
    }

    /// Attaches to a library that a person named. Nothing may use it yet.
    fn watch_named_file(&mut self, path: &Path) {
        let name = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let kind = [path, &name]
            .into_iter()
            .find_map(|path| LibraryKind::from_file_name(path.file_name()?));
        match kind {
            Some(kind) => {
                self.watch_file(kind, path, path);
            }
            None => self.refuse(
                path,
                "its name is none of a library that we know".to_owned(),
            ),
        }
    }

    /// Attaches to a library file, unless it is attached already; returns its number.
    fn watch_file(&mut self, kind: LibraryKind, access: &Path, path: &Path) -> Option<u64> {
        if !SYMBOLS.iter().any(|symbol| symbol.library == kind) {
            return None;
        }
        // A process that is gone has nothing to attach to.
        let identity = files::identity_at(access).ok()?;
        if let Some(known) = self.files.iter().find(|file| file.identity() == identity) {
            return Some(known.number);
        }
        self.next_file += 1;
        let is_sampled = |symbol| self.governor.is_sampled(symbol);
        let number = self.next_file;
        match AttachedFile::attach(&self.kernel, kind, access, path, number, is_sampled) {
            Ok(mut file) => {
                if self.is_off() {
                    file.pause();
                }
                file.watch(&mut self.changes, access);
                if self.governor.is_window_open() {
                    // What it may not attach to now, it may not later.
                    let _ = file.open_window(&self.kernel);
                }
                self.files.push(file);
            }
            Err(error) if error.is_not_found() => return None,
            Err(error) => {
                self.refuse(path, error.to_string());
                return None;
            }
        }
        Some(self.next_file)
    }

    /// Notes why no probe can be attached to a file.
    fn refuse(&mut self, path: &Path, reason: String) {
        let refused = Arc::make_mut(&mut self.refused);
        refused.retain(|refused| refused.path != path);
        refused.push(RefusedFile {
            path: path.to_owned(),
            reason,
        });
    }

    /// A descriptor that is readable when [`Self::discover`] has something to do.
    pub fn discovery_descriptor(&self) -> io::Result<OwnedFd> {
        self.events.try_clone()
    }

    /// Whether a thread was found to pay far too much, since the last time: then [`Self::read`] and
    /// [`Self::govern`] should not wait.
    pub fn take_alarm(&mut self) -> bool {
        std::mem::take(&mut self.is_alarmed)
    }

    /// Takes in what happened to processes and to library files: attaches to what is mapped, lets go
    /// of what was written to.
    pub fn discover(&mut self) -> Result<(), ObserveError> {
        if self.changes.take() {
            self.drop_changed_files();
        }
        self.is_alarmed |= self.kernel.alarm.take();
        let events = self.discovery.poll(Duration::ZERO)?;
        self.take(&events);
        Ok(())
    }

    /// Looks at every process of the machine.
    pub fn scan(&mut self) -> Result<(), ObserveError> {
        let events = self.discovery.scan()?;
        self.take(&events);
        self.drop_changed_files();
        self.refresh_gpus();
        self.adopt()
    }

    /// Reads utilization and memory of all GPUs.
    fn refresh_gpus(&mut self) {
        self.gpu_facts = self.gpus.facts();
    }

    fn take(&mut self, events: &[Event]) {
        for event in events {
            match event {
                Event::Mapped {
                    process,
                    kind,
                    file,
                } => {
                    if let Some(number) = self.watch_file(*kind, &file.map_files, &file.path) {
                        let mapped = self.maps.entry(*process);
                        let mapped =
                            mapped.or_insert_with(|| MappedFiles::new(*process, BTreeSet::new()));
                        mapped.files.insert(number);
                    }
                }
                Event::Executed { process } | Event::Exited { process } => {
                    let mapped = self.maps.remove(process);
                    let identity = mapped.and_then(|mapped| mapped.identity);
                    let exited = identity.map(|identity| (*process, identity));
                    self.exited_identities.extend(exited);
                    self.found_running.remove(process);
                }
                Event::Forked { parent, child } => {
                    if let Some(parent) = self.maps.get(parent) {
                        let mapped = MappedFiles::new(*child, parent.files.clone());
                        self.maps.insert(*child, mapped);
                    }
                }
            }
        }
    }

    /// Takes the probes off files that were written to, and off those that nobody can use any more.
    fn drop_changed_files(&mut self) {
        let mapped = self.maps.values().flat_map(|mapped| &mapped.files);
        let used: BTreeSet<u64> = mapped.copied().collect();
        let mut let_go = BTreeSet::new();
        for file in &mut self.files {
            if !file.is_unchanged() {
                file.detach(files::WRITTEN_TO);
                let_go.insert(file.number);
            }
        }
        for process in self.processes.values_mut() {
            let maps = self.maps.get(&process.key());
            if maps.is_some_and(|maps| !maps.files.is_disjoint(&let_go)) {
                process.lose_sight(monotonic_ns());
            }
        }
        self.files.retain(|file| {
            let useful = file.is_unchanged() && !file.is_deleted();
            useful || used.contains(&file.number)
        });
        let watched = self.files.iter().flat_map(AttachedFile::watched);
        self.changes.keep(&watched.collect());
    }

    /// Takes in the threads and the children that known processes had before they were known. To be
    /// called when a process becomes known, and now and then; what is forked later is taken in at once.
    pub fn adopt(&self) -> Result<(), ObserveError> {
        self.kernel.adopt().map_err(ObserveError::Read)
    }

    /// Where a scheduler finds the states of tasks, or why it does not.
    pub fn shared_state(&self) -> Result<PathBuf, &str> {
        self.kernel.shared_state()
    }

    /// The state of a thread, as a scheduler sees it; `None` if it belongs to no ML process.
    pub fn task_state(&self, tid: u32) -> Result<Option<RawTaskState>, ObserveError> {
        self.kernel.task_state(tid).map_err(ObserveError::Read)
    }

    /// Takes over what the kernel has kept since the last time.
    pub fn read(&mut self) -> Result<(), ObserveError> {
        self.kernel.beat();
        for index in 1..layout::PROCESSES {
            let raw = self.kernel.processes.read(index);
            self.know_process(index as u32, &raw);
            let process = self.processes.get_mut(&(index as u32));
            if let Some(process) = process.filter(|_| raw.pid != 0) {
                process.read(&self.kernel, index, &raw);
            }
        }
        self.exited_identities.clear();
        if std::mem::take(&mut self.has_new_ones) {
            // What it forked before it was known loads data for it from now on.
            self.adopt()?;
        }
        self.read_step_marks().map_err(ObserveError::Read)?;
        let now_ns = monotonic_ns();
        for process in self.processes.values_mut() {
            process.advance(now_ns);
        }
        probes::read_maps(&self.kernel, &mut self.processes).map_err(ObserveError::Read)?;
        self.read_phases().map_err(ObserveError::Read)?;
        self.let_go().map_err(ObserveError::Read)
    }

    /// Takes in a process, if there is one at that place and it is new.
    fn know_process(&mut self, index: u32, raw: &layout::Process) {
        if raw.pid == 0 || self.retired.contains(&index) || self.processes.contains_key(&index) {
            return;
        }
        let mut process = ObservedProcess::new(raw);
        let mapped = self.maps.get(&process.key());
        let earlier = mapped.and_then(|mapped| mapped.identity.as_ref());
        let earlier = earlier.or_else(|| self.exited_identities.get(&process.key()));
        process.complete_identity(earlier);
        if self.found_running.contains(&process.key()) {
            process.was_found_late();
        }
        process.find_devices(&self.gpu_facts);
        process.join_sampling(&self.governor.symbols(), self.governor.is_window_open());
        self.processes.insert(index, process);
        self.has_new_ones = true;
    }

    fn read_step_marks(&mut self) -> libbpf_rs::Result<()> {
        for process in self.processes.values_mut() {
            process.distrust_sampled_marks();
        }
        let marks: Vec<layout::StepMark> = self.kernel.step_marks.take()?.collect();
        for mark in marks {
            if !self.processes.contains_key(&mark.process) {
                let raw = self.kernel.processes.read(mark.process as usize);
                self.know_process(mark.process, &raw);
            }
            if let Some(process) = self.processes.get_mut(&mark.process) {
                process.mark_step(&mark, &self.governor.windows);
            }
        }
        Ok(())
    }

    /// Of each process the thread that drives its steps tells the phase.
    fn read_phases(&mut self) -> libbpf_rs::Result<()> {
        let now_ns = monotonic_ns();
        let mut states = self.kernel.task_states()?;
        states.sort_by_key(|state| state.tgid);
        for process in self.processes.values_mut() {
            let pid = process.pid;
            let first = states.partition_point(|state| state.tgid < pid);
            let own = states[first..].iter().take_while(|state| state.tgid == pid);
            process.set_phases(own, now_ns);
        }
        Ok(())
    }

    /// Gives back the places of processes that have ended, and forgets those that ended long ago.
    fn let_go(&mut self) -> libbpf_rs::Result<()> {
        let ended: Vec<u32> = self
            .processes
            .iter()
            .filter(|(_, process)| process.ended_ns.is_some())
            .map(|(index, _)| *index)
            .collect();
        for index in ended {
            // Its last calls may have come after it was read, but before it ended.
            let raw = self.kernel.processes.read(index as usize);
            if let Some(mut process) = self.processes.remove(&index) {
                process.read(&self.kernel, index as usize, &raw);
                if let Some(ended_ns) = process.ended_ns.filter(|_| self.governor.is_window_open())
                {
                    let counters = self.kernel.counters.read(index as usize);
                    self.governor
                        .have_window_taken(&mut process, &counters, ended_ns);
                }
                let ns = self.governor.cost.of_call(process.threads());
                process.note_last_cost(ns);
                self.exited_ranks.add(&process, raw.exit_code);
                process.end();
                self.ended.push(process);
            }
            self.retired.insert(index);
        }
        self.exited_ranks.prune(self.processes.values());
        // Loaders that outlive their trainer still write to its place.
        let needed = |trainer: &u32| {
            let mut living = self.processes.values();
            living.any(|process| process.trainer == *trainer)
        };
        let (kept, free) = self.retired.iter().partition(|index| needed(index));
        self.retired = kept;
        let free: BTreeSet<u32> = free;
        for index in free {
            self.kernel.forget_process(index)?;
        }
        let now_ns = monotonic_ns();
        let grace_ns = self.grace.as_nanos() as u64;
        let is_over = |process: &mut ObservedProcess| {
            let ended_ns = process.ended_ns;
            ended_ns.is_some_and(|end| now_ns - end >= grace_ns)
        };
        for process in self.ended.extract_if(.., is_over) {
            let user = process.identity.as_ref().map(|identity| identity.uid);
            for (family, histogram) in process.durations() {
                if matches!(family, Family::Enqueue(_) | Family::UntilSync(_)) {
                    let past = self.past.entry((user, family)).or_default();
                    Arc::make_mut(past).merge(histogram);
                }
            }
        }
        Ok(())
    }

    /// Reads the identity and the devices of some processes anew, others the next time: programs rename themselves and
    /// change their user after they start.
    fn refresh_identities(&mut self) {
        let count = self.processes.len().div_ceil(IDENTITY_ROUNDS);
        let next = self.processes.range_mut(self.next_identity..).take(count);
        let mut last = None;
        for (index, process) in next {
            last = Some(*index);
            if let Some(identity) = process::identify_life(process.pid, process.start_ns) {
                process.set_identity(identity);
                process.find_devices(&self.gpu_facts);
            }
        }
        self.next_identity = last.map_or(0, |index| index + 1);
    }

    /// When a sampling window opens or closes next.
    fn next_window_turn(&self) -> Option<Instant> {
        self.governor.next_turn()
    }

    /// Every process that was seen, those that ended a short while ago included.
    pub fn processes(&self) -> impl Iterator<Item = &ObservedProcess> {
        self.processes.values().chain(&self.ended)
    }

    /// Ranks that have ended while others still hold a communicator with them.
    pub fn gone_ranks(&self) -> impl Iterator<Item = &ExitedRank> {
        self.exited_ranks.iter()
    }

    /// What makes the numbers less than they should be, one sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let off = self.off.map(Off::why);
        problems.extend(off.or_else(|| self.rests.problem()));
        for (cause, lost) in self.losses().by_cause() {
            if lost > 0 {
                problems.push(format!("{lost} {} lost", cause.replace('_', " ")));
            }
        }
        problems
    }

    /// Switches of ML threads that were not seen, as the next one of the thread shows: what it did
    /// meanwhile is missing from its times.
    #[must_use]
    pub fn missed_switches(&self) -> u64 {
        self.kernel.losses.read(0).switches
    }

    /// What could not be kept.
    #[must_use]
    pub fn losses(&self) -> Losses {
        let raw = self.kernel.losses.read(0);
        Losses {
            processes: raw.processes,
            histograms: raw.histograms,
            calls: raw.calls,
            allocations: raw.allocations,
            memory_accounts: raw.memory_accounts,
            communicators: raw.communicators,
            threads: raw.threads,
            contexts: raw.contexts,
            collectives: raw.collectives,
        }
    }
}

/// A descriptor that is readable when one of several is.
fn any<const N: usize>(sources: [BorrowedFd<'_>; N]) -> rustix::io::Result<OwnedFd> {
    use rustix::event::epoll;
    let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for source in sources {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&all, source, data, epoll::EventFlags::IN)?;
    }
    Ok(all)
}

/// CLOCK_MONOTONIC, which the probes stamp with.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Seconds since a moment in nanoseconds of CLOCK_MONOTONIC; `None` for 0, which stands for no moment.
pub(crate) fn seconds_ago(ns: u64) -> Option<f64> {
    (ns != 0).then(|| monotonic_ns().saturating_sub(ns) as f64 / 1e9)
}
