//! The default assertion that no CPU is idle while tasks wait, in scenarios whose tasks could use every CPU all the time.

use super::Finding;
use crate::scenario::figures::RunFigures;
use crate::scenario::{Scenario, ScenarioAction, ScenarioCgroup};
use zernel_workload::{Affinity, WorkSpec, WorkType};

/// The largest share of idle time, that of the scenario `saturate`.
const LARGEST_IDLE_SHARE: f64 = 0.02;

/// `None` if the scenario's tasks may leave CPUs idle, or if the account is missing.
pub(super) fn judge_idle_time(scenario: &Scenario, figures: &RunFigures) -> Option<Finding> {
    let account = figures.account.as_ref()?;
    let spinners = allowed_cpus_of_spinners(scenario, account.cpus);
    (count_busy_cpus(&spinners, account.cpus) == account.cpus).then(|| {
        let (idle, limit) = (account.idle, account.cpus as f64 * LARGEST_IDLE_SHARE);
        let text = format!(
            "idle time: {idle:.2} CPUs beside {} tasks that never sleep, at most {limit:.2}",
            spinners.len()
        );
        Finding::new(idle <= limit, text)
    })
}

/// The CPUs that each worker may use that spins from the scenario's start to its end.
fn allowed_cpus_of_spinners(scenario: &Scenario, cpus: usize) -> Vec<Vec<usize>> {
    let is_spinner = |group: &&WorkSpec| {
        group.work_type == WorkType::SpinWait && is_group_unrestricted(scenario, &group.name)
    };
    let groups = scenario.groups.iter().filter(is_spinner);
    let of_worker = |group: &WorkSpec, worker: usize| match &group.affinity {
        Affinity::Inherit => Some((0..cpus).collect()),
        Affinity::Exact(set) => Some(set.iter().copied().collect()),
        Affinity::PerWorker(sets) => Some(sets.get(worker)?.iter().copied().collect()),
        Affinity::SingleCpu => Some(vec![worker % cpus]),
        _ => None,
    };
    let spinners = groups
        .flat_map(|group| (0..group.workers).filter_map(move |worker| of_worker(group, worker)));
    spinners.collect()
}

/// How many CPUs these workers can keep busy at once, each of which may use the listed CPUs.
fn count_busy_cpus(workers: &[Vec<usize>], cpus: usize) -> usize {
    let mut worker_of_cpu = vec![None; cpus];
    let found =
        |worker: &usize| place_worker(*worker, workers, &mut worker_of_cpu, &mut vec![false; cpus]);
    (0..workers.len()).filter(found).count()
}

/// Finds a CPU for a worker, if need be by moving the worker that has it to another one. Returns whether there is one.
fn place_worker(
    worker: usize,
    workers: &[Vec<usize>],
    worker_of_cpu: &mut [Option<usize>],
    is_tried: &mut [bool],
) -> bool {
    workers[worker].iter().any(|&cpu| {
        if cpu >= is_tried.len() || std::mem::replace(&mut is_tried[cpu], true) {
            return false;
        }
        let is_free = worker_of_cpu[cpu]
            .is_none_or(|other| place_worker(other, workers, worker_of_cpu, is_tried));
        if is_free {
            worker_of_cpu[cpu] = Some(worker);
        }
        is_free
    })
}

/// Whether no cgroup and no step restricts a group.
fn is_group_unrestricted(scenario: &Scenario, group: &str) -> bool {
    let cgroup_name = scenario
        .cgroup_of_group(group)
        .map_or("", |cgroup| cgroup.name.as_str());
    let holds_group = |name: &str| {
        cgroup_name == name
            || cgroup_name
                .strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('/'))
    };
    let restricts = |cgroup: &ScenarioCgroup| {
        holds_group(&cgroup.name) && (cgroup.cpus.is_some() || cgroup.max_ms_per_100ms.is_some())
    };
    let changes_group = |action: &ScenarioAction| match action {
        ScenarioAction::Add(name) | ScenarioAction::Remove(name) => name == group,
        ScenarioAction::Move { group: name, .. } => name == group,
        ScenarioAction::Freeze(name) => holds_group(name),
        ScenarioAction::Set(cgroup) => restricts(cgroup),
        ScenarioAction::Thaw(_) | ScenarioAction::Offline(_) | ScenarioAction::Online(_) => false,
    };
    let has_restricting_step = scenario
        .steps
        .iter()
        .any(|step| changes_group(&step.action));
    !has_restricting_step && !scenario.cgroups.iter().any(restricts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assertion::Verdict;
    use crate::scenario::figures::CpuTimeFigures;

    /// How many of four CPUs four spinners can keep busy.
    fn busy_cpus_in(text: &str) -> usize {
        let text =
            format!("about = 'x'\n[[group]]\nname = 'a'\nworkers = 4\nwork = 'spin_wait'\n{text}");
        let scenario = Scenario::parse(&text, "x.toml").unwrap();
        count_busy_cpus(&allowed_cpus_of_spinners(&scenario, 4), 4)
    }

    #[test]
    fn spinners_take_the_cpus_that_others_may_not_use() {
        assert_eq!(busy_cpus_in("affinity = { exact = [1] }"), 1);
        assert_eq!(busy_cpus_in("affinity = { exact = [0, 1] }"), 2);
        assert_eq!(busy_cpus_in("affinity = 'single_cpu'"), 4);
        assert_eq!(busy_cpus_in("affinity = { exact = [7] }"), 0);
        let chain = "affinity = { per_worker = [[0, 1], [0], [1, 2], [2, 3]] }";
        assert_eq!(busy_cpus_in(chain), 4);
        let beside =
            "affinity = { exact = [0, 1] }\n[[group]]\nname = 'b'\nworkers = 2\nwork = 'spin_wait'";
        assert_eq!(busy_cpus_in(beside), 4);
    }

    #[test]
    fn spinners_that_a_cgroup_or_a_step_restricts_do_not_count() {
        assert_eq!(busy_cpus_in(""), 4);
        assert_eq!(busy_cpus_in("nice = 5"), 4);
        let sleeper = "[[group]]\nname = 'b'\nwork.bursty = { burst_us = 10, sleep_us = 10 }";
        assert_eq!(busy_cpus_in(sleeper), 4);
        let in_cgroup = |settings: &str| {
            format!(
                "[[cgroup]]\nname = 'c'\n{settings}\n[[cgroup]]\nname = 'c/d'\ngroups = ['a']\n"
            )
        };
        assert_eq!(busy_cpus_in(&in_cgroup("weight = 10")), 4);
        assert_eq!(busy_cpus_in(&in_cgroup("cpus = [0]")), 0, "of its parent");
        assert_eq!(busy_cpus_in(&in_cgroup("max_ms_per_100ms = 10")), 0);
        let step = |action: &str| {
            let cgroup = in_cgroup("");
            format!("{cgroup}[[step]]\nat_ms = 1\naction = {{ {action} }}")
        };
        assert_eq!(busy_cpus_in(&step("offline = 3")), 4);
        assert_eq!(busy_cpus_in(&step("remove = 'a'")), 0);
        assert_eq!(busy_cpus_in(&step("freeze = 'c'")), 0);
        assert_eq!(busy_cpus_in(&step("set = { name = 'c', cpus = [1] }")), 0);
        assert_eq!(busy_cpus_in(&step("set = { name = 'c', weight = 5 }")), 4);
    }

    #[test]
    fn idle_cpu_beside_waiting_spinners_fails() {
        let text =
            "about = 'x'\n[[group]]\nname = 'a'\nworkers = 8\nwork = 'spin_wait'\n".to_owned();
        let verdict = |text: &str, idle| {
            let account = CpuTimeFigures {
                cpus: 4,
                idle,
                ..CpuTimeFigures::default()
            };
            let figures = RunFigures {
                account: Some(account),
                ..RunFigures::default()
            };
            let scenario = Scenario::parse(text, "x.toml").unwrap();
            judge_idle_time(&scenario, &figures).map(|finding| finding.verdict)
        };
        assert_eq!(verdict(&text, 0.05), Some(Verdict::Pass));
        assert_eq!(verdict(&text, 0.7), Some(Verdict::Fail));
        assert_eq!(verdict(&text.replace('8', "3"), 0.7), None);
    }
}
