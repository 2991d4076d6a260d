//! `zernel workload`: runs the workload that a file describes, and lists the work types.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use clap::{Args, Subcommand};
use serde::Serialize;
use zernel_report::text::{replace_control_characters, shorten_text};
use zernel_workload::spec::{WorkloadOutcome, WorkloadProgress, WorkloadSpec};
use zernel_workload::spec_keys::{SpecChoice, SpecKey};
use zernel_workload::work::WorkTypeInfo;
use zernel_workload::{ReportTable, WorkType};

use crate::{help, interrupt_flags};

/// Run reproducible loads: workers that, for example, spin, wake each other or train
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(RunOptions),
    List(ListOptions),
}

/// Run the workload of a file and report each worker
///
/// SPEC is a TOML file; docs/workload.md describes its keys. Ctrl-C stops the workload early and
/// still prints the report.
///
/// Exits with 0 if all workers succeed, 1 if a worker fails, 2 if SPEC has an error or does not fit
/// this machine.
#[derive(Debug, Args)]
#[command(after_help = help::WORKLOAD_RUN_EXAMPLES)]
struct RunOptions {
    /// Workload file (TOML), such as those in examples/; `-` for stdin
    #[arg(value_name = "SPEC")]
    file: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// List the work types and their parameters
///
/// Prints one line per parameter: name, type, default, meaning.
#[derive(Debug, Args)]
struct ListOptions {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    match &options.command {
        Command::Run(options) => run_spec_file(options),
        Command::List(options) => list_work_types(options),
    }
}

fn run_spec_file(options: &RunOptions) -> Result<ExitCode, Box<dyn Error>> {
    // The spec is read before signals are caught, so that a signal still ends a program that waits for its input.
    let spec = match WorkloadSpec::load(&options.file) {
        Ok(spec) => spec,
        Err(error) => {
            crate::print_error(&error);
            return Ok(ExitCode::from(2));
        }
    };
    let interrupt = interrupt_flags::interrupt_flag()?;
    let shows_progress = io::stderr().is_terminal();
    let watch = |progress: &WorkloadProgress| {
        if shows_progress {
            show_progress(progress);
        }
        match interrupt.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let outcome = match spec.run(watch) {
        Err(error) if is_caused_by_spec(&error) => {
            crate::print_error(&error);
            return Ok(ExitCode::from(2));
        }
        outcome => outcome?,
    };
    if shows_progress {
        eprint!("\r\x1b[K");
    }
    crate::print_to_stdout(&format_outcome(&outcome, options.json)?)?;
    let all_well = outcome
        .reports
        .iter()
        .all(|report| report.exit_info.is_none());
    Ok(ExitCode::from(u8::from(!all_well)))
}

/// Whether the spec causes the error: it is invalid or does not fit this machine.
fn is_caused_by_spec(error: &zernel_workload::Error) -> bool {
    use zernel_workload::Error::{Invalid, SpecFile, Topology};
    matches!(error, SpecFile { .. } | Invalid { .. } | Topology { .. })
}

fn format_outcome(outcome: &WorkloadOutcome, as_json: bool) -> Result<Vec<u8>, Box<dyn Error>> {
    if as_json {
        let mut text = serde_json::to_vec_pretty(outcome)?;
        writeln!(text)?;
        return Ok(text);
    }
    let mut text = ReportTable(&outcome.reports).to_string();
    if outcome.interrupted {
        text += "interrupted: the workload was stopped early\n";
    }
    for problem in &outcome.not_applied {
        text += &format!("not applied: {problem}\n");
    }
    // Names of groups come from the file.
    Ok(replace_control_characters(&text).into_bytes())
}

/// Prints the progress of the workload in place of the line printed before.
fn show_progress(progress: &WorkloadProgress) {
    let rounds: Vec<_> = progress
        .rounds
        .iter()
        .map(|(group, rounds)| format!("{} {rounds}", shorten_text(group, 40)))
        .collect();
    eprint!(
        "\r\x1b[K{:.1} of {:.1} s  {}",
        progress.elapsed.as_secs_f64(),
        progress.total.as_secs_f64(),
        rounds.join("  ")
    );
}

/// A work type as `list --json` prints it.
#[derive(Serialize)]
struct ListedWorkType {
    #[serde(flatten)]
    about: WorkTypeInfo,
    workers: String,
    parameters: Vec<SpecKey>,
}

fn list_work_types(options: &ListOptions) -> Result<ExitCode, Box<dyn Error>> {
    let all: Vec<ListedWorkType> = WorkType::all()
        .iter()
        .map(|work| ListedWorkType {
            about: work.describe(),
            workers: work.worker_rule(),
            parameters: work.parameters(),
        })
        .collect();
    let mut text = Vec::new();
    if options.json {
        serde_json::to_writer_pretty(&mut text, &all)?;
        writeln!(text)?;
    } else {
        for work in &all {
            write_work_type(&mut text, work)?;
        }
    }
    crate::print_to_stdout(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn write_work_type(text: &mut Vec<u8>, work: &ListedWorkType) -> io::Result<()> {
    writeln!(text, "{}", work.about.name)?;
    writeln!(text, "    {}", work.about.does)?;
    writeln!(text, "    exercises: {}", work.about.exercises)?;
    writeln!(text, "    workers: {}", work.workers)?;
    if work.parameters.is_empty() {
        return writeln!(text, "    parameters: none\n");
    }
    writeln!(text, "    parameters:")?;
    let width = |column: fn(&SpecKey) -> &str| {
        let cells = work.parameters.iter().map(column);
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let (name, kind, default) = (
        width(|key| key.name),
        width(|key| &key.kind),
        width(|key| &key.default),
    );
    for key in &work.parameters {
        writeln!(
            text,
            "        {:name$}  {:kind$}  {:default$}  {}",
            key.name, key.kind, key.default, key.meaning
        )?;
        write_choices(text, &key.choices)?;
    }
    writeln!(text)
}

fn write_choices(text: &mut Vec<u8>, choices: &[SpecChoice]) -> io::Result<()> {
    let widths = choices.iter().map(|choice| choice.value.chars().count());
    let value = widths.max().unwrap_or(0);
    choices.iter().try_for_each(|choice| {
        let meaning = &choice.meaning;
        writeln!(text, "            {:value$}  {meaning}", choice.value)
    })
}
