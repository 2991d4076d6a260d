//! Parses a cgroup path: pod, container, Slurm job and systemd unit.
//!
//! Container runtimes and batch systems name cgroups by convention, and one may run inside another. So a cgroup path
//! is parsed segment by segment, starting anywhere in the hierarchy: inside a cgroup namespace a path may start with
//! `/../..`.

use super::printable_text::{MAX_NAME_BYTES, to_printable};
use super::tenant::Tenant;

/// The kernel's limit for a path.
const MAX_PATH_BYTES: usize = 4096;

/// The parts of a cgroup path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cgroup {
    /// The path of the cgroup in its hierarchy, as the kernel shows it.
    pub path: String,
    /// UID of the Kubernetes pod, with hyphens.
    pub pod_uid: Option<String>,
    /// Whether the pod's cgroup is at a place where only root can create any.
    pub is_pod_certain: bool,
    /// Id of the container: in a pod the container that the kubelet started, else the innermost container.
    pub container: Option<String>,
    /// Id of the Slurm job.
    pub slurm_job: Option<String>,
    /// The innermost systemd service or scope that is not a container's.
    pub unit: Option<String>,
}

impl Cgroup {
    /// Parses a path.
    #[must_use]
    pub fn parse(path: &str) -> Self {
        // The kernel adds ` (deleted)` to the path when the cgroup of an exiting process has been removed.
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let mut cgroup = Self {
            path: to_printable(path.as_bytes(), MAX_PATH_BYTES),
            ..Self::default()
        };
        let mut in_slurm = false;
        // A runtime configured for systemd's naming without systemd writes `slice:prefix:name`.
        for segment in path.split(['/', ':']) {
            in_slurm |= segment.contains("slurm");
            if let Some(uid) = pod_uid(segment) {
                cgroup.pod_uid = Some(uid);
                cgroup.container = None;
            } else if let Some(id) = container_id(segment) {
                // A container started inside a pod's container is unknown to the cluster.
                if cgroup.pod_uid.is_none() || cgroup.container.is_none() {
                    cgroup.container = Some(id);
                }
            } else if in_slurm && let Some(job) = slurm_job_id(segment) {
                cgroup.slurm_job = Some(job);
            } else if is_systemd_unit(segment) {
                cgroup.unit = Some(to_printable(segment.as_bytes(), MAX_NAME_BYTES));
            }
        }
        cgroup
    }

    /// Returns the most specific of a process's cgroups. With cgroup v1 a process has one per
    /// hierarchy, and batch systems use only some hierarchies.
    #[must_use]
    pub fn most_specific<'a>(paths: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let paths: Vec<&str> = paths.into_iter().collect();
        let cgroups = paths.iter().map(|path| Self::parse(path));
        // `max_by_key` returns the last maximum, and the kernel lists cgroup v2 last.
        let mut cgroup = cgroups.max_by_key(Self::specificity)?;
        // A process in a pod can create cgroups below that of the pod, and name them like those of other pods.
        if let Some(Tenant::Pod(uid)) = Tenant::from_cgroups(paths) {
            cgroup.pod_uid = Some(uid);
            cgroup.is_pod_certain = true;
        }
        Some(cgroup)
    }

    /// Returns a sort key: the known parts first, then the depth of the path.
    fn specificity(&self) -> (u32, usize) {
        let pod = u32::from(self.pod_uid.is_some());
        let container = u32::from(self.container.is_some());
        let job = u32::from(self.slurm_job.is_some());
        let unit = u32::from(self.unit.is_some());
        let depth = self.path.split('/').filter(|part| !part.is_empty());
        (8 * pod + 4 * container + 4 * job + unit, depth.count())
    }
}

/// Parses `pod<uid>` below `kubepods`, or systemd's `kubepods-burstable-pod<uid with
/// underscores>.slice`.
pub(super) fn pod_uid(segment: &str) -> Option<String> {
    let name = segment.strip_suffix(".slice").unwrap_or(segment);
    let uid = match name.strip_prefix("pod") {
        Some(uid) => uid,
        None => name.rsplit_once("-pod")?.1,
    };
    let uid = uid.replace('_', "-");
    let digits: String = uid.chars().filter(|letter| *letter != '-').collect();
    // Static pods have a hash without hyphens as UID.
    is_hex(&digits, 32).then_some(uid)
}

/// Parses the id in `<id>`, `docker-<id>.scope`, `cri-containerd-<id>.scope`, `crio-<id>.scope`,
/// `libpod-<id>.scope` or `lxc.payload.<name>`.
fn container_id(segment: &str) -> Option<String> {
    const CONTAINER_ID_DIGITS: usize = 64;
    if let Some(name) = segment.strip_prefix("lxc.payload.") {
        return (!name.is_empty()).then(|| to_printable(name.as_bytes(), MAX_NAME_BYTES));
    }
    let name = segment.strip_suffix(".scope").unwrap_or(segment);
    let (runtime, id) = name.rsplit_once('-').unwrap_or(("", name));
    // conmon is the monitor of a container and runs outside of it.
    (is_hex(id, CONTAINER_ID_DIGITS) && !runtime.ends_with("conmon")).then(|| id.to_owned())
}

/// Parses `job_<number>`.
pub(super) fn slurm_job_id(segment: &str) -> Option<String> {
    let number = segment.strip_prefix("job_")?;
    number.parse::<u32>().is_ok().then(|| number.to_owned())
}

fn is_systemd_unit(segment: &str) -> bool {
    let is_conmon = segment.contains("conmon-");
    !is_conmon && (segment.ends_with(".service") || segment.ends_with(".scope"))
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONTAINER_ID: &str = "3f1b7a90c2d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e";
    const INNER_CONTAINER_ID: &str =
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const POD_UID: &str = "0e4f3c5a-1b2c-4d3e-9f80-a1b2c3d4e5f6";
    const UNDERSCORED_POD_UID: &str = "0e4f3c5a_1b2c_4d3e_9f80_a1b2c3d4e5f6";

    /// A path with placeholders `{id}`, `{inner}`, `{uid}` and `{uid_}` for the constants above;
    /// then pod, container, Slurm job and unit.
    type CgroupCase = (
        &'static str,
        Option<&'static str>,
        Option<&'static str>,
        Option<&'static str>,
        Option<&'static str>,
    );

    #[rustfmt::skip] // a table
    const CGROUP_CASES: &[CgroupCase] = &[
        // containerd
        ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice/cri-containerd-{id}.scope",
            Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/kubepods.slice/kubepods-pod{uid_}.slice/cri-containerd-{id}.scope", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/kubepods/burstable/pod{uid}/{id}", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/kubepods/pod{uid}/{id}", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/system.slice/containerd.service/kubepods-besteffort-pod{uid_}.slice:cri-containerd:{id}",
            Some(POD_UID), Some(CONTAINER_ID), None, Some("containerd.service")),
        ("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid_}.slice", Some(POD_UID), None, None, None),
        // A static pod
        ("/kubepods/burstable/podd4e5f60718293a4b5c6d7e8f90a1b2c3/{id}",
            Some("d4e5f60718293a4b5c6d7e8f90a1b2c3"), Some(CONTAINER_ID), None, None),
        // CRI-O, and its monitor
        ("/kubepods.slice/kubepods-pod{uid_}.slice/crio-{id}.scope", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/kubepods.slice/kubepods-pod{uid_}.slice/crio-{id}.scope/container", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/kubepods.slice/kubepods-pod{uid_}.slice/crio-conmon-{id}.scope", Some(POD_UID), None, None, None),
        // Docker, under Kubernetes and alone
        ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice/docker-{id}.scope",
            Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/system.slice/docker-{id}.scope", None, Some(CONTAINER_ID), None, None),
        ("/system.slice/docker-{id}.scope/init", None, Some(CONTAINER_ID), None, None),
        ("/docker/{id}", None, Some(CONTAINER_ID), None, None),
        ("/system.slice:docker:{id}", None, Some(CONTAINER_ID), None, None),
        // Docker in Docker; Kubernetes in Docker; Docker in a pod
        ("/docker/{inner}/docker/{id}", None, Some(CONTAINER_ID), None, None),
        ("/docker/{inner}/kubelet/kubepods/besteffort/pod{uid}/{id}", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/system.slice/docker-{inner}.scope/kubelet.slice/kubelet-kubepods.slice/\
          kubelet-kubepods-pod{uid_}.slice/cri-containerd-{id}.scope", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/kubepods/burstable/pod{uid}/{id}/docker/{inner}", Some(POD_UID), Some(CONTAINER_ID), None, None),
        // Podman, as root and as a user, and Podman's monitor process
        ("/machine.slice/libpod-{id}.scope/container", None, Some(CONTAINER_ID), None, None),
        ("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{id}.scope/container",
            None, Some(CONTAINER_ID), None, Some("user@1000.service")),
        ("/machine.slice/libpod-conmon-{id}.scope", None, None, None, None),
        // nerdctl, ECS, LXC
        ("/system.slice/nerdctl-{id}.scope", None, Some(CONTAINER_ID), None, None),
        ("/ecs/cluster/0123456789abcdef0123456789abcdef/{id}", None, Some(CONTAINER_ID), None, None),
        ("/lxc.payload.trainer/system.slice/ssh.service", None, Some("trainer"), None, Some("ssh.service")),
        ("/lxc.monitor.trainer", None, None, None, None),
        // Slurm, with cgroup v1 and v2, and with several daemons on a node
        ("/slurm/uid_1000/job_42/step_0/task_1", None, None, Some("42"), None),
        ("/slurm_node7/uid_1000/job_42/step_batch/task_0", None, None, Some("42"), None),
        ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_1", None, None, Some("42"), Some("slurmstepd.scope")),
        ("/system.slice/node7_slurmstepd.scope/job_42/step_extern/user/task_special",
            None, None, Some("42"), Some("node7_slurmstepd.scope")),
        ("/system.slice/slurmd.service", None, None, None, Some("slurmd.service")),
        ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0/docker/{id}",
            None, Some(CONTAINER_ID), Some("42"), Some("slurmstepd.scope")),
        // systemd
        ("/user.slice/user-1000.slice/session-3.scope", None, None, None, Some("session-3.scope")),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service", None, None, None, Some("jupyter.service")),
        ("/init.scope", None, None, None, Some("init.scope")),
        // The path inside a cgroup namespace, and after removal of the cgroup
        ("/../../kubepods-pod{uid_}.slice/cri-containerd-{id}.scope", Some(POD_UID), Some(CONTAINER_ID), None, None),
        ("/../{id}", None, Some(CONTAINER_ID), None, None),
        ("/system.slice/docker-{id}.scope (deleted)", None, Some(CONTAINER_ID), None, None),
        // Paths without any known part
        ("/", None, None, None, None),
        ("", None, None, None, None),
        ("/home/job_42/step_0", None, None, None, None),
        ("/slurm/uid_1000/job_x/step_0", None, None, None, None),
        ("/podracing/pod-bay", None, None, None, None),
        ("/kubepods/podbeef/short-deadbeef.scope/x", None, None, None, Some("short-deadbeef.scope")),
        ("/docker/{id}0", None, None, None, None),
    ];

    fn expand_placeholders(pattern: &str) -> String {
        pattern
            .replace("{id}", CONTAINER_ID)
            .replace("{inner}", INNER_CONTAINER_ID)
            .replace("{uid}", POD_UID)
            .replace("{uid_}", UNDERSCORED_POD_UID)
    }

    #[test]
    fn cgroup_paths_of_known_runtimes_are_parsed() {
        for (pattern, pod, container, job, unit) in CGROUP_CASES {
            let cgroup = Cgroup::parse(&expand_placeholders(pattern));
            assert_eq!(cgroup.pod_uid.as_deref(), *pod, "pod of {pattern}");
            assert_eq!(
                cgroup.container.as_deref(),
                *container,
                "container of {pattern}"
            );
            assert_eq!(cgroup.slurm_job.as_deref(), *job, "job of {pattern}");
            assert_eq!(cgroup.unit.as_deref(), *unit, "unit of {pattern}");
        }
    }

    proptest! {
        /// Any user who may create cgroups chooses their names.
        #[test]
        fn arbitrary_cgroup_paths_never_panic_and_stay_bounded(path in "(/|:|pod|job_|slurm|-|_|conmon|\\.scope|\\.slice|[0-9a-f]{32}|\\PC|\\n){0,40}") {
            let cgroup = Cgroup::parse(&path);
            let names = [&cgroup.container, &cgroup.slurm_job, &cgroup.unit];
            for name in names.into_iter().flatten() {
                prop_assert!(!name.is_empty() && name.len() <= MAX_NAME_BYTES);
                prop_assert!(!name.contains(char::is_control));
            }
        }
    }

    /// Users create cgroups with names of their choice in subtrees that belong to them.
    #[test]
    fn the_name_of_a_pod_counts_only_where_the_kubelet_creates_it() {
        const OTHER_POD_UID: &str = "11111111-1111-1111-1111-111111111111";
        for (path, pod, is_certain) in [
            ("/kubepods/burstable/pod{uid}/{id}", POD_UID, true),
            (
                &format!("/kubepods/pod{{uid}}/{{id}}/kubepods/pod{OTHER_POD_UID}"),
                POD_UID,
                true,
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/kubepods/pod{uid}",
                POD_UID,
                false,
            ),
        ] {
            let path = expand_placeholders(path);
            let cgroup = Cgroup::most_specific([path.as_str()]).unwrap();
            assert_eq!(cgroup.pod_uid.as_deref(), Some(pod), "{path}");
            assert_eq!(cgroup.is_pod_certain, is_certain, "{path}");
        }
    }

    #[test]
    fn the_most_specific_hierarchy_is_chosen() {
        let cases: [(&[&str], Option<&str>); 6] = [
            // cgroup v1, Slurm: only some controllers are used, at different depths.
            (
                &[
                    "/",
                    "/slurm/uid_0/job_7",
                    "/slurm/uid_0/job_7/step_0/task_1",
                    "/slurm/uid_0/job_7/step_0",
                    "/system.slice/slurmd.service",
                ],
                Some("/slurm/uid_0/job_7/step_0/task_1"),
            ),
            // cgroup v1, Docker under Kubernetes.
            (
                &["/", "/kubepods/pod{uid}/{id}", "/docker/{id}"],
                Some("/kubepods/pod{uid}/{id}"),
            ),
            // Hybrid hierarchy: the path of cgroup v2 shows the unit, that of v1 the container.
            (
                &["/docker/{id}", "/system.slice/containerd.service"],
                Some("/docker/{id}"),
            ),
            (
                &["/", "/", "/user.slice/user-0.slice/session-1.scope"],
                Some("/user.slice/user-0.slice/session-1.scope"),
            ),
            // If both paths are equally specific, the one of cgroup v2 is used, which is last.
            (&["/a.service", "/b.service"], Some("/b.service")),
            (&[], None),
        ];
        for (paths, expected) in cases {
            let paths: Vec<_> = paths.iter().map(|path| expand_placeholders(path)).collect();
            let chosen = Cgroup::most_specific(paths.iter().map(String::as_str));
            assert_eq!(
                chosen.map(|cgroup| cgroup.path),
                expected.map(expand_placeholders)
            );
        }
    }
}
