//! The library files that probes are attached to.
//!
//! A file stays attached while it may be used again, so that a process that starts later is seen from
//! its first call on. Functions that busy programs call rarely share one link; each of the others has
//! its own, so that the governor can take it off, or put it on for a moment.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;

use libbpf_rs::Link;

use super::changes::{Changes, WatchId};
use super::kernel::{Kernel, Target};
use crate::capability::reason;
use crate::probes::SYMBOLS;
use zernel_elf::{FileIdentity, Library, LibraryError, LibraryKind, Site, TrapCost};

/// Why a file that somebody wrote to is let go.
pub(crate) const WRITTEN_TO: &str = "the file was written to after it was attached to";

/// How a function of a file is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachMode {
    /// All the time.
    Permanent,
    /// In windows.
    Sampled,
    /// Not at all, and why.
    NotAttached(String),
}

/// A function of a file.
#[derive(Debug)]
pub(crate) struct Function {
    /// As the file exports it.
    pub(crate) name: &'static str,
    /// Its row in [`SYMBOLS`].
    pub(crate) symbol: usize,
    pub(crate) site: Option<Site>,
    pub(crate) mode: AttachMode,
}

/// A file that probes are attached to.
pub(crate) struct AttachedFile {
    /// Never given to another.
    pub(crate) number: u64,
    pub(crate) kind: LibraryKind,
    /// What people call it.
    pub(crate) path: PathBuf,
    pub(crate) functions: Vec<Function>,
    file: File,
    identity: FileIdentity,
    infrequent_links: Vec<Link>,
    /// Of the functions that may have to be sampled, those that are watched all the time.
    frequent_links: BTreeMap<usize, Vec<Link>>,
    window_links: Vec<Link>,
    change_watches: Vec<WatchId>,
}

impl AttachedFile {
    /// Opens the file at `access`, known to people as `path`, and attaches to all its functions.
    pub(crate) fn attach(
        kernel: &Kernel,
        kind: LibraryKind,
        access: &Path,
        path: &Path,
        number: u64,
        is_sampled: impl Fn(usize) -> bool,
    ) -> Result<Self, LibraryError> {
        let library = Library::open(access)?;
        let functions = find_functions(kind, &library);
        let (file, identity) = library.into_file();
        let mut attached = Self {
            number,
            kind,
            path: path.to_owned(),
            functions,
            file,
            identity,
            infrequent_links: Vec::new(),
            frequent_links: BTreeMap::new(),
            window_links: Vec::new(),
            change_watches: Vec::new(),
        };
        for symbol in attached.frequent_symbols() {
            if is_sampled(symbol) {
                attached.set_mode(symbol, &AttachMode::Sampled);
            } else {
                attached.attach_permanently(kernel, symbol);
            }
        }
        // Last, because a process whose first call was seen counts as seen completely.
        attached.attach_infrequent(kernel);
        Ok(attached)
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Has changes of the file told, which was found at `access`, until it is detached for good.
    pub(crate) fn watch_for_changes(&mut self, changes: &mut Changes, access: &Path) {
        self.change_watches = changes.watch(&self.file, access, &self.path);
        if !self.is_unchanged() {
            self.detach(WRITTEN_TO);
        }
    }

    /// Whether any function of it is watched at all.
    pub(crate) fn has_probes(&self) -> bool {
        let mut functions = self.functions.iter();
        functions.any(|function| !matches!(function.mode, AttachMode::NotAttached(_)))
    }

    /// Its watches in [`Changes`].
    pub(crate) fn change_watches(&self) -> impl Iterator<Item = WatchId> {
        self.change_watches.iter().copied()
    }

    /// Whether the file is still what was attached to. If somebody wrote to it, the probes are where
    /// they should not be.
    pub(crate) fn is_unchanged(&self) -> bool {
        FileIdentity::read(&self.file).is_ok_and(|now| now == self.identity)
    }

    /// Whether the file has no name any more: nobody new can use it.
    pub(crate) fn is_deleted(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        self.file.metadata().is_ok_and(|status| status.nlink() == 0)
    }

    /// The numbers of its functions that may have to be sampled.
    pub(crate) fn frequent_symbols(&self) -> Vec<usize> {
        let mut symbols: Vec<_> = self
            .functions
            .iter()
            .filter(|function| function.site.is_some() && SYMBOLS[function.symbol].frequent)
            .map(|function| function.symbol)
            .collect();
        symbols.dedup();
        symbols
    }

    fn attach_infrequent(&mut self, kernel: &Kernel) {
        let targets = self.targets(|function| {
            !SYMBOLS[function.symbol].frequent && function.mode == AttachMode::Permanent
        });
        match self.link(kernel, &targets) {
            Ok(links) => self.infrequent_links = links,
            Err(problem) => {
                for function in &mut self.functions {
                    if function.site.is_some() && !SYMBOLS[function.symbol].frequent {
                        function.mode = AttachMode::NotAttached(problem.clone());
                    }
                }
            }
        }
    }

    /// Watches a frequent function all the time.
    pub(crate) fn attach_permanently(&mut self, kernel: &Kernel, symbol: usize) {
        let targets = self.targets(|function| function.symbol == symbol);
        let mode = match self.link(kernel, &targets) {
            Ok(links) => {
                self.frequent_links.insert(symbol, links);
                AttachMode::Permanent
            }
            Err(problem) => AttachMode::NotAttached(problem),
        };
        self.set_mode(symbol, &mode);
    }

    /// Watches a frequent function in windows from now on. Dropping the links takes it off, which takes a while.
    pub(crate) fn switch_to_sampling(&mut self, symbol: usize) -> Vec<Link> {
        self.set_mode(symbol, &AttachMode::Sampled);
        self.frequent_links.remove(&symbol).unwrap_or_default()
    }

    /// Takes everything off for a while.
    pub(crate) fn pause(&mut self) {
        let frequent = std::mem::take(&mut self.frequent_links);
        let mut links: Vec<Link> = frequent.into_values().flatten().collect();
        links.append(&mut self.infrequent_links);
        links.append(&mut self.window_links);
        detach(links);
    }

    /// Puts on again what was on before a pause.
    pub(crate) fn resume(&mut self, kernel: &Kernel) {
        for symbol in self.frequent_symbols() {
            let mut functions = self.functions.iter();
            if functions.any(|it| it.symbol == symbol && it.mode == AttachMode::Permanent) {
                self.attach_permanently(kernel, symbol);
            }
        }
        self.attach_infrequent(kernel);
    }

    /// Takes everything off, and says why.
    pub(crate) fn detach(&mut self, reason: &str) {
        self.pause();
        self.change_watches.clear();
        for function in &mut self.functions {
            if function.site.is_some() {
                function.mode = AttachMode::NotAttached(reason.to_owned());
            }
        }
    }

    /// Attaches to all sampled functions at once.
    pub(crate) fn open_window(&mut self, kernel: &Kernel) -> Result<(), String> {
        let targets = self.targets(|function| function.mode == AttachMode::Sampled);
        self.window_links = self.link(kernel, &targets)?;
        Ok(())
    }

    /// The links of the window; dropping them takes it off again, which takes a while.
    pub(crate) fn close_window(&mut self) -> Vec<Link> {
        std::mem::take(&mut self.window_links)
    }

    fn set_mode(&mut self, symbol: usize, mode: &AttachMode) {
        for function in &mut self.functions {
            if function.symbol == symbol && function.site.is_some() {
                function.mode = mode.clone();
            }
        }
    }

    fn targets(&self, wanted: impl Fn(&Function) -> bool) -> Vec<Target> {
        let wanted = self.functions.iter().filter(|function| wanted(function));
        wanted
            .filter_map(|function| {
                Some(Target {
                    offset: function.site?.file_offset,
                    symbol: function.symbol,
                })
            })
            .collect()
    }

    fn link(&self, kernel: &Kernel, targets: &[Target]) -> Result<Vec<Link>, String> {
        // Through our own descriptor: the process that led us here may be gone, and the path may
        // lead to another file by now.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        kernel
            .attach(Path::new(&path), targets)
            .map_err(|error| format!("the kernel does not attach ({})", reason(&error)))
    }
}

impl Drop for AttachedFile {
    fn drop(&mut self) {
        self.detach("");
    }
}

/// Detaches links side by side: each waits for the same moment of rest of the whole machine.
pub(crate) fn detach(links: Vec<Link>) {
    thread::scope(|scope| {
        for link in links {
            scope.spawn(|| drop(link));
        }
    });
}

/// The rows of [`SYMBOLS`] that belong to a library, and where the file has them.
fn find_functions(kind: LibraryKind, library: &Library) -> Vec<Function> {
    let wanted = wanted_names(kind, library);
    let names: Vec<&str> = wanted.iter().map(|(.., exported)| &**exported).collect();
    let mut functions: Vec<Function> = wanted
        .iter()
        .zip(library.sites(&names))
        .map(|((symbol, name, _), site)| Function {
            name,
            symbol: *symbol,
            mode: match &site {
                Ok(_) => AttachMode::Permanent,
                Err(error) => AttachMode::NotAttached(error.to_string()),
            },
            site: site.ok(),
        })
        .collect();
    refuse_aliases(&mut functions);
    refuse_single_stepped(&mut functions);
    functions
}

/// The row, its name, and the name that the file exports. A beginning of names that nothing exports
/// stays as it is, so that it shows as missing.
fn wanted_names(kind: LibraryKind, library: &Library) -> Vec<(usize, &'static str, String)> {
    let rows = SYMBOLS.iter().enumerate();
    let mut wanted = Vec::new();
    for (symbol, row) in rows.filter(|(_, row)| row.library == kind) {
        for name in row.names {
            let before = wanted.len();
            if row.by_prefix {
                let exported = library.functions().filter(|other| other.starts_with(name));
                wanted.extend(exported.map(|exported| (symbol, *name, exported.to_owned())));
            }
            if wanted.len() == before {
                wanted.push((symbol, *name, (*name).to_owned()));
            }
        }
    }
    wanted
}

/// Two names of one function would count its calls twice.
fn refuse_aliases(functions: &mut [Function]) {
    let mut taken: BTreeMap<u64, &'static str> = BTreeMap::new();
    for function in functions {
        let Some(site) = function.site else { continue };
        match taken.get(&site.file_offset) {
            None => {
                taken.insert(site.file_offset, function.name);
            }
            Some(first) => {
                function.site = None;
                function.mode = AttachMode::NotAttached(format!("is the same function as {first}"));
            }
        }
    }
}

/// A frequent function that can only be single-stepped costs more than it tells.
fn refuse_single_stepped(functions: &mut [Function]) {
    for function in functions {
        let stepped = function
            .site
            .is_some_and(|site| site.trap == TrapCost::SingleStepped);
        if stepped && SYMBOLS[function.symbol].frequent {
            function.site = None;
            function.mode = AttachMode::NotAttached(
                "is called often, and the kernel would have to single-step its first instruction"
                    .to_owned(),
            );
        }
    }
}

/// The identity of a file that is not open, to see whether it is attached already.
pub(crate) fn identity_at(access: &Path) -> io::Result<FileIdentity> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::open(access, flags, Mode::empty())?;
    FileIdentity::read(&File::from(file))
}
