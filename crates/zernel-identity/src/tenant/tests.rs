//! Tenants from cgroup paths and uid maps.

use proptest::prelude::*;

use super::*;

const CONTAINER_ID: &str = "3f1b7a90c2d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e";
const POD_UID: &str = "0e4f3c5a-1b2c-4d3e-9f80-a1b2c3d4e5f6";
const UNDERSCORED_POD_UID: &str = "0e4f3c5a_1b2c_4d3e_9f80_a1b2c3d4e5f6";
const OTHER_POD_UID: &str = "11111111-2222-3333-4444-555555555555";

fn pod_tenant() -> Option<Tenant> {
    Some(Tenant::Pod(POD_UID.to_owned()))
}

fn job_tenant(id: &str) -> Option<Tenant> {
    Some(Tenant::SlurmJob(id.to_owned()))
}

/// The tenant of a path with the placeholders `{id}`, `{uid}`, `{uid_}` and `{other}`.
fn tenant_of_pattern(pattern: &str) -> Option<Tenant> {
    let path = pattern
        .replace("{id}", CONTAINER_ID)
        .replace("{uid}", POD_UID)
        .replace("{uid_}", UNDERSCORED_POD_UID)
        .replace("{other}", OTHER_POD_UID)
        .replace("{other_}", &OTHER_POD_UID.replace('-', "_"));
    Tenant::from_cgroups([path.as_str()])
}

#[rustfmt::skip] // a table
#[test]
fn a_pod_is_found_where_the_kubelet_creates_it() {
    for path in [
        // The kubelet's systemd driver, by class; containerd and CRI-O
        "/kubepods.slice/kubepods-pod{uid_}.slice/cri-containerd-{id}.scope",
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice/cri-containerd-{id}.scope",
        "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid_}.slice/crio-{id}.scope/container",
        "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid_}.slice",
        "/kubepods.slice/kubepods-pod{uid_}.slice/crio-conmon-{id}.scope",
        // Its cgroupfs driver
        "/kubepods/pod{uid}/{id}",
        "/kubepods/burstable/pod{uid}/{id}",
        "/kubepods/besteffort/pod{uid}/{id} (deleted)",
        // With a cgroup root
        "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{uid_}.slice/cri-containerd-{id}.scope",
        "/kubelet/kubepods/besteffort/pod{uid}/{id}",
        // containerd creates cgroups itself, the kubelet has systemd's names
        "/system.slice/containerd.service/kubepods-besteffort-pod{uid_}.slice:cri-containerd:{id}",
        "/kubepods-besteffort-pod{uid_}.slice:cri-containerd:{id}",
        // Below the cgroup of its container, a pod creates cgroups of any name
        "/kubepods/pod{uid}/{id}/kubepods/pod{other}/{id}",
        "/kubepods.slice/kubepods-pod{uid_}.slice/cri-containerd-{id}.scope/kubepods.slice/kubepods-pod{other_}.slice",
        "/kubepods/pod{uid}/{id}/slurm/uid_0/job_7",
        "/kubepods/pod{uid}/{id}/a:b\u{fffd}",
        // Seen from a cgroup namespace: from another pod, from the same class, from a container of the same pod
        "/../../../kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice/cri-containerd-{id}.scope",
        "/../../kubepods-besteffort-pod{uid_}.slice/cri-containerd-{id}.scope",
        "/../../../../kubepods/burstable/pod{uid}/{id}",
        "/../../pod{uid}/{id}",
    ] {
        assert_eq!(tenant_of_pattern(path), self::pod_tenant(), "{path}");
    }
}

#[test]
fn a_slurm_job_is_found_where_slurmd_creates_it() {
    for path in [
        // cgroup v1
        "/slurm/uid_1000/job_42/step_0/task_1",
        "/slurm/uid_1000/job_42",
        "/slurm_node7/uid_1000/job_42/step_batch/task_0",
        // cgroup v2
        "/system.slice/slurmstepd.scope/job_42/step_0/user/task_1",
        "/system.slice/node7_slurmstepd.scope/job_42/step_extern/user/task_special",
        "/system.slice/slurmstepd.scope/job_42/step_0/user/task_0/system.slice/slurmstepd.scope/job_7",
        // Seen from a cgroup namespace
        "/../../system.slice/slurmstepd.scope/job_42/step_0/user/task_1",
        "/../slurmstepd.scope/job_42/step_0/user/task_1",
    ] {
        assert_eq!(tenant_of_pattern(path), self::job_tenant("42"), "{path}");
    }
}

/// A user may create any cgroup below a cgroup that systemd, a container manager or slurmd delegated.
#[rustfmt::skip] // a table
#[test]
fn a_user_cannot_name_a_cgroup_to_be_another_tenant() {
    for path in [
        "/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-pod{uid_}.slice/cri-containerd-{id}.scope",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/kubepods/pod{uid}/{id}",
        "/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_42",
        "/user.slice/user-1000.slice/user@1000.service/slurm/uid_1000/job_42",
        "/user.slice/user-1000.slice/user@1000.service/kubepods-pod{uid_}.slice:cri-containerd:{id}",
        "/user.slice/user-1000.slice/user@1000.service/../../kubepods/pod{uid}",
        "/../../user.slice/user-1000.slice/user@1000.service/kubepods/pod{uid}/{id}",
        "/../user@1000.service/slurmstepd.scope/job_42",
        "/system.slice/docker-{id}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{uid_}.slice",
        "/system.slice/jupyter.service/kubepods-pod{uid_}.slice:cri-containerd:{id}",
        "/machine.slice/libpod-{id}.scope/container/kubepods/pod{uid}",
        "/system.slice/user.service/slurmstepd.scope/job_42",
        "/slurm-of-alice/uid_1000/job_42",
        "/slurm/job_42",
        "/kubepods/alice/pod{uid}",
        "/kubepods/podbeef/{id}",
        "/slurmstepd.scope/job_42",
        "/system.slice/slurmstepd.scope/job_x",
        "/",
        "",
        "/..",
    ] {
        assert_eq!(tenant_of_pattern(path), None, "{path}");
    }
}

#[test]
fn one_hierarchy_of_several_is_enough() {
    // cgroup v1: slurmd uses some controllers only.
    let slurm = [
        "/",
        "/user.slice",
        "/slurm/uid_1000/job_7/step_0",
        "/system.slice/slurmd.service",
    ];
    assert_eq!(Tenant::from_cgroups(slurm), job_tenant("7"));
    let both = [
        "/slurm/uid_0/job_7".to_owned(),
        format!("/kubepods/pod{POD_UID}/{CONTAINER_ID}"),
    ];
    assert_eq!(
        Tenant::from_cgroups(both.iter().map(String::as_str)),
        pod_tenant()
    );
    assert_eq!(Tenant::from_cgroups([]), None);
}

#[test]
fn a_range_that_root_maps_is_one_user() {
    // A container manager, a sandbox of one user, a service with PrivateUsers=, and an identity map.
    let container = "         0     100000      65536\n";
    let sandbox = "1000 1000 1\n";
    let service = "0 0 1\n1000 1000 1\n";
    let identity = "0 0 4294967295\n";
    let cases = [
        (container, 100_000, 100_000),
        (container, 101_234, 100_000),
        (container, 1000, 1000),
        (sandbox, 1000, 1000),
        (service, 1000, 1000),
        (identity, 1000, 1000),
        ("0 1000 1\n1 100000 65536\n", 100_007, 100_000),
        ("", 1000, 1000),
        ("x y z\n1\n", 1000, 1000),
    ];
    for (map, uid, user) in cases {
        assert_eq!(owner_of_uid_range(map, uid), user, "{uid} in {map:?}");
    }
}

#[test]
fn the_tenant_of_this_process_is_known() {
    let tenant = Tenant::of_pid(std::process::id()).unwrap();
    if let Tenant::User(user) = tenant {
        let uid = rustix::process::getuid().as_raw();
        assert_eq!(user, SubordinateUids::read_from_machine().user_of(uid));
    }
    let error = Tenant::of_pid(u32::MAX).unwrap_err();
    assert_eq!(error.error_kind(), std::io::ErrorKind::NotFound);
}

proptest! {
    /// No cgroup that a user creates in a delegated subtree is a pod or a job.
    #[test]
    fn nothing_below_a_users_cgroup_is_another_tenant(
        below in "(/|:|\\.\\.|kubepods|\\.slice|-pod|pod|slurm|uid_1|job_7|slurmstepd\\.scope|[0-9a-f]{32}|\\PC){0,30}"
    ) {
        let path = format!("/user.slice/user-1000.slice/user@1000.service/{below}");
        prop_assert_eq!(Tenant::from_cgroups([path.as_str()]), None);
    }

    #[test]
    fn arbitrary_cgroup_paths_never_panic(path in "\\PC{0,80}") {
        let _ = Tenant::from_cgroups([path.as_str()]);
    }
}
