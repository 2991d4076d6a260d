//! sched_ext and cgroups.

use std::fs;

use rustix::fs::{Access, access};
use zernel_scheduler::sched_ext::SchedExt;

use super::kernel::{mount_point, os_message};
use super::row::Row;

pub(super) fn rows() -> Vec<Row> {
    vec![sched_ext(), cgroups()]
}

fn sched_ext() -> Row {
    let name = "sched_ext";
    match SchedExt::current() {
        Ok(SchedExt::NoScheduler { state }) => match malformed_functions() {
            0 => Row::ok(name, format!("{state}: no scheduler is loaded")),
            count => Row::missing(
                name,
                format!("{state}, but the kernel's BTF has {count} malformed scheduler functions"),
                "no scheduler can be loaded: the verifier refuses all of them",
            )
            .remedy("use another kernel; `zernel lab kernel list` checks those in the cache"),
        },
        Ok(SchedExt::Loaded { state, scheduler }) => Row::degraded(
            name,
            format!("{state}: the scheduler {scheduler} is loaded"),
            "zernel sched cannot be loaded beside it",
        )
        .remedy(format!("stop {scheduler} first")),
        Ok(SchedExt::Absent) => Row::missing(
            name,
            "this kernel has no sched_ext",
            "phases can be observed but not acted on",
        )
        .remedy("use a kernel built with CONFIG_SCHED_CLASS_EXT=y (6.12 or newer; Debian's: 6.16)"),
        Err(error) => Row::missing(name, os_message(&error), "its state is not known"),
    }
}

/// The number of functions that keep the running kernel from loading schedulers.
pub(crate) fn malformed_functions() -> usize {
    let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap_or_default();
    let functions = zernel_lab::kernel::malformed_scheduler_functions(&btf);
    functions.map_or(0, |functions| functions.len())
}

/// Controllers that workloads and scheduler comparisons use.
const CONTROLLERS: [&str; 2] = ["cpu", "cpuset"];

fn cgroups() -> Row {
    let name = "cgroup v2";
    let Some(root) = mount_point("cgroup2") else {
        return Row::missing(
            name,
            "not mounted",
            "workloads cannot be placed, and jobs not distinguished by cgroup",
        )
        .remedy("mount -t cgroup2 none /sys/fs/cgroup");
    };
    let offered = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let lacking: Vec<_> = CONTROLLERS
        .into_iter()
        .filter(|wanted| {
            !offered
                .split_whitespace()
                .any(|controller| controller == *wanted)
        })
        .collect();
    let place = root.display();
    if access(root.join("cgroup.procs"), Access::WRITE_OK).is_err() {
        return Row::degraded(
            name,
            format!("{place}, which this user may not change"),
            "workloads cannot be placed",
        )
        .remedy("run as root, or have a part of the tree delegated to this user");
    }
    if lacking.is_empty() {
        return Row::ok(name, format!("{place}, controllers: {}", offered.trim()));
    }
    let offered = match offered.trim() {
        "" => "none",
        some => some,
    };
    Row::degraded(
        name,
        format!("{place}, controllers: {offered}"),
        format!(
            "workloads can be placed, but {} not set",
            lacking.join(" and ")
        ),
    )
    .remedy("boot with cgroup v2 alone (systemd.unified_cgroup_hierarchy=1)")
}
