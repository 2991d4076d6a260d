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
    let spinners = count_unrestricted_spinners(scenario);
    (spinners >= account.cpus).then(|| {
        let (idle, limit) = (account.idle, account.cpus as f64 * LARGEST_IDLE_SHARE);
        let text = format!(
            "idle time: {idle:.2} CPUs beside {spinners} tasks that never sleep, at most {limit:.2}"
        );
        Finding::new(idle <= limit, text)
    })
}

/// Workers that spin on any CPU from the scenario's start to its end.
fn count_unrestricted_spinners(scenario: &Scenario) -> usize {
    let is_spinner = |group: &&WorkSpec| {
        group.work_type == WorkType::SpinWait
            && group.affinity == Affinity::Inherit
            && is_group_unrestricted(scenario, &group.name)
    };
    let spinners = scenario.groups.iter().filter(is_spinner);
    spinners.map(|group| group.workers).sum()
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

    fn spinners_in(text: &str) -> usize {
        let text =
            format!("about = 'x'\n[[group]]\nname = 'a'\nworkers = 4\nwork = 'spin_wait'\n{text}");
        count_unrestricted_spinners(&Scenario::parse(&text, "x.toml").unwrap())
    }

    #[test]
    fn only_unrestricted_spinners_are_counted() {
        assert_eq!(spinners_in(""), 4);
        assert_eq!(spinners_in("nice = 5"), 4);
        assert_eq!(spinners_in("affinity = { exact = [0] }"), 0);
        let sleeper = "[[group]]\nname = 'b'\nwork.bursty = { burst_us = 10, sleep_us = 10 }";
        assert_eq!(spinners_in(sleeper), 4);
        let in_cgroup = |settings: &str| {
            format!(
                "[[cgroup]]\nname = 'c'\n{settings}\n[[cgroup]]\nname = 'c/d'\ngroups = ['a']\n"
            )
        };
        assert_eq!(spinners_in(&in_cgroup("weight = 10")), 4);
        assert_eq!(spinners_in(&in_cgroup("cpus = [0]")), 0, "of its parent");
        assert_eq!(spinners_in(&in_cgroup("max_ms_per_100ms = 10")), 0);
        let step = |action: &str| {
            let cgroup = in_cgroup("");
            format!("{cgroup}[[step]]\nat_ms = 1\naction = {{ {action} }}")
        };
        assert_eq!(spinners_in(&step("offline = 3")), 4);
        assert_eq!(spinners_in(&step("remove = 'a'")), 0);
        assert_eq!(spinners_in(&step("freeze = 'c'")), 0);
        assert_eq!(spinners_in(&step("set = { name = 'c', cpus = [1] }")), 0);
        assert_eq!(spinners_in(&step("set = { name = 'c', weight = 5 }")), 4);
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
