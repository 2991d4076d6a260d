//! A library file that a child process reads and attaches to.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zernel_elf::{Library, LibraryError, LibraryKind};
use zernel_identity::Tenant;
use zernel_model::snapshot::RefusalCause;

use super::attached_files::{AttachedFile, AttachedFunctionSet, FileLinks, LinkProblem};
use super::attachment::AttachContext;
use super::file_changes::{self, FileChanges, WatchId};
use super::file_queue::FileDemand;
use super::found_functions::{
    AttachMode, FoundFunction, find_functions, frequent_symbols, infrequent_targets, probe_targets,
    refuse_infrequent, set_attach_mode,
};
use super::kernel::{KernelPrograms, ProbeTarget};
use crate::child_task::{ChildOutcome, ChildTask, ChildTaskError, DescriptorHandover};
use crate::foreign_file::{ForeignFile, ON_FUSE_REASON};
use crate::overlay_layers;
use crate::probe_link::ProbeLink;
use crate::quarantine::FileInProgress;

/// How long a file system may take to deliver what is read of a library. A slow file system needs less.
const MAX_READ_TIME: Duration = Duration::from_secs(10);

/// Why no probe can be attached to a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileRefusal {
    pub(crate) cause: RefusalCause,
    pub(crate) reason: String,
}

impl FileRefusal {
    /// A file whose file system could hold up an attachment.
    fn on_fuse(reason: &str) -> Self {
        Self {
            cause: RefusalCause::OnFuse,
            reason: reason.to_owned(),
        }
    }
}

impl From<LibraryError> for FileRefusal {
    fn from(error: LibraryError) -> Self {
        Self {
            cause: match &error {
                LibraryError::Unreadable { .. } => RefusalCause::Unreadable,
                LibraryError::NotAFile { .. } => RefusalCause::NotAFile,
                LibraryError::NotALibrary { .. } => RefusalCause::NotALibrary,
                LibraryError::OverLimit { .. } => RefusalCause::OverLimit,
                LibraryError::Changed { .. } => RefusalCause::Changed,
            },
            reason: error.to_string(),
        }
    }
}

impl From<ChildTaskError> for FileRefusal {
    fn from(error: ChildTaskError) -> Self {
        Self {
            cause: match error {
                ChildTaskError::TimedOut(_) => RefusalCause::NoAnswer,
                ChildTaskError::TooManyChildren | ChildTaskError::ChildNotStarted => {
                    RefusalCause::NoProcess
                }
                ChildTaskError::ChildDied => RefusalCause::Unreadable,
            },
            reason: error.to_string(),
        }
    }
}

/// What a child process found in a file and attached. The child hands the links over separately: first those of each
/// frequent function, then those of the infrequent ones.
#[derive(Debug, Serialize, Deserialize)]
struct ProbedFile {
    functions: Vec<FoundFunction>,
    /// Links of each frequent function that is attached permanently.
    frequent_links: Vec<(usize, AttachedFunctionSet)>,
    /// Links of the infrequent functions, unless all probes are detached for now.
    infrequent_links: Option<AttachedFunctionSet>,
    change_watches: Vec<WatchId>,
}

impl ProbedFile {
    /// Assigns the links that the child process handed over to the functions of the file. A function that could not be
    /// probed keeps the reason why. If the kernel refuses probes for a reason that may pass, the file is refused and
    /// tried again later.
    fn take_links(&mut self, handed_over: Vec<ProbeLink>) -> Result<FileLinks, FileRefusal> {
        let mut handed_over = handed_over.into_iter();
        let mut links = FileLinks::default();
        let refuse = |problem: LinkProblem| match problem.is_temporary {
            true => Err(FileRefusal {
                cause: RefusalCause::RefusedByKernel,
                reason: problem.text,
            }),
            false => Ok(problem.text),
        };
        for (symbol, set) in std::mem::take(&mut self.frequent_links) {
            match set.take_handed_over(&mut handed_over) {
                Ok(taken) => {
                    links.frequent_links.insert(symbol, taken);
                }
                Err(problem) => {
                    let mode = AttachMode::NotAttached(refuse(problem)?);
                    set_attach_mode(&mut self.functions, symbol, &mode);
                }
            }
        }
        let infrequent = self.infrequent_links.take();
        match infrequent.map(|set| set.take_handed_over(&mut handed_over)) {
            Some(Ok(taken)) => links.infrequent_links = taken,
            Some(Err(problem)) => refuse_infrequent(&mut self.functions, &refuse(problem)?),
            None => {}
        }
        Ok(links)
    }
}

/// A file that a child process reads and attaches to.
pub(crate) struct FileTask {
    pub(crate) kind: LibraryKind,
    pub(crate) file: ForeignFile,
    tenant: Tenant,
    task: ChildTask<Result<ProbedFile, FileRefusal>>,
    _in_progress: Option<FileInProgress>,
}

/// How probes are attached to a new file.
pub(crate) struct AttachPlan {
    /// The functions that are sampled.
    pub(crate) sampled_symbols: BTreeSet<usize>,
    /// Whether all probes of the observer are detached for now.
    pub(crate) are_probes_off: bool,
}

impl FileTask {
    /// Starts to attach to a file. Gives the file back if no child process can be started.
    pub(super) fn start(
        changes: &FileChanges,
        kind: LibraryKind,
        file: ForeignFile,
        demand: &FileDemand,
        context: AttachContext<'_>,
    ) -> Result<Self, (ForeignFile, FileRefusal)> {
        // Files that root has chosen are not checked: installed ones and those of `--library`.
        if !demand.is_installed
            && let Some(reason) = overlay_layers::refusal_of_overlay(file.as_fd())
        {
            return Err((file, FileRefusal::on_fuse(reason)));
        }
        let (kernel, plan) = (context.kernel, context.attach_plan());
        let mut kept = kernel.program_descriptors();
        kept.extend([file.as_fd(), changes.as_fd()]);
        let work = |handover: &DescriptorHandover<'_>| {
            let library = Library::open(&file.reopen_path())?;
            let functions = find_functions(kind, &library)?;
            if !demand.is_installed && file.is_on_fuse() {
                return Err(FileRefusal::on_fuse(ON_FUSE_REASON));
            }
            let file = (&file, demand.access_path.as_path());
            Ok(probe_file(
                kernel,
                changes.as_fd(),
                file,
                functions,
                &plan,
                handover,
            ))
        };
        let in_hand = (!demand.is_installed).then(|| FileInProgress::new(file.identity));
        match ChildTask::start(&demand.tenant, MAX_READ_TIME, &kept, work) {
            Ok(task) => Ok(Self {
                kind,
                file,
                tenant: demand.tenant.clone(),
                task,
                _in_progress: in_hand,
            }),
            Err(error) => Err((file, error.into())),
        }
    }

    /// Returns the result of the child process, or gives the task back if the child still works.
    pub(crate) fn take_result(
        mut self,
        number: u64,
    ) -> Result<Result<AttachedFile, (ForeignFile, FileRefusal)>, Box<Self>> {
        let Some(result) = self.task.poll_result() else {
            return Err(Box::new(self));
        };
        let Self {
            kind, file, tenant, ..
        } = self;
        let (mut probed, links) = match result {
            Ok(ChildOutcome {
                value: Ok(probed),
                links,
            }) => (probed, links),
            Ok(ChildOutcome {
                value: Err(refusal),
                ..
            }) => return Ok(Err((file, refusal))),
            Err(error) => return Ok(Err((file, error.into()))),
        };
        let links = match probed.take_links(links) {
            Ok(links) => links,
            Err(refusal) => return Ok(Err((file, refusal))),
        };
        Ok(Ok(AttachedFile {
            file_number: number,
            kind,
            tenant,
            functions: probed.functions,
            links,
            change_watches: probed.change_watches,
            is_kept: false,
            unmapped_since: None,
            exclusion_reason: None,
            lacks_windows: false,
            misses_window: false,
            is_deferred: false,
            file,
        }))
    }
}

/// Attaches probes to the functions of a file, and watches the file for changes. Runs in a child process.
fn probe_file(
    kernel: &KernelPrograms,
    changes: BorrowedFd<'_>,
    (file, access): (&ForeignFile, &Path),
    mut functions: Vec<FoundFunction>,
    plan: &AttachPlan,
    handover: &DescriptorHandover<'_>,
) -> ProbedFile {
    // The file is watched before probes are attached, so that no write goes unnoticed.
    let change_watches = file_changes::watch_file(changes, file, access);
    let attach = |targets: &[ProbeTarget]| {
        AttachedFunctionSet::attach_functions(kernel, file, targets, handover)
    };
    let mut frequent_links = Vec::new();
    for symbol in frequent_symbols(&functions) {
        if plan.sampled_symbols.contains(&symbol) {
            set_attach_mode(&mut functions, symbol, &AttachMode::Sampled);
        } else if !plan.are_probes_off {
            let targets = probe_targets(&functions, |function| function.symbol == symbol);
            frequent_links.push((symbol, attach(&targets)));
        }
    }
    // Last, because a process whose `cuInit` is probed counts as completely covered.
    let infrequent_links = (!plan.are_probes_off).then(|| attach(&infrequent_targets(&functions)));
    ProbedFile {
        functions,
        frequent_links,
        infrequent_links,
        change_watches,
    }
}

impl AsFd for FileTask {
    /// A descriptor that is readable when the child process may have a result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.task.as_fd()
    }
}
