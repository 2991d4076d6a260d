//! Reads the identities of processes, in child processes.
//!
//! The environment of a process is part of its memory. A process can map a file there whose file system does not answer, and
//! then whoever reads it waits. So the processes of each tenant are read by a child process of their own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use zernel_identity::{Tenant, identify};
use zernel_model::identity::Identity;

use crate::child_task::{ChildTask, Outcome};
use crate::discovery::ProcessKey;

/// How long reading the processes of one tenant may take. The loop waits for it.
const LIMIT: Duration = Duration::from_secs(1);

/// The identities of these processes. Those are missing that have exited, or could not be read in time.
pub(super) fn read<'a>(
    processes: impl IntoIterator<Item = &'a ProcessKey>,
) -> BTreeMap<ProcessKey, Identity> {
    let mut by_tenant: BTreeMap<Tenant, Vec<ProcessKey>> = BTreeMap::new();
    for process in processes {
        if let Ok(tenant) = Tenant::of(process.pid) {
            by_tenant.entry(tenant).or_default().push(*process);
        }
    }
    let until = Instant::now() + LIMIT;
    let tasks: Vec<ChildTask<Vec<Option<Identity>>>> = by_tenant
        .iter()
        .filter_map(|(tenant, processes)| {
            let read = || Outcome {
                value: processes.iter().map(identity_of).collect(),
                descriptors: Vec::new(),
            };
            ChildTask::start(tenant, LIMIT, &[], read).ok()
        })
        .collect();
    let mut identities = BTreeMap::new();
    for mut task in tasks {
        let left = until.saturating_duration_since(Instant::now());
        if let Some(Ok(outcome)) = task.wait(left) {
            let read = outcome.value.into_iter().flatten();
            identities.extend(read.map(|identity| (key_of(&identity), identity)));
        }
    }
    identities
}

/// The identity of a process; `None` if it has exited.
fn identity_of(process: &ProcessKey) -> Option<Identity> {
    let identity = identify(process.pid).ok()?;
    (key_of(&identity) == *process).then_some(identity)
}

fn key_of(identity: &Identity) -> ProcessKey {
    let tick_ns = 1_000_000_000 / procfs::ticks_per_second();
    ProcessKey::new(identity.pid, identity.start_time * tick_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_run_are_identified() {
        let own = identify(std::process::id()).unwrap();
        let key = key_of(&own);
        let other = ProcessKey::new(key.pid, key.start_ns + 1_000_000_000);
        let read = read(&[key, other]);
        assert_eq!(read.into_iter().collect::<Vec<_>>(), [(key, own)]);
    }
}
