//! Reads the tasks of a group from `/proc`: their CPU time, their waiting time, and which of them wait now.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// CPU time and waiting time that a task has had so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct TaskTimes {
    pub(super) cpu_ns: u64,
    pub(super) run_delay_ns: u64,
}

impl TaskTimes {
    fn read_schedstat(task: &Path) -> Option<Self> {
        let text = fs::read_to_string(task.join("schedstat")).ok()?;
        let mut fields = text.split_whitespace().map(str::parse);
        Some(Self {
            cpu_ns: fields.next()?.ok()?,
            run_delay_ns: fields.next()?.ok()?,
        })
    }
}

/// Whether a task is running or waiting for a CPU.
fn is_runnable(task: &Path) -> bool {
    let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
    state_in_stat(&stat) == Some('R')
}

/// The state of a task in the text of its `stat` file. The name of the task before the state may contain anything.
fn state_in_stat(stat: &str) -> Option<char> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.trim_start().chars().next()
}

/// The tasks of a group, as the last sample found them.
#[derive(Debug, Default)]
pub(super) struct TaskSampler {
    tasks: BTreeMap<i32, SampledTask>,
    /// CPU time and waiting time of tasks that have ended.
    times_of_ended_tasks: TaskTimes,
    longest_wait_ns: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct SampledTask {
    times: TaskTimes,
    /// Time since which a task was runnable at every sample and did not run.
    waiting_since_ns: Option<u64>,
}

impl TaskSampler {
    /// Takes a sample of the threads of these processes and of their descendants.
    pub(super) fn sample_processes(&mut self, pids: &[i32], now_ns: u64) {
        self.sample(pids, true, now_ns);
    }

    /// Takes a sample of the threads of a process, without its descendants.
    pub(super) fn sample_threads(&mut self, pid: i32, now_ns: u64) {
        self.sample(&[pid], false, now_ns);
    }

    fn sample(&mut self, pids: &[i32], includes_descendants: bool, now_ns: u64) {
        let mut sampled_tasks = BTreeMap::new();
        let mut processes = pids.to_vec();
        while let Some(process) = processes.pop() {
            for task in thread_ids(process) {
                let folder = format!("/proc/{process}/task/{task}");
                let folder = Path::new(&folder);
                if let Some(times) = TaskTimes::read_schedstat(folder) {
                    sampled_tasks.insert(
                        task,
                        self.update_task(task, times, is_runnable(folder), now_ns),
                    );
                }
                if includes_descendants {
                    processes.extend(child_pids(folder));
                }
            }
        }
        for (task, sampled) in std::mem::replace(&mut self.tasks, sampled_tasks) {
            if !self.tasks.contains_key(&task) {
                self.times_of_ended_tasks.cpu_ns += sampled.times.cpu_ns;
                self.times_of_ended_tasks.run_delay_ns += sampled.times.run_delay_ns;
            }
        }
    }

    fn update_task(
        &mut self,
        task: i32,
        times: TaskTimes,
        is_runnable: bool,
        now_ns: u64,
    ) -> SampledTask {
        let earlier = self.tasks.get(&task).copied();
        let has_run = earlier.is_none_or(|earlier| earlier.times.cpu_ns != times.cpu_ns);
        let waiting_since_ns = match (is_runnable, has_run) {
            (false, _) => None,
            (true, true) => Some(now_ns),
            (true, false) => earlier
                .and_then(|earlier| earlier.waiting_since_ns)
                .or(Some(now_ns)),
        };
        if let Some(since_ns) = waiting_since_ns {
            self.longest_wait_ns = self.longest_wait_ns.max(now_ns - since_ns);
        }
        SampledTask {
            times,
            waiting_since_ns,
        }
    }

    /// CPU time and waiting time of all tasks so far, tasks that have ended included.
    pub(super) fn total_task_times(&self) -> TaskTimes {
        let times = self.tasks.values().map(|sampled| sampled.times);
        times.fold(self.times_of_ended_tasks, |sum, task_times| TaskTimes {
            cpu_ns: sum.cpu_ns + task_times.cpu_ns,
            run_delay_ns: sum.run_delay_ns + task_times.run_delay_ns,
        })
    }

    /// The longest time for which a task was runnable at every sample and did not run.
    pub(super) fn longest_wait_ns(&self) -> u64 {
        self.longest_wait_ns
    }
}

fn thread_ids(process: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/task")) else {
        return Vec::new();
    };
    let tid = |entry: std::io::Result<fs::DirEntry>| -> Option<i32> {
        entry.ok()?.file_name().to_str()?.parse().ok()
    };
    entries.filter_map(tid).collect()
}

fn child_pids(task: &Path) -> Vec<i32> {
    let text = fs::read_to_string(task.join("children")).unwrap_or_default();
    text.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn task_state_is_parsed_after_any_task_name() {
        assert_eq!(state_in_stat("12 (a) R) x) S 1 2"), Some('S'));
        assert_eq!(state_in_stat("12 (cat) R 1 2"), Some('R'));
        assert_eq!(state_in_stat("malformed"), None);
    }

    #[test]
    fn longest_wait_counts_runnable_time_without_cpu() {
        let mut sampler = TaskSampler::default();
        let mut update_task = |cpu_ns, runnable, now_ns| {
            let times = TaskTimes {
                cpu_ns,
                run_delay_ns: 0,
            };
            let sampled = sampler.update_task(1, times, runnable, now_ns);
            sampler.tasks.insert(1, sampled);
            sampler.longest_wait_ns()
        };
        assert_eq!(update_task(5, true, SECOND_NS), 0);
        assert_eq!(update_task(5, true, 3 * SECOND_NS), 2 * SECOND_NS);
        assert_eq!(
            update_task(6, true, 4 * SECOND_NS),
            2 * SECOND_NS,
            "it has run"
        );
        assert_eq!(
            update_task(6, false, 9 * SECOND_NS),
            2 * SECOND_NS,
            "it sleeps"
        );
        assert_eq!(update_task(6, true, 10 * SECOND_NS), 2 * SECOND_NS);
        assert_eq!(update_task(6, true, 13 * SECOND_NS), 3 * SECOND_NS);
    }

    #[test]
    fn sampling_counts_cpu_time_of_this_process() {
        let mut sampler = TaskSampler::default();
        let own_pid = i32::try_from(std::process::id()).unwrap();
        sampler.sample_processes(&[own_pid], 1);
        assert!(sampler.total_task_times().cpu_ns > 0);
        let before = sampler.total_task_times();
        sampler.sample_processes(&[], 2);
        assert_eq!(
            sampler.total_task_times(),
            before,
            "tasks that ended keep their times"
        );
    }
}
