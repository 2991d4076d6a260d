//! The library files that probes are attached to, and the processes that map them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use zernel_elf::{FileIdentity, LibraryError, LibraryKind};
use zernel_model::identity::Identity;
use zernel_model::snapshot::{
    AttachState, FunctionEntry, Ledger, LibraryFile, MappedBy, RefusalCause, RefusedFile,
    RefusedFiles,
};

use super::changes::Changes;
use super::files::{self, AttachMode, AttachedFile};
use super::governor::Governor;
use super::kernel::Kernel;
use super::process;
use crate::discovery::{ProcessEvent, ProcessKey};
use crate::probes::SYMBOLS;

/// The library files that probes are attached to, and the processes that map them.
pub(super) struct Attachment {
    pub(super) files: Vec<AttachedFile>,
    /// Files that no probe can be attached to.
    refused: Arc<RefusedFiles>,
    /// Files whose content was refused last. They are not read again until they change.
    refused_contents: VecDeque<(LibraryKind, FileIdentity)>,
    changes: Changes,
    /// Files by process.
    mapped: BTreeMap<ProcessKey, MappedFiles>,
    /// Identities of processes that exited or executed another program since the last round.
    exited_identities: BTreeMap<ProcessKey, Identity>,
    /// Processes that mapped the CUDA driver when observing began.
    found_running: BTreeSet<ProcessKey>,
    last_number: u64,
}

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
            identity: process::identify_unless_reused(process.pid, process.start_ns),
            files,
        }
    }
}

/// What decides how a file is attached to.
#[derive(Clone, Copy)]
pub(super) struct AttachContext<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) governor: &'a Governor,
    /// Whether all probes are detached for now.
    pub(super) is_off: bool,
}

impl Attachment {
    pub(super) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            files: Vec::new(),
            refused: Arc::default(),
            refused_contents: VecDeque::new(),
            changes: Changes::new()?,
            mapped: BTreeMap::new(),
            exited_identities: BTreeMap::new(),
            found_running: BTreeSet::new(),
            last_number: 0,
        })
    }

    /// Attaches to a library that a user named. No process may map it yet.
    pub(super) fn attach_named(&mut self, path: &Path, context: AttachContext<'_>) {
        let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut names = [path, &target].into_iter();
        let kind = names.find_map(|path| LibraryKind::from_file_name(path.file_name()?));
        match kind {
            Some(kind) => {
                self.attach(kind, path, path, context);
            }
            None => {
                let reason = "its name is not that of a known library".to_owned();
                self.refuse(path, RefusalCause::UnknownName, reason);
            }
        }
    }

    /// Attaches to the library file at `access`, unless probes are attached already. Returns the number of the file.
    pub(super) fn attach(
        &mut self,
        kind: LibraryKind,
        access: &Path,
        path: &Path,
        context: AttachContext<'_>,
    ) -> Option<u64> {
        if !SYMBOLS.iter().any(|symbol| symbol.library == kind) {
            return None;
        }
        // A process that has exited maps nothing.
        let identity = files::identity_at(access).ok()?;
        if let Some(known) = self.files.iter().find(|file| file.identity() == identity) {
            return Some(known.number);
        }
        if self.refused_contents.contains(&(kind, identity)) {
            return None;
        }
        let number = self.last_number + 1;
        let is_sampled = |symbol| context.governor.is_sampled(symbol);
        match AttachedFile::attach(context.kernel, kind, access, path, number, is_sampled) {
            Ok(mut file) => {
                if context.is_off {
                    file.pause();
                }
                file.watch_for_changes(&mut self.changes, access);
                if context.governor.is_window_open() {
                    // A file that cannot be attached to now is reported when the next window opens.
                    let _ = file.open_window(context.kernel);
                }
                self.files.push(file);
                self.last_number = number;
                Some(number)
            }
            Err(error) if error.is_not_found() => None,
            Err(error) => {
                let cause = refusal_cause(&error);
                if matches!(cause, RefusalCause::NotALibrary | RefusalCause::OverLimit) {
                    self.refused_contents.push_back((kind, identity));
                    if self.refused_contents.len() > RefusedFiles::KEPT {
                        self.refused_contents.pop_front();
                    }
                }
                self.refuse(path, cause, error.to_string());
                None
            }
        }
    }

    /// Records why no probe can be attached to a file.
    fn refuse(&mut self, path: &Path, cause: RefusalCause, reason: String) {
        Arc::make_mut(&mut self.refused).add(RefusedFile {
            path: path.to_owned(),
            cause,
            reason,
        });
    }

    /// Follows what happened to processes: attaches to the libraries that they map.
    pub(super) fn follow(&mut self, events: &[ProcessEvent], context: AttachContext<'_>) {
        for event in events {
            match event {
                ProcessEvent::Mapped {
                    process,
                    kind,
                    file,
                } => {
                    let number = self.attach(*kind, &file.map_files, &file.path, context);
                    if let Some(number) = number {
                        let mapped = self.mapped.entry(*process);
                        let new = || MappedFiles::new(*process, BTreeSet::new());
                        mapped.or_insert_with(new).files.insert(number);
                    }
                }
                ProcessEvent::Executed { process } | ProcessEvent::Exited { process } => {
                    let mapped = self.mapped.remove(process);
                    let identity = mapped.and_then(|mapped| mapped.identity);
                    let exited = identity.map(|identity| (*process, identity));
                    self.exited_identities.extend(exited);
                    self.found_running.remove(process);
                }
                ProcessEvent::Forked { parent, child } => {
                    if let Some(parent) = self.mapped.get(parent) {
                        let mapped = MappedFiles::new(*child, parent.files.clone());
                        self.mapped.insert(*child, mapped);
                    }
                }
            }
        }
    }

    /// Whether a file was written to or removed since the last call.
    pub(super) fn take_changes(&mut self) -> bool {
        self.changes.take()
    }

    /// Detaches from files that were written to and from files that no process can map any more. Returns the processes
    /// that map a file that was written to.
    pub(super) fn drop_changed_files(&mut self) -> BTreeSet<ProcessKey> {
        let mapped = self.mapped.values().flat_map(|mapped| &mapped.files);
        let used: BTreeSet<u64> = mapped.copied().collect();
        let mut changed = BTreeSet::new();
        for file in &mut self.files {
            if !file.is_unchanged() {
                file.detach(files::WRITTEN_TO);
                changed.insert(file.number);
            }
        }
        self.files.retain(|file| {
            let useful = file.is_unchanged() && !file.is_deleted();
            useful || used.contains(&file.number)
        });
        let watched = self.files.iter().flat_map(AttachedFile::change_watches);
        self.changes.retain(&watched.collect());
        self.users_of(&changed)
    }

    fn users_of(&self, files: &BTreeSet<u64>) -> BTreeSet<ProcessKey> {
        let mapped = self.mapped.iter();
        let users = mapped.filter(|(_, mapped)| !mapped.files.is_disjoint(files));
        users.map(|(process, _)| *process).collect()
    }

    /// Remembers the processes that map the CUDA driver now: their first calls were not observed.
    pub(super) fn remember_running(&mut self) {
        let files = self.files.iter();
        let drivers = files.filter(|file| file.kind == LibraryKind::Cuda);
        let drivers: BTreeSet<u64> = drivers.map(|file| file.number).collect();
        self.found_running = self.users_of(&drivers);
    }

    /// Whether a process mapped the CUDA driver when observing began.
    pub(super) fn was_found_running(&self, process: ProcessKey) -> bool {
        self.found_running.contains(&process)
    }

    /// The identity that a process had when it mapped its first library.
    pub(super) fn identity(&self, process: ProcessKey) -> Option<&Identity> {
        let mapped = self.mapped.get(&process);
        let identity = mapped.and_then(|mapped| mapped.identity.as_ref());
        identity.or_else(|| self.exited_identities.get(&process))
    }

    /// Forgets processes that exited before the round that ends now.
    pub(super) fn end_round(&mut self) {
        self.exited_identities.clear();
    }

    /// Number of files with at least one probe.
    pub(super) fn watched_files(&self) -> usize {
        self.files.iter().filter(|file| file.has_probes()).count()
    }

    /// Which functions are probed in which file. `off` says why all probes are detached.
    pub(super) fn ledger(&self, off: Option<&Arc<str>>) -> Ledger {
        let files = self.files.iter();
        let mapped_by = self.mapped.iter().map(|(process, mapped)| MappedBy {
            pid: process.pid,
            start_ns: process.start_ns,
            uid: mapped.identity.as_ref().map(|identity| identity.uid),
            files: mapped.files.clone(),
        });
        Ledger {
            files: files.map(|file| describe_file(file, off)).collect(),
            mapped_by: mapped_by.collect(),
            refused: Arc::clone(&self.refused),
        }
    }
}

impl AsFd for Attachment {
    /// Readable when a file was written to or removed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }
}

fn refusal_cause(error: &LibraryError) -> RefusalCause {
    match error {
        LibraryError::Unreadable { .. } => RefusalCause::Unreadable,
        LibraryError::NotAFile { .. } => RefusalCause::NotAFile,
        LibraryError::NotALibrary { .. } => RefusalCause::NotALibrary,
        LibraryError::OverLimit { .. } => RefusalCause::OverLimit,
        LibraryError::Changed { .. } => RefusalCause::Changed,
    }
}

fn describe_file(file: &AttachedFile, off: Option<&Arc<str>>) -> LibraryFile {
    let functions = file.functions.iter().map(|function| FunctionEntry {
        symbol: function.name,
        counted_as: SYMBOLS[function.symbol].name(),
        state: match (&function.mode, off) {
            (AttachMode::NotAttached(reason), _) => {
                AttachState::NotAttached(reason.as_str().into())
            }
            (_, Some(reason)) => AttachState::NotAttached(Arc::clone(reason)),
            (AttachMode::Permanent, None) => AttachState::Attached,
            (AttachMode::Sampled, None) => AttachState::Sampled,
        },
        displacement: function.site.map_or(0, |site| site.displacement.into()),
    });
    LibraryFile {
        number: file.number,
        path: file.path.clone(),
        kind: file.kind.stem(),
        functions: functions.collect(),
    }
}
