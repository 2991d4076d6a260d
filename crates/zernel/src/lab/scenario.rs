//! `zernel lab scenario`, `zernel lab test`, and the hidden commands that run inside the virtual machine.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use zernel_lab::scenario::execute::execute_plan;
use zernel_lab::scenario::figures::{GroupFigures, RunFigures, exact_quantile};
use zernel_lab::{
    GuestAnswer, RunResult, Scenario, ScenarioRun, SchedulerChoice, TickAlignment, Verdict,
};
use zernel_lab_schedulers::Fault;

use crate::{help, interrupt_flags, print_to_stdout};

/// Run one scenario under one scheduler and print what was measured
///
/// The scenario runs in a deterministic virtual machine: the same scenario, scheduler and seed give
/// the same figures to the last digit.
#[derive(Debug, Args)]
#[command(after_help = help::LAB_SCENARIO_EXAMPLES)]
pub(super) struct ScenarioOptions {
    /// Scenario file
    file: PathBuf,
    /// eevdf, zernel or zernel:ARGUMENTS, a control (nice, fifo, weight, idle, slice, ref), fair, or PATH or
    /// PATH:ARGUMENTS of a program that loads a scheduler
    #[arg(long, value_name = "SCHEDULER", default_value = "eevdf")]
    sched: String,
    /// Seed, which moves the start of the groups and their service times
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    common: CommonOptions,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Check a scheduler against scenarios
///
/// Exit code: 0 all passed, 1 one failed, 3 one was inconclusive, 4 one was skipped.
#[derive(Debug, Args)]
#[command(after_help = help::LAB_TEST_EXAMPLES)]
pub(super) struct TestOptions {
    /// Scenario files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Scheduler to check, as for `zernel lab scenario`
    #[arg(long, value_name = "SCHEDULER", default_value = "eevdf")]
    sched: String,
    /// Seeds 1 to N of each scenario
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    #[command(flatten)]
    common: CommonOptions,
}

/// Options that all commands that boot a scenario share.
#[derive(Debug, Args)]
pub(super) struct CommonOptions {
    /// Spread the scheduler ticks of the CPUs over the tick interval
    #[arg(long)]
    pub(super) skew_ticks: bool,
    /// Run the scenarios even if their results are cached
    #[arg(long)]
    pub(super) no_cache: bool,
    /// Run no observer under these schedulers, or under `all`
    #[arg(long, value_name = "SCHEDULER,…", value_delimiter = ',')]
    pub(super) without_observer: Vec<String>,
    /// zernel program inside the virtual machine [default: this one]
    #[arg(long, value_name = "FILE")]
    pub(super) guest: Option<PathBuf>,
}

impl CommonOptions {
    pub(super) fn apply_to_run(&self, run: ScenarioRun) -> ScenarioRun {
        let ticks = match self.skew_ticks {
            true => TickAlignment::Skewed,
            false => TickAlignment::Aligned,
        };
        let mut run = run.ticks(ticks);
        let is_unobserved = |name: &String| name == "all" || *name == run.scheduler_name();
        if self.without_observer.iter().any(is_unobserved) {
            run = run.without_observer();
        }
        if let Some(guest) = &self.guest {
            run = run.guest_program(guest);
        }
        match self.no_cache {
            true => run.without_cache(),
            false => run,
        }
    }
}

/// Options of the command that runs a plan inside the virtual machine.
#[derive(Debug, Args)]
pub(super) struct GuestOptions {
    plan: PathBuf,
}

/// Options of the command that loads one of the lab's own schedulers.
#[derive(Debug, Args)]
pub(super) struct SchedulerOptions {
    name: Fault,
}

/// Exit code of wrong input.
pub(super) const WRONG_INPUT_EXIT_CODE: u8 = 2;

/// Reads files and schedulers.
pub(super) fn load_scenarios_and_schedulers(
    files: &[PathBuf],
    schedulers: &[String],
) -> Result<(Vec<Scenario>, Vec<SchedulerChoice>), Box<dyn Error>> {
    let scenarios = files.iter().map(|file| Scenario::load(file));
    let schedulers = schedulers
        .iter()
        .map(|text| SchedulerChoice::parse_argument(text, &Fault::ALL.map(Fault::name)));
    Ok((
        scenarios.collect::<Result<_, _>>()?,
        schedulers.collect::<Result<_, String>>()?,
    ))
}

pub(super) fn run_scenario(options: &ScenarioOptions) -> Result<ExitCode, Box<dyn Error>> {
    let loaded = load_scenarios_and_schedulers(
        std::slice::from_ref(&options.file),
        std::slice::from_ref(&options.sched),
    );
    let (mut scenarios, mut schedulers) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            crate::print_error(&*error);
            return Ok(ExitCode::from(WRONG_INPUT_EXIT_CODE));
        }
    };
    let run = ScenarioRun::new(scenarios.remove(0), schedulers.remove(0))
        .seed(options.seed)
        .interrupted_by(interrupt_flags::interrupt_flag()?);
    let result = options.common.apply_to_run(run).run();
    let mut text = Vec::new();
    if options.json {
        serde_json::to_writer_pretty(&mut text, &result)?;
        text.push(b'\n');
    } else {
        write!(text, "{result}")?;
        if let Some(figures) = &result.figures {
            write!(text, "\n{}", group_table(figures))?;
        }
    }
    print_to_stdout(&text)?;
    Ok(exit_code_of_result(&result))
}

pub(super) fn test_scenarios(options: &TestOptions) -> Result<ExitCode, Box<dyn Error>> {
    let (scenarios, schedulers) =
        match load_scenarios_and_schedulers(&options.files, std::slice::from_ref(&options.sched)) {
            Ok(loaded) => loaded,
            Err(error) => {
                crate::print_error(&*error);
                return Ok(ExitCode::from(WRONG_INPUT_EXIT_CODE));
            }
        };
    let interrupt = interrupt_flags::interrupt_flag()?;
    let mut worst = Verdict::Pass;
    for scenario in &scenarios {
        for seed in 1..=options.seeds {
            let run = ScenarioRun::new(scenario.clone(), schedulers[0].clone())
                .seed(seed)
                .interrupted_by(interrupt.clone());
            let result = options.common.apply_to_run(run).run();
            if interrupt.load(std::sync::atomic::Ordering::Relaxed) {
                return Ok(ExitCode::from(interrupt_flags::INTERRUPTED_EXIT_CODE));
            }
            worst = worst.max(result.verdict());
            print_to_stdout(result.to_string().as_bytes())?;
        }
    }
    Ok(ExitCode::from(worst.exit_code()))
}

fn exit_code_of_result(result: &RunResult) -> ExitCode {
    ExitCode::from(result.verdict().exit_code())
}

/// One line per group.
fn group_table(figures: &RunFigures) -> String {
    let mut text = format!(
        "{:<16} {:>6} {:>9} {:>10} {:>10} {:>10} {:>10} {:>10} {:>9}\n",
        "group",
        "CPUs",
        "per s",
        "step p50",
        "step p99",
        "wake p50",
        "wake p99",
        "wake max",
        "wait ms"
    );
    for group in &figures.groups {
        text += &group_row(group, figures.window_ns);
    }
    if let Some(wait_ns) = figures.observer_longest_wait_ns {
        let wait_ms = wait_ns as f64 / 1e6;
        text += &format!("the observer waited for a CPU for {wait_ms:.1} ms at most\n");
    }
    if let Some(account) = &figures.account {
        text += &format!("{account}\n");
    }
    text
}

fn group_row(group: &GroupFigures, window_ns: u64) -> String {
    let ms = |ns: Option<u64>| ns.map_or("-".to_owned(), |ns| format!("{:.2} ms", ns as f64 / 1e6));
    let us = |ns: Option<u64>| ns.map_or("-".to_owned(), |ns| format!("{:.0} us", ns as f64 / 1e3));
    let wake = &group.wake_latency;
    format!(
        "{:<16} {:>6.3} {:>9.1} {:>10} {:>10} {:>10} {:>10} {:>10} {:>9.1}\n",
        group.name,
        group.cpu_ns as f64 / window_ns.max(1) as f64,
        group.rate_per_second(window_ns),
        ms(exact_quantile(&group.steps_ns, 0.5)),
        ms(exact_quantile(&group.steps_ns, 0.99)),
        us(wake.quantile(0.5)),
        us(wake.quantile(0.99)),
        us(wake.quantile(1.0)),
        group.longest_wait_ns.max(group.largest_gap_ns) as f64 / 1e6,
    )
}

/// Runs a plan and prints the answer, whatever happens.
pub(super) fn run_plan_in_guest(options: &GuestOptions) -> Result<ExitCode, Box<dyn Error>> {
    let plan = serde_json::from_slice(&fs::read(&options.plan)?)?;
    let program = std::env::current_exe()?;
    let answer = match execute_plan(&plan, &program) {
        Ok(figures) => GuestAnswer::Figures(figures),
        Err(problem) => GuestAnswer::Error(problem),
    };
    print_to_stdout(&serde_json::to_vec(&answer)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Loads one of the lab's schedulers until it is asked to stop.
pub(super) fn run_lab_scheduler(options: &SchedulerOptions) -> Result<ExitCode, Box<dyn Error>> {
    let stop = interrupt_flags::interrupt_flag()?;
    zernel_lab_schedulers::run_scheduler(options.name, &stop)?;
    Ok(ExitCode::SUCCESS)
}
