//! A library file that a child process reads and attaches to.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zernel_elf::{Library, LibraryError, LibraryKind};
use zernel_identity::Tenant;
use zernel_model::snapshot::RefusalCause;

use super::changes::{self, Changes, WatchId};
use super::files::{AttachedFile, Links, ProbeLink, link};
use super::functions::{
    AttachMode, Function, find_functions, frequent_symbols, infrequent_targets, refuse_infrequent,
    set_mode, targets,
};
use super::kernel::Kernel;
use crate::child_task::{ChildTask, Outcome, TaskError};
use crate::foreign_file::ForeignFile;

/// How long a file system may take to deliver what is read of a library: a slow one, not a dead one.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// Why no probe can be attached to a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) cause: RefusalCause,
    pub(crate) reason: String,
}

impl From<LibraryError> for Refusal {
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

impl From<TaskError> for Refusal {
    fn from(error: TaskError) -> Self {
        Self {
            cause: match error {
                TaskError::TimedOut(_) | TaskError::TooMany => RefusalCause::NoAnswer,
                TaskError::Died | TaskError::NotStarted => RefusalCause::Unreadable,
            },
            reason: error.to_string(),
        }
    }
}

/// What a child process found in a file and did with it. The links come as descriptors: those of the infrequent functions
/// first, then those of each frequent one.
#[derive(Debug, Serialize, Deserialize)]
struct ProbedFile {
    functions: Vec<Function>,
    infrequent_links: usize,
    /// Frequent functions that are attached permanently, with their numbers of links.
    frequent_links: Vec<(usize, usize)>,
    change_watches: Vec<WatchId>,
}

/// A file that a child process reads and attaches to.
pub(crate) struct FileTask {
    pub(crate) kind: LibraryKind,
    pub(crate) file: ForeignFile,
    pub(crate) tenant: Tenant,
    task: ChildTask<Result<ProbedFile, Refusal>>,
}

/// How probes are attached to a new file.
pub(crate) struct AttachPlan {
    /// The functions that are sampled.
    pub(crate) sampled: BTreeSet<usize>,
    /// Whether all probes are detached for now.
    pub(crate) is_off: bool,
}

impl FileTask {
    /// Starts to attach to a file, which was found at `access` and is mapped by a process of `tenant`.
    pub(crate) fn start(
        kernel: &Kernel,
        changes: &Changes,
        kind: LibraryKind,
        file: ForeignFile,
        (tenant, access): (&Tenant, &Path),
        plan: &AttachPlan,
    ) -> Result<Self, Refusal> {
        let mut kept = kernel.program_descriptors();
        kept.extend([file.as_fd(), changes.as_fd()]);
        let work = || probe_file(kernel, changes.as_fd(), kind, &file, access, plan);
        let task = ChildTask::start(tenant, READ_LIMIT, &kept, work)?;
        Ok(Self {
            kind,
            file,
            tenant: tenant.clone(),
            task,
        })
    }

    /// The result, waiting for at most `patience`; gives the task back if there is none yet.
    pub(crate) fn finish(
        mut self,
        patience: Duration,
        number: u64,
    ) -> Result<Result<AttachedFile, (ForeignFile, Refusal)>, Box<Self>> {
        let Some(result) = self.task.wait(patience) else {
            return Err(Box::new(self));
        };
        let Self {
            kind, file, tenant, ..
        } = self;
        let (probed, mut links) = match result {
            Ok(Outcome {
                value: Ok(probed),
                descriptors,
            }) => (probed, descriptors.into_iter()),
            Ok(Outcome {
                value: Err(refusal),
                ..
            }) => return Ok(Err((file, refusal))),
            Err(error) => return Ok(Err((file, error.into()))),
        };
        let mut take = |count: usize| links.by_ref().take(count).collect::<Vec<ProbeLink>>();
        Ok(Ok(AttachedFile {
            number,
            kind,
            tenant,
            functions: probed.functions,
            links: Links {
                infrequent: take(probed.infrequent_links),
                frequent: probed
                    .frequent_links
                    .into_iter()
                    .map(|(symbol, count)| (symbol, take(count)))
                    .collect(),
                window: Vec::new(),
            },
            change_watches: probed.change_watches,
            is_kept: false,
            unused_since: None,
            rest: None,
            is_deferred: false,
            file,
        }))
    }
}

/// Reads a file, attaches to its functions and watches it for changes. Runs in a child process.
fn probe_file(
    kernel: &Kernel,
    changes: BorrowedFd<'_>,
    kind: LibraryKind,
    file: &ForeignFile,
    access: &Path,
    plan: &AttachPlan,
) -> Outcome<Result<ProbedFile, Refusal>> {
    let found = Library::open(&file.reopen_path())
        .and_then(|library| find_functions(kind, &library).map(|functions| (library, functions)));
    let (_library, functions) = match found {
        Ok(found) => found,
        Err(error) => {
            return Outcome {
                value: Err(error.into()),
                descriptors: Vec::new(),
            };
        }
    };
    let mut probed = ProbedFile {
        functions,
        infrequent_links: 0,
        frequent_links: Vec::new(),
        // Before probes are attached, so that no write goes unnoticed.
        change_watches: changes::watch(changes, file, access),
    };
    let mut frequent = Vec::new();
    for symbol in frequent_symbols(&probed.functions) {
        let targets = targets(&probed.functions, |function| function.symbol == symbol);
        if plan.sampled.contains(&symbol) {
            set_mode(&mut probed.functions, symbol, &AttachMode::Sampled);
        } else if !plan.is_off {
            match link(kernel, file, &targets) {
                Ok(links) => {
                    probed.frequent_links.push((symbol, links.len()));
                    frequent.extend(links);
                }
                Err(problem) => {
                    let mode = AttachMode::NotAttached(problem);
                    set_mode(&mut probed.functions, symbol, &mode);
                }
            }
        }
    }
    // Last, because a process whose `cuInit` is probed counts as completely covered.
    let mut links = Vec::new();
    if !plan.is_off {
        match link(kernel, file, &infrequent_targets(&probed.functions)) {
            Ok(infrequent) => links = infrequent,
            Err(problem) => refuse_infrequent(&mut probed.functions, &problem),
        }
    }
    probed.infrequent_links = links.len();
    links.append(&mut frequent);
    Outcome {
        value: Ok(probed),
        descriptors: links,
    }
}

impl AsFd for FileTask {
    /// Readable when there may be a result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.task.as_fd()
    }
}
