//! Families of blocked threads.

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::snapshot::Role;

use super::SchedBlockReason;
use crate::metrics::{ScopedSnapshot, families, write_family_of_processes};

families! {
    BLOCKED = Counter "zernel_blocked_seconds_total" ["pid", "reason"]
        "Time that the threads of a process were blocked, by reason; for loaders only io, network and page_fault.";
}

pub(crate) fn expose(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    write_family_of_processes(out, &BLOCKED, scoped, |process, add| {
        // Of loaders only some reasons are exported: a node has many loaders, and most of the time they wait for
        // work.
        let is_listed = |reason: &str| {
            process.role != Role::Loader
                || SchedBlockReason::FETCHING
                    .iter()
                    .any(|it| it.name() == reason)
        };
        for (reason, seconds) in &process.probes.sched.blocked_seconds {
            if *seconds > 0.0 && is_listed(reason) {
                add(&[("reason", reason)], *seconds);
            }
        }
    });
}
