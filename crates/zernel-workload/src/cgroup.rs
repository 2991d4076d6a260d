//! The cgroups (version 2) of a workload: made before the workers start, removed when they are
//! gone.
//!
//! A small process, the janitor, removes them. It waits for the end of a pipe that only the caller
//! and its workers hold, so it does its work after a normal end and after a `kill -9` of the caller
//! alike.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::config::CloneMode;
use crate::error::{Error, Result};
use crate::handle::WorkloadHandle;
use crate::sys::{process, signal};
use crate::topology::{CpuSet, format_list};

/// How long the janitor tries to remove a cgroup whose last processes are still dying.
const REMOVAL_LIMIT_NS: u64 = 10_000_000_000;
const RETRY_NS: u64 = 2_000_000;
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// A cgroup as a spec file states it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CgroupSpec {
    /// Its name; the folder is made below the caller's own cgroup.
    pub name: String,
    /// The groups whose workers run in it.
    pub groups: Vec<String>,
    /// The CPUs its tasks may use (`cpuset.cpus`).
    pub cpus: Option<CpuSet>,
    /// Its share of the CPU, 1 to 10000 (`cpu.weight`); others have 100.
    pub weight: Option<u32>,
    /// CPU time per 100 ms that all its tasks may use together, in ms (`cpu.max`).
    pub max_ms_per_100ms: Option<u64>,
}

impl CgroupSpec {
    pub(crate) fn check(&self) -> Result<()> {
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

    /// The controllers that its settings need.
    fn controllers(&self) -> impl Iterator<Item = &'static str> {
        self.settings().map(|(_, file, _)| controller_of(file))
    }

    /// The files that hold its settings, and what to write to them.
    fn settings(&self) -> impl Iterator<Item = (&'static str, &'static str, String)> {
        let cpus = self
            .cpus
            .as_ref()
            .map(|cpus| ("cpus", "cpuset.cpus", format_list(cpus)));
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

/// The controller that a file belongs to.
fn controller_of(file: &str) -> &str {
    file.split('.').next().unwrap_or(file)
}

/// Those of our controllers that the children of a cgroup have already.
fn enabled_in(folder: &Path) -> BTreeSet<&'static str> {
    let enabled = fs::read_to_string(folder.join(SUBTREE_CONTROL)).unwrap_or_default();
    let is_enabled = |name: &&str| enabled.split_whitespace().any(|other| other == *name);
    ["cpu", "cpuset"].into_iter().filter(is_enabled).collect()
}

/// The cgroups of a running workload.
#[derive(Debug, Default)]
pub(crate) struct Cgroups {
    made: Vec<(CgroupSpec, PathBuf)>,
    janitor: Option<Janitor>,
    not_applied: Vec<String>,
}

impl Cgroups {
    /// Makes what can be made, and remembers what cannot.
    pub(crate) fn create(specs: &[CgroupSpec], mode: CloneMode) -> Self {
        let mut cgroups = Self::default();
        if specs.is_empty() {
            return cgroups;
        }
        if let Err(problem) = cgroups.make(specs, mode) {
            let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
            cgroups.not_applied.push(format!(
                "cgroups {names:?}: {problem}; their groups run in the caller's cgroup"
            ));
            cgroups.made.clear();
        }
        cgroups
    }

    fn make(&mut self, specs: &[CgroupSpec], mode: CloneMode) -> std::result::Result<(), String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let parent = own_cgroup().ok_or("no cgroup v2 file system is mounted")?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let top = parent.join(format!("zernel-{}-{number}", std::process::id()));
        let folders: Vec<PathBuf> = specs.iter().map(|spec| top.join(&spec.name)).collect();
        let needed: BTreeSet<&str> = specs.iter().flat_map(CgroupSpec::controllers).collect();
        let missing: Vec<&str> = needed.difference(&enabled_in(&parent)).copied().collect();
        let janitor = Janitor::start(folders.iter().chain([&top]), &parent, &missing);
        let no_janitor = |error| format!("cannot start the process that removes them: {error}");
        self.janitor = Some(janitor.map_err(no_janitor)?);
        make_folder(&top)?;
        // What cannot be had shows when the settings are written.
        missing
            .iter()
            .for_each(|name| drop(write(&parent, SUBTREE_CONTROL, &format!("+{name}"))));
        needed
            .iter()
            .for_each(|name| drop(write(&top, SUBTREE_CONTROL, &format!("+{name}"))));
        if mode == CloneMode::Thread {
            make_threaded(&top)?;
        }
        for (spec, folder) in specs.iter().zip(folders) {
            make_folder(&folder)?;
            if mode == CloneMode::Thread {
                make_threaded(&folder)?;
            }
            self.apply_settings(spec, &folder);
            self.made.push((spec.clone(), folder));
        }
        Ok(())
    }

    fn apply_settings(&mut self, spec: &CgroupSpec, folder: &Path) {
        for (field, file, text) in spec.settings() {
            if let Err(error) = write(folder, file, &text) {
                let (name, controller) = (&spec.name, controller_of(file));
                self.not_applied.push(format!(
                    "cgroup `{name}`, field `{field}`: cannot write `{text}` to {file}: {error}; \
                     the `{controller}` controller may not be available to this cgroup"
                ));
            }
        }
    }

    /// Moves the workers of each cgroup's groups into it.
    pub(crate) fn place(&mut self, handle: &WorkloadHandle) {
        for (spec, folder) in &self.made {
            for group in &spec.groups {
                for (file, id) in placements(handle, group) {
                    if let Err(error) = write(folder, file, &id.to_string()) {
                        let name = &spec.name;
                        self.not_applied
                            .push(format!("cgroup `{name}`: cannot move task {id} of group `{group}` there: {error}"));
                    }
                }
            }
        }
    }

    /// Removes everything, and says what could not be applied. The workers must be gone.
    pub(crate) fn remove(mut self) -> Vec<String> {
        drop(self.janitor.take());
        std::mem::take(&mut self.not_applied)
    }
}

/// Through which file, and by which id, each task of a group is moved.
fn placements(handle: &WorkloadHandle, group: &str) -> Vec<(&'static str, i32)> {
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

/// The folder of the caller's own cgroup.
fn own_cgroup() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut mounts = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let mount = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"))?[1].to_owned();
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))?
        .to_owned();
    Some(Path::new(&mount).join(own))
}

fn make_folder(folder: &Path) -> std::result::Result<(), String> {
    fs::create_dir(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))
}

fn make_threaded(folder: &Path) -> std::result::Result<(), String> {
    write(folder, "cgroup.type", "threaded")
        .map_err(|error| format!("cannot make {} threaded: {error}", folder.display()))
}

fn write(folder: &Path, file: &str, text: &str) -> io::Result<()> {
    // Not `fs::write`: that would make the file where the controller is missing, and fail with a
    // riddle.
    let mut options = fs::OpenOptions::new();
    io::Write::write_all(
        &mut options.write(true).open(folder.join(file))?,
        text.as_bytes(),
    )
}

/// The process that removes the cgroups. Dropping this makes it do so, and waits for it.
#[derive(Debug)]
struct Janitor {
    pid: libc::pid_t,
    /// Its end is the sign that the caller is done, or dead.
    lifeline: Option<OwnedFd>,
}

impl Janitor {
    /// It will remove `folders` and take `controllers` away from the children of `parent` again.
    fn start<'a>(
        folders: impl Iterator<Item = &'a PathBuf>,
        parent: &Path,
        controllers: &[&str],
    ) -> io::Result<Self> {
        let paths = folders.map(|folder| CString::new(folder.as_os_str().as_bytes()));
        let paths: Vec<CString> = paths.collect::<std::result::Result<_, _>>()?;
        let control = CString::new(parent.join(SUBTREE_CONTROL).as_os_str().as_bytes())?;
        let undo: Vec<String> = controllers.iter().map(|name| format!("-{name}")).collect();
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut lifeline = Some(writer);
        let pid = process::fork(|| {
            signal::block_all();
            drop(lifeline.take());
            while rustix::io::read(&reader, &mut [0; 8]) == Err(rustix::io::Errno::INTR) {}
            paths.iter().for_each(remove);
            undo.iter().for_each(|text| write_to(&control, text));
            0
        })?;
        Ok(Self { pid, lifeline })
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.lifeline.take());
        let _ = process::reap(self.pid);
    }
}

/// Removes a cgroup, waiting for its last processes to die. Fork safe.
fn remove(path: &CString) {
    let until_ns = clock::now_ns() + REMOVAL_LIMIT_NS;
    while unlinkat(CWD, path.as_c_str(), AtFlags::REMOVEDIR) == Err(rustix::io::Errno::BUSY)
        && clock::now_ns() < until_ns
    {
        let _ = rustix::thread::nanosleep(&clock::timespec(RETRY_NS));
    }
}

/// Writes to a control file, if the kernel lets it. Fork safe.
fn write_to(file: &CString, text: &str) {
    if let Ok(file) = openat(CWD, file.as_c_str(), OFlags::WRONLY, Mode::empty()) {
        let _ = rustix::io::write(&file, text.as_bytes());
    }
}
