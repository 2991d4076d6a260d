//! The library files that probes are attached to, and the processes that map them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zernel_elf::{FileIdentity, LibraryKind};
use zernel_identity::Tenant;
use zernel_model::identity::Identity;
use zernel_model::snapshot::{
    AttachState, FunctionEntry, Ledger, LibraryFile, MappingProcess, RefusalCause, RefusedFile,
    RefusedFiles,
};

use super::attached_files::{self, AttachedFile};
use super::file_changes::FileChanges;
use super::file_queue::{FileDemand, FileQueue, FinishedFile};
use super::file_task::{AttachPlan, FileRefusal};
use super::found_functions::AttachMode;
use super::governor::Governor;
use super::identity_reader::{self, IdentityReader};
use super::kernel::KernelPrograms;
use crate::discovery::{ProcessEvent, ProcessKey};
use crate::foreign_file::ForeignFile;
use crate::probes::SYMBOLS;
use crate::tenant_shares::TenantShares;

/// The library files that probes are attached to, and the processes that map them.
pub(super) struct LibraryAttachments {
    pub(super) files: Vec<AttachedFile>,
    /// New files.
    queue: FileQueue,
    /// Readable when a file was written to or removed, or a child process has a result.
    events: OwnedFd,
    /// Files that no probe can be attached to.
    refused: Arc<RefusedFiles>,
    /// Files whose content was refused last. A refused file is not read again until it changes.
    refused_contents: VecDeque<(LibraryKind, FileIdentity)>,
    changes: FileChanges,
    /// Numbers of the files that a process maps.
    mapped: BTreeMap<ProcessKey, BTreeSet<u64>>,
    /// Identities of processes, read at the first library of each: it may exit before the next round.
    identities: BTreeMap<ProcessKey, Identity>,
    /// Identities of processes that exited or executed another program since the last round.
    exited_identities: BTreeMap<ProcessKey, Identity>,
    /// Processes that mapped the CUDA driver when observing began.
    found_running: BTreeSet<ProcessKey>,
    /// Reads identities of processes.
    identity_reader: IdentityReader,
    /// Files that the next scan tries again.
    retries: BTreeSet<FileRetry>,
}

/// A file that is tried again.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FileRetry {
    tenant: Tenant,
    /// The process that maps the file; `None` for an installed library.
    process: Option<ProcessKey>,
    kind: LibraryKind,
    access_path: PathBuf,
}

/// The parts of the observer that decide how probes are attached.
#[derive(Clone, Copy)]
pub(super) struct AttachContext<'a> {
    pub(super) kernel: &'a KernelPrograms,
    pub(super) governor: &'a Governor,
    /// Whether all probes of the observer are detached for now.
    pub(super) are_probes_off: bool,
}

impl AttachContext<'_> {
    pub(super) fn attach_plan(&self) -> AttachPlan {
        AttachPlan {
            sampled_symbols: self.governor.sampled_symbols().into_iter().collect(),
            are_probes_off: self.are_probes_off,
        }
    }
}

/// How long the observer's thread waits for child processes when processes have mapped new files. Most need less, and
/// then the first calls of a process are counted.
const MAX_WAIT_FOR_NEW_FILES: Duration = Duration::from_millis(500);
/// Shares of the files that may have probes at the same time. Each of these files takes some 30 descriptors.
const PROBED_FILE_SHARES: TenantShares = TenantShares {
    capacity: 512,
    reserved_entries: 128,
    minimum_per_tenant: 8,
};

/// Shares of the refused files that the next scan tries again: any user can have files refused.
const RETRIED_FILE_SHARES: TenantShares = TenantShares {
    capacity: 1024,
    reserved_entries: 256,
    minimum_per_tenant: 8,
};

/// The tenant of installed libraries.
const INSTALLED_LIBRARIES_TENANT: Tenant = Tenant::User(0);

fn has_functions(kind: LibraryKind) -> bool {
    SYMBOLS.iter().any(|symbol| symbol.library == kind)
}

impl LibraryAttachments {
    pub(super) fn new() -> rustix::io::Result<Self> {
        let changes = FileChanges::new()?;
        let queue = FileQueue::new()?;
        Ok(Self {
            files: Vec::new(),
            events: super::epoll_any([changes.as_fd(), queue.as_fd()])?,
            queue,
            refused: Arc::default(),
            refused_contents: VecDeque::new(),
            changes,
            mapped: BTreeMap::new(),
            identities: BTreeMap::new(),
            exited_identities: BTreeMap::new(),
            found_running: BTreeSet::new(),
            identity_reader: IdentityReader::default(),
            retries: BTreeSet::new(),
        })
    }

    /// Attaches to a library that a user named with `--library`. Perhaps no process maps the library yet.
    pub(super) fn attach_named(&mut self, path: &Path) {
        let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut names = [path, &target].into_iter();
        let kind = names.find_map(|path| LibraryKind::from_file_name(path.file_name()?));
        match kind {
            Some(kind) => self.attach_installed(kind, path),
            None => {
                let reason = "its name is not that of a known library".to_owned();
                self.record_refusal(
                    path,
                    &INSTALLED_LIBRARIES_TENANT,
                    RefusalCause::UnknownName,
                    reason,
                );
            }
        }
    }

    /// Attaches probes to an installed library. They stay attached although no process maps the library.
    pub(super) fn attach_installed(&mut self, kind: LibraryKind, path: &Path) {
        if !has_functions(kind) {
            return;
        }
        match ForeignFile::open(path) {
            Ok(file) => self.attach_in_child(
                kind,
                file,
                FileDemand {
                    processes: BTreeSet::new(),
                    mapped_at: BTreeMap::new(),
                    tenant: INSTALLED_LIBRARIES_TENANT,
                    is_shared: false,
                    access_path: path.to_owned(),
                    is_installed: true,
                },
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let reason = format!("cannot read {}: {error}", path.display());
                self.record_refusal(
                    path,
                    &INSTALLED_LIBRARIES_TENANT,
                    RefusalCause::Unreadable,
                    reason,
                );
            }
        }
    }

    /// Attaches to a file that a process maps.
    fn attach_mapped(&mut self, process: ProcessKey, kind: LibraryKind, access: &Path) {
        // A process that has exited maps nothing.
        let (Ok(tenant), Ok(file)) = (Tenant::of_pid(process.pid), ForeignFile::open(access))
        else {
            return;
        };
        // The process may have mapped another file here since it was scanned, which the next scan reports.
        let name = file.path.file_name().and_then(LibraryKind::from_file_name);
        if name != Some(kind) || !has_functions(kind) {
            return;
        }
        let demand = FileDemand {
            processes: BTreeSet::from([process]),
            mapped_at: BTreeMap::from([(process, (tenant.clone(), access.to_owned()))]),
            tenant,
            is_shared: false,
            access_path: access.to_owned(),
            is_installed: false,
        };
        self.attach_in_child(kind, file, demand);
    }

    /// Has a child process attach to a file, unless probes are attached already.
    fn attach_in_child(&mut self, kind: LibraryKind, file: ForeignFile, demand: FileDemand) {
        let is_refused = self.refused_contents.contains(&(kind, file.identity));
        if is_refused || self.is_known(file.identity, &demand) {
            return;
        }
        if !file.is_regular() {
            let reason = format!("{} is not a regular file", file.path.display());
            self.record_refusal(&file.path, &demand.tenant, RefusalCause::NotAFile, reason);
        } else if !self.has_room_for(&demand.tenant) {
            let reason = "its tenant has more library files than may be probed at once".to_owned();
            let cause = RefusalCause::TooManyFiles;
            self.record_refusal(&file.path, &demand.tenant, cause, reason);
            self.retry_later(kind, &demand);
        } else {
            self.queue.add_file(kind, file, demand);
        }
    }

    /// Whether the file has probes already or is in the queue. If so, records which processes map the file.
    fn is_known(&mut self, identity: FileIdentity, demand: &FileDemand) -> bool {
        let mut files = self.files.iter_mut();
        if let Some(known) = files.find(|it| it.file.identity == identity) {
            if known.tenant != demand.tenant {
                known.tenant = attached_files::SHARED_FILE_TENANT;
            }
            let number = known.file_number;
            self.add_mapping_processes(&demand.processes, number);
            return true;
        }
        let queued = self.queue.demand_for(identity);
        queued.is_some_and(|queued| {
            queued.is_shared |= queued.tenant != demand.tenant;
            queued.processes.extend(&demand.processes);
            queued.mapped_at.extend(demand.mapped_at.clone());
            queued.is_installed |= demand.is_installed;
            true
        })
    }

    /// Has the next scan try to attach to the file again, because the reason for the refusal may pass.
    fn retry_later(&mut self, kind: LibraryKind, demand: &FileDemand) {
        let installed = (None, (&demand.tenant, &demand.access_path));
        let installed = demand.is_installed.then_some(installed);
        // A child process may open the file by the mapping of any of these processes, because some may exit.
        let processes = demand.processes.iter().filter_map(|process| {
            let (tenant, access) = demand.mapped_at.get(process)?;
            Some((Some(*process), (tenant, access)))
        });
        for (process, (tenant, access)) in installed.into_iter().chain(processes) {
            let tenants = self.retries.iter().map(|retry| &retry.tenant);
            if RETRIED_FILE_SHARES.may_add_entry(tenant, tenants) {
                self.retries.insert(FileRetry {
                    tenant: tenant.clone(),
                    process,
                    kind,
                    access_path: access.clone(),
                });
            }
        }
    }

    /// Tries again to attach to files that were refused for a reason that may have passed.
    pub(super) fn retry_refused_files(&mut self, context: AttachContext<'_>) {
        attached_files::attach_each_file(self.files.iter_mut(), |file| {
            file.retry_attaching(context.kernel);
        });
        for retry in std::mem::take(&mut self.retries) {
            match retry.process {
                Some(process) => self.attach_mapped(process, retry.kind, &retry.access_path),
                None => self.attach_installed(retry.kind, &retry.access_path),
            }
        }
    }

    /// Whether probes may be attached to one more file of this tenant.
    fn has_room_for(&self, tenant: &Tenant) -> bool {
        let attached = self.files.iter().map(|file| &file.tenant);
        let tenants = attached.chain(self.queue.demands().map(|(_, demand)| &demand.tenant));
        PROBED_FILE_SHARES.may_add_entry(tenant, tenants)
    }

    /// Records that processes map a file.
    fn add_mapping_processes(&mut self, processes: &BTreeSet<ProcessKey>, number: u64) {
        for process in processes {
            self.mapped.entry(*process).or_default().insert(number);
        }
    }

    /// Takes over the files that child processes have attached to. Waits for child processes until the time `until`.
    pub(super) fn take_finished_files(&mut self, until: Instant, context: AttachContext<'_>) {
        for finished in self.queue.work_until(until, &self.changes, context) {
            let FinishedFile {
                kind,
                demand,
                result,
            } = finished;
            match result {
                Ok(mut file) => {
                    file.is_kept = demand.is_installed;
                    if demand.is_shared {
                        file.tenant = attached_files::SHARED_FILE_TENANT;
                    }
                    self.changes.take_over_watches(file.change_watches());
                    self.add_mapping_processes(&demand.processes, file.file_number);
                    self.add_file(file, context);
                }
                Err((file, refusal)) => self.record_refused_content(kind, &file, &demand, refusal),
            }
        }
    }

    /// Records why a file was refused. The next scan tries the file again if the reason may pass.
    fn record_refused_content(
        &mut self,
        kind: LibraryKind,
        file: &ForeignFile,
        demand: &FileDemand,
        refusal: FileRefusal,
    ) {
        match refusal.cause {
            RefusalCause::NotALibrary | RefusalCause::OverLimit | RefusalCause::OnFuse => {
                self.refused_contents.push_back((kind, file.identity));
                if self.refused_contents.len() > RefusedFiles::MAX_KEPT_FILES {
                    self.refused_contents.pop_front();
                }
            }
            RefusalCause::NoAnswer
            | RefusalCause::NoProcess
            | RefusalCause::RefusedByKernel
            | RefusalCause::Quarantined => self.retry_later(kind, demand),
            _ => {}
        }
        self.record_refusal(&file.path, &demand.tenant, refusal.cause, refusal.reason);
    }

    fn add_file(&mut self, mut file: AttachedFile, context: AttachContext<'_>) {
        file.apply_attach_plan(context.kernel, &context.attach_plan());
        if !file.file.is_unchanged() {
            file.detach_for_good(attached_files::WRITTEN_TO_REASON);
        }
        if context.governor.is_window_open() {
            attached_files::attach_for_window(context.kernel, [&mut file].into_iter());
        }
        self.files.push(file);
    }

    /// Records why no probe can be attached to a file.
    fn record_refusal(
        &mut self,
        path: &Path,
        tenant: &Tenant,
        cause: RefusalCause,
        reason: String,
    ) {
        Arc::make_mut(&mut self.refused).add_refused_file(RefusedFile {
            path: path.to_owned(),
            cause,
            reason,
            tenant: tenant.to_string(),
        });
    }

    /// Handles events of processes: attaches to mapped libraries, and forgets the mappings of exited processes.
    pub(super) fn follow_process_events(
        &mut self,
        events: &[ProcessEvent],
        context: AttachContext<'_>,
    ) {
        self.identify_new_processes(events);
        // Child processes attach to several files at the same time. A file system that does not answer delays the
        // observer's thread by this time once, and not once for each of its files.
        let until = Instant::now() + MAX_WAIT_FOR_NEW_FILES;
        for event in events {
            match event {
                ProcessEvent::Mapped {
                    process,
                    kind,
                    file,
                } => self.attach_mapped(*process, *kind, &file.map_files),
                ProcessEvent::Executed { process } => self.forget_mappings_of(*process),
                ProcessEvent::Exited { process } => {
                    self.forget_mappings_of(*process);
                    let identity = self.identities.remove_entry(process);
                    self.exited_identities.extend(identity);
                }
                ProcessEvent::Forked { parent, child } => {
                    if let Some(files) = self.mapped.get(parent) {
                        self.mapped.insert(*child, files.clone());
                    }
                }
            }
        }
        self.take_finished_files(until, context);
    }

    /// Reads the identities of processes that are new, or have executed another program.
    fn identify_new_processes(&mut self, events: &[ProcessEvent]) {
        let mut new = BTreeSet::new();
        for event in events {
            match event {
                ProcessEvent::Executed { process } => {
                    let identity = self.identities.remove_entry(process);
                    self.exited_identities.extend(identity);
                }
                ProcessEvent::Mapped { process, .. }
                | ProcessEvent::Forked { child: process, .. } => {
                    new.insert(*process);
                }
                ProcessEvent::Exited { .. } => {}
            }
        }
        new.retain(|process| !self.identities.contains_key(process));
        self.identity_reader.request_processes(&new);
        let patience = match new.is_empty() {
            true => Duration::ZERO,
            false => identity_reader::MAX_WAIT_FOR_IDENTITIES,
        };
        self.identities
            .extend(self.identity_reader.take_identities(patience));
    }

    /// Forgets the identities of processes that map no file: an identity may be read only after its process has exited.
    pub(super) fn forget_unused_identities(&mut self) {
        let queued = self.queue.demands();
        let queued = queued.flat_map(|(_, demand)| &demand.processes);
        let queued: BTreeSet<ProcessKey> = queued.copied().collect();
        let (mapped, identities) = (&self.mapped, &mut self.identities);
        identities.retain(|process, _| mapped.contains_key(process) || queued.contains(process));
    }

    /// Forgets the mappings of a process.
    fn forget_mappings_of(&mut self, process: ProcessKey) {
        self.queue.forget_process(process);
        self.mapped.remove(&process);
        self.found_running.remove(&process);
    }

    /// Whether a file was written to or removed since the last call.
    pub(super) fn take_file_change(&mut self) -> bool {
        self.changes.take_change()
    }

    /// Detaches from files that were written to and from files that no process can map any more. Returns the processes
    /// that map a file that was written to.
    pub(super) fn drop_changed_files(&mut self) -> BTreeSet<ProcessKey> {
        let used: BTreeSet<u64> = self.mapped.values().flatten().copied().collect();
        let mut changed = BTreeSet::new();
        for file in &mut self.files {
            if !file.file.is_unchanged() {
                file.detach_for_good(attached_files::WRITTEN_TO_REASON);
                changed.insert(file.file_number);
            }
        }
        for file in &mut self.files {
            file.record_mapped(used.contains(&file.file_number));
        }
        attached_files::drop_files(self.files.extract_if(.., |file| !file.is_useful()));
        let watched = self.files.iter().flat_map(AttachedFile::change_watches);
        self.changes.keep_only_watches(&watched.collect());
        self.processes_mapping(&changed)
    }

    fn processes_mapping(&self, files: &BTreeSet<u64>) -> BTreeSet<ProcessKey> {
        let mapped = self.mapped.iter();
        let users = mapped.filter(|(_, mapped)| !mapped.is_disjoint(files));
        users.map(|(process, _)| *process).collect()
    }

    /// The user of a process.
    fn uid_of(&self, process: ProcessKey) -> Option<u32> {
        let identity = self.identities.get(&process);
        let uid = identity.map(|identity| identity.uid);
        uid.or_else(|| zernel_identity::uid_of(process.pid).ok())
    }

    /// Whether only processes of this tenant have mapped a file, and all that map it now belong to this user.
    pub(super) fn is_private_to_user(&self, file: u64, tenant: &Tenant, uid: u32) -> bool {
        let mut files = self.files.iter();
        let file = files.find(|it| it.file_number == file && it.tenant == *tenant);
        file.is_some_and(|file| {
            let users = self.processes_mapping(&BTreeSet::from([file.file_number]));
            users.into_iter().all(|user| self.uid_of(user) == Some(uid))
        })
    }

    /// The numbers of the files that a process maps.
    pub(super) fn files_of(&self, process: ProcessKey) -> BTreeSet<u64> {
        self.mapped.get(&process).cloned().unwrap_or_default()
    }

    /// The attached files with these numbers.
    pub(super) fn files_mut(
        &mut self,
        numbers: &BTreeSet<u64>,
    ) -> impl Iterator<Item = &mut AttachedFile> {
        let files = self.files.iter_mut();
        files.filter(|file| numbers.contains(&file.file_number))
    }

    /// Remembers the processes that map the CUDA driver now: their first calls were not observed.
    pub(super) fn remember_running_processes(&mut self) {
        let files = self.files.iter();
        let drivers = files.filter(|file| file.kind == LibraryKind::Cuda);
        let drivers: BTreeSet<u64> = drivers.map(|file| file.file_number).collect();
        self.found_running = self.processes_mapping(&drivers);
        let queued = self.queue.demands();
        let queued = queued.filter(|(kind, _)| *kind == LibraryKind::Cuda);
        let processes = queued.flat_map(|(_, demand)| &demand.processes);
        self.found_running.extend(processes);
    }

    /// Whether a process mapped the CUDA driver when observing began.
    pub(super) fn ran_before_observing(&self, process: ProcessKey) -> bool {
        self.found_running.contains(&process)
    }

    /// The identity that a process had when it mapped its first ML library.
    pub(super) fn identity_at_first_mapping(&self, process: ProcessKey) -> Option<&Identity> {
        let identity = self.identities.get(&process);
        identity.or_else(|| self.exited_identities.get(&process))
    }

    /// Forgets processes that exited before the round that ends now.
    pub(super) fn forget_exited_identities(&mut self) {
        self.exited_identities.clear();
    }

    /// Whether files are not probed because their tenants have too many, as a sentence.
    pub(super) fn describe_exceeded_shares(&self) -> Option<String> {
        let refusals = self
            .refused
            .refusal_counts()
            .get(&RefusalCause::TooManyFiles)?;
        let why = "their tenants have more than may be probed at once";
        Some(format!(
            "library files were refused {refusals} times: {why}"
        ))
    }

    /// Number of files with at least one probe.
    pub(super) fn probed_file_count(&self) -> usize {
        self.files.iter().filter(|file| file.has_probes()).count()
    }

    /// Which functions are probed in which file. `off` says why all probes are detached.
    pub(super) fn describe_as_ledger(&self, off: Option<&Arc<str>>) -> Ledger {
        let files = self.files.iter();
        let mapping_processes = self.mapped.iter().map(|(process, mapped)| MappingProcess {
            pid: process.pid,
            start_ns: process.start_ns,
            uid: self.identities.get(process).map(|identity| identity.uid),
            files: mapped.clone(),
        });
        Ledger {
            files: files.map(|file| describe_file(file, off)).collect(),
            mapping_processes: mapping_processes.collect(),
            refused: Arc::clone(&self.refused),
        }
    }
}

impl Drop for LibraryAttachments {
    fn drop(&mut self) {
        attached_files::drop_files(self.files.drain(..));
    }
}

impl AsFd for LibraryAttachments {
    /// Readable when a file was written to or removed, or a child process has a result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

fn describe_file(file: &AttachedFile, off: Option<&Arc<str>>) -> LibraryFile {
    let off = off.or(file.exclusion_reason.as_ref());
    let functions = file.functions.iter().map(|function| FunctionEntry {
        symbol: function.name(),
        call_counter_name: SYMBOLS[function.symbol].name(),
        state: match (&function.mode, off) {
            (AttachMode::NotAttached(reason), _) => {
                AttachState::NotAttached(reason.as_str().into())
            }
            (_, Some(reason)) => AttachState::NotAttached(Arc::clone(reason)),
            (AttachMode::Permanent, None) => AttachState::Attached,
            (AttachMode::Sampled, None) => AttachState::Sampled,
        },
        bytes_after_entry: function
            .site
            .map_or(0, |site| site.bytes_after_entry.into()),
    });
    LibraryFile {
        number: file.file_number,
        path: file.file.path.clone(),
        kind: file.kind.file_stem(),
        functions: functions.collect(),
    }
}
