//! sched_ext and cgroups.

use std::fs;

use rustix::fs::{Access, access};
use zernel_scheduler::sched_ext::SchedExtState;

use super::kernel::{mount_point, os_message};
use super::row::CheckRow;

pub(super) fn scheduling_rows() -> Vec<CheckRow> {
    vec![sched_ext_row(), cgroups_row()]
}

fn sched_ext_row() -> CheckRow {
    let name = "sched_ext";
    match SchedExtState::read_current() {
        Ok(SchedExtState::NoScheduler { state }) => match count_malformed_functions() {
            0 => CheckRow::ok(name, format!("{state}: no scheduler is loaded")),
            count => CheckRow::missing(
                name,
                format!("{state}, but the kernel's BTF has {count} malformed scheduler functions"),
                "no scheduler can be loaded: the verifier refuses all of them",
            )
            .with_remedy("use another kernel; `zernel lab kernel list` checks those in the cache"),
        },
        Ok(SchedExtState::Loaded { state, scheduler }) => CheckRow::degraded(
            name,
            format!("{state}: the scheduler {scheduler} is loaded"),
            "zernel sched cannot be loaded beside it",
        )
        .with_remedy(format!("stop {scheduler} first")),
        Ok(SchedExtState::Absent) => CheckRow::missing(
            name,
            "this kernel has no sched_ext",
            "phases can be observed but not acted on",
        )
        .with_remedy(
            "use a kernel built with CONFIG_SCHED_CLASS_EXT=y (6.12 or newer; Debian's: 6.16)",
        ),
        Err(error) => CheckRow::missing(name, os_message(&error), "its state is not known"),
    }
}

/// The number of functions that keep the running kernel from loading schedulers.
pub(crate) fn count_malformed_functions() -> usize {
    let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap_or_default();
    let functions = zernel_lab::kernel::malformed_scheduler_functions(&btf);
    functions.map_or(0, |functions| functions.len())
}

/// Controllers that workloads and scheduler comparisons use.
const NEEDED_CONTROLLERS: [&str; 2] = ["cpu", "cpuset"];

fn cgroups_row() -> CheckRow {
    let name = "cgroup v2";
    let Some(root) = mount_point("cgroup2") else {
        return CheckRow::missing(
            name,
            "not mounted",
            "workloads cannot be placed, and jobs not distinguished by cgroup",
        )
        .with_remedy("mount -t cgroup2 none /sys/fs/cgroup");
    };
    let offered = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let lacking: Vec<_> = NEEDED_CONTROLLERS
        .into_iter()
        .filter(|wanted| {
            !offered
                .split_whitespace()
                .any(|controller| controller == *wanted)
        })
        .collect();
    let place = root.display();
    if access(root.join("cgroup.procs"), Access::WRITE_OK).is_err() {
        return CheckRow::degraded(
            name,
            format!("{place}, which this user may not change"),
            "workloads cannot be placed",
        )
        .with_remedy("run as root, or have a part of the tree delegated to this user");
    }
    if lacking.is_empty() {
        return CheckRow::ok(name, format!("{place}, controllers: {}", offered.trim()));
    }
    let offered = match offered.trim() {
        "" => "none",
        some => some,
    };
    CheckRow::degraded(
        name,
        format!("{place}, controllers: {offered}"),
        format!(
            "workloads can be placed, but {} not set",
            lacking.join(" and ")
        ),
    )
    .with_remedy("boot with cgroup v2 alone (systemd.unified_cgroup_hierarchy=1)")
}
