//! Scenarios: what runs in a virtual machine, when, in which cgroups, and what must hold.
//!
//! A scenario is a TOML file. Its `[[group]]` tables are those of a workload file. [`Scenario::load`] reads and checks
//! a scenario, [`crate::ScenarioRun`] runs it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use zernel_workload::work::GpuBackend;
use zernel_workload::{CloneMode, WorkSpec, WorkType, WorkloadSpec};

use crate::assertion::Assertion;
use crate::topology::CpuTopology;

pub mod cgroup;
pub mod control;
pub mod execute;
pub mod figures;
pub mod plan;
mod seed;
mod task_sampler;

pub use cgroup::ScenarioCgroup;
pub use control::EevdfControl;

/// Path of the software GPU's `libcuda.so.1` in the virtual machine.
pub const SOFTWARE_GPU_DRIVER_PATH: &str = "/softgpu/libcuda.so.1";
/// Folder in the virtual machine for the temporary files of training jobs.
const TRAINING_FILES_FOLDER: &str = "/tmp";

/// A scenario as a file states it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// The name of the scenario: the file name without `.toml`.
    #[serde(skip)]
    pub name: String,
    /// What the scenario shows, in one sentence.
    pub about: String,
    /// The CPUs of the virtual machine: a number, or nodes x last-level caches x cores x threads.
    pub topology: String,
    /// The version of the kernel, such as `6.18`.
    pub kernel: String,
    /// Memory of the virtual machine, in MiB.
    pub memory_mib: u32,
    /// Time between the start of the groups and the start of the measurement.
    pub warmup_ms: u64,
    /// Length of the measurement.
    pub duration_ms: u64,
    /// Largest delay of a group's start. The seed chooses a delay for each group.
    pub start_spread_us: u64,
    /// Largest change of a service time (every `_us` key of a work type), in percent. The seed chooses a change for
    /// each.
    pub service_spread_percent: f64,
    /// Whether `zernel observe` runs in the virtual machine during the run.
    pub observe: bool,
    /// The groups that controls favour: training jobs, or other work that must be fast.
    pub training: Vec<String>,
    /// The groups that controls hold back.
    pub noise: Vec<String>,
    /// Groups of workers.
    #[serde(rename = "group")]
    pub groups: Vec<WorkSpec>,
    /// Cgroups of the virtual machine. A parent comes before its children.
    #[serde(rename = "cgroup")]
    pub cgroups: Vec<ScenarioCgroup>,
    /// Changes that are made while the scenario runs.
    #[serde(rename = "step")]
    pub steps: Vec<TimedAction>,
    /// Assertions that a run must pass in addition to the default ones.
    #[serde(rename = "assert")]
    pub assertions: Vec<Assertion>,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            name: String::new(),
            about: String::new(),
            topology: "4".to_owned(),
            kernel: "6.18".to_owned(),
            memory_mib: 1024,
            warmup_ms: 500,
            duration_ms: 1500,
            start_spread_us: 4000,
            service_spread_percent: 2.0,
            observe: false,
            training: Vec::new(),
            noise: Vec::new(),
            groups: Vec::new(),
            cgroups: Vec::new(),
            steps: Vec::new(),
            assertions: Vec::new(),
        }
    }
}

/// A change of a running scenario at a certain moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedAction {
    /// The moment of the change, counted from the start of the groups.
    pub at_ms: u64,
    /// The change.
    pub action: ScenarioAction,
}

/// A change of a running scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ScenarioAction {
    /// Starts a group, which then does not start with the other groups.
    Add(String),
    /// Stops a group.
    Remove(String),
    /// Moves a group to another cgroup.
    Move {
        /// The name of the group.
        group: String,
        /// The name of the cgroup.
        to: String,
    },
    /// Freezes a cgroup.
    Freeze(String),
    /// Thaws a cgroup.
    Thaw(String),
    /// Changes settings of a cgroup; settings that are not named stay as they are.
    Set(ScenarioCgroup),
    /// Switches a CPU off.
    Offline(usize),
    /// Switches a CPU on again.
    Online(usize),
}

/// The first mistake in a scenario file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{file}: {problem}")]
pub struct ScenarioError {
    file: String,
    problem: String,
}

impl Scenario {
    /// Reads and checks a scenario file.
    ///
    /// # Errors
    /// The file cannot be read or is no valid scenario. The error names its first mistake.
    pub fn load(path: &Path) -> Result<Self, ScenarioError> {
        let file = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| ScenarioError {
            file: file.clone(),
            problem: format!("cannot read it: {error}"),
        })?;
        Self::parse(&text, &file)
    }

    /// Parses and checks the text of a scenario. Errors name `file`, and the scenario is named after `file`.
    ///
    /// # Errors
    /// The first mistake in the text.
    pub fn parse(text: &str, file: &str) -> Result<Self, ScenarioError> {
        let failed = |problem: String| ScenarioError {
            file: file.to_owned(),
            problem,
        };
        let mut scenario: Self = toml::from_str(text)
            .map_err(|error| failed(error.to_string().trim_end().to_owned()))?;
        let stem = Path::new(file).file_stem().unwrap_or_default();
        scenario.name = stem.to_string_lossy().into_owned();
        for group in &mut scenario.groups {
            if let WorkType::MlTraining(work) = &mut group.work_type {
                work.folder = TRAINING_FILES_FOLDER.into();
            }
        }
        scenario.check().map_err(failed)?;
        Ok(scenario)
    }

    /// The CPU topology of the virtual machine.
    ///
    /// # Errors
    /// What is wrong with `topology`.
    pub fn parsed_topology(&self) -> Result<CpuTopology, String> {
        if let Ok(cpus @ 1..=255) = self.topology.parse::<u32>() {
            return Ok(CpuTopology::with_one_cache(cpus));
        }
        self.topology
            .parse::<CpuTopology>()
            .map_err(|error| format!("key `topology`: {error}"))
    }

    /// The group with this name.
    #[must_use]
    pub fn find_group(&self, name: &str) -> Option<&WorkSpec> {
        self.groups.iter().find(|group| group.name == name)
    }

    /// The cgroup that a group starts in.
    #[must_use]
    pub fn cgroup_of_group(&self, group: &str) -> Option<&ScenarioCgroup> {
        let holds = |cgroup: &&ScenarioCgroup| cgroup.groups.iter().any(|name| name == group);
        self.cgroups.iter().find(holds)
    }

    /// Whether a step of the scenario starts this group.
    #[must_use]
    pub fn is_added_by_step(&self, group: &str) -> bool {
        let adds =
            |step: &TimedAction| matches!(&step.action, ScenarioAction::Add(name) if name == group);
        self.steps.iter().any(adds)
    }

    /// Whether a group uses the software GPU.
    #[must_use]
    pub fn needs_software_gpu(&self) -> bool {
        self.groups
            .iter()
            .any(|group| gpu_driver_path_of_work(&group.work_type).is_some())
    }

    fn check(&self) -> Result<(), String> {
        if self.about.is_empty() {
            return Err("key `about` is missing; describe the scenario in one sentence".to_owned());
        }
        if self.duration_ms == 0 {
            return Err("key `duration_ms` is 0; measure for at least 1 ms".to_owned());
        }
        if !(0.0..=50.0).contains(&self.service_spread_percent) {
            return Err("key `service_spread_percent` is not between 0 and 50".to_owned());
        }
        self.parsed_topology()?;
        self.check_groups()?;
        self.check_cgroups()?;
        self.steps
            .iter()
            .try_for_each(|step| self.check_step(step))?;
        let names: BTreeSet<&str> = self
            .groups
            .iter()
            .map(|group| group.name.as_str())
            .collect();
        for name in self.training.iter().chain(&self.noise) {
            check_name_exists("group", name, &names, "training` or `noise")?;
        }
        for assertion in &self.assertions {
            for name in assertion.named_groups() {
                check_name_exists("group", name, &names, "assert")?;
            }
        }
        Ok(())
    }

    fn check_groups(&self) -> Result<(), String> {
        if let Some(number) = self.groups.iter().position(|group| group.name.is_empty()) {
            return Err(format!("group {number} has no `name`; name it"));
        }
        for group in &self.groups {
            if let Some(path) = gpu_driver_path_of_work(&group.work_type)
                && path != SOFTWARE_GPU_DRIVER_PATH
            {
                return Err(format!(
                    "group `{}`, key `gpu`: the driver in the virtual machine is `{SOFTWARE_GPU_DRIVER_PATH}`",
                    group.name
                ));
            }
        }
        if self.groups.is_empty() {
            return Ok(());
        }
        // These checks are not made on the host, which has neither the guest's driver nor its files.
        let spec = WorkloadSpec {
            groups: self
                .groups
                .iter()
                .map(with_gpu_simulated_by_cpu_time)
                .collect(),
            clone_mode: CloneMode::Fork,
            ..WorkloadSpec::default()
        };
        spec.check().map_err(|error| error.to_string())
    }

    fn check_cgroups(&self) -> Result<(), String> {
        let groups: BTreeSet<&str> = self
            .groups
            .iter()
            .map(|group| group.name.as_str())
            .collect();
        let mut names: BTreeSet<&str> = BTreeSet::new();
        let mut members: BTreeMap<&str, &str> = BTreeMap::new();
        for cgroup in &self.cgroups {
            cgroup.check_settings()?;
            if let Some((parent, _)) = cgroup.name.rsplit_once('/')
                && !names.contains(parent)
            {
                return Err(format!(
                    "cgroup `{}`: there is no cgroup `{parent}` before it; add it",
                    cgroup.name
                ));
            }
            if !names.insert(cgroup.name.as_str()) {
                return Err(format!(
                    "two cgroups are named `{}`; rename one",
                    cgroup.name
                ));
            }
            for group in &cgroup.groups {
                check_name_exists("group", group, &groups, "cgroup.groups")?;
                if let Some(other) = members.insert(group, &cgroup.name) {
                    return Err(format!(
                        "group `{group}` is in `{other}` and in `{}`",
                        cgroup.name
                    ));
                }
            }
        }
        match self
            .cgroups
            .iter()
            .find(|cgroup| !cgroup.groups.is_empty() && self.has_children(cgroup))
        {
            Some(cgroup) => Err(format!(
                "cgroup `{}` has groups and child cgroups; a cgroup holds processes or children, so move its groups to a child",
                cgroup.name
            )),
            None => Ok(()),
        }
    }

    fn has_children(&self, cgroup: &ScenarioCgroup) -> bool {
        let prefix = format!("{}/", cgroup.name);
        self.cgroups
            .iter()
            .any(|other| other.name.starts_with(&prefix))
    }

    fn check_step(&self, step: &TimedAction) -> Result<(), String> {
        let end_ms = self.warmup_ms + self.duration_ms;
        if step.at_ms > end_ms {
            return Err(format!(
                "the step at {} ms comes after the end at {end_ms} ms (warmup_ms + duration_ms)",
                step.at_ms
            ));
        }
        let groups: BTreeSet<&str> = self
            .groups
            .iter()
            .map(|group| group.name.as_str())
            .collect();
        let cgroups: BTreeSet<&str> = self
            .cgroups
            .iter()
            .map(|cgroup| cgroup.name.as_str())
            .collect();
        match &step.action {
            ScenarioAction::Add(group) | ScenarioAction::Remove(group) => {
                check_name_exists("group", group, &groups, "step")
            }
            ScenarioAction::Move { group, to } => {
                check_name_exists("group", group, &groups, "step")?;
                check_name_exists("cgroup", to, &cgroups, "step")
            }
            ScenarioAction::Freeze(cgroup) | ScenarioAction::Thaw(cgroup) => {
                check_name_exists("cgroup", cgroup, &cgroups, "step")
            }
            ScenarioAction::Set(cgroup) => {
                cgroup.check_settings()?;
                check_name_exists("cgroup", &cgroup.name, &cgroups, "step")
            }
            ScenarioAction::Offline(0) | ScenarioAction::Online(0) => {
                Err("CPU 0 cannot be switched; use another".to_owned())
            }
            ScenarioAction::Offline(_) | ScenarioAction::Online(_) => Ok(()),
        }
    }
}

fn check_name_exists(
    kind: &str,
    name: &str,
    names: &BTreeSet<&str>,
    key: &str,
) -> Result<(), String> {
    if names.contains(name) {
        return Ok(());
    }
    let names: Vec<&str> = names.iter().copied().collect();
    Err(format!(
        "key `{key}`: there is no {kind} `{name}`; there are [{}]",
        names.join(", ")
    ))
}

/// The path of the GPU driver that a work type uses; `None` if it uses none.
fn gpu_driver_path_of_work(work: &WorkType) -> Option<&str> {
    let backend = match work {
        WorkType::MlTraining(work) => &work.gpu,
        WorkType::Inference(work) => &work.gpu,
        _ => return None,
    };
    match backend {
        GpuBackend::Driver(path) => path.to_str(),
        GpuBackend::CpuTime => None,
    }
}

fn with_gpu_simulated_by_cpu_time(group: &WorkSpec) -> WorkSpec {
    let mut group = group.clone();
    match &mut group.work_type {
        WorkType::MlTraining(work) => work.gpu = GpuBackend::CpuTime,
        WorkType::Inference(work) => work.gpu = GpuBackend::CpuTime,
        _ => {}
    }
    group
}

#[cfg(test)]
mod tests;
