//! Controls: settings that an administrator could make instead of running another scheduler.

use std::fmt;
use std::str::FromStr;

use zernel_workload::{SchedPolicy, WorkSpec, WorkType};

use super::{Scenario, ScenarioAction, ScenarioCgroup, TimedAction};

/// The slice that the control `slice` asks EEVDF for: a fortieth of the kernel's default.
const SHORT_SLICE_US: u64 = 100;
/// The real-time priority of the control `fifo`.
const FIFO_PRIORITY: u32 = 50;
/// The largest `cpu.weight`.
const LARGEST_WEIGHT: u32 = 10_000;
/// The name of the group of spinners that keeps CPUs busy under the control `ref`.
const IDLE_SPINNERS_GROUP: &str = "idle-spinners";

/// A change of a scenario under EEVDF. "Training" means the groups of the key `training`, with the loaders that they
/// fork; "noise" means the groups of the key `noise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EevdfControl {
    /// Training runs at nice -20.
    Nice,
    /// Training runs at SCHED_FIFO.
    Fifo,
    /// Training runs in a cgroup with `cpu.weight` 10000.
    Weight,
    /// Noise runs in a cgroup with `cpu.idle`.
    Idle,
    /// Training runs with an EEVDF slice of 100 µs.
    Slice,
    /// The upper bound of what a scheduler can reach: training at SCHED_FIFO, without noise, beside one SCHED_IDLE
    /// spinner per CPU. The spinners keep the CPUs as busy as noise does, because an emulated CPU is faster while other
    /// CPUs idle.
    Reference,
}

impl EevdfControl {
    /// All controls.
    pub const ALL: [Self; 6] = [
        Self::Nice,
        Self::Fifo,
        Self::Weight,
        Self::Idle,
        Self::Slice,
        Self::Reference,
    ];

    /// The name of the control on a command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nice => "nice",
            Self::Fifo => "fifo",
            Self::Weight => "weight",
            Self::Idle => "idle",
            Self::Slice => "slice",
            Self::Reference => "ref",
        }
    }

    /// The scenario with this control, or why the control means nothing in it.
    ///
    /// # Errors
    /// The scenario names no training, or no noise.
    pub fn apply_to_scenario(self, scenario: &Scenario) -> Result<Scenario, String> {
        let needs_noise = self == Self::Idle;
        let (key, groups) = match needs_noise {
            true => ("noise", &scenario.noise),
            false => ("training", &scenario.training),
        };
        if groups.is_empty() {
            return Err(format!("the scenario names no groups in its key `{key}`"));
        }
        let mut changed = scenario.clone();
        match self {
            Self::Nice => change_training_groups(&mut changed, |group| group.nice = Some(-20)),
            Self::Fifo => change_training_groups(&mut changed, set_fifo_policy),
            Self::Slice => change_training_groups(&mut changed, |group| {
                group.policy = Some(SchedPolicy::NormalSlice {
                    slice_us: SHORT_SLICE_US,
                });
            }),
            Self::Weight => {
                change_cgroups_of_groups(&mut changed, &scenario.training, "training", |cgroup| {
                    cgroup.weight = Some(LARGEST_WEIGHT);
                });
                // Without a cgroup each task of the noise would count as much as a cgroup.
                change_cgroups_of_groups(&mut changed, &scenario.noise, "noise", |_| {});
            }
            Self::Idle => {
                change_cgroups_of_groups(&mut changed, &scenario.noise, "noise", |cgroup| {
                    cgroup.idle = Some(true);
                });
            }
            Self::Reference => turn_into_reference_scenario(&mut changed)?,
        }
        Ok(changed)
    }
}

impl fmt::Display for EevdfControl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for EevdfControl {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let control = Self::ALL.into_iter().find(|control| control.name() == name);
        control.ok_or(())
    }
}

fn change_training_groups(scenario: &mut Scenario, change: impl Fn(&mut WorkSpec)) {
    let training = scenario.training.clone();
    let is_training = |group: &&mut WorkSpec| training.contains(&group.name);
    scenario
        .groups
        .iter_mut()
        .filter(is_training)
        .for_each(change);
}

fn set_fifo_policy(group: &mut WorkSpec) {
    group.policy = Some(SchedPolicy::Fifo {
        priority: FIFO_PRIORITY,
    });
    group.nice = None;
}

/// Changes the cgroups of some groups. Groups without a cgroup get one in common.
fn change_cgroups_of_groups(
    scenario: &mut Scenario,
    groups: &[String],
    name: &str,
    change: impl Fn(&mut ScenarioCgroup),
) {
    let has_cgroup = |group: &&String| scenario.cgroup_of_group(group).is_some();
    let (with_cgroup, without_cgroup): (Vec<&String>, Vec<&String>) =
        groups.iter().partition(has_cgroup);
    for cgroup in &mut scenario.cgroups {
        if cgroup
            .groups
            .iter()
            .any(|group| with_cgroup.contains(&group))
        {
            change(cgroup);
        }
    }
    if without_cgroup.is_empty() {
        return;
    }
    let mut cgroup = ScenarioCgroup {
        name: format!("control-{name}"),
        groups: without_cgroup.into_iter().cloned().collect(),
        ..ScenarioCgroup::default()
    };
    change(&mut cgroup);
    scenario.cgroups.push(cgroup);
}

fn turn_into_reference_scenario(scenario: &mut Scenario) -> Result<(), String> {
    change_training_groups(scenario, set_fifo_policy);
    let noise = std::mem::take(&mut scenario.noise);
    let is_noise = |name: &String| noise.contains(name);
    scenario.groups.retain(|group| !is_noise(&group.name));
    for cgroup in &mut scenario.cgroups {
        cgroup.groups.retain(|group| !is_noise(group));
    }
    let concerns_noise = |step: &TimedAction| match &step.action {
        ScenarioAction::Add(group)
        | ScenarioAction::Remove(group)
        | ScenarioAction::Move { group, .. } => is_noise(group),
        _ => false,
    };
    scenario.steps.retain(|step| !concerns_noise(step));
    let names_noise = |name: &str| noise.iter().any(|noise| noise == name);
    scenario
        .assertions
        .retain(|assertion| !assertion.named_groups().into_iter().any(names_noise));
    let cpus = scenario.parsed_topology()?.cpu_count();
    let spinners = WorkSpec::new()
        .name(IDLE_SPINNERS_GROUP)
        .workers(usize::try_from(cpus).unwrap_or(usize::MAX))
        .work_type(WorkType::SpinWait)
        .policy(SchedPolicy::Idle);
    scenario.groups.push(spinners);
    scenario.noise.push(IDLE_SPINNERS_GROUP.to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training_and_noise_scenario() -> Scenario {
        let text = "about = 'x'\ntraining = ['t']\nnoise = ['n']\n[[group]]\nname = 't'\n[[group]]\nname = 'n'\nworkers = 8\n\
                    [[step]]\nat_ms = 9\naction = { remove = 'n' }";
        Scenario::parse(text, "x.toml").unwrap()
    }

    #[test]
    fn controls_change_only_training_or_noise() {
        let nice = EevdfControl::Nice
            .apply_to_scenario(&training_and_noise_scenario())
            .unwrap();
        assert_eq!(
            (nice.groups[0].nice, nice.groups[1].nice),
            (Some(-20), None)
        );
        let slice = EevdfControl::Slice
            .apply_to_scenario(&training_and_noise_scenario())
            .unwrap();
        assert_eq!(
            slice.groups[0].policy,
            Some(SchedPolicy::NormalSlice { slice_us: 100 })
        );
        let weight = EevdfControl::Weight
            .apply_to_scenario(&training_and_noise_scenario())
            .unwrap();
        assert_eq!(weight.cgroup_of_group("t").unwrap().weight, Some(10_000));
        assert_eq!(weight.cgroup_of_group("n").unwrap().weight, None);
        let idle = EevdfControl::Idle
            .apply_to_scenario(&training_and_noise_scenario())
            .unwrap();
        assert_eq!(idle.cgroup_of_group("n").unwrap().idle, Some(true));
        assert!(idle.cgroup_of_group("t").is_none());
    }

    #[test]
    fn reference_control_replaces_noise_by_idle_spinners() {
        let reference = EevdfControl::Reference
            .apply_to_scenario(&training_and_noise_scenario())
            .unwrap();
        assert!(reference.find_group("n").is_none() && reference.steps.is_empty());
        let spinners = reference.find_group(IDLE_SPINNERS_GROUP).unwrap();
        assert_eq!(
            (spinners.workers, &spinners.policy),
            (4, &Some(SchedPolicy::Idle))
        );
        assert_eq!(
            reference.groups[0].policy,
            Some(SchedPolicy::Fifo { priority: 50 })
        );
    }

    #[test]
    fn controls_refuse_scenario_without_training() {
        let plain = Scenario::parse("about = 'x'\n[[group]]\nname = 'a'", "x.toml").unwrap();
        for control in EevdfControl::ALL {
            let error = control.apply_to_scenario(&plain).unwrap_err();
            assert!(error.contains("the scenario names no groups"), "{error}");
        }
    }

    #[test]
    fn weight_control_changes_existing_cgroup() {
        let mut scenario = training_and_noise_scenario();
        scenario.cgroups.push(ScenarioCgroup {
            name: "mine".to_owned(),
            groups: vec!["t".to_owned()],
            ..ScenarioCgroup::default()
        });
        let changed = EevdfControl::Weight.apply_to_scenario(&scenario).unwrap();
        assert_eq!(changed.cgroup_of_group("t").unwrap().name, "mine");
        assert_eq!(changed.cgroup_of_group("t").unwrap().weight, Some(10_000));
    }
}
