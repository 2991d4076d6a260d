//! Reads the identities of processes, in child processes.
//!
//! The environment of a process is part of its memory. A process can map a file over its environment whose file system does
//! not answer, and then a reader of the environment waits. So separate child processes read the processes of each tenant, a
//! few at a time. A process that is not read at once is read in a later round.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use zernel_identity::{Tenant, identify};
use zernel_model::identity::Identity;

use crate::child_task::{self, ChildTask};
use crate::discovery::ProcessKey;

/// Deadline of a child process that reads identities.
const MAX_READ_TIME: Duration = Duration::from_secs(1);
/// How long the observer's thread waits for identities. Most processes are read in less than a millisecond.
pub(super) const MAX_WAIT_FOR_IDENTITIES: Duration = Duration::from_millis(200);
/// Number of processes whose identities one child process reads.
const PROCESSES_PER_TASK: usize = 32;
/// The most processes that may wait to be read.
const MAX_WAITING_PROCESSES: usize = 8192;

/// Reads identities of processes.
#[derive(Debug, Default)]
pub(super) struct IdentityReader {
    /// Processes that no child process reads yet, by tenant.
    waiting_processes: BTreeMap<Tenant, Vec<ProcessKey>>,
    /// Processes that could not be read together with others. Each of these is read by a child process of its own.
    suspect_processes: BTreeMap<Tenant, Vec<ProcessKey>>,
    tasks: Vec<IdentityTask>,
}

/// A child process that reads the identities of processes of one tenant.
#[derive(Debug)]
struct IdentityTask {
    tenant: Tenant,
    processes: Vec<ProcessKey>,
    task: ChildTask<Vec<Option<Identity>>>,
}

impl IdentityReader {
    /// Requests the identities of these processes, except those that a child process is reading already.
    pub(super) fn request_processes<'a>(
        &mut self,
        processes: impl IntoIterator<Item = &'a ProcessKey>,
    ) {
        let requested = [&self.waiting_processes, &self.suspect_processes];
        let requested = requested.into_iter().flat_map(BTreeMap::values).flatten();
        let read = self.tasks.iter().flat_map(|task| &task.processes);
        let mut known: BTreeSet<ProcessKey> = requested.chain(read).copied().collect();
        for process in processes {
            let room = known.len() < MAX_WAITING_PROCESSES;
            if let Ok(tenant) = Tenant::of_pid(process.pid)
                && room
                && known.insert(*process)
            {
                self.waiting_processes
                    .entry(tenant)
                    .or_default()
                    .push(*process);
            }
        }
    }

    /// The identities that have been read by now. Waits for further results for at most `patience`. Processes that have
    /// exited, or do not answer, are missing.
    pub(super) fn take_identities(&mut self, patience: Duration) -> BTreeMap<ProcessKey, Identity> {
        let until = Instant::now() + patience;
        let mut identities = BTreeMap::new();
        loop {
            self.start_tasks();
            let patience = until.saturating_duration_since(Instant::now());
            if !self.finish_tasks(patience, &mut identities) {
                return identities;
            }
        }
    }

    /// Starts as many child processes as there is room for.
    fn start_tasks(&mut self) {
        for (queue, at_once) in [
            (&mut self.waiting_processes, PROCESSES_PER_TASK),
            (&mut self.suspect_processes, 1),
        ] {
            for (tenant, processes) in queue.iter_mut() {
                while !processes.is_empty() && child_task::has_room_for_child_of(tenant) {
                    let some = processes.split_off(processes.len().saturating_sub(at_once));
                    match start_task(tenant, &some) {
                        Some(task) => self.tasks.push(IdentityTask {
                            tenant: tenant.clone(),
                            processes: some,
                            task,
                        }),
                        None => {
                            processes.extend(some);
                            break;
                        }
                    }
                }
            }
            queue.retain(|_, processes| !processes.is_empty());
        }
    }

    /// Takes results over, waiting for them for at most `patience`. Returns whether a child process had a result.
    fn finish_tasks(
        &mut self,
        patience: Duration,
        identities: &mut BTreeMap<ProcessKey, Identity>,
    ) -> bool {
        let until = Instant::now() + patience;
        let mut has_finished = false;
        for mut task in std::mem::take(&mut self.tasks) {
            let patience = until.saturating_duration_since(Instant::now());
            match task.task.wait_for_result(patience) {
                None => self.tasks.push(task),
                Some(Ok(outcome)) => {
                    has_finished = true;
                    let read = outcome.value.into_iter().flatten();
                    identities.extend(read.map(|identity| (key_of(&identity), identity)));
                }
                Some(Err(_)) => {
                    has_finished = true;
                    // One of the processes does not answer. A process that does not answer is read alone, so that it
                    // does not delay the others.
                    if task.processes.len() > 1 {
                        let suspects = self.suspect_processes.entry(task.tenant).or_default();
                        suspects.append(&mut task.processes);
                    }
                }
            }
        }
        has_finished
    }
}

/// Has a child process read some processes of a tenant; `None` if there is no room for it.
fn start_task(
    tenant: &Tenant,
    processes: &[ProcessKey],
) -> Option<ChildTask<Vec<Option<Identity>>>> {
    let read = || processes.iter().map(identity_of).collect();
    ChildTask::start(tenant, MAX_READ_TIME, &[], |_| read()).ok()
}

/// Reads the identity of a process; `None` if the process has exited.
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
    use std::process::{Child, Command, Stdio};

    use zernel_testkit::eventually;

    use super::*;

    #[test]
    fn processes_that_run_are_identified() {
        let own = identify(std::process::id()).unwrap();
        let key = key_of(&own);
        let other = ProcessKey::new(key.pid, key.start_ns + 1_000_000_000);
        let mut reader = IdentityReader::default();
        reader.request_processes(&[key, other]);
        let mut read = BTreeMap::new();
        eventually("it is read", || {
            read.extend(reader.take_identities(MAX_WAIT_FOR_IDENTITIES));
            !read.is_empty()
        });
        assert_eq!(read.into_iter().collect::<Vec<_>>(), [(key, own)]);
    }

    /// Requests more processes of one user than child processes of one tenant can read at once.
    #[test]
    fn many_processes_are_all_identified() {
        let sleepers: Vec<Child> = (0..600)
            .map(|_| {
                let mut command = Command::new("sleep");
                command.arg("60").env("RANK", "3").stdin(Stdio::null());
                command.spawn().unwrap()
            })
            .collect();
        let key = |child: &Child| {
            let identity = identify(child.id()).unwrap();
            key_of(&identity)
        };
        let keys: Vec<ProcessKey> = sleepers.iter().map(key).collect();
        let mut reader = IdentityReader::default();
        reader.request_processes(&keys);
        let mut read = BTreeMap::new();
        eventually("all are read", || {
            read.extend(reader.take_identities(Duration::from_millis(10)));
            read.len() == keys.len()
        });
        for mut sleeper in sleepers {
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
        }
    }
}
