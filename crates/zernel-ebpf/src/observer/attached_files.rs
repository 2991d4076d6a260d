//! The library files that probes are attached to.
//!
//! Probes stay attached while a process may still map the file, so that a process that starts later is counted from
//! its first call. All functions of a file that programs call rarely share links. Each frequently called function has
//! its own link, so that the governor can detach that link or attach it for a sampling window.
//!
//! Library files belong to other users. Child processes ([`ChildTask`]) read these files and attach to them, and hand
//! the links over.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::file_changes::WatchId;
use super::file_task::AttachPlan;
use super::found_functions::{
    AttachMode, FoundFunction, frequent_symbols, infrequent_targets, probe_targets,
    refuse_infrequent, set_attach_mode,
};
use super::kernel::{KernelPrograms, ProbeTarget};
use crate::capability::{error_number, innermost_reason};
use crate::child_task::{ChildOutcome, ChildTask, ChildTaskError, DescriptorHandover};
use crate::foreign_file::ForeignFile;
use crate::probe_link::{ProbeLink, detach_links, release_links};
use zernel_elf::LibraryKind;
use zernel_identity::Tenant;

/// Why probes are detached from a file that was written to.
pub(crate) const WRITTEN_TO_REASON: &str = "the file was written to after probes were attached";
/// How long attaching to a library may take that was read before. The observer's thread waits for it.
const MAX_ATTACH_TIME: Duration = Duration::from_millis(500);
/// How long probes stay on a file that no process maps.
const MAX_UNMAPPED_TIME: Duration = Duration::from_secs(600);
/// Number of files that child processes attach probes to at the same time.
const MAX_FILES_LINKED_AT_ONCE: usize = 6;
/// Stands for the tenant of a file that several tenants map: a uid that no user has.
pub(super) const SHARED_FILE_TENANT: Tenant = Tenant::User(u32::MAX);

/// The result of attaching probes to a set of functions in a child process: the number of links that it handed over.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AttachedFunctionSet {
    links: usize,
    /// Why some probes of the set could not be attached. All other probes of the set are then detached.
    problem: Option<LinkProblem>,
}

/// Why the kernel refuses probes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LinkProblem {
    pub(super) text: String,
    /// Whether the kernel may have refused the probes because of a process that maps the file, and not because of the
    /// file.
    pub(super) is_temporary: bool,
}

impl LinkProblem {
    /// The kernel changes the code in every process that maps a file, and one where it cannot do that is enough. A user can cause
    /// that, for example with a `userfaultfd` on a mapping of a library on tmpfs.
    fn new(error: &libbpf_rs::Error) -> Self {
        let passing = [Errno::FAULT, Errno::NOMEM, Errno::INTR, Errno::AGAIN];
        Self {
            text: format!(
                "the kernel refuses the probes ({})",
                innermost_reason(error)
            ),
            is_temporary: error_number(error).is_some_and(|number| {
                let mut passing = passing.iter();
                passing.any(|errno| errno.raw_os_error() == number)
            }),
        }
    }
}

impl AttachedFunctionSet {
    /// Attaches probes to functions of a file. Runs in a child process.
    pub(super) fn attach_functions(
        kernel: &KernelPrograms,
        file: &ForeignFile,
        targets: &[ProbeTarget],
        handover: &DescriptorHandover<'_>,
    ) -> Self {
        let access = file.reopen_path();
        let (links, attached) = handover
            .attach_and_hand_over(|take| kernel.attach_and_pass_links(&access, targets, take));
        Self {
            links,
            problem: attached.err().as_ref().map(LinkProblem::new),
        }
    }

    /// Takes the links of a file out of the links that the child process handed over.
    pub(super) fn take_handed_over(
        self,
        handed_over: &mut impl Iterator<Item = ProbeLink>,
    ) -> Result<Vec<ProbeLink>, LinkProblem> {
        let links = handed_over.take(self.links).collect();
        match self.problem {
            None => Ok(links),
            Some(problem) => Err(problem),
        }
    }
}

/// A file that probes are attached to.
pub(crate) struct AttachedFile {
    /// Identifies the file. Numbers are not reused.
    pub(crate) file_number: u64,
    pub(crate) kind: LibraryKind,
    pub(crate) functions: Vec<FoundFunction>,
    pub(crate) file: ForeignFile,
    /// The tenant of the first process that mapped the file, or [`SHARED_FILE_TENANT`].
    pub(super) tenant: Tenant,
    pub(super) links: FileLinks,
    pub(super) change_watches: Vec<WatchId>,
    /// Whether the file is an installed library, to which probes stay attached although no process maps it.
    pub(super) is_kept: bool,
    /// Since when no process maps the file.
    pub(super) unmapped_since: Option<Instant>,
    /// Why the file's probes are detached for a while; `None` while they are attached.
    pub(super) exclusion_reason: Option<Arc<str>>,
    /// Whether the probes of the file could not be attached for a reason that may pass. The next scan tries again to
    /// attach them.
    pub(super) is_deferred: bool,
    /// Whether the probes of a sampling window could not be attached for a reason that may pass. Then the file has no
    /// sampling windows until the next scan.
    pub(super) lacks_windows: bool,
    /// Whether the sampled functions of the file had no probes in the last sampling window, or only in a part of it.
    pub(super) misses_window: bool,
}

/// The links of a file.
#[derive(Debug, Default)]
pub(super) struct FileLinks {
    pub(super) infrequent_links: Vec<ProbeLink>,
    /// Links of permanently probed frequent functions, by index in `SYMBOLS`.
    pub(super) frequent_links: BTreeMap<usize, Vec<ProbeLink>>,
    pub(super) window_links: Vec<ProbeLink>,
}

/// Links of several sets of functions of one file, in the order in which they were asked for.
type AttachedFunctionSets = Vec<AttachedFunctionSet>;

impl AttachedFile {
    /// Starts to attach probes to several sets of functions.
    fn start_linking(
        &self,
        kernel: &KernelPrograms,
        sets: &[Vec<ProbeTarget>],
    ) -> Result<ChildTask<AttachedFunctionSets>, ChildTaskError> {
        let mut kept = kernel.program_descriptors();
        kept.push(self.file.as_fd());
        ChildTask::start(&self.tenant, MAX_ATTACH_TIME, &kept, |handover| {
            let attach = |set: &Vec<ProbeTarget>| {
                AttachedFunctionSet::attach_functions(kernel, &self.file, set, handover)
            };
            sets.iter().map(attach).collect()
        })
    }

    /// Attaches probes to several sets of functions. If the child process fails, the next scan tries again.
    fn link_function_sets(
        &mut self,
        kernel: &KernelPrograms,
        sets: &[Vec<ProbeTarget>],
    ) -> Vec<Result<Vec<ProbeLink>, LinkProblem>> {
        let links = match finish_linking(self.start_linking(kernel, sets)) {
            Ok(links) => links,
            Err(error) => {
                self.detach_until_next_scan(&error.to_string());
                return Vec::new();
            }
        };
        let mut problems = links.iter().filter_map(|set| set.as_ref().err());
        match problems.find(|problem| problem.is_temporary) {
            Some(problem) => {
                self.detach_until_next_scan(&problem.text);
                Vec::new()
            }
            None => links,
        }
    }

    /// Detaches the file's probes until the next scan.
    fn detach_until_next_scan(&mut self, reason: &str) {
        self.detach_for_exclusion(reason);
        self.is_deferred = true;
    }

    /// Tries again to attach the file's probes.
    pub(crate) fn retry_attaching(&mut self, kernel: &KernelPrograms) {
        self.lacks_windows = false;
        if std::mem::take(&mut self.is_deferred) {
            self.end_exclusion(kernel);
        }
    }

    /// Whether any function of the file is probed, permanently or in sampling windows.
    pub(crate) fn has_probes(&self) -> bool {
        let mut functions = self.functions.iter();
        functions.any(|function| !matches!(function.mode, AttachMode::NotAttached(_)))
    }

    /// Its watches in [`FileChanges`].
    pub(crate) fn change_watches(&self) -> impl Iterator<Item = WatchId> {
        self.change_watches.iter().copied()
    }

    /// Records whether a process maps the file now.
    pub(crate) fn record_mapped(&mut self, is_used: bool) {
        self.unmapped_since = match is_used {
            true => None,
            false => self.unmapped_since.or_else(|| Some(Instant::now())),
        };
    }

    /// Whether probes on the file may still count calls. Probes stay attached for a while to a file that no process maps,
    /// because its program may start again.
    pub(crate) fn is_useful(&self) -> bool {
        let Some(since) = self.unmapped_since else {
            return true;
        };
        let may_be_mapped = self.file.is_unchanged() && !self.file.is_deleted();
        may_be_mapped && (self.is_kept || since.elapsed() < MAX_UNMAPPED_TIME)
    }

    /// Attaches and detaches the file's probes as the plan of sampled functions demands now. The plan may have
    /// changed while a child process attached to the file.
    pub(crate) fn apply_attach_plan(&mut self, kernel: &KernelPrograms, plan: &AttachPlan) {
        for symbol in frequent_symbols(&self.functions) {
            let mut functions = self.functions.iter();
            let is_sampled =
                functions.any(|it| it.symbol == symbol && it.mode == AttachMode::Sampled);
            match (plan.sampled_symbols.contains(&symbol), is_sampled) {
                (true, false) => detach_links(self.switch_to_sampling(symbol)),
                (false, true) => self.attach_permanently(kernel, symbol),
                _ => {}
            }
        }
        if plan.are_probes_off {
            self.pause_probes();
        } else if self.links.infrequent_links.is_empty() {
            self.resume_probes(kernel);
        }
    }

    /// Whether all probes of the file are detached until the next scan.
    pub(crate) fn is_detached_until_scan(&self) -> bool {
        self.is_deferred && self.exclusion_reason.is_some()
    }

    /// A sentence for users, if it has no probes or no sampling windows until the next scan.
    pub(crate) fn describe_wait_for_scan(&self) -> Option<String> {
        let path = self.file.path.display();
        match self
            .exclusion_reason
            .as_ref()
            .filter(|_| self.is_detached_until_scan())
        {
            Some(reason) => Some(format!("{path} has no probes for some seconds: {reason}")),
            None if self.lacks_windows => Some(format!(
                "{path} is not sampled for some seconds: its probes could not be attached in time"
            )),
            None => None,
        }
    }

    /// Detaches the file's probes for a while, and stores the reason.
    pub(crate) fn detach_for_exclusion(&mut self, reason: &str) {
        self.is_deferred = false;
        self.exclusion_reason = Some(reason.into());
        release_links(self.take_links());
    }

    /// Attaches the file's probes again after its processes were excluded.
    pub(crate) fn end_exclusion(&mut self, kernel: &KernelPrograms) {
        if self.exclusion_reason.take().is_some() {
            self.resume_probes(kernel);
        }
    }

    /// Attaches probes to a frequent function all the time.
    pub(crate) fn attach_permanently(&mut self, kernel: &KernelPrograms, symbol: usize) {
        if self.exclusion_reason.is_some() {
            set_attach_mode(&mut self.functions, symbol, &AttachMode::Permanent);
            return;
        }
        set_attach_mode(&mut self.functions, symbol, &AttachMode::Permanent);
        let targets = probe_targets(&self.functions, |function| function.symbol == symbol);
        for links in self.link_function_sets(kernel, &[targets]) {
            self.add_permanent(symbol, links);
        }
    }

    fn add_permanent(&mut self, symbol: usize, links: Result<Vec<ProbeLink>, LinkProblem>) {
        let mode = match links {
            Ok(links) => {
                self.links.frequent_links.insert(symbol, links);
                AttachMode::Permanent
            }
            Err(problem) => AttachMode::NotAttached(problem.text),
        };
        set_attach_mode(&mut self.functions, symbol, &mode);
    }

    /// Samples a frequent function from now on. Returns the function's permanent links: dropping them detaches the
    /// probes, which takes a while.
    pub(crate) fn switch_to_sampling(&mut self, symbol: usize) -> Vec<ProbeLink> {
        set_attach_mode(&mut self.functions, symbol, &AttachMode::Sampled);
        self.links
            .frequent_links
            .remove(&symbol)
            .unwrap_or_default()
    }

    /// Detaches all probes of the file, and remembers for [`Self::resume_probes`] which of them were attached
    /// permanently.
    pub(crate) fn pause_probes(&mut self) {
        detach_links(self.take_links());
    }

    /// Takes out all links of the file. Dropping the links detaches the file's probes.
    fn take_links(&mut self) -> Vec<ProbeLink> {
        self.misses_window |= !self.links.window_links.is_empty();
        let frequent = std::mem::take(&mut self.links.frequent_links);
        let mut links: Vec<ProbeLink> = frequent.into_values().flatten().collect();
        links.append(&mut self.links.infrequent_links);
        links.append(&mut self.links.window_links);
        links
    }

    /// Attaches the probes of the file again that [`Self::pause_probes`] detached.
    pub(crate) fn resume_probes(&mut self, kernel: &KernelPrograms) {
        if self.exclusion_reason.is_some() {
            return;
        }
        let is_permanent = |symbol: &usize| {
            let mut functions = self.functions.iter();
            functions.any(|it| it.symbol == *symbol && it.mode == AttachMode::Permanent)
        };
        let mut permanent = frequent_symbols(&self.functions);
        permanent.retain(is_permanent);
        let of = |symbol: &usize| probe_targets(&self.functions, |it| it.symbol == *symbol);
        let mut sets: Vec<Vec<ProbeTarget>> = permanent.iter().map(of).collect();
        // Last, because a process whose `cuInit` is probed counts as completely covered.
        sets.push(infrequent_targets(&self.functions));
        let mut links = self.link_function_sets(kernel, &sets).into_iter();
        for symbol in permanent {
            if let Some(links) = links.next() {
                self.add_permanent(symbol, links);
            }
        }
        match links.next() {
            Some(Ok(links)) => self.links.infrequent_links = links,
            Some(Err(problem)) => refuse_infrequent(&mut self.functions, &problem.text),
            None => {}
        }
    }

    /// Detaches all probes of the file for good, and stores the reason.
    pub(crate) fn detach_for_good(&mut self, reason: &str) {
        release_links(self.take_links());
        self.change_watches.clear();
        for function in &mut self.functions {
            if function.site.is_some() {
                function.mode = AttachMode::NotAttached(reason.to_owned());
            }
        }
    }

    /// Closes the file's sampling window and returns its links. Dropping the links detaches the probes, which takes a
    /// while.
    pub(crate) fn close_window(&mut self) -> Vec<ProbeLink> {
        std::mem::take(&mut self.links.window_links)
    }
}

/// Detaches the probes of all these files at once, and remembers for [`AttachedFile::resume_probes`] which of them
/// were attached permanently.
pub(crate) fn pause_files<'a>(files: impl Iterator<Item = &'a mut AttachedFile>) {
    detach_links(files.flat_map(AttachedFile::take_links).collect());
}

/// Detaches from files for good.
pub(crate) fn drop_files(files: impl Iterator<Item = AttachedFile>) {
    release_links(files.flat_map(|mut file| file.take_links()).collect());
}

/// Waits for the links that a child process attaches, and returns one result per set of functions.
fn finish_linking(
    task: Result<ChildTask<AttachedFunctionSets>, ChildTaskError>,
) -> Result<Vec<Result<Vec<ProbeLink>, LinkProblem>>, ChildTaskError> {
    let late = ChildTaskError::TimedOut(MAX_ATTACH_TIME);
    let outcome =
        task.and_then(|mut task| task.wait_for_result(MAX_ATTACH_TIME).unwrap_or(Err(late)));
    outcome.map(|ChildOutcome { value, links }| {
        let mut links = links.into_iter();
        let sets = value.into_iter();
        sets.map(|set| set.take_handed_over(&mut links)).collect()
    })
}

/// Calls `attach`, which attaches probes, for each of these files. After a file of a tenant did not answer, the tenant's
/// other files are left to the next scan.
pub(crate) fn attach_each_file<'a>(
    files: impl Iterator<Item = &'a mut AttachedFile>,
    attach: impl Fn(&mut AttachedFile),
) {
    let mut slow = BTreeSet::new();
    for file in files {
        if slow.contains(&file.tenant) && !file.is_deferred {
            file.detach_until_next_scan(&ChildTaskError::TimedOut(MAX_ATTACH_TIME).to_string());
        }
        attach(file);
        if file.is_deferred {
            slow.insert(file.tenant.clone());
        }
    }
}

/// Attaches probes to all sampled functions of these files, for a sampling window, and records which files have none. If
/// the kernel refuses the probes of a file for good, all probes of that file are detached. If the reason may pass, as on a
/// machine that is too busy, the file's other probes stay attached, and the file has no windows until the next scan.
pub(crate) fn attach_for_window<'a>(
    kernel: &KernelPrograms,
    files: impl Iterator<Item = &'a mut AttachedFile>,
) {
    let mut files = files.filter_map(|file| {
        let sampled = probe_targets(&file.functions, |it| it.mode == AttachMode::Sampled);
        file.misses_window = !sampled.is_empty();
        let may_attach = file.exclusion_reason.is_none() && !file.lacks_windows;
        (file.misses_window && may_attach).then_some((file, sampled))
    });
    let mut slow = BTreeSet::new();
    loop {
        let some = files
            .by_ref()
            .filter(|(file, _)| !slow.contains(&file.tenant));
        let started: Vec<_> = some
            .take(MAX_FILES_LINKED_AT_ONCE)
            .map(|(file, sampled)| {
                let task = file.start_linking(kernel, &[sampled]);
                (file, task)
            })
            .collect();
        if started.is_empty() {
            return;
        }
        for (file, task) in started {
            match finish_linking(task).map(|mut sets| sets.pop()) {
                Ok(Some(Ok(links))) => {
                    file.links.window_links = links;
                    file.misses_window = false;
                }
                Ok(Some(Err(problem))) if problem.is_temporary => file.lacks_windows = true,
                Ok(Some(Err(problem))) => file.detach_for_good(&problem.text),
                Ok(None) => {}
                Err(_) => {
                    slow.insert(file.tenant.clone());
                    file.lacks_windows = true;
                }
            }
        }
    }
}
