//! The cgroups (version 2) of a workload: created before the workers start, removed after the last
//! worker exits.
//!
//! The workload's cgroups are created below the caller's cgroup. If the caller's cgroup cannot give them the
//! controllers that their settings need, they are created beside it: a cgroup that holds processes cannot have children
//! with settings, except for the root and for threaded cgroups.
//!
//! A small process, the janitor, removes the workload's cgroups and disables the controllers that were enabled for
//! them. The janitor waits for a byte from the caller or for the end of a pipe that only the caller and its children
//! hold. So it also cleans up after a `kill -9` of the caller.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{
    Access, AtFlags, CWD, Mode, OFlags, XattrFlags, access, getxattr, openat, removexattr,
    setxattr, unlinkat,
};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::clock;
use crate::config::CloneMode;
use crate::error::{Error, Result};
use crate::handle::WorkloadHandle;
use crate::spec_keys::spec_table;
use crate::sys::{process, signal};
use crate::topology::{CpuSet, format_cpu_list};

/// How long the janitor tries to remove a cgroup whose last processes are still dying.
const REMOVAL_LIMIT_NS: u64 = 10_000_000_000;
const REMOVAL_RETRY_NS: u64 = 2_000_000;
/// The file that lists the controllers of a cgroup.
const CONTROLLERS_FILE: &str = "cgroup.controllers";
/// The file that lists the controllers that a cgroup gives its children.
const SUBTREE_CONTROL_FILE: &str = "cgroup.subtree_control";
const CGROUP_TYPE_FILE: &str = "cgroup.type";

spec_table! {
    /// A cgroup as a workload file states it.
    #[derive(Eq)]
    pub struct CgroupSpec {
        /// Name of the cgroup, made of letters, digits, `-`, `_` and `.`; unique. It is created below
        /// the caller's cgroup, or beside it where the caller's cannot have such children.
        pub name: String = String::new(),
        shown as "required",
        /// Names of the groups whose workers run in it. A group is in at most one cgroup.
        pub groups: Vec<String> = Vec::new(),
        /// CPUs that the tasks of the cgroup may use (`cpuset.cpus`).
        pub cpus: Option<CpuSet> = None,
        /// Weight of the cgroup's share of CPU time, 1 to 10000 (`cpu.weight`); the kernel's default is 100.
        pub weight: Option<u32> = None,
        /// CPU time that all tasks of the cgroup together may use per 100 ms, in milliseconds, at least 1 (`cpu.max`).
        pub max_ms_per_100ms: Option<u64> = None,
    }
}

impl CgroupSpec {
    pub(crate) fn check_settings(&self) -> Result<()> {
        let invalid = |field, problem: &str| Err(Error::invalid(&self.name, field, problem));
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        if self.name.is_empty() || self.name.starts_with('.') || !self.name.chars().all(is_plain) {
            return invalid(
                "name",
                "the name of a cgroup is made of letters, digits, `-`, `_` and `.`",
            );
        }
        if self
            .weight
            .is_some_and(|weight| !(1..=10_000).contains(&weight))
        {
            return invalid("weight", "a weight is between 1 and 10000");
        }
        if self.cpus.as_ref().is_some_and(CpuSet::is_empty) {
            return invalid("cpus", "an empty set of CPUs; name at least one");
        }
        if self.max_ms_per_100ms == Some(0) {
            return invalid(
                "max_ms_per_100ms",
                "0 would stop its tasks for ever; use at least 1",
            );
        }
        Ok(())
    }

    /// The controllers that the settings of this cgroup need.
    fn needed_controllers(&self) -> impl Iterator<Item = &'static str> {
        self.files_and_values()
            .map(|(_, file, _)| controller_of(file))
    }

    /// For each setting of this cgroup: the name of the field, the cgroup file that holds the setting, and the text to
    /// write to the file.
    fn files_and_values(&self) -> impl Iterator<Item = (&'static str, &'static str, String)> {
        let cpus = self
            .cpus
            .as_ref()
            .map(|cpus| ("cpus", "cpuset.cpus", format_cpu_list(cpus)));
        let weight = self
            .weight
            .map(|weight| ("weight", "cpu.weight", weight.to_string()));
        let quota = |ms: u64| {
            (
                "max_ms_per_100ms",
                "cpu.max",
                format!("{} 100000", ms.saturating_mul(1000)),
            )
        };
        [cpus, weight, self.max_ms_per_100ms.map(quota)]
            .into_iter()
            .flatten()
    }
}

/// The controller that a cgroup file belongs to: `cpu` for `cpu.weight`.
fn controller_of(file: &str) -> &str {
    file.split('.').next().unwrap_or(file)
}

/// Names of cgroup controllers.
type ControllerNames = BTreeSet<&'static str>;

/// The controllers that a file of a cgroup lists, as far as workloads use them.
fn listed_controllers(folder: &Path, file: &str) -> ControllerNames {
    let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
    let is_listed = |name: &&str| text.split_whitespace().any(|other| other == *name);
    ["cpu", "cpuset"].into_iter().filter(is_listed).collect()
}

/// The extended attribute that marks a controller as enabled by a workload. The last workload disables it.
fn controller_mark_attribute(controller: &str) -> String {
    format!("user.zernel.{controller}")
}

/// The controllers that a cgroup gives its children and that no workload has enabled.
fn controllers_enabled_by_others(folder: &Path) -> ControllerNames {
    let mut given = listed_controllers(folder, SUBTREE_CONTROL_FILE);
    given.retain(|name| getxattr(folder, controller_mark_attribute(name), &mut [0; 8]).is_err());
    given
}

/// Controllers that a cgroup gives its children for as long as the workload lives.
#[derive(Debug)]
struct EnabledControllers {
    folder: PathBuf,
    controllers: ControllerNames,
}

impl EnabledControllers {
    /// Marks these controllers as enabled by a workload. Without extended attributes, overlapping workloads may leave
    /// them enabled.
    fn mark_enabled(&self) {
        for name in &self.controllers {
            let _ = setxattr(
                &self.folder,
                controller_mark_attribute(name),
                b"1",
                XattrFlags::empty(),
            );
        }
    }
}

/// The place in the hierarchy where the cgroups of a workload are created.
#[derive(Debug)]
struct CgroupSite {
    parent: PathBuf,
    /// The controllers that the workload's cgroups, the children of `parent`, can have.
    controllers: ControllerNames,
    /// The controllers to enable for the children of `parent` and of its ancestors, nearest cgroup first.
    controllers_to_enable: Vec<EnabledControllers>,
}

impl CgroupSite {
    /// Chooses the cgroup nearest to the caller whose children can have all `controllers`, or else the caller's own
    /// cgroup without controllers.
    fn find_nearest(mut controllers: ControllerNames, mode: CloneMode) -> Option<Self> {
        let (root, own) = root_and_own_cgroup_folders()?;
        // A controller that the machine lacks is reported when a setting that needs it is written.
        let available = listed_controllers(&root, CONTROLLERS_FILE);
        controllers.retain(|name| available.contains(name));
        let is_inside = |folder: &&Path| folder.starts_with(&root);
        let lineage: Vec<&Path> = own.ancestors().take_while(is_inside).collect();
        // A thread can be moved only within the threaded subtree of its process.
        let places = match mode {
            CloneMode::Thread => 1,
            CloneMode::Fork => lineage.len(),
        };
        let place = (0..places).find_map(|place| {
            let changes = controllers_to_enable(&lineage[place..], &controllers, mode)?;
            Some((lineage[place].to_owned(), changes))
        });
        Some(match place {
            Some((parent, changes)) => Self {
                parent,
                controllers,
                controllers_to_enable: changes,
            },
            None => Self {
                parent: own,
                controllers: ControllerNames::new(),
                controllers_to_enable: Vec::new(),
            },
        })
    }
}

/// The changes by which the children of the first cgroup of `lineage` get `controllers`. The last cgroup of `lineage`
/// has these controllers. Returns `None` if the changes are impossible, or if a cgroup that holds processes would have
/// to change.
fn controllers_to_enable(
    lineage: &[&Path],
    controllers: &ControllerNames,
    mode: CloneMode,
) -> Option<Vec<EnabledControllers>> {
    let parent = lineage
        .first()
        .filter(|parent| can_hold_worker_cgroups(parent, mode))?;
    let mut changes = Vec::new();
    for folder in lineage {
        let missing = controllers - &controllers_enabled_by_others(folder);
        if missing.is_empty() {
            return Some(changes);
        }
        let is_thread_root = mode == CloneMode::Thread && folder == parent;
        if !(is_thread_root || is_hierarchy_root(folder) || holds_no_processes(folder)) {
            return None;
        }
        changes.push(EnabledControllers {
            folder: folder.to_path_buf(),
            controllers: missing,
        });
    }
    Some(changes)
}

/// Whether this process can make cgroups below `folder` that hold workers of this mode.
fn can_hold_worker_cgroups(folder: &Path, mode: CloneMode) -> bool {
    let kind = fs::read_to_string(folder.join(CGROUP_TYPE_FILE)).unwrap_or_default();
    // A process cannot be in a threaded subtree that another process has made.
    let fits =
        mode == CloneMode::Thread || is_hierarchy_root(folder) || kind.trim_end() == "domain";
    fits && access(folder, Access::WRITE_OK).is_ok()
}

/// Whether `folder` is the root of the whole cgroup hierarchy, which may hold processes and have children with
/// settings.
fn is_hierarchy_root(folder: &Path) -> bool {
    !folder.join(CGROUP_TYPE_FILE).exists()
}

fn holds_no_processes(folder: &Path) -> bool {
    fs::read_to_string(folder.join("cgroup.procs")).is_ok_and(|pids| pids.is_empty())
}

/// Enables controllers for the children of a cgroup. A controller that cannot be enabled is reported when a setting
/// that needs it is written.
fn enable_controllers(folder: &Path, controllers: &ControllerNames) {
    for name in controllers {
        let _ = write_cgroup_file(folder, SUBTREE_CONTROL_FILE, &format!("+{name}"));
    }
}

/// The cgroups of a running workload.
#[derive(Debug, Default)]
pub(crate) struct WorkloadCgroups {
    created: Vec<(CgroupSpec, PathBuf)>,
    janitor: Option<CgroupJanitor>,
    not_applied: Vec<String>,
}

impl WorkloadCgroups {
    /// Creates the cgroups and applies their settings. The settings and cgroups that failed are listed in the
    /// workload's report.
    pub(crate) fn create(specs: &[CgroupSpec], mode: CloneMode) -> Self {
        let mut cgroups = Self::default();
        if specs.is_empty() {
            return cgroups;
        }
        if let Err(problem) = cgroups.create_folders(specs, mode) {
            let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
            cgroups.not_applied.push(format!(
                "cgroups {names:?}: {problem}; their groups run in the caller's cgroup"
            ));
            cgroups.created.clear();
        }
        cgroups
    }

    fn create_folders(
        &mut self,
        specs: &[CgroupSpec],
        mode: CloneMode,
    ) -> std::result::Result<(), String> {
        static NEXT_FOLDER_NUMBER: AtomicU32 = AtomicU32::new(0);
        let needed = specs
            .iter()
            .flat_map(CgroupSpec::needed_controllers)
            .collect();
        let site =
            CgroupSite::find_nearest(needed, mode).ok_or("no cgroup v2 file system is mounted")?;
        let number = NEXT_FOLDER_NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("zernel-{}-{number}", std::process::id());
        let top = site.parent.join(name);
        let folders: Vec<PathBuf> = specs.iter().map(|spec| top.join(&spec.name)).collect();
        let janitor =
            CgroupJanitor::start(folders.iter().chain([&top]), &site.controllers_to_enable);
        let no_janitor = |error| format!("cannot start the process that removes them: {error}");
        self.janitor = Some(janitor.map_err(no_janitor)?);
        make_folder(&top)?;
        // The folder becomes threaded before it gets controllers: only a threaded subtree may have controllers and
        // processes in the same cgroup.
        if mode == CloneMode::Thread {
            make_cgroup_threaded(&top)?;
        }
        for change in site.controllers_to_enable.iter().rev() {
            change.mark_enabled();
            enable_controllers(&change.folder, &change.controllers);
        }
        enable_controllers(&top, &site.controllers);
        for (spec, folder) in specs.iter().zip(folders) {
            make_folder(&folder)?;
            if mode == CloneMode::Thread {
                make_cgroup_threaded(&folder)?;
            }
            self.apply_settings(spec, &folder);
            self.created.push((spec.clone(), folder));
        }
        Ok(())
    }

    fn apply_settings(&mut self, spec: &CgroupSpec, folder: &Path) {
        for (field, file, text) in spec.files_and_values() {
            if let Err(error) = write_cgroup_file(folder, file, &text) {
                let (name, controller) = (&spec.name, controller_of(file));
                self.not_applied.push(format!(
                    "cgroup `{name}`, field `{field}`: cannot write `{text}` to {file}: {error}; \
                     the machine does not have the `{controller}` controller, or the caller's cgroup and \
                     those above it cannot give it: they hold processes or are not ours to change"
                ));
            }
        }
    }

    /// Moves the workers of each cgroup's groups into the cgroup.
    pub(crate) fn move_workers_into_cgroups(&mut self, handle: &WorkloadHandle) {
        for (spec, folder) in &self.created {
            for group in &spec.groups {
                for (file, id) in files_and_task_ids(handle, group) {
                    if let Err(error) = write_cgroup_file(folder, file, &id.to_string()) {
                        let name = &spec.name;
                        self.not_applied
                            .push(format!("cgroup `{name}`: cannot move task {id} of group `{group}` there: {error}"));
                    }
                }
            }
        }
    }

    /// Removes the cgroups and returns the settings that could not be applied. All workers must have exited.
    pub(crate) fn remove_all(mut self) -> Vec<String> {
        drop(self.janitor.take());
        std::mem::take(&mut self.not_applied)
    }
}

/// For each task of a group: the cgroup file that moves it, and the id to write to the file.
fn files_and_task_ids(handle: &WorkloadHandle, group: &str) -> Vec<(&'static str, i32)> {
    let pids = handle.worker_pids();
    let is_member = |worker: usize| handle.plan.group_of(worker).name == group;
    let hosts_member = |index: usize| handle.plan.processes[index].workers.clone().any(is_member);
    let processes = (0..handle.plan.processes.len()).filter(|index| hosts_member(*index));
    let threads = handle
        .plan
        .threads
        .clone()
        .filter(|worker| is_member(*worker));
    let first_thread = handle.plan.processes.len();
    let thread_number = |worker: usize| first_thread + worker - handle.plan.threads.start;
    let by_process = processes.map(|index| ("cgroup.procs", pids[index]));
    by_process
        .chain(threads.map(|worker| ("cgroup.threads", pids[thread_number(worker)])))
        .collect()
}

/// The folders of two cgroups: the uppermost one that this process can see, and the one that it is in.
fn root_and_own_cgroup_folders() -> Option<(PathBuf, PathBuf)> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut mounts = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let root = PathBuf::from(mounts.find(|fields| fields.get(2) == Some(&"cgroup2"))?[1]);
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = root.join(own);
    Some((root, own))
}

fn make_folder(folder: &Path) -> std::result::Result<(), String> {
    fs::create_dir(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))
}

fn make_cgroup_threaded(folder: &Path) -> std::result::Result<(), String> {
    write_cgroup_file(folder, CGROUP_TYPE_FILE, "threaded")
        .map_err(|error| format!("cannot make {} threaded: {error}", folder.display()))
}

fn write_cgroup_file(folder: &Path, file: &str, text: &str) -> io::Result<()> {
    // Opens the file without `O_CREAT`. `fs::write` would try to create the file if its controller is missing, and fail
    // with an unrelated error.
    let mut options = fs::OpenOptions::new();
    io::Write::write_all(
        &mut options.write(true).open(folder.join(file))?,
        text.as_bytes(),
    )
}

/// The process that removes the workload's cgroups. Dropping this value makes the process remove them, and waits for
/// its end.
#[derive(Debug)]
struct CgroupJanitor {
    pid: libc::pid_t,
    /// The caller's end of a pipe to the janitor. If the pipe closes, the caller has died. A caller that is done writes
    /// a byte, because other children of its process may hold the pipe open.
    caller_pipe_end: Option<OwnedFd>,
}

impl CgroupJanitor {
    /// Starts the janitor, which will remove `folders` and then undo `changes`, both in the given order.
    fn start<'a>(
        folders: impl Iterator<Item = &'a PathBuf>,
        changes: &[EnabledControllers],
    ) -> io::Result<Self> {
        let folders: Vec<CString> = folders
            .map(|path| c_path(path))
            .collect::<io::Result<_>>()?;
        let undo = cleanups_of_controllers(changes)?;
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut caller_pipe_end = Some(writer);
        let pid = process::fork(|| {
            signal::block_all_signals();
            drop(caller_pipe_end.take());
            while rustix::io::read(&reader, &mut [0; 8]) == Err(rustix::io::Errno::INTR) {}
            folders.iter().for_each(remove_when_empty);
            undo.iter().for_each(ControllerCleanup::disable_controller);
            0
        })?;
        Ok(Self {
            pid,
            caller_pipe_end,
        })
    }
}

impl Drop for CgroupJanitor {
    fn drop(&mut self) {
        if let Some(caller_pipe_end) = self.caller_pipe_end.take() {
            let _ = rustix::io::write(&caller_pipe_end, &[1]);
        }
        let _ = process::reap_child(self.pid);
    }
}

/// What the janitor needs to take one controller away from the children of a cgroup.
struct ControllerCleanup {
    folder: CString,
    mark: CString,
    file: CString,
    text: String,
}

impl ControllerCleanup {
    fn new(folder: &Path, controller: &str) -> io::Result<Self> {
        Ok(Self {
            folder: c_path(folder)?,
            mark: CString::new(controller_mark_attribute(controller))?,
            file: c_path(&folder.join(SUBTREE_CONTROL_FILE))?,
            text: format!("-{controller}"),
        })
    }

    /// Takes the controller away from the children of the cgroup. The kernel refuses while another workload uses the
    /// controller. Fork safe.
    fn disable_controller(&self) {
        let file = openat(CWD, self.file.as_c_str(), OFlags::WRONLY, Mode::empty());
        if file.is_ok_and(|file| rustix::io::write(&file, self.text.as_bytes()).is_ok()) {
            let _ = removexattr(self.folder.as_c_str(), self.mark.as_c_str());
        }
    }
}

fn cleanups_of_controllers(changes: &[EnabledControllers]) -> io::Result<Vec<ControllerCleanup>> {
    let all = changes.iter().flat_map(|change| {
        let names = change.controllers.iter();
        names.map(|name| ControllerCleanup::new(&change.folder, name))
    });
    all.collect()
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Removes a cgroup, and waits until the last processes in it have exited. Fork safe.
fn remove_when_empty(path: &CString) {
    let until_ns = clock::now_ns() + REMOVAL_LIMIT_NS;
    while unlinkat(CWD, path.as_c_str(), AtFlags::REMOVEDIR) == Err(rustix::io::Errno::BUSY)
        && clock::now_ns() < until_ns
    {
        let _ = rustix::thread::nanosleep(&clock::ns_to_timespec(REMOVAL_RETRY_NS));
    }
}
