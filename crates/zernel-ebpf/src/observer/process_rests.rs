//! Stops observing a process whose overhead is too high, and goes on observing all others.
//!
//! A process whose overhead stays above the ceiling although its frequent functions are sampled is *rested* for a while.
//! The kernel skips the calls of a rested process at the entry of the probes. Probes are detached from the files that only
//! the process's user has mapped; all processes that map these files are rested too. Probes on files that other tenants
//! have mapped stay attached. Each rest of a tenant is twice as long as its previous one, at most 10 minutes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use zernel_identity::Tenant;

use super::{Observer, attached_files, monotonic_ns};
use crate::probe_link::detach_links;

/// Longest rest before a process is tried again.
const MAX_REST: Duration = Duration::from_secs(600);

/// A time in which some processes of a tenant are not observed.
#[derive(Debug)]
struct CurrentRest {
    /// The process that exceeded the ceiling.
    pid: u32,
    /// Its user.
    uid: u32,
    until: Instant,
    /// Handles of the processes that are rested.
    processes: BTreeSet<u32>,
    /// Numbers of the files that are rested.
    files: BTreeSet<u64>,
}

/// The current rest of one tenant, and the length of its next rest.
#[derive(Debug)]
struct TenantRests {
    current_rest: Option<CurrentRest>,
    /// Length of the next rest.
    next_length: Duration,
    /// When the last rest ended.
    last_ended: Instant,
}

impl TenantRests {
    /// The length of a rest that begins now: twice the last rest, or that of a first rest if the tenant was observed since
    /// then for longer than the last rest took.
    fn begin_rest(&mut self, first: Duration) -> Duration {
        if self.last_ended.elapsed() > self.next_length {
            self.next_length = first;
        }
        let length = self.next_length;
        self.next_length = (2 * length).min(MAX_REST);
        length
    }
}

/// All rests.
#[derive(Debug)]
pub(super) struct Rests {
    first_length: Duration,
    tenants: BTreeMap<Tenant, TenantRests>,
    /// Number of rests so far, and the pid of the process that caused the last rest.
    past_rests: Option<(u32, u32)>,
}

impl Rests {
    pub(super) fn new(first: Duration) -> Self {
        Self {
            first_length: first,
            tenants: BTreeMap::new(),
            past_rests: None,
        }
    }

    fn current_rests(&self) -> impl Iterator<Item = &CurrentRest> {
        let tenants = self.tenants.values();
        tenants.filter_map(|tenant| tenant.current_rest.as_ref())
    }

    /// Sentences for users about rests, because the time of rests is missing from the figures.
    pub(super) fn describe_rests(&self) -> Vec<String> {
        let current = self.current_rests().map(|rest| {
            let left = rest.until.saturating_duration_since(Instant::now());
            let (processes, seconds) = (rest.processes.len(), left.as_secs());
            format!(
                "{processes} processes are not observed for another {seconds} s: the overhead of process {} exceeded the \
                 ceiling",
                rest.pid
            )
        });
        let mut problems: Vec<String> = current.collect();
        if problems.is_empty()
            && let Some((times, pid)) = self.past_rests
        {
            let times = match times {
                1 => "once".to_owned(),
                more => format!("{more} times"),
            };
            problems.push(format!(
                "processes were not observed for a while {times}, last because the overhead of process {pid} exceeded the \
                 ceiling"
            ));
        }
        problems
    }
}

impl Observer {
    /// Pids of the processes that are not observed because they cost too much.
    pub fn rested_pids(&self) -> impl Iterator<Item = u32> {
        let rests = self.rests.current_rests();
        let handles = rests.flat_map(|rest| &rest.processes);
        handles.filter_map(|handle| Some(self.processes.running.get(handle)?.pid))
    }

    /// Rests a process, and the files and processes of its user that it shares with nobody else. A process that has exited
    /// needs no rest.
    pub(super) fn rest_with_private_files(&mut self, handle: u32) {
        let Some(process) = self.processes.running.get(&handle) else {
            return;
        };
        let (pid, key) = (process.pid, process.discovery_key());
        let uid = process.identity.as_ref().map(|identity| identity.uid);
        let (Some(uid), Ok(tenant)) = (uid, Tenant::of_pid(pid)) else {
            return;
        };
        let mut files = self.attachment.files_of(key);
        files.retain(|file| self.attachment.is_private(*file, &tenant, uid));
        let running = self.processes.running.iter();
        let sharing = running.filter(|(_, other)| {
            let mapped = self.attachment.files_of(other.discovery_key());
            !mapped.is_disjoint(&files)
        });
        let mut processes: BTreeSet<u32> = sharing.map(|(handle, _)| *handle).collect();
        processes.insert(handle);
        detach_links(self.close_window());
        // Reads the step marks from before the rest. If that fails, the next `read` reports the error.
        let _ = self.read_step_marks();
        for handle in &processes {
            self.rest_process(*handle);
        }
        let reason = format!("the overhead of process {pid} exceeded the ceiling");
        for file in self.attachment.files_mut(&files) {
            file.detach_for_rest(&reason);
        }
        self.kernel.note_detached();
        let times = self.rests.past_rests.map_or(0, |(times, _)| times);
        self.rests.past_rests = Some((times + 1, pid));
        let first = self.rests.first_length;
        let tenants = &mut self.rests.tenants;
        let rests = tenants.entry(tenant).or_insert_with(|| TenantRests {
            current_rest: None,
            next_length: first,
            last_ended: Instant::now(),
        });
        let until = Instant::now() + rests.begin_rest(first);
        let rest = rests.current_rest.get_or_insert(CurrentRest {
            pid,
            uid,
            until,
            processes: BTreeSet::new(),
            files: BTreeSet::new(),
        });
        rest.until = rest.until.max(until);
        rest.processes.append(&mut processes);
        rest.files.append(&mut files);
    }

    fn rest_process(&mut self, handle: u32) {
        self.kernel.set_rested(handle, true);
        if let Some(process) = self.processes.running.get_mut(&handle) {
            process.overhead.is_rested = true;
            process.suspend_counting(&self.governor.sampled_symbols(), monotonic_ns());
        }
    }

    /// Skips the calls of processes that map a file whose probes are all detached until the next scan: the other calls
    /// alone would show wrong phases. Counts the calls of such a process again when the probes are attached again.
    pub(super) fn skip_processes_without_probes(&mut self) {
        let processes = self.processes.running.iter_mut();
        let changed: Vec<u32> = processes
            .filter_map(|(handle, process)| {
                let mapped = self.attachment.files_of(process.discovery_key());
                let mut waiting = self.attachment.files.iter().filter(|it| it.awaits_scan());
                let awaits = waiting.any(|file| mapped.contains(&file.file_number));
                let before = std::mem::replace(&mut process.awaits_probes, awaits);
                (awaits != before).then_some(*handle)
            })
            .collect();
        for handle in changed {
            let Some(process) = self.processes.running.get_mut(&handle) else {
                continue;
            };
            self.kernel.set_rested(handle, process.is_skipped());
            match process.is_skipped() {
                true => {
                    process.suspend_counting(&self.governor.sampled_symbols(), monotonic_ns());
                }
                false => self.resume_process(handle),
            }
        }
    }

    /// Ends the rests that are over, and those of files that another tenant maps by now.
    pub(super) fn end_rests(&mut self) {
        let now = Instant::now();
        let mut ended = Vec::new();
        for (tenant, rests) in &mut self.rests.tenants {
            if let Some(rest) = rests.current_rest.as_mut() {
                let shared = |file: &u64| !self.attachment.is_private(*file, tenant, rest.uid);
                let shared: BTreeSet<u64> = rest.files.iter().copied().filter(shared).collect();
                rest.files.retain(|file| !shared.contains(file));
                attached_files::attach_each(self.attachment.files_mut(&shared), |file| {
                    file.end_rest(&self.kernel);
                });
            }
            if let Some(rest) = rests.current_rest.take_if(|rest| now >= rest.until) {
                rests.last_ended = now;
                ended.push(rest);
            }
        }
        self.rests.tenants.retain(|_, rests| {
            rests.current_rest.is_some() || rests.last_ended.elapsed() < MAX_REST
        });
        for rest in ended {
            attached_files::attach_each(self.attachment.files_mut(&rest.files), |file| {
                file.end_rest(&self.kernel);
            });
            for handle in rest.processes {
                let Some(process) = self.processes.running.get_mut(&handle) else {
                    continue;
                };
                process.overhead.is_rested = false;
                self.kernel.set_rested(handle, process.is_skipped());
                self.resume_process(handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_double_until_a_tenant_is_observed_for_longer() {
        let first = Duration::from_millis(1);
        let mut tenant = TenantRests {
            current_rest: None,
            next_length: first,
            last_ended: Instant::now() + Duration::from_secs(3600),
        };
        let lengths: Vec<_> = (0..30).map(|_| tenant.begin_rest(first)).collect();
        assert_eq!(lengths[..3], [first, 2 * first, 4 * first]);
        assert_eq!(lengths[29], MAX_REST);
        tenant.next_length = 8 * first;
        tenant.last_ended = Instant::now() - Duration::from_secs(1);
        assert_eq!(tenant.begin_rest(first), first);
    }

    #[test]
    fn the_last_culprit_is_named() {
        let mut rests = Rests::new(Duration::ZERO);
        assert!(rests.describe_rests().is_empty());
        rests.past_rests = Some((31, 2));
        let problem = rests.describe_rests().concat();
        assert!(
            problem.contains("31 times") && problem.contains("process 2 "),
            "{problem}"
        );
    }
}
