//! Finds the processes that map ML libraries, and reports when they do.
//!
//! [`Discovery`] attaches to no ML library itself. It has four sources of information. Each source covers what the
//! source before it misses:
//!
//! - a scan of all mappings, by an iterator in the kernel or, if the kernel refuses it, by procfs;
//! - tracepoints on exec, and, for processes of interest, on fork and exit;
//! - a probe on the function that every dynamic loader calls after it has loaded or unloaded a library: it covers
//!   libraries linked to a program as well as `dlopen` hours after its start. Each loader file has its own probe;
//!   loaders in containers get theirs when they are found;
//! - the scan again, whenever the caller repeats it. Mappings that only the scan finds are counted.
//!
//! An event only names a process to look at. A lost event does no harm, because it is counted and the next poll scans
//! all processes.

mod library;
mod loader;
mod process;
mod programs;
mod scan;
pub(crate) mod sys;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::BorrowedFd;
use std::time::Duration;
use std::{fs, io};

#[cfg(test)]
use zernel_phase::mirror::Mirrors;

pub use loader::Loader;
pub use process::{MappedFile, ProcessKey};

use crate::capability::innermost_reason;
use crate::privilege;
use library::MappedFileKind;
use loader::Loaders;
use programs::{DiscoveryPrograms, Executable, ProcessNotice};
use scan::{Mapping, Scanner};
use zernel_elf::LibraryKind;

/// The compiled BPF objects of the discovery, each with the Rust mirrors of its types.
#[cfg(test)]
pub(crate) const OBJECTS_AND_MIRRORS: [(&str, &[u8], &[Mirrors]); 2] = [
    (
        "discovery",
        programs::DISCOVERY_OBJECT,
        &[programs::MIRRORS],
    ),
    (
        "mappings",
        scan::MAPPINGS_OBJECT,
        &[scan::MIRRORS, library::MIRRORS],
    ),
];

/// With more processes than this to look at, a full scan is cheaper.
const MAX_PROCESSES_SCANNED_SINGLY: usize = 32;

/// A change in the processes that map ML libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// A process maps a file, named like an ML library, as executable. A mapped library is reported once, and again
    /// when the process maps it at another address.
    Mapped {
        /// The process that maps the library.
        process: ProcessKey,
        /// The kind of library, by its file name.
        kind: LibraryKind,
        /// The mapped library file, and the path that opens it.
        file: MappedFile,
    },
    /// A process called exec, or has unmapped every ML library. Mappings reported before no longer exist; the new mappings
    /// of the process are reported after this event.
    Executed {
        /// The process that called exec: exec keeps pid and start time.
        process: ProcessKey,
    },
    /// A process with ML libraries, or a child of one, forked. The mappings of the child are reported after this
    /// event.
    Forked {
        /// The process that forked.
        parent: ProcessKey,
        /// The new process.
        child: ProcessKey,
    },
    /// All threads of a reported process have exited.
    Exited {
        /// The process.
        process: ProcessKey,
    },
}

/// Why processes cannot be discovered on this machine.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// Capabilities that loading BPF programs needs are missing.
    #[error(
        "discovering processes needs more privilege ({}); run as root, or with CAP_BPF, CAP_PERFMON, \
         CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_CHECKPOINT_RESTORE",
        innermost_reason(.0)
    )]
    MissingPrivilege(#[source] libbpf_rs::Error),
    /// Capabilities that opening other users' mappings needs are missing. Without these capabilities the kernel hides
    /// the mappings of other users and returns no error.
    #[error(
        "what other users' processes map cannot be seen without {0}; run as root with all capabilities, or with \
         CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_CHECKPOINT_RESTORE"
    )]
    MappingsHidden(String),
    /// This process is in another pid namespace than the pids that the kernel reports.
    #[error(
        "discovering processes needs the host's pids, but this is another pid namespace; run it on the \
         host, or in a container that shares the host's (hostPID: true, --pid=host)"
    )]
    NotInitialPidNamespace,
    /// The kernel refused to load the BPF programs of the discovery, or their maps.
    #[error("the kernel does not load the programs that discover processes ({}); see zernel doctor", innermost_reason(.0))]
    ProgramsNotLoaded(#[source] libbpf_rs::Error),
    /// The kernel refused to attach the programs.
    #[error("the tracepoints on exec, fork and exit cannot be attached ({}); see zernel doctor", innermost_reason(.0))]
    TracepointsNotAttached(#[source] libbpf_rs::Error),
    /// The ring buffer or a map failed.
    #[error("the events of processes cannot be read ({})", innermost_reason(.0))]
    EventsUnreadable(#[source] libbpf_rs::Error),
    /// The iterator failed.
    #[error("the mappings of processes cannot be read by the kernel's iterator ({0})")]
    IteratorUnreadable(#[source] io::Error),
    /// procfs could not be read.
    #[error("the processes cannot be listed ({0}); is /proc mounted?")]
    ProcfsUnreadable(#[source] procfs::ProcError),
}

impl DiscoveryError {
    fn from_load_error(error: libbpf_rs::Error) -> Self {
        match error.kind() {
            libbpf_rs::ErrorKind::PermissionDenied => Self::MissingPrivilege(error),
            _ => Self::ProgramsNotLoaded(error),
        }
    }
}

/// A known mapping: device, inode, first address.
type MappingId = (u64, u64, u64);

/// Finds processes with ML libraries on this machine. Dropping a `Discovery` detaches all its programs and probes.
pub struct Discovery {
    loaders: Loaders,
    scanner: Scanner,
    programs: DiscoveryPrograms,
    /// The reported processes and their known mappings.
    reported_mappings: HashMap<ProcessKey, HashSet<MappingId>>,
    lost_events_before: u64,
    missed_by_events: u64,
    has_scanned: bool,
}

impl Discovery {
    /// Starts discovery. The first [`Self::scan`] reports processes that already run.
    pub fn start() -> Result<Self, DiscoveryError> {
        Self::start_with(Scanner::new())
    }

    /// Starts discovery without the kernel's iterator over mappings. Reading mappings from procfs is slower, and on
    /// overlayfs files have the device and inode that `stat` shows. [`Self::start`] falls back to it if the kernel
    /// refuses the iterator.
    pub fn start_without_iterator() -> Result<Self, DiscoveryError> {
        Self::start_with(Scanner::Procfs)
    }

    fn start_with(scanner: Scanner) -> Result<Self, DiscoveryError> {
        require_initial_pid_namespace()?;
        let programs = DiscoveryPrograms::start()?;
        require_process_access()?;
        let mut loaders = Loaders::default();
        loaders.attach_new_loaders(&scanner.mappings_of_all()?, &programs);
        Ok(Self {
            loaders,
            scanner,
            programs,
            reported_mappings: HashMap::new(),
            lost_events_before: 0,
            missed_by_events: 0,
            has_scanned: false,
        })
    }

    /// Scans all processes. Call `scan` once after the start, and then every few seconds: no mapping is missed for
    /// longer than that.
    pub fn scan(&mut self) -> Result<Vec<ProcessEvent>, DiscoveryError> {
        let mut events = self.poll(Duration::ZERO)?;
        let before = events.len();
        self.scan_all_processes(&mut events)?;
        let late = self.programs.wait_for_notices(Duration::ZERO)?;
        let reported: HashSet<_> = late.iter().map(|notice| notice.process().pid).collect();
        if self.has_scanned {
            let missed = events[before..].iter().filter(|event| match event {
                ProcessEvent::Mapped { process, .. } => !reported.contains(&process.pid),
                _ => false,
            });
            self.missed_by_events += missed.count() as u64;
        }
        self.has_scanned = true;
        self.handle_notices(&late, &mut events)?;
        Ok(events)
    }

    /// Waits for an event of a process, for at most `timeout`. Returns the changes of a process; none if the process
    /// maps no ML library, as most processes do.
    pub fn poll(&mut self, timeout: Duration) -> Result<Vec<ProcessEvent>, DiscoveryError> {
        let notices = self.programs.wait_for_notices(timeout)?;
        let mut events = Vec::new();
        self.handle_notices(&notices, &mut events)?;
        let lost = self.programs.lost_event_count();
        if lost != self.lost_events_before {
            self.lost_events_before = lost;
            self.scan_all_processes(&mut events)?;
        }
        Ok(events)
    }

    /// A descriptor that is readable when [`Self::poll`] would not wait.
    #[must_use]
    pub fn readable_descriptor(&self) -> BorrowedFd<'_> {
        self.programs.readable_descriptor()
    }

    /// Number of events lost because the ring buffer was full. After a loss, all processes are scanned.
    #[must_use]
    pub fn lost_event_count(&self) -> u64 {
        self.programs.lost_event_count()
    }

    /// Number of mappings that a scan found and no event had announced. Mappings that the first scan found do not
    /// count.
    #[must_use]
    pub fn missed_by_events(&self) -> u64 {
        self.missed_by_events
    }

    /// Number of processes whose forks and exits are reported.
    #[must_use]
    pub fn followed_process_count(&self) -> usize {
        self.reported_mappings.len()
    }

    /// The dynamic loaders that processes of this machine use.
    pub fn loaders(&self) -> impl Iterator<Item = &Loader> {
        self.loaders.iter()
    }

    /// Whether mappings are read by the kernel's iterator; otherwise they are read from procfs.
    #[must_use]
    pub fn uses_iterator(&self) -> bool {
        matches!(self.scanner, Scanner::Iterator { .. })
    }

    /// Turns notices into events.
    fn handle_notices(
        &mut self,
        notices: &[ProcessNotice],
        events: &mut Vec<ProcessEvent>,
    ) -> Result<(), DiscoveryError> {
        let mut changed = BTreeSet::new();
        let mut executables: HashMap<ProcessKey, Executable> = HashMap::new();
        for notice in notices {
            let process = notice.process();
            changed.insert(process);
            match *notice {
                ProcessNotice::Executed(_, executable) => {
                    executables.insert(process, executable);
                    if self.reported_mappings.remove(&process).is_some() {
                        events.push(ProcessEvent::Executed { process });
                    }
                }
                ProcessNotice::Forked { parent, child } => {
                    if self.reported_mappings.contains_key(&parent) {
                        self.reported_mappings.entry(child).or_default();
                        events.push(ProcessEvent::Forked { parent, child });
                    }
                }
                ProcessNotice::Exited(_) => {
                    changed.remove(&process);
                    if self.reported_mappings.remove(&process).is_some() {
                        events.push(ProcessEvent::Exited { process });
                    }
                }
                ProcessNotice::Loaded(_) => {}
            }
        }
        self.scan_processes(&changed, events)?;
        // The loader of a process that exited before it was looked at is unknown, so the next exec of its executable
        // is to be reported too.
        for (process, executable) in executables {
            if !process.is_alive() {
                self.programs.forget_executable(&executable);
            }
        }
        Ok(())
    }

    /// Reads the mappings of some processes.
    fn scan_processes(
        &mut self,
        changed: &BTreeSet<ProcessKey>,
        events: &mut Vec<ProcessEvent>,
    ) -> Result<(), DiscoveryError> {
        if changed.len() > MAX_PROCESSES_SCANNED_SINGLY {
            return self.scan_all_processes(events);
        }
        for process in changed {
            let mut mappings = self.scanner.mappings_of_process(process.pid)?;
            if self.loaders.attach_new_loaders(&mappings, &self.programs) {
                // The process may have loaded libraries before its loader had a probe.
                mappings = self.scanner.mappings_of_process(process.pid)?;
            }
            self.report_new_mappings(&mappings, events);
            let maps_libraries = mappings.iter().any(Mapping::is_library);
            if !maps_libraries && let Some(places) = self.reported_mappings.get_mut(process) {
                places.clear();
            }
        }
        Ok(())
    }

    /// Scans all processes, and reports exits that no event announced.
    fn scan_all_processes(&mut self, events: &mut Vec<ProcessEvent>) -> Result<(), DiscoveryError> {
        let mut mappings = self.scanner.mappings_of_all()?;
        if self.loaders.attach_new_loaders(&mappings, &self.programs) {
            mappings = self.scanner.mappings_of_all()?;
        }
        if self.loaders.detach_unused_loaders(&mappings) {
            // A program whose exec is no longer reported may be started with a detached loader again.
            self.programs.forget_all_executables();
        }
        self.report_new_mappings(&mappings, events);
        let present: HashSet<_> = mappings
            .iter()
            .filter(|mapping| mapping.is_library())
            .map(|mapping| mapping.process)
            .collect();
        let absent = |process: &&ProcessKey| !present.contains(process);
        let absent: Vec<_> = self
            .reported_mappings
            .keys()
            .filter(absent)
            .copied()
            .collect();
        for process in absent {
            self.report_unmapped_process(process, events);
        }
        Ok(())
    }

    /// Reports that a known process maps no ML library any more.
    fn report_unmapped_process(&mut self, process: ProcessKey, events: &mut Vec<ProcessEvent>) {
        self.reported_mappings.remove(&process);
        self.programs.unfollow_process(process);
        events.push(match process.is_alive() {
            true => ProcessEvent::Executed { process },
            false => ProcessEvent::Exited { process },
        });
    }

    /// Adds an event for each mapping that was unknown, and stores all mappings. `mappings` must have all mappings of
    /// each process in it.
    fn report_new_mappings(&mut self, mappings: &[Mapping], events: &mut Vec<ProcessEvent>) {
        let mut by_process: BTreeMap<ProcessKey, Vec<(&Mapping, LibraryKind)>> = BTreeMap::new();
        for mapping in mappings {
            if let MappedFileKind::Library(kind) = mapping.file_kind {
                let of_process = by_process.entry(mapping.process).or_default();
                of_process.push((mapping, kind));
            }
        }
        for (process, libraries) in by_process {
            // The process is watched before its files are opened: if it still maps the files then, its exit will be
            // reported.
            self.programs.follow_process(process);
            let known = self
                .reported_mappings
                .get(&process)
                .cloned()
                .unwrap_or_default();
            let mut places = HashSet::new();
            for (mapping, kind) in libraries {
                let place = (mapping.device, mapping.inode, mapping.start);
                if known.contains(&place) {
                    places.insert(place);
                } else if let Some(file) = mapped_file(mapping) {
                    places.insert(place);
                    events.push(ProcessEvent::Mapped {
                        process,
                        kind,
                        file,
                    });
                }
            }
            if !places.is_empty() {
                self.reported_mappings.insert(process, places);
            } else if !self.reported_mappings.contains_key(&process) {
                self.programs.unfollow_process(process);
            }
        }
    }
}

impl Mapping {
    fn is_library(&self) -> bool {
        matches!(self.file_kind, MappedFileKind::Library(_))
    }
}

impl ProcessNotice {
    /// The process whose mappings may have changed.
    fn process(&self) -> ProcessKey {
        match *self {
            Self::Executed(process, _) | Self::Exited(process) | Self::Loaded(process) => process,
            Self::Forked { child, .. } => child,
        }
    }
}

/// The file of a mapping; `None` if the process no longer maps the file there.
fn mapped_file(mapping: &Mapping) -> Option<MappedFile> {
    let map_files = mapping.map_files();
    Some(MappedFile {
        device: mapping.device,
        inode: mapping.inode,
        path: fs::read_link(&map_files).ok()?,
        map_files,
        start: mapping.start,
        end: mapping.end,
        offset: mapping.offset,
    })
}

fn require_process_access() -> Result<(), DiscoveryError> {
    let lacking = privilege::lacking_capabilities(
        &privilege::CAPABILITIES_TO_SEE_PROCESSES,
        privilege::held_capabilities(),
    );
    match lacking.is_empty() {
        true => Ok(()),
        false => Err(DiscoveryError::MappingsHidden(lacking.join(" and "))),
    }
}

/// Fails outside the initial pid namespace: the kernel reports pids of that namespace. The inode number of the
/// initial pid namespace is fixed.
fn require_initial_pid_namespace() -> Result<(), DiscoveryError> {
    match fs::read_link("/proc/self/ns/pid") {
        Ok(name) if name.as_os_str() != "pid:[4026531836]" => {
            Err(DiscoveryError::NotInitialPidNamespace)
        }
        _ => Ok(()),
    }
}
