//! New library files: those that wait for a child process, and those that a child process attaches to.
//!
//! The number of child processes that work for one tenant at a time is limited. A file that no child process is free for
//! waits in this queue, and delays neither the observer's thread nor the files of other tenants.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use zernel_elf::{FileIdentity, LibraryKind};
use zernel_identity::Tenant;
use zernel_model::snapshot::RefusalCause;

use super::attached_files::AttachedFile;
use super::attachment::AttachContext;
use super::file_changes::FileChanges;
use super::file_task::{FileRefusal, FileTask};
use crate::child_task;
use crate::discovery::ProcessKey;
use crate::foreign_file::ForeignFile;
use crate::quarantine;

/// The processes that need the probes of a file, and their tenant.
#[derive(Debug, Clone)]
pub(super) struct FileDemand {
    /// The processes that map the file.
    pub(super) processes: BTreeSet<ProcessKey>,
    /// The tenant of each process, and where it maps the file.
    pub(super) mapped_at: BTreeMap<ProcessKey, (Tenant, PathBuf)>,
    /// The tenant of the first process that mapped the file. Installed libraries count for root.
    pub(super) tenant: Tenant,
    /// Whether processes of several tenants map the file.
    pub(super) is_shared: bool,
    /// Where the file was found.
    pub(super) access_path: PathBuf,
    /// Whether the file is an installed library. An installed library stays attached although no process maps it.
    pub(super) is_installed: bool,
}

/// A library file that waits in the queue, with its kind.
struct NewFile {
    kind: LibraryKind,
    file: ForeignFile,
    demand: FileDemand,
}

/// A file that a child process attaches to.
struct PendingFile {
    task: FileTask,
    demand: FileDemand,
}

/// A file that has left the queue: a child process attached to it, or failed.
pub(super) struct FinishedFile {
    pub(super) kind: LibraryKind,
    pub(super) demand: FileDemand,
    pub(super) result: Result<AttachedFile, (ForeignFile, FileRefusal)>,
}

/// New library files.
pub(super) struct FileQueue {
    waiting_files: VecDeque<NewFile>,
    pending_files: Vec<PendingFile>,
    /// A descriptor that is readable when a child process may have a result.
    result_descriptor: OwnedFd,
    last_number: u64,
}

impl FileQueue {
    pub(super) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            waiting_files: VecDeque::new(),
            pending_files: Vec::new(),
            result_descriptor: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            last_number: 0,
        })
    }

    /// Adds a file.
    pub(super) fn add_file(&mut self, kind: LibraryKind, file: ForeignFile, demand: FileDemand) {
        self.waiting_files.push_back(NewFile { kind, file, demand });
    }

    /// The demand for a file of this identity; `None` if it is not in the queue.
    pub(super) fn demand_for(&mut self, identity: FileIdentity) -> Option<&mut FileDemand> {
        let waiting = self.waiting_files.iter_mut();
        let waiting = waiting.map(|it| (it.file.identity, &mut it.demand));
        let pending = self.pending_files.iter_mut();
        let pending = pending.map(|it| (it.task.file.identity, &mut it.demand));
        let mut files = waiting.chain(pending);
        files.find_map(|(other, demand)| (other == identity).then_some(demand))
    }

    /// The kind of each file in the queue, and the processes that need it.
    pub(super) fn demands(&self) -> impl Iterator<Item = (LibraryKind, &FileDemand)> {
        let waiting = self.waiting_files.iter().map(|it| (it.kind, &it.demand));
        let pending = self
            .pending_files
            .iter()
            .map(|it| (it.task.kind, &it.demand));
        waiting.chain(pending)
    }

    /// Forgets that a process maps files. Files that nobody maps any more leave the queue.
    pub(super) fn forget_process(&mut self, process: ProcessKey) {
        for pending in &mut self.pending_files {
            pending.demand.processes.remove(&process);
        }
        self.waiting_files.retain_mut(|waiting| {
            let demand = &mut waiting.demand;
            demand.processes.remove(&process);
            demand.is_installed || !demand.processes.is_empty()
        });
    }

    /// Starts child processes for waiting files, and takes over the files that child processes are done with. Waits for
    /// further child processes until the time `until`.
    pub(super) fn work_until(
        &mut self,
        until: Instant,
        changes: &FileChanges,
        context: AttachContext<'_>,
    ) -> Vec<FinishedFile> {
        let mut finished = Vec::new();
        loop {
            finished.extend(self.start_tasks(changes, context));
            let before = finished.len();
            self.finish_tasks(&mut finished);
            let is_idle = finished.len() == before && self.pending_files.is_empty();
            let is_over = Instant::now() >= until || child_task::is_asked_to_stop();
            if is_idle || is_over {
                return finished;
            }
            if finished.len() == before {
                self.wait_for_a_child(until);
            }
        }
    }

    /// Starts child processes for waiting files, and returns those for which none can be started.
    fn start_tasks(
        &mut self,
        changes: &FileChanges,
        context: AttachContext<'_>,
    ) -> Vec<FinishedFile> {
        let mut refused = Vec::new();
        for new in std::mem::take(&mut self.waiting_files) {
            if quarantine::is_quarantined(&new.file.identity) && !new.demand.is_installed {
                let refusal = FileRefusal {
                    cause: RefusalCause::Quarantined,
                    reason: quarantine::QUARANTINE_REASON.to_owned(),
                };
                refused.push(new.into_refused(refusal));
            } else if child_task::has_room_for_child_of(&new.demand.tenant) {
                refused.extend(self.start_task(new, changes, context));
            } else {
                self.waiting_files.push_back(new);
            }
        }
        refused
    }

    /// Has a child process attach to a file, and returns the file if that cannot be started.
    fn start_task(
        &mut self,
        new: NewFile,
        changes: &FileChanges,
        context: AttachContext<'_>,
    ) -> Option<FinishedFile> {
        let NewFile { kind, file, demand } = new;
        match FileTask::start(changes, kind, file, &demand, context) {
            Ok(task) => {
                let data = epoll::EventData::new_u64(0);
                // If epoll cannot add the task, the next round still finds its result.
                let _ = epoll::add(&self.result_descriptor, &task, data, epoll::EventFlags::IN);
                self.pending_files.push(PendingFile { task, demand });
                None
            }
            Err((file, refusal)) => Some(NewFile { kind, file, demand }.into_refused(refusal)),
        }
    }

    /// Takes over the files that child processes are done with.
    fn finish_tasks(&mut self, finished: &mut Vec<FinishedFile>) {
        for PendingFile { task, demand } in std::mem::take(&mut self.pending_files) {
            let kind = task.kind;
            let number = self.last_number + 1;
            match task.take_result(number) {
                Err(task) => self.pending_files.push(PendingFile {
                    task: *task,
                    demand,
                }),
                Ok(result) => {
                    self.last_number = number;
                    finished.push(FinishedFile {
                        kind,
                        demand,
                        result,
                    });
                }
            }
        }
    }

    /// Waits until a child process may have a result, at most until the given time.
    fn wait_for_a_child(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        child_task::wait_until_readable(
            self.result_descriptor.as_fd(),
            left.min(MAX_WAIT_FOR_CHILDREN),
        );
    }
}

/// Longest wait before the deadlines of child processes are looked at.
const MAX_WAIT_FOR_CHILDREN: Duration = Duration::from_millis(50);

impl NewFile {
    fn into_refused(self, refusal: FileRefusal) -> FinishedFile {
        FinishedFile {
            kind: self.kind,
            demand: self.demand,
            result: Err((self.file, refusal)),
        }
    }
}

impl AsFd for FileQueue {
    /// A descriptor that is readable when a child process may have a result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.result_descriptor.as_fd()
    }
}
