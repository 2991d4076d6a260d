//! The tenant of a process: the pod, job or user that it counts for where tenants share a limited resource.
//!
//! A tenant is a pod, else a Slurm job, else a user. The rules keep a process from choosing its tenant:
//!
//! - A user can create cgroups of any name in its own subtree. So a cgroup path is matched from the root of the hierarchy
//!   down, and only at the places where the kubelet and slurmd create cgroups. Only root can create cgroups at these
//!   places.
//! - A user can create user namespaces, and has 65,536 subordinate uids in them. So a process in user namespaces counts for
//!   the owner of the outermost one.
//! - A user can also run a program with a subordinate uid outside of any namespace: a file may have such an owner and
//!   the setuid bit. So a subordinate uid counts for the user who has that uid by `/etc/subuid`.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;

use procfs::ProcResult;
use procfs::process::Process;
use serde::{Deserialize, Serialize};

use crate::cgroup::{pod_uid, slurm_job_id};
use crate::subordinate_uids::SubordinateUids;
use crate::{IdentityError, open_process};

mod parents;
mod sys;

pub use parents::{TenantParent, tenant_parents, tenant_with_cgroup};

/// The pod, Slurm job or user that a process counts for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Tenant {
    /// A Kubernetes pod, by its UID.
    Pod(String),
    /// A Slurm job, by its id.
    SlurmJob(String),
    /// A user, by its uid in the initial user namespace.
    User(u32),
}

impl Tenant {
    /// The tenant of process `pid`. Needs root, or a process of the same user.
    pub fn of_pid(pid: u32) -> Result<Self, IdentityError> {
        let read = || Self::of_process(&open_process(pid)?.0);
        read().map_err(|error| IdentityError::new(pid, error))
    }

    /// The handle of the process stays valid when its pid is reused, so all reads concern one process.
    fn of_process(process: &Process) -> ProcResult<Self> {
        let cgroups = read_process_file(process, "cgroup")?;
        // A line is `hierarchy:controllers:path`, and a path may contain colons.
        let paths = cgroups
            .lines()
            .filter_map(|line| line.splitn(3, ':').nth(2));
        if let Some(tenant) = Self::from_cgroups(paths) {
            return Ok(tenant);
        }
        let uid = process.status()?.ruid;
        let user = user_of_namespace(process, uid)?.unwrap_or(uid);
        Ok(Self::User(
            SubordinateUids::read_from_machine().user_of(user),
        ))
    }

    /// The pod or Slurm job of a process with these cgroup paths, one per hierarchy.
    #[must_use]
    pub fn from_cgroups<'a>(paths: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let tenants = paths.into_iter().filter_map(Self::from_cgroup);
        // Pods come first in the order of tenants.
        tenants.min()
    }

    fn from_cgroup(path: &str) -> Option<Self> {
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let segments: Vec<&str> = path.split('/').filter(|it| !it.is_empty()).collect();
        // Inside a cgroup namespace, a path leads up from the namespace's root, and then down. The part of the path
        // above that place is not shown: this process is in it too, so it belongs to no other user.
        let up = segments.iter().take_while(|it| **it == "..").count();
        let (is_absolute, down) = (up == 0, &segments[up..]);
        pod_uid_of_path(down, is_absolute)
            .map(Self::Pod)
            .or_else(|| slurm_job_of_path(down, is_absolute).map(Self::SlurmJob))
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(uid) => write!(formatter, "pod {uid}"),
            Self::SlurmJob(id) => write!(formatter, "Slurm job {id}"),
            Self::User(uid) => write!(formatter, "user {uid}"),
        }
    }
}

/// Names of the cgroup of all pods. The names that contain `kubelet` are those of a kubelet with
/// `--cgroup-root=/kubelet`.
const PODS_CGROUP_NAMES: [&str; 3] = ["kubepods", "kubepods.slice", "kubelet-kubepods.slice"];
const KUBELET_CGROUP_NAMES: [&str; 2] = ["kubelet", "kubelet.slice"];
/// Quality-of-service classes that have a cgroup of their own.
const POD_QOS_CLASSES: [&str; 2] = ["burstable", "besteffort"];
/// Services that start containers. These services create cgroups themselves if they are not configured for systemd, and the
/// kubelet is.
const RUNTIME_SERVICES: [&str; 3] = ["containerd.service", "crio.service", "docker.service"];

/// The UID of the pod, if the first segments are those of a pod's cgroup.
fn pod_uid_of_path(segments: &[&str], is_absolute: bool) -> Option<String> {
    let mut rest = segments;
    skip_segment_if(&mut rest, |name| KUBELET_CGROUP_NAMES.contains(&name));
    if !skip_segment_if(&mut rest, |name| PODS_CGROUP_NAMES.contains(&name)) && is_absolute {
        return pod_of_runtime(segments);
    }
    skip_segment_if(&mut rest, is_pod_qos_class);
    let name = rest.first()?;
    let is_pod = name.starts_with("pod") || is_below_pods_cgroup(name);
    is_pod.then(|| pod_uid(name)).flatten()
}

/// The UID of the pod, if the segments are `system.slice/containerd.service/kubepods-pod<uid>.slice:cri-containerd:<id>`, or the
/// last of them.
fn pod_of_runtime(segments: &[&str]) -> Option<String> {
    let mut rest = segments;
    if skip_segment_if(&mut rest, |name| name == "system.slice") {
        skip_segment_if(&mut rest, |name| RUNTIME_SERVICES.contains(&name));
    }
    let (slice, _) = rest.first()?.split_once(':')?;
    is_below_pods_cgroup(slice)
        .then(|| pod_uid(slice))
        .flatten()
}

/// Whether systemd's name of a cgroup is one below the cgroup of all pods.
fn is_below_pods_cgroup(name: &str) -> bool {
    ["kubepods-", "kubelet-kubepods-"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

fn is_pod_qos_class(name: &str) -> bool {
    let plain = name.strip_suffix(".slice").unwrap_or(name);
    POD_QOS_CLASSES.iter().any(|class| {
        plain == *class
            || (is_below_pods_cgroup(name) && plain.ends_with(&format!("kubepods-{class}")))
    })
}

/// The id of the Slurm job, if the first segments are those of a job's cgroup.
fn slurm_job_of_path(segments: &[&str], is_absolute: bool) -> Option<String> {
    let mut rest = segments;
    // cgroup v1: /slurm/uid_1000/job_42, or /slurm_node/... with several daemons on a node.
    if skip_segment_if(&mut rest, is_slurm_root) {
        let is_user = skip_segment_if(&mut rest, |name| name.starts_with("uid_"));
        return is_user.then(|| slurm_job_id(rest.first()?)).flatten();
    }
    // cgroup v2: /system.slice/slurmstepd.scope/job_42, or node_slurmstepd.scope.
    let is_system = skip_segment_if(&mut rest, |name| name == "system.slice");
    let is_slurm = (is_system || !is_absolute) && skip_segment_if(&mut rest, is_slurm_scope);
    is_slurm.then(|| slurm_job_id(rest.first()?)).flatten()
}

fn is_slurm_root(name: &str) -> bool {
    name == "slurm" || name.starts_with("slurm_")
}

fn is_slurm_scope(name: &str) -> bool {
    name == "slurmstepd.scope" || name.ends_with("_slurmstepd.scope")
}

/// Removes the first segment of a path if the segment meets a condition.
fn skip_segment_if(segments: &mut &[&str], condition: impl Fn(&str) -> bool) -> bool {
    let Some((first, rest)) = segments.split_first() else {
        return false;
    };
    let is_met = condition(first);
    if is_met {
        *segments = rest;
    }
    is_met
}

/// Reads a file of a process, with replacements for bytes that are not text: users choose names of cgroups.
fn read_process_file(process: &Process, name: &str) -> ProcResult<String> {
    let mut bytes = Vec::new();
    let file = process.open_relative(name)?;
    file.take(MAX_PROCESS_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// More than any `/proc/PID/cgroup` or `uid_map` has.
const MAX_PROCESS_FILE_BYTES: u64 = 1 << 20;
/// The kernel nests user namespaces this deep at most.
const MAX_NESTED_NAMESPACES: usize = 33;

/// The user that a process in a user namespace counts for; `None` if it is in the namespace of this process.
fn user_of_namespace(process: &Process, uid: u32) -> ProcResult<Option<u32>> {
    let own = std::fs::metadata("/proc/self/ns/user")?.ino();
    let mut outermost = process.open_relative("ns/user")?;
    if outermost.metadata()?.ino() == own {
        return Ok(None);
    }
    let mut inner = None;
    for _ in 0..MAX_NESTED_NAMESPACES {
        // The request fails at the outermost namespace that this process may see.
        let Ok(parent) = sys::parent_of_namespace(&outermost) else {
            break;
        };
        if parent.metadata()?.ino() == own {
            break;
        }
        inner = Some(std::mem::replace(&mut outermost, parent));
    }
    let owner = sys::owner_of_namespace(&outermost).map_err(io::Error::from)?;
    if owner != 0 {
        return Ok(Some(owner));
    }
    // A container manager or a setuid program has created it as root for another user. The owner of the next inner
    // namespace, or else the mapped uids, show which user.
    match inner {
        Some(inner) => Ok(Some(
            sys::owner_of_namespace(&inner).map_err(io::Error::from)?,
        )),
        None => Ok(Some(owner_of_uid_range(
            &read_process_file(process, "uid_map")?,
            uid,
        ))),
    }
}

/// The user that root has mapped a range of uids for: the first uid of the range. A uid that is mapped to itself stands for
/// itself. `map` is `/proc/PID/uid_map`.
fn owner_of_uid_range(map: &str, uid: u32) -> u32 {
    let ranges = map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let mut next = || numbers.next()?.ok();
        Some((next()?, next()?, next()?))
    });
    let mut of_uid = ranges.filter(|(_, first, count)| uid.wrapping_sub(*first) < *count);
    match of_uid.next() {
        Some((inside, first, _)) if inside != first => first,
        _ => uid,
    }
}

#[cfg(test)]
mod tests;
