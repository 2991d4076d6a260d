//! Stops observing a process whose overhead is too high, and goes on observing all others.
//!
//! A process whose overhead stays above the ceiling although its frequent functions are sampled is *excluded* for a while.
//! The kernel skips the calls of an excluded process at the entry of the probes. Probes are detached from the files that only
//! the process's user has mapped; all processes that map these files are excluded too. Probes on files that other tenants
//! have mapped stay attached. Each exclusion of a tenant is twice as long as its previous one, at most 10 minutes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use zernel_identity::Tenant;

use super::{Observer, attached_files, monotonic_ns};
use crate::probe_link::detach_links;

/// Longest exclusion before a process is tried again.
const MAX_EXCLUSION_TIME: Duration = Duration::from_secs(600);

/// A time in which some processes of a tenant are not observed.
#[derive(Debug)]
struct CurrentExclusion {
    /// The process that exceeded the ceiling.
    pid: u32,
    /// Its user.
    uid: u32,
    ends_at: Instant,
    /// Handles of the processes that are excluded.
    excluded_handles: BTreeSet<u32>,
    /// Numbers of the files that are excluded.
    excluded_files: BTreeSet<u64>,
}

/// The current exclusion of one tenant, and the length of its next exclusion.
#[derive(Debug)]
struct TenantExclusions {
    current_exclusion: Option<CurrentExclusion>,
    /// Length of the next exclusion.
    next_length: Duration,
    /// When the last exclusion ended.
    last_ended: Instant,
}

impl TenantExclusions {
    /// The length of an exclusion that begins now: twice the last exclusion, or that of a first exclusion if the tenant was observed since
    /// then for longer than the last exclusion took.
    fn next_exclusion_length(&mut self, first: Duration) -> Duration {
        if self.last_ended.elapsed() > self.next_length {
            self.next_length = first;
        }
        let length = self.next_length;
        self.next_length = (2 * length).min(MAX_EXCLUSION_TIME);
        length
    }
}

/// All exclusions.
#[derive(Debug)]
pub(super) struct ProcessExclusions {
    first_length: Duration,
    tenants: BTreeMap<Tenant, TenantExclusions>,
    /// Number of exclusions so far, and the pid of the process that caused the last exclusion.
    past_exclusions: Option<(u32, u32)>,
}

impl ProcessExclusions {
    pub(super) fn new(first: Duration) -> Self {
        Self {
            first_length: first,
            tenants: BTreeMap::new(),
            past_exclusions: None,
        }
    }

    fn current_exclusions(&self) -> impl Iterator<Item = &CurrentExclusion> {
        let tenants = self.tenants.values();
        tenants.filter_map(|tenant| tenant.current_exclusion.as_ref())
    }

    /// Sentences for users about exclusions, because the time of exclusions is missing from the figures.
    pub(super) fn describe_exclusions(&self) -> Vec<String> {
        let current = self.current_exclusions().map(|exclusion| {
            let left = exclusion.ends_at.saturating_duration_since(Instant::now());
            let (processes, seconds) = (exclusion.excluded_handles.len(), left.as_secs());
            format!(
                "{processes} processes are not observed for another {seconds} s: the overhead of process {} exceeded the \
                 ceiling",
                exclusion.pid
            )
        });
        let mut problems: Vec<String> = current.collect();
        if problems.is_empty()
            && let Some((times, pid)) = self.past_exclusions
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
    pub fn excluded_pids(&self) -> impl Iterator<Item = u32> {
        let exclusions = self.exclusions.current_exclusions();
        let handles = exclusions.flat_map(|exclusion| &exclusion.excluded_handles);
        handles.filter_map(|handle| Some(self.processes.running_processes.get(handle)?.pid))
    }

    /// Excludes a process, and the files and processes of its user that it shares with nobody else. A process that has exited
    /// needs no exclusion.
    pub(super) fn exclude_with_private_files(&mut self, handle: u32) {
        let Some(process) = self.processes.running_processes.get(&handle) else {
            return;
        };
        let (pid, key) = (process.pid, process.discovery_key());
        let uid = process.identity.as_ref().map(|identity| identity.uid);
        let (Some(uid), Ok(tenant)) = (uid, Tenant::of_pid(pid)) else {
            return;
        };
        let mut files = self.attachment.files_of(key);
        files.retain(|file| self.attachment.is_private_to_user(*file, &tenant, uid));
        let running = self.processes.running_processes.iter();
        let sharing = running.filter(|(_, other)| {
            let mapped = self.attachment.files_of(other.discovery_key());
            !mapped.is_disjoint(&files)
        });
        let mut processes: BTreeSet<u32> = sharing.map(|(handle, _)| *handle).collect();
        processes.insert(handle);
        detach_links(self.close_window());
        // Reads the step marks from before the exclusion. If that fails, the next `read` reports the error.
        let _ = self.read_step_marks();
        for handle in &processes {
            self.exclude_process(*handle);
        }
        let reason = format!("the overhead of process {pid} exceeded the ceiling");
        for file in self.attachment.files_mut(&files) {
            file.detach_for_exclusion(&reason);
        }
        self.kernel.record_detach_time();
        let times = self
            .exclusions
            .past_exclusions
            .map_or(0, |(times, _)| times);
        self.exclusions.past_exclusions = Some((times + 1, pid));
        let first = self.exclusions.first_length;
        let tenants = &mut self.exclusions.tenants;
        let exclusions = tenants.entry(tenant).or_insert_with(|| TenantExclusions {
            current_exclusion: None,
            next_length: first,
            last_ended: Instant::now(),
        });
        let until = Instant::now() + exclusions.next_exclusion_length(first);
        let exclusion = exclusions
            .current_exclusion
            .get_or_insert(CurrentExclusion {
                pid,
                uid,
                ends_at: until,
                excluded_handles: BTreeSet::new(),
                excluded_files: BTreeSet::new(),
            });
        exclusion.ends_at = exclusion.ends_at.max(until);
        exclusion.excluded_handles.append(&mut processes);
        exclusion.excluded_files.append(&mut files);
    }

    fn exclude_process(&mut self, handle: u32) {
        self.kernel.set_uncounted(handle, true);
        if let Some(process) = self.processes.running_processes.get_mut(&handle) {
            process.overhead.is_excluded = true;
            process.suspend_counting(&self.governor.sampled_symbols(), monotonic_ns());
        }
    }

    /// Skips the calls of processes that map a file whose probes are all detached until the next scan: the other calls
    /// alone would show wrong phases. Counts the calls of such a process again when the probes are attached again.
    pub(super) fn skip_processes_without_probes(&mut self) {
        let processes = self.processes.running_processes.iter_mut();
        let changed: Vec<u32> = processes
            .filter_map(|(handle, process)| {
                let mapped = self.attachment.files_of(process.discovery_key());
                let mut waiting = self
                    .attachment
                    .files
                    .iter()
                    .filter(|it| it.is_detached_until_scan());
                let awaits = waiting.any(|file| mapped.contains(&file.file_number));
                let before = std::mem::replace(&mut process.awaits_probes, awaits);
                (awaits != before).then_some(*handle)
            })
            .collect();
        for handle in changed {
            let Some(process) = self.processes.running_processes.get_mut(&handle) else {
                continue;
            };
            self.kernel.set_uncounted(handle, process.is_uncounted());
            match process.is_uncounted() {
                true => {
                    process.suspend_counting(&self.governor.sampled_symbols(), monotonic_ns());
                }
                false => self.resume_process(handle),
            }
        }
    }

    /// Ends the exclusions that are over, and those of files that another tenant maps by now.
    pub(super) fn end_exclusions(&mut self) {
        let now = Instant::now();
        let mut ended = Vec::new();
        for (tenant, exclusions) in &mut self.exclusions.tenants {
            if let Some(exclusion) = exclusions.current_exclusion.as_mut() {
                let shared = |file: &u64| {
                    !self
                        .attachment
                        .is_private_to_user(*file, tenant, exclusion.uid)
                };
                let shared: BTreeSet<u64> = exclusion
                    .excluded_files
                    .iter()
                    .copied()
                    .filter(shared)
                    .collect();
                exclusion
                    .excluded_files
                    .retain(|file| !shared.contains(file));
                attached_files::attach_each_file(self.attachment.files_mut(&shared), |file| {
                    file.end_exclusion(&self.kernel);
                });
            }
            if let Some(exclusion) = exclusions
                .current_exclusion
                .take_if(|exclusion| now >= exclusion.ends_at)
            {
                exclusions.last_ended = now;
                ended.push(exclusion);
            }
        }
        self.exclusions.tenants.retain(|_, exclusions| {
            exclusions.current_exclusion.is_some()
                || exclusions.last_ended.elapsed() < MAX_EXCLUSION_TIME
        });
        for exclusion in ended {
            attached_files::attach_each_file(
                self.attachment.files_mut(&exclusion.excluded_files),
                |file| {
                    file.end_exclusion(&self.kernel);
                },
            );
            for handle in exclusion.excluded_handles {
                let Some(process) = self.processes.running_processes.get_mut(&handle) else {
                    continue;
                };
                process.overhead.is_excluded = false;
                self.kernel.set_uncounted(handle, process.is_uncounted());
                self.resume_process(handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusions_double_until_a_tenant_is_observed_for_longer() {
        let first = Duration::from_millis(1);
        let mut tenant = TenantExclusions {
            current_exclusion: None,
            next_length: first,
            last_ended: Instant::now() + Duration::from_secs(3600),
        };
        let lengths: Vec<_> = (0..30)
            .map(|_| tenant.next_exclusion_length(first))
            .collect();
        assert_eq!(lengths[..3], [first, 2 * first, 4 * first]);
        assert_eq!(lengths[29], MAX_EXCLUSION_TIME);
        tenant.next_length = 8 * first;
        tenant.last_ended = Instant::now() - Duration::from_secs(1);
        assert_eq!(tenant.next_exclusion_length(first), first);
    }

    #[test]
    fn the_last_excluded_process_is_named() {
        let mut exclusions = ProcessExclusions::new(Duration::ZERO);
        assert!(exclusions.describe_exclusions().is_empty());
        exclusions.past_exclusions = Some((31, 2));
        let problem = exclusions.describe_exclusions().concat();
        assert!(
            problem.contains("31 times") && problem.contains("process 2 "),
            "{problem}"
        );
    }
}
