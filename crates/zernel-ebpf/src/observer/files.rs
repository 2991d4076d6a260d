//! The library files that probes are attached to.
//!
//! Probes stay attached while a process may still map the file, so that a process that starts later is counted from
//! its first call. All infrequent functions of a file share links. Each frequent function has its own, so that the
//! governor can detach it or attach it for a sampling window.

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
use zernel_elf::{FileIdentity, FunctionName, Library, LibraryError, LibraryKind, Site, TrapCost};

/// Why probes are detached from a file that was written to.
pub(crate) const WRITTEN_TO: &str = "the file was written to after probes were attached";

/// When probes are attached to a function of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachMode {
    /// All the time.
    Permanent,
    /// In sampling windows.
    Sampled,
    /// Never; the text says why.
    NotAttached(String),
}

/// A function of a file.
#[derive(Debug)]
pub(crate) struct Function {
    /// Name in [`SYMBOLS`].
    pub(crate) name: &'static str,
    /// Its row in [`SYMBOLS`].
    pub(crate) symbol: usize,
    pub(crate) site: Option<Site>,
    pub(crate) mode: AttachMode,
}

/// A file that probes are attached to.
pub(crate) struct AttachedFile {
    /// Identifies the file. Numbers are not reused.
    pub(crate) number: u64,
    pub(crate) kind: LibraryKind,
    /// Path that users know.
    pub(crate) path: PathBuf,
    pub(crate) functions: Vec<Function>,
    file: File,
    identity: FileIdentity,
    infrequent_links: Vec<Link>,
    /// Links of permanently probed frequent functions, by index in [`SYMBOLS`].
    frequent_links: BTreeMap<usize, Vec<Link>>,
    window_links: Vec<Link>,
    change_watches: Vec<WatchId>,
}

impl AttachedFile {
    /// Opens the file at `access`, which users know as `path`, and attaches probes to all its functions.
    pub(crate) fn attach(
        kernel: &Kernel,
        kind: LibraryKind,
        access: &Path,
        path: &Path,
        number: u64,
        is_sampled: impl Fn(usize) -> bool,
    ) -> Result<Self, LibraryError> {
        let library = Library::open(access)?;
        let functions = find_functions(kind, &library)?;
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
        // Last, because a process whose `cuInit` is probed counts as completely covered.
        attached.attach_infrequent(kernel);
        Ok(attached)
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Watches the file, which was found at `access`, for changes until [`Self::detach`].
    pub(crate) fn watch_for_changes(&mut self, changes: &mut Changes, access: &Path) {
        self.change_watches = changes.watch(&self.file, access, &self.path);
        if !self.is_unchanged() {
            self.detach(WRITTEN_TO);
        }
    }

    /// Whether probes are attached to any function, all the time or in windows.
    pub(crate) fn has_probes(&self) -> bool {
        let mut functions = self.functions.iter();
        functions.any(|function| !matches!(function.mode, AttachMode::NotAttached(_)))
    }

    /// Its watches in [`Changes`].
    pub(crate) fn change_watches(&self) -> impl Iterator<Item = WatchId> {
        self.change_watches.iter().copied()
    }

    /// Whether the file has not been written to since probes were attached. Otherwise probes may be at wrong offsets.
    pub(crate) fn is_unchanged(&self) -> bool {
        FileIdentity::read(&self.file).is_ok_and(|now| now == self.identity)
    }

    /// Whether the file has no path any more, so that no new process can map it.
    pub(crate) fn is_deleted(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        self.file.metadata().is_ok_and(|status| status.nlink() == 0)
    }

    /// Indices in [`SYMBOLS`] of its frequent functions, which may have to be sampled.
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

    /// Attaches probes to a frequent function all the time.
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

    /// Samples a frequent function from now on. Returns its links: dropping them detaches, which takes a while.
    pub(crate) fn switch_to_sampling(&mut self, symbol: usize) -> Vec<Link> {
        self.set_mode(symbol, &AttachMode::Sampled);
        self.frequent_links.remove(&symbol).unwrap_or_default()
    }

    /// Detaches all probes, and keeps their modes for [`Self::resume`].
    pub(crate) fn pause(&mut self) {
        let frequent = std::mem::take(&mut self.frequent_links);
        let mut links: Vec<Link> = frequent.into_values().flatten().collect();
        links.append(&mut self.infrequent_links);
        links.append(&mut self.window_links);
        detach(links);
    }

    /// Attaches the probes again that [`Self::pause`] detached.
    pub(crate) fn resume(&mut self, kernel: &Kernel) {
        for symbol in self.frequent_symbols() {
            let mut functions = self.functions.iter();
            if functions.any(|it| it.symbol == symbol && it.mode == AttachMode::Permanent) {
                self.attach_permanently(kernel, symbol);
            }
        }
        self.attach_infrequent(kernel);
    }

    /// Detaches all probes for good, for this reason.
    pub(crate) fn detach(&mut self, reason: &str) {
        self.pause();
        self.change_watches.clear();
        for function in &mut self.functions {
            if function.site.is_some() {
                function.mode = AttachMode::NotAttached(reason.to_owned());
            }
        }
    }

    /// Attaches probes to all sampled functions.
    pub(crate) fn open_window(&mut self, kernel: &Kernel) -> Result<(), String> {
        let targets = self.targets(|function| function.mode == AttachMode::Sampled);
        self.window_links = self.link(kernel, &targets)?;
        Ok(())
    }

    /// Returns the links of the window. Dropping them detaches, which takes a while.
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
        // Through our own descriptor: the process that maps the file may have exited, and another file may be at the
        // path by now.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        kernel
            .attach(Path::new(&path), targets)
            .map_err(|error| format!("the kernel refuses the probes ({})", reason(&error)))
    }
}

impl Drop for AttachedFile {
    fn drop(&mut self) {
        self.detach("");
    }
}

/// Detaches links in parallel: each waits for an RCU grace period, and they can share it.
pub(crate) fn detach(links: Vec<Link>) {
    thread::scope(|scope| {
        for link in links {
            scope.spawn(|| drop(link));
        }
    });
}

/// The functions of a library in [`SYMBOLS`], with their sites in the file. A prefix that matches no export is reported
/// as missing.
fn find_functions(kind: LibraryKind, library: &Library) -> Result<Vec<Function>, LibraryError> {
    let rows = SYMBOLS.iter().enumerate();
    let rows = rows.filter(|(_, row)| row.library == kind);
    let wanted: Vec<(usize, &'static str)> = rows
        .flat_map(|(symbol, row)| row.names.iter().map(move |name| (symbol, *name)))
        .collect();
    let names: Vec<FunctionName<'_>> = wanted
        .iter()
        .map(|(symbol, name)| match SYMBOLS[*symbol].by_prefix {
            true => FunctionName::Prefix(name),
            false => FunctionName::Exact(name),
        })
        .collect();
    let mut functions = Vec::new();
    for ((symbol, name), sites) in wanted.into_iter().zip(library.find(&names)?) {
        functions.extend(sites.into_iter().map(|site| Function {
            name,
            symbol,
            mode: match &site {
                Ok(_) => AttachMode::Permanent,
                Err(error) => AttachMode::NotAttached(error.to_string()),
            },
            site: site.ok(),
        }));
    }
    refuse_aliases(&mut functions);
    refuse_single_stepped(&mut functions);
    Ok(functions)
}

/// Refuses the second name of a function at the same offset: its calls would count twice.
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
                function.mode =
                    AttachMode::NotAttached(format!("is another name of {first}, which is probed"));
            }
        }
    }
}

/// Refuses frequent functions whose first instruction the kernel must single-step: their overhead is too high.
fn refuse_single_stepped(functions: &mut [Function]) {
    for function in functions {
        let stepped = function
            .site
            .is_some_and(|site| site.trap == TrapCost::SingleStepped);
        if stepped && SYMBOLS[function.symbol].frequent {
            function.site = None;
            function.mode = AttachMode::NotAttached(
                "is called often, and the kernel must single-step its first instruction".to_owned(),
            );
        }
    }
}

/// The identity of a file that is not open, to find out whether probes are already attached.
pub(crate) fn identity_at(access: &Path) -> io::Result<FileIdentity> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::open(access, flags, Mode::empty())?;
    FileIdentity::read(&File::from(file))
}

#[cfg(test)]
mod tests;
