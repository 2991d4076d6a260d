//! The plan of a run, which is the input of the virtual machine: one scenario, changed by a seed, under one scheduler.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::seed::{self, StartOffsetsUs};
use super::{EevdfControl, Scenario};
use crate::peer_schedulers::{PEER_SCHEDULERS, PeerCache, PeerScheduler, find_peer_scheduler};

/// Path of the plan in the virtual machine.
pub const PLAN_PATH: &str = "/lab/plan.json";
/// Path of the guest program in the virtual machine.
pub const GUEST_PROGRAM_PATH: &str = "/lab/zernel";
/// Path in the virtual machine of a scheduler that the user gave by path.
pub const SCHEDULER_PROGRAM_PATH: &str = "/lab/scheduler";
/// The name of this project's scheduler on a command line.
const ZERNEL_SCHEDULER_NAME: &str = "zernel";

/// The scheduler under which a scenario runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedulerChoice {
    /// The kernel's own scheduler.
    Eevdf,
    /// The kernel's own scheduler, with settings that an administrator could make.
    EevdfWithControl(EevdfControl),
    /// One of the lab's schedulers, by name. The guest program contains it.
    LabScheduler(String),
    /// `zernel sched` with these arguments.
    Zernel(Vec<String>),
    /// Any program that loads a sched_ext scheduler.
    Program {
        /// The path of the program on this machine.
        path: PathBuf,
        /// The arguments of the program.
        arguments: Vec<String>,
    },
}

impl SchedulerChoice {
    /// Parses `eevdf`, a control, `zernel[:ARGUMENTS]`, one of `lab_schedulers`, the name of a peer (a public
    /// scheduler), or `PATH[:ARGUMENTS]`.
    ///
    /// # Errors
    /// The text names none of these, and no such file exists.
    pub fn parse_argument(text: &str, lab_schedulers: &[&str]) -> Result<Self, String> {
        if text == "eevdf" {
            return Ok(Self::Eevdf);
        }
        if let Ok(control) = text.parse() {
            return Ok(Self::EevdfWithControl(control));
        }
        if lab_schedulers.contains(&text) {
            return Ok(Self::LabScheduler(text.to_owned()));
        }
        let (path, arguments) = text.split_once(':').unwrap_or((text, ""));
        let arguments = arguments.split_whitespace().map(str::to_owned);
        if path == ZERNEL_SCHEDULER_NAME {
            return Ok(Self::Zernel(arguments.collect()));
        }
        if let Ok(peer) = find_peer_scheduler(path) {
            return Self::from_peer_scheduler(peer, arguments.collect());
        }
        let path = PathBuf::from(path);
        if !path.is_file() {
            let controls = EevdfControl::ALL.map(EevdfControl::name).join(", ");
            return Err(format!(
                "there is no scheduler `{text}`; use eevdf, zernel, a control ({controls}), one of the lab's ({}), a peer ({}), \
                 or the path of a program",
                lab_schedulers.join(", "),
                PEER_SCHEDULERS.map(|peer| peer.name).join(", ")
            ));
        }
        Ok(Self::Program {
            path,
            arguments: arguments.collect(),
        })
    }

    /// A public scheduler with these arguments, or with those that its authors recommend.
    fn from_peer_scheduler(peer: PeerScheduler, arguments: Vec<String>) -> Result<Self, String> {
        let cache = PeerCache::from_environment().map_err(|error| error.to_string())?;
        let path = cache.program_path(peer).ok_or_else(|| {
            let name = peer.name;
            format!("{name} is not built; build it with `zernel lab peers {name}`")
        })?;
        let arguments = match arguments.is_empty() {
            true => peer.arguments.iter().map(ToString::to_string).collect(),
            false => arguments,
        };
        Ok(Self::Program { path, arguments })
    }

    /// The name of the scheduler in tables.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Eevdf => "eevdf".to_owned(),
            Self::EevdfWithControl(control) => control.name().to_owned(),
            Self::LabScheduler(name) => name.clone(),
            Self::Program { path, arguments } => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name_with_arguments(&name, arguments)
            }
            Self::Zernel(arguments) => name_with_arguments(ZERNEL_SCHEDULER_NAME, arguments),
        }
    }

    /// How the scheduler is loaded in the virtual machine.
    fn guest_command(&self) -> SchedulerCommand {
        match self {
            Self::Eevdf | Self::EevdfWithControl(_) => SchedulerCommand::None,
            Self::LabScheduler(name) => SchedulerCommand::LabScheduler(name.clone()),
            Self::Zernel(arguments) => SchedulerCommand::Zernel(arguments.clone()),
            Self::Program { arguments, .. } => SchedulerCommand::Program(arguments.clone()),
        }
    }
}

fn name_with_arguments(name: &str, arguments: &[String]) -> String {
    let words = std::iter::once(name).chain(arguments.iter().map(String::as_str));
    words.collect::<Vec<_>>().join(" ")
}

/// How the virtual machine loads a scheduler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulerCommand {
    /// No sched_ext scheduler is loaded.
    None,
    /// The guest program contains the scheduler, and loads it.
    #[serde(rename = "Own")]
    LabScheduler(String),
    /// The guest program loads the scheduler when it runs as `zernel sched` with these arguments.
    Zernel(Vec<String>),
    /// The program at [`SCHEDULER_PROGRAM_PATH`] loads the scheduler when it runs with these arguments.
    Program(Vec<String>),
}

/// The option by which a user passes a map of hints to a scheduler.
const HINT_MAP_OPTION: &str = "--task-hint-map";

impl SchedulerCommand {
    /// Path of the BPF map in which the scheduler expects hints; `None` if it expects none.
    #[must_use]
    pub fn hint_map_path(&self) -> Option<&str> {
        let Self::Program(arguments) = self else {
            return None;
        };
        let mut arguments = arguments
            .iter()
            .skip_while(|argument| *argument != HINT_MAP_OPTION);
        arguments.nth(1).map(String::as_str)
    }
}

/// The plan of a run: what the virtual machine gets as input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GuestPlan {
    /// The scenario, with the changes of the control and the seed.
    pub scenario: Scenario,
    /// The delay of each group's start, in microseconds.
    pub start_offsets: StartOffsetsUs,
    /// How the scheduler of the run is loaded.
    pub scheduler: SchedulerCommand,
}

impl GuestPlan {
    /// Makes the plan of one run.
    ///
    /// # Errors
    /// The control means nothing in this scenario.
    pub fn new(
        scenario: &Scenario,
        scheduler: &SchedulerChoice,
        seed: u64,
    ) -> Result<Self, String> {
        let mut scenario = match scheduler {
            SchedulerChoice::EevdfWithControl(control) => control.apply_to_scenario(scenario)?,
            _ => scenario.clone(),
        };
        // The host judges, so another assertion needs no new boot.
        scenario.assertions.clear();
        let start_offsets = seed::apply_seed(&mut scenario, seed)?;
        Ok(Self {
            scenario,
            start_offsets,
            scheduler: scheduler.guest_command(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduler_choices_are_parsed_from_arguments() {
        let parse = |text: &str| SchedulerChoice::parse_argument(text, &["fair"]);
        assert_eq!(parse("eevdf"), Ok(SchedulerChoice::Eevdf));
        assert_eq!(
            parse("fifo"),
            Ok(SchedulerChoice::EevdfWithControl(EevdfControl::Fifo))
        );
        assert_eq!(
            parse("fair"),
            Ok(SchedulerChoice::LabScheduler("fair".to_owned()))
        );
        let hinted = parse("/bin/true:--task-hint-map /sys/fs/bpf/hints []").unwrap();
        assert_eq!(
            hinted.guest_command().hint_map_path(),
            Some("/sys/fs/bpf/hints")
        );
        assert_eq!(SchedulerChoice::Eevdf.guest_command().hint_map_path(), None);
        let program = parse("/bin/true:-s 20000 --fast").unwrap();
        assert_eq!(program.name(), "true -s 20000 --fast");
        assert_eq!(parse("zernel"), Ok(SchedulerChoice::Zernel(Vec::new())));
        let zernel = parse("zernel:--slice-us 2000").unwrap();
        assert_eq!(zernel.name(), "zernel --slice-us 2000");
        let error = parse("fifa").unwrap_err();
        assert!(
            error.contains("`fifa`") && error.contains("nice, fifo"),
            "{error}"
        );
    }

    #[test]
    fn guest_plan_round_trips_through_json() {
        let text =
            "about = 'x'\ntraining = ['a']\n[[group]]\nname = 'a'\nworkers = 2\nwork.bursty = {}";
        let scenario = Scenario::parse(text, "x.toml").unwrap();
        let plan = GuestPlan::new(
            &scenario,
            &SchedulerChoice::EevdfWithControl(EevdfControl::Fifo),
            7,
        )
        .unwrap();
        let json = serde_json::to_string(&plan).unwrap();
        let mut back: GuestPlan = serde_json::from_str(&json).unwrap();
        back.scenario.name = "x".to_owned();
        assert_eq!(back, plan);
    }
}
