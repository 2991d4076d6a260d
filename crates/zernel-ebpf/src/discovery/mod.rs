//! Which processes map which ML libraries, from when on.
//!
//! [`Discovery`] says what is there; it attaches to no library. Four sources, each covering what the
//! one before it cannot see:
//!
//! - a scan of all mappings, by an iterator in the kernel or, where that is not accepted, by procfs;
//! - tracepoints on exec, and, for processes of interest, on fork and exit;
//! - a probe on the function that every dynamic loader calls when it has loaded or unloaded something:
//!   it covers libraries linked to a program as well as `dlopen` hours after its start. Loaders are
//!   attached to by file, those in containers as they are discovered;
//! - the same scan again, every few seconds, at the caller's pleasure: what only it finds is counted.
//!
//! Events only say which process to look at, so losing one does no harm: it is counted, and the next
//! poll scans everything.

mod library;
mod loader;
mod process;
mod scan;
pub(crate) mod sys;
mod trace;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::BorrowedFd;
use std::time::Duration;
use std::{fs, io};

#[cfg(test)]
use zernel_phase::mirror::Mirrors;

pub use loader::Loader;
pub use process::{MappedFile, ProcessKey};

use crate::capability::reason;
use crate::privilege;
use library::Subject;
use loader::Loaders;
use scan::{Mapping, Scanner};
use trace::{Executable, Notice, Trace};
use zernel_elf::LibraryKind;

/// The objects of this module, each with the mirrors of its types.
#[cfg(test)]
pub(crate) const BOUNDARY: [(&str, &[u8], &[Mirrors]); 2] = [
    ("discovery", trace::OBJECT, &[trace::MIRRORS]),
    ("mappings", scan::OBJECT, &[scan::MIRRORS, library::MIRRORS]),
];

/// With more processes than this to look at, looking at all is cheaper.
const FEW: usize = 32;

/// Something that whoever attaches to libraries must know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A file that looks like a library of interest is mapped executable by a process. Reported once,
    /// and again when the process maps it at another address.
    Mapped {
        /// By which process.
        process: ProcessKey,
        /// What its name says it is.
        kind: LibraryKind,
        /// The file and how to open it.
        file: MappedFile,
    },
    /// The process executed another program, or has unmapped every library: all that it had mapped
    /// is gone. What it maps now is reported after this.
    Executed {
        /// Its pid and start are the same as before.
        process: ProcessKey,
    },
    /// A process with libraries of interest, or a child of it, forked. What the child maps is reported
    /// after this.
    Forked {
        /// The one that was known.
        parent: ProcessKey,
        /// The new one.
        child: ProcessKey,
    },
    /// All threads of a process that was reported are gone.
    Exited {
        /// Which one.
        process: ProcessKey,
    },
}

/// Why discovery does not work here.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// BPF is not for us.
    #[error(
        "discovering processes needs more privilege ({}); run as root, or with CAP_BPF, CAP_PERFMON, \
         CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_CHECKPOINT_RESTORE",
        reason(.0)
    )]
    Privilege(#[source] libbpf_rs::Error),
    /// The kernel would show nothing of what other users' processes map, and no error either.
    #[error(
        "what other users' processes map cannot be seen without {0}; run as root with all capabilities, or with \
         CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_CHECKPOINT_RESTORE"
    )]
    Blind(String),
    /// The kernel speaks of pids that are not ours.
    #[error(
        "discovering processes needs the host's pids, but this is another pid namespace; run it on the \
         host, or in a container that shares the host's (hostPID: true, --pid=host)"
    )]
    PidNamespace,
    /// The kernel refused the programs or their maps.
    #[error("the kernel does not load the programs that discover processes ({}); see zernel doctor", reason(.0))]
    Load(#[source] libbpf_rs::Error),
    /// The kernel refused to attach them.
    #[error("the tracepoints on exec, fork and exit cannot be attached ({}); see zernel doctor", reason(.0))]
    Attach(#[source] libbpf_rs::Error),
    /// The ring buffer or a map failed.
    #[error("the events of processes cannot be read ({})", reason(.0))]
    Ring(#[source] libbpf_rs::Error),
    /// The iterator failed.
    #[error("the mappings of processes cannot be read by the kernel's iterator ({0})")]
    Iterate(#[source] io::Error),
    /// So did procfs.
    #[error("the processes cannot be listed ({0}); is /proc mounted?")]
    Procfs(#[source] procfs::ProcError),
}

impl Error {
    fn load(error: libbpf_rs::Error) -> Self {
        match error.kind() {
            libbpf_rs::ErrorKind::PermissionDenied => Self::Privilege(error),
            _ => Self::Load(error),
        }
    }
}

/// A mapping as it is remembered: device, inode, first address.
type Place = (u64, u64, u64);

/// Watches the machine for processes with ML libraries. Dropping it detaches everything.
pub struct Discovery {
    loaders: Loaders,
    scanner: Scanner,
    trace: Trace,
    /// The processes that were reported, and what they map.
    known: HashMap<ProcessKey, HashSet<Place>>,
    lost_before: u64,
    missed_by_events: u64,
    scanned: bool,
}

impl Discovery {
    /// Starts to watch. What is there already is told by the first [`Self::scan`].
    pub fn start() -> Result<Self, Error> {
        Self::start_with(Scanner::new())
    }

    /// The same without the kernel's iterator over mappings: slower, and on overlayfs with the
    /// identity that `stat` shows. [`Self::start`] does this by itself where it must.
    pub fn start_without_iterator() -> Result<Self, Error> {
        Self::start_with(Scanner::Procfs)
    }

    fn start_with(scanner: Scanner) -> Result<Self, Error> {
        require_initial_pid_namespace()?;
        let trace = Trace::start()?;
        require_sight()?;
        let mut loaders = Loaders::default();
        loaders.attach(&scanner.everything()?, &trace);
        Ok(Self {
            loaders,
            scanner,
            trace,
            known: HashMap::new(),
            lost_before: 0,
            missed_by_events: 0,
            scanned: false,
        })
    }

    /// Looks at every process. Call it once after the start, and then every few seconds: nothing
    /// is missed for longer than that.
    pub fn scan(&mut self) -> Result<Vec<Event>, Error> {
        let mut events = self.poll(Duration::ZERO)?;
        let before = events.len();
        self.scan_everything(&mut events)?;
        let late = self.trace.wait(Duration::ZERO)?;
        let told: HashSet<_> = late.iter().map(|notice| notice.process().pid).collect();
        if self.scanned {
            let missed = events[before..].iter().filter(|event| match event {
                Event::Mapped { process, .. } => !told.contains(&process.pid),
                _ => false,
            });
            self.missed_by_events += missed.count() as u64;
        }
        self.scanned = true;
        self.take(&late, &mut events)?;
        Ok(events)
    }

    /// Waits until something happens to a process, `timeout` at most, and tells what it means. That
    /// may be nothing: most processes are of no interest.
    pub fn poll(&mut self, timeout: Duration) -> Result<Vec<Event>, Error> {
        let notices = self.trace.wait(timeout)?;
        let mut events = Vec::new();
        self.take(&notices, &mut events)?;
        let lost = self.trace.lost();
        if lost != self.lost_before {
            self.lost_before = lost;
            self.scan_everything(&mut events)?;
        }
        Ok(events)
    }

    /// Readable when [`Self::poll`] would not wait.
    #[must_use]
    pub fn file_descriptor(&self) -> BorrowedFd<'_> {
        self.trace.file_descriptor()
    }

    /// How many events were lost because they came faster than they were polled. Each loss is made
    /// good by a scan.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.trace.lost()
    }

    /// How many mappings only a scan found, the first one not counted: what events should have told.
    #[must_use]
    pub fn missed_by_events(&self) -> u64 {
        self.missed_by_events
    }

    /// How many processes are being followed.
    #[must_use]
    pub fn followed(&self) -> usize {
        self.known.len()
    }

    /// The dynamic loaders in use on this machine.
    pub fn loaders(&self) -> impl Iterator<Item = &Loader> {
        self.loaders.iter()
    }

    /// Whether the kernel's iterator is used, or else procfs.
    #[must_use]
    pub fn uses_iterator(&self) -> bool {
        matches!(self.scanner, Scanner::Iterator { .. })
    }

    /// Makes events of notices.
    fn take(&mut self, notices: &[Notice], events: &mut Vec<Event>) -> Result<(), Error> {
        let mut changed = BTreeSet::new();
        let mut executables: HashMap<ProcessKey, Executable> = HashMap::new();
        for notice in notices {
            let process = notice.process();
            changed.insert(process);
            match *notice {
                Notice::Executed(_, executable) => {
                    executables.insert(process, executable);
                    if self.known.remove(&process).is_some() {
                        events.push(Event::Executed { process });
                    }
                }
                Notice::Forked { parent, child } => {
                    if self.known.contains_key(&parent) {
                        self.known.entry(child).or_default();
                        events.push(Event::Forked { parent, child });
                    }
                }
                Notice::Exited(_) => {
                    changed.remove(&process);
                    if self.known.remove(&process).is_some() {
                        events.push(Event::Exited { process });
                    }
                }
                Notice::Loaded(_) => {}
            }
        }
        self.look_at(&changed, events)?;
        // Whoever was gone before it was looked at has not shown its loader: ask for the next one.
        for (process, executable) in executables {
            if !process.is_alive() {
                self.trace.forget(&executable);
            }
        }
        Ok(())
    }

    /// Looks at some processes.
    fn look_at(
        &mut self,
        changed: &BTreeSet<ProcessKey>,
        events: &mut Vec<Event>,
    ) -> Result<(), Error> {
        if changed.len() > FEW {
            return self.scan_everything(events);
        }
        for process in changed {
            let mut mappings = self.scanner.process(process.pid)?;
            if self.loaders.attach(&mappings, &self.trace) {
                // It may have loaded libraries while nobody was told.
                mappings = self.scanner.process(process.pid)?;
            }
            self.update(&mappings, events);
            let maps_libraries = mappings.iter().any(Mapping::is_library);
            if !maps_libraries && let Some(places) = self.known.get_mut(process) {
                places.clear();
            }
        }
        Ok(())
    }

    /// Looks at all processes, and reports those that have gone unnoticed.
    fn scan_everything(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let mut mappings = self.scanner.everything()?;
        if self.loaders.attach(&mappings, &self.trace) {
            mappings = self.scanner.everything()?;
        }
        if self.loaders.keep(&mappings) {
            // The next one may be for an executable that was seen before.
            self.trace.forget_all();
        }
        self.update(&mappings, events);
        let present: HashSet<_> = mappings
            .iter()
            .filter(|mapping| mapping.is_library())
            .map(|mapping| mapping.process)
            .collect();
        let absent = |process: &&ProcessKey| !present.contains(process);
        let absent: Vec<_> = self.known.keys().filter(absent).copied().collect();
        for process in absent {
            self.settle_absent(process, events);
        }
        Ok(())
    }

    /// A process that was known maps nothing of interest.
    fn settle_absent(&mut self, process: ProcessKey, events: &mut Vec<Event>) {
        self.known.remove(&process);
        self.trace.unwatch(process);
        events.push(match process.is_alive() {
            true => Event::Executed { process },
            false => Event::Exited { process },
        });
    }

    /// Reports what of these mappings was not known, and remembers them all. They must be complete
    /// for each process that they name.
    fn update(&mut self, mappings: &[Mapping], events: &mut Vec<Event>) {
        let mut by_process: BTreeMap<ProcessKey, Vec<(&Mapping, LibraryKind)>> = BTreeMap::new();
        for mapping in mappings {
            if let Subject::Library(kind) = mapping.subject {
                let of_process = by_process.entry(mapping.process).or_default();
                of_process.push((mapping, kind));
            }
        }
        for (process, libraries) in by_process {
            // Before the files are looked at: whoever still has them then will be seen to exit.
            self.trace.watch(process);
            let known = self.known.get(&process).cloned().unwrap_or_default();
            let mut places = HashSet::new();
            for (mapping, kind) in libraries {
                let place = (mapping.device, mapping.inode, mapping.start);
                if known.contains(&place) {
                    places.insert(place);
                } else if let Some(file) = mapped_file(mapping) {
                    places.insert(place);
                    events.push(Event::Mapped {
                        process,
                        kind,
                        file,
                    });
                }
            }
            if !places.is_empty() {
                self.known.insert(process, places);
            } else if !self.known.contains_key(&process) {
                self.trace.unwatch(process);
            }
        }
    }
}

impl Mapping {
    fn is_library(&self) -> bool {
        matches!(self.subject, Subject::Library(_))
    }
}

impl Notice {
    /// The process to look at.
    fn process(&self) -> ProcessKey {
        match *self {
            Self::Executed(process, _) | Self::Exited(process) | Self::Loaded(process) => process,
            Self::Forked { child, .. } => child,
        }
    }
}

/// `None` when the mapping is gone.
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

fn require_sight() -> Result<(), Error> {
    let lacking = privilege::lacking(&privilege::TO_SEE, privilege::held());
    match lacking.is_empty() {
        true => Ok(()),
        false => Err(Error::Blind(lacking.join(" and "))),
    }
}

/// The kernel numbers processes as the initial pid namespace does, which has a fixed number itself.
fn require_initial_pid_namespace() -> Result<(), Error> {
    match fs::read_link("/proc/self/ns/pid") {
        Ok(name) if name.as_os_str() != "pid:[4026531836]" => Err(Error::PidNamespace),
        _ => Ok(()),
    }
}
