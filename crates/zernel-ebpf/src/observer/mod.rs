//! Observes ML processes: attaches probes, reads their counts, keeps their overhead in a budget, publishes snapshots.
//!
//! | part | subject |
//! |---|---|
//! | `observer_thread` | the thread that owns an [`Observer`] and publishes snapshots |
//! | `attachment`, `attached_files` | the library files that probes are attached to, and the processes that map them |
//! | `file_queue`, `file_task` | new library files, which child processes read and attach to |
//! | `file_changes` | notices when one of these files is written to or removed |
//! | `process_table`, `process`, `past_durations` | the observed processes, and what stays of exited ones |
//! | `governor`, `alarm` | keep the overhead of the probes within a budget |
//! | `process_exclusions` | stops observing processes whose overhead exceeds the ceiling |
//! | `suspension` | detaches all probes on request |
//! | `estimate` | launches per step and calls of sampled functions, with their intervals |
//! | `describe_snapshot` | everything as a snapshot |
//! | `kernel`, `mapped_array`, `map_batches`, `step_marks`, `histogram_reader` | the loaded programs and the maps shared with them |
//! | `tenants` | the tenants of processes, and their shares of the maps |
//! | `shared_state`, `observer_heart`, `pinned_map` | the pinned states of tasks, for a scheduler |
//! | `hints` | the classes of threads, for other schedulers |
//! | `decisions` | what a scheduler would have decided |
//! | `sampled_phases` | phases by the sampled rule, of processes whose calls are not probed |
//! | `optional_parts` | parts of the programs that are chosen before they are loaded |
//! | `event_trace` | every event of every tracker, for `zernel truth` |

mod alarm;
mod attached_files;
mod attachment;
mod decisions;
mod describe_snapshot;
mod estimate;
mod event_trace;
mod file_changes;
mod file_queue;
mod file_task;
mod found_functions;
mod governor;
mod hints;
mod histogram_reader;
mod identity_reader;
mod kernel;
mod map_batches;
mod mapped_array;
mod observer_heart;
mod observer_thread;
mod optional_parts;
mod past_durations;
mod pinned_map;
mod process;
mod process_exclusions;
mod process_table;
mod sampled_phases;
mod shared_state;
mod step_marks;
mod suspension;
mod tenants;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use attachment::{AttachContext, LibraryAttachments};
pub use decisions::{ClassDecisions, ProcessDecisions};
pub use estimate::ConfidenceInterval;
pub use event_trace::{CoverageChange, TraceItem, TracedEvent, TracedProcess};
pub use found_functions::AttachMode;
use governor::{GovernedParts, Governor};
pub use governor::{GovernorOptions, ProbeCost};
pub(crate) use kernel::KernelPrograms;
#[cfg(test)]
pub(crate) use kernel::OBSERVE_OBJECT;
pub use kernel::UprobeKind;
pub use observer_thread::{ObserverRequests, ObserverThread, PublishedSnapshot};
pub use process::{CallCount, ObservedProcess, ProcessCost, ProcessCoverage, ProcessPhases};
use process_exclusions::ProcessExclusions;
use process_table::{ProcessTable, ReadContext};
use rustix::process::{Resource, Rlimit};
use sampled_phases::SampledProcesses;
pub(crate) use tenants::{CgroupHierarchy, TenantTable};
use zernel_phase::shared::{PIN_DIRECTORY, RawTaskState};
use zernel_phase::tracker::TrackerConfig;

use crate::capability::innermost_reason;
use crate::discovery::{Discovery, DiscoveryError};
use crate::probe_link::{ProbeLink, pin_links};
use crate::probes::{ExitedRank, SYMBOLS};
use zernel_elf::LibraryKind;
use zernel_identity::gpu::{GpuFacts, Gpus};

/// Builds an [`AttachContext`]. A macro, because a method would borrow the whole observer, and callers also need
/// other fields than the attachment.
macro_rules! attach_context {
    ($observer:ident) => {
        AttachContext {
            kernel: &$observer.kernel,
            governor: &$observer.governor,
            are_probes_off: $observer.is_suspended,
        }
    };
}

/// Builds a [`ReadContext`]. A macro, because a method would borrow the whole observer, and callers also need other
/// fields than the processes.
macro_rules! read_context {
    ($observer:ident) => {
        ReadContext {
            kernel: &$observer.kernel,
            governor: &$observer.governor,
            attachment: &$observer.attachment,
            gpus: &$observer.gpu_facts,
        }
    };
}

/// Builds a [`GovernedParts`]. A macro, because a method would borrow the whole observer, and callers also need other
/// fields than the governor.
macro_rules! governed {
    ($observer:ident) => {
        &mut GovernedParts {
            kernel: &$observer.kernel,
            attachment: &mut $observer.attachment,
            processes: &mut $observer.processes,
            gpus: &$observer.gpu_facts,
            are_probes_off: $observer.is_suspended,
        }
    };
}

/// How long the start waits for installed libraries, for example on a slow network file system.
const MAX_START_WAIT: Duration = Duration::from_secs(10);

/// Why the observer cannot observe the processes of this machine.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// The BPF programs do not load.
    #[error("the kernel does not load the probes ({}); run `zernel doctor` to see what is missing", innermost_reason(.0))]
    Load(#[source] libbpf_rs::Error),
    /// Hints cannot be written.
    #[error("the hints at {path} cannot be used: {reason}", path = .path.display())]
    HintsUnusable {
        /// Path of the pinned map.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A map cannot be read.
    #[error("the BPF maps cannot be read ({})", innermost_reason(.0))]
    ReadMap(#[source] libbpf_rs::Error),
    /// The event descriptor cannot be created.
    #[error("the observer cannot wait for events ({0}); raise the limit on open files (ulimit -n)")]
    NoEventDescriptor(#[from] rustix::io::Errno),
    /// A thread that borrowed the observer panicked.
    #[error("the observer is unusable: a thread that borrowed it panicked")]
    BorrowerPanicked,
    /// Processes cannot be discovered.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
}

/// How to observe.
#[derive(Debug, Clone)]
pub struct ObserverOptions {
    /// Kinds of uprobes to try, best first.
    pub rungs: Vec<UprobeKind>,
    /// Libraries to attach to at the start, before any process maps them.
    pub libraries: Vec<PathBuf>,
    /// Grace period: how long a process is still exported after it exited.
    pub grace_period: Duration,
    /// How many processes of one tenant are still exported after they exited.
    pub max_exited: usize,
    /// Budget and ceiling of the overhead.
    pub governor: GovernorOptions,
    /// Directory in a bpffs where task states are pinned, for a scheduler.
    pub pins: PathBuf,
    /// Path in a bpffs of the map of hints for other schedulers, if hints are written.
    pub hints: Option<PathBuf>,
    /// Whether the sampled rule gives phases to processes that use a GPU and whose calls are not probed.
    pub samples_phases: bool,
    /// Whether decisions of a scheduler are counted; see [`Observer::decisions`].
    pub counts_decisions: bool,
    /// Whether events are traced; see [`Observer::take_trace`].
    pub traces_events: bool,
}

impl Default for ObserverOptions {
    fn default() -> Self {
        Self {
            rungs: UprobeKind::BEST_FIRST.to_vec(),
            libraries: Vec::new(),
            grace_period: Duration::from_secs(60),
            max_exited: 256,
            governor: GovernorOptions::default(),
            pins: PIN_DIRECTORY.into(),
            hints: None,
            samples_phases: false,
            counts_decisions: false,
            traces_events: false,
        }
    }
}

impl ObserverOptions {
    /// Options of an observer that counts every call, whatever the overhead, with probes on these libraries from the
    /// start.
    pub fn counting_everything(libraries: impl IntoIterator<Item = PathBuf>) -> Self {
        Self {
            libraries: libraries.into_iter().collect(),
            governor: GovernorOptions::COUNT_EVERYTHING,
            ..Self::default()
        }
    }
}

/// Number of events that the kernel could not record, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[allow(missing_docs)] // documented in bpf/losses.h and bpf/tenants.h
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
    pub refused_processes: u64,
    pub refused_allocations: u64,
    pub refused_histograms: u64,
    pub refused_communicators: u64,
    pub refused_memory_accounts: u64,
}

impl Losses {
    /// The counts of lost events, each with the name of its cause.
    #[must_use]
    pub fn by_cause(&self) -> [(&'static str, u64); 14] {
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
            ("refused_processes", self.refused_processes),
            ("refused_allocations", self.refused_allocations),
            ("refused_histograms", self.refused_histograms),
            ("refused_communicators", self.refused_communicators),
            ("refused_memory_accounts", self.refused_memory_accounts),
        ]
    }
}

/// Observes the ML processes of this machine. Dropping the observer detaches all its probes.
pub struct Observer {
    attachment: LibraryAttachments,
    processes: ProcessTable,
    discovery: Discovery,
    governor: Governor,
    gpus: Gpus,
    gpu_facts: Vec<GpuFacts>,
    /// When the utilization of the GPUs was last read.
    utilization_read_at: Instant,
    /// A descriptor that is readable when there are process events, file changes or alarms.
    events: OwnedFd,
    has_unread_alarm: bool,
    /// Whether all probes are detached on request.
    is_suspended: bool,
    exclusions: ProcessExclusions,
    /// The processes whose phases are sampled; `None` if none may be.
    sampled: Option<SampledProcesses>,
    kernel: KernelPrograms,
}

impl Observer {
    /// Loads the probes, measures the cost of a probed call, and attaches to installed and mapped libraries.
    pub fn start(options: &ObserverOptions) -> Result<Self, ObserveError> {
        pin_links(&options.pins);
        // The discovery starts first, because its error names the privilege that is missing.
        let discovery = Discovery::start()?;
        raise_descriptor_limit();
        let tracker = TrackerConfig::default();
        let kernel = KernelPrograms::load(options, &tracker)?;
        let governor = Governor::with_measured_cost(&kernel, options.governor);
        kernel.forget_own_process().map_err(ObserveError::ReadMap)?;
        let gpus = Gpus::open();
        let attachment = LibraryAttachments::new()?;
        let mut observer = Self {
            events: epoll_any([
                discovery.readable_descriptor(),
                attachment.as_fd(),
                kernel.alarm.as_fd(),
            ])?,
            attachment,
            processes: ProcessTable::new(options.grace_period, options.max_exited),
            discovery,
            governor,
            gpu_facts: gpus.read_facts(),
            utilization_read_at: Instant::now(),
            gpus,
            has_unread_alarm: false,
            is_suspended: false,
            exclusions: ProcessExclusions::new(options.governor.first_exclusion),
            sampled: options.samples_phases.then(SampledProcesses::default),
            kernel,
        };
        observer.attach_libraries(&options.libraries);
        observer.scan()?;
        observer.attachment.remember_running_processes();
        Ok(observer)
    }

    /// Attaches to the libraries that the user named and to those that are installed.
    fn attach_libraries(&mut self, named: &[PathBuf]) {
        for path in named {
            self.attachment.attach_named(path);
        }
        for kind in [LibraryKind::Cuda, LibraryKind::Nccl] {
            for path in kind.installed_paths() {
                self.attachment.attach_installed(kind, &path);
            }
        }
        let until = Instant::now() + MAX_START_WAIT;
        self.attachment
            .take_finished_files(until, attach_context!(self));
    }

    /// The kind of uprobes in use.
    #[must_use]
    pub fn rung(&self) -> UprobeKind {
        self.kernel.rung
    }

    /// A descriptor that is readable when [`Self::discover`] has something to do.
    pub fn discovery_descriptor(&self) -> io::Result<OwnedFd> {
        self.events.try_clone()
    }

    /// Whether the overhead of a thread was far above the budget since the last call of this function. If so, call
    /// [`Self::read_counts`] and [`Self::govern`] at once.
    pub fn had_alarm_since_last_call(&mut self) -> bool {
        std::mem::take(&mut self.has_unread_alarm)
    }

    /// Handles process events and file changes: attaches to libraries that were mapped, detaches from libraries that
    /// were written to.
    pub fn discover(&mut self) -> Result<(), ObserveError> {
        if self.attachment.take_file_change() {
            self.drop_changed_files();
        }
        self.has_unread_alarm |= self.kernel.alarm.had_alarm_since_last_call();
        let events = self.discovery.poll(Duration::ZERO)?;
        self.attachment
            .follow_process_events(&events, attach_context!(self));
        Ok(())
    }

    /// Scans every process of the machine.
    pub fn scan(&mut self) -> Result<(), ObserveError> {
        let events = self.discovery.scan()?;
        self.attachment.retry_refused_files(attach_context!(self));
        self.attachment
            .follow_process_events(&events, attach_context!(self));
        self.attachment.forget_unused_identities();
        self.drop_changed_files();
        self.refresh_gpus();
        let refreshed = self.kernel.tenants.refresh_lookup_tables();
        refreshed.map_err(ObserveError::ReadMap)?;
        self.adopt_existing_tasks()
    }

    fn drop_changed_files(&mut self) {
        let users = self.attachment.drop_changed_files();
        if !users.is_empty() {
            self.kernel.record_detach_time();
        }
        self.processes.mark_incomplete(&users);
    }

    /// Whether this machine has GPUs that NVML reports.
    pub(crate) fn has_gpus(&self) -> bool {
        !self.gpu_facts.is_empty()
    }

    /// Reads the utilization of all GPUs.
    pub(crate) fn refresh_utilization(&mut self) {
        let now = Instant::now();
        let since = now - self.utilization_read_at;
        self.gpus.refresh_utilization(&mut self.gpu_facts, since);
        self.utilization_read_at = now;
    }

    /// Reads utilization and memory of all GPUs, publishes which processes use them, and chooses the sampled ones.
    pub fn refresh_gpus(&mut self) {
        self.refresh_utilization();
        let before = std::mem::replace(&mut self.gpu_facts, self.gpus.read_facts());
        for gpu in &mut self.gpu_facts {
            let known = before.iter().find(|known| known.uuid == gpu.uuid);
            gpu.busy_ns = known.map_or(0, |known| known.busy_ns);
        }
        let gpu_processes = self.gpus.process_memory();
        self.processes
            .publish_gpus(&self.kernel, &self.gpu_facts, &gpu_processes);
        self.choose_sampled_processes(&gpu_processes);
    }

    /// Observes the threads and children that observed processes had before they were observed. Threads and children
    /// that are created later are observed from their start. Call `adopt_existing_tasks` when a process is new, and regularly.
    pub fn adopt_existing_tasks(&self) -> Result<(), ObserveError> {
        self.kernel
            .adopt_existing_tasks()
            .map_err(ObserveError::ReadMap)
    }

    /// Path of the pinned map of task states, or the reason why the map is not pinned.
    pub fn shared_state(&self) -> Result<PathBuf, &str> {
        self.kernel.shared_state()
    }

    /// The state of a thread, as a scheduler sees it; `None` if it belongs to no ML process.
    pub fn task_state(&self, tid: u32) -> Result<Option<RawTaskState>, ObserveError> {
        self.kernel.task_state(tid).map_err(ObserveError::ReadMap)
    }

    /// The states of all threads of ML processes.
    pub fn task_states(&self) -> Result<Vec<RawTaskState>, ObserveError> {
        self.kernel.task_states().map_err(ObserveError::ReadMap)
    }

    /// Reads the counts of all processes from the kernel.
    pub fn read_counts(&mut self) -> Result<(), ObserveError> {
        // The trace is read before the handles of exited processes are freed.
        self.read_trace().map_err(ObserveError::ReadMap)?;
        let read = self.processes.read_processes(read_context!(self));
        read.map_err(ObserveError::ReadMap)?;
        self.attachment.forget_exited_identities();
        Ok(())
    }

    fn read_step_marks(&mut self) -> libbpf_rs::Result<()> {
        self.processes.read_step_marks(read_context!(self))
    }

    fn refresh_identities(&mut self) {
        self.processes.refresh_identities(&self.gpu_facts);
    }

    /// Measures the overhead of every process, changes which functions are sampled, and stops observing a process for a
    /// while if it stays above the ceiling.
    pub fn govern(&mut self) {
        for handle in self.governor.govern(governed!(self)) {
            self.exclude_with_private_files(handle);
        }
        self.end_exclusions();
        self.skip_processes_without_probes();
    }

    /// Opens or closes a sampling window if it is due. Returns the links of a closed window: dropping them detaches the
    /// probes, which takes a while.
    fn open_or_close_window(&mut self) -> Vec<ProbeLink> {
        self.governor.open_or_close_window(governed!(self))
    }

    /// Closes the sampling window, if one is open.
    fn close_window(&mut self) -> Vec<ProbeLink> {
        self.governor.close_window(governed!(self))
    }

    /// The measured cost of a probed call, and the number of sampling windows so far.
    #[must_use]
    pub fn probe_cost(&self) -> ProbeCost {
        self.governor.cost
    }

    /// Names of the functions that are sampled now.
    pub fn sampled_function_names(&self) -> impl Iterator<Item = &'static str> {
        let sampled = self.governor.sampled_symbols().into_iter();
        sampled.map(|symbol| SYMBOLS[symbol].name())
    }

    /// When a sampling window opens or closes next.
    fn next_window_change(&self) -> Option<Instant> {
        self.governor.next_window_change()
    }

    /// All observed processes, including those whose grace period after their exit is not over.
    pub fn processes(&self) -> impl Iterator<Item = &ObservedProcess> {
        self.processes.iter()
    }

    /// Ranks that exited while other ranks still hold a communicator with them.
    pub fn exited_ranks(&self) -> impl Iterator<Item = &ExitedRank> {
        self.processes.exited_ranks.iter()
    }

    /// Why figures are incomplete, one sentence per problem.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.is_suspended {
            problems.push(suspension::PAUSED_REASON.to_owned());
        }
        problems.extend(self.exclusions.describe_exclusions());
        let files = self.attachment.files.iter();
        problems.extend(files.filter_map(attached_files::AttachedFile::describe_wait_for_scan));
        problems.extend(
            self.sampled
                .as_ref()
                .and_then(SampledProcesses::describe_refusal),
        );
        for (cause, lost) in self.losses().by_cause() {
            if lost > 0 && !cause.starts_with("refused_") {
                problems.push(format!("{lost} {} lost", cause.replace('_', " ")));
            }
        }
        problems.extend(self.kernel.tenants.describe_refusals());
        problems.extend(self.attachment.describe_exceeded_shares());
        problems
    }

    /// Number of tenants with entries in the kernel's tables, and of those that had some and are not forgotten yet.
    pub fn tenant_count(&self) -> Result<usize, ObserveError> {
        self.kernel
            .tenants
            .tenant_count()
            .map_err(ObserveError::ReadMap)
    }

    /// Entries of BPF maps that were visited so far to delete those of exited processes and of destroyed CUDA contexts.
    #[must_use]
    pub fn visited_entries(&self) -> u64 {
        self.kernel.visited_entries.load(Ordering::Relaxed)
    }

    /// Number of context switches of ML threads that the probes missed, as the next switch of the thread shows. The
    /// time between the two switches is missing from the thread's on-CPU and off-CPU times.
    #[must_use]
    pub fn missed_switches(&self) -> u64 {
        self.kernel.losses.read(0).switches
    }

    /// Number of events that the kernel could not record.
    #[must_use]
    pub fn losses(&self) -> Losses {
        let raw = self.kernel.losses.read(0);
        let tenants = &self.kernel.tenants;
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
            refused_processes: tenants.refused_events_of(TenantTable::Processes),
            refused_allocations: tenants.refused_events_of(TenantTable::Allocations),
            refused_histograms: tenants.refused_events_of(TenantTable::Histograms),
            refused_communicators: tenants.refused_events_of(TenantTable::Communicators),
            refused_memory_accounts: tenants.refused_events_of(TenantTable::MemoryAccounts),
        }
    }
}

/// An epoll descriptor that is readable when one of these descriptors is readable.
fn epoll_any<const N: usize>(sources: [BorrowedFd<'_>; N]) -> rustix::io::Result<OwnedFd> {
    use rustix::event::epoll;
    let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for source in sources {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&all, source, data, epoll::EventFlags::IN)?;
    }
    Ok(all)
}

/// Raises the limit on open files as far as allowed: each probed library takes some 30 descriptors.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // If the limit cannot be raised, fewer libraries can be probed.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}

/// Now, in nanoseconds of CLOCK_MONOTONIC, the clock of the probes.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Seconds since a time in nanoseconds of CLOCK_MONOTONIC; `None` for 0, which stands for no time.
pub(crate) fn seconds_ago(ns: u64) -> Option<f64> {
    (ns != 0).then(|| monotonic_ns().saturating_sub(ns) as f64 / 1e9)
}
