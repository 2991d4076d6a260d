//! `zernel workload`: reproducible loads, written down in files.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use clap::{Args, Subcommand};
use zernel_workload::spec::{Outcome, Progress, Spec};
use zernel_workload::{ReportTable, WorkType};

use crate::{help, interrupt};

/// Make a reproducible load: workers that spin, wake each other, train
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(RunOptions),
    /// Explain the types of work
    List,
}

/// Run the workload that a file describes, and report on each of its workers
///
/// Ctrl-C ends it early, with reports. Exits with 1 when a worker did not end as it should, with 2
/// when the file cannot be used on this machine.
#[derive(Debug, Args)]
#[command(after_help = help::WORKLOAD_RUN)]
struct RunOptions {
    /// The file; examples are in the folder examples/
    #[arg(value_name = "SPEC")]
    file: PathBuf,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    match &options.command {
        Command::Run(options) => run_file(options),
        Command::List => list(),
    }
}

fn run_file(options: &RunOptions) -> Result<ExitCode, Box<dyn Error>> {
    let interrupt = interrupt::flag()?;
    let shows_progress = io::stderr().is_terminal();
    let watch = |progress: &Progress| {
        if shows_progress {
            show(progress);
        }
        match interrupt.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let outcome = match Spec::load(&options.file).and_then(|spec| spec.run(watch)) {
        Err(error) if is_the_specs(&error) => {
            eprintln!("zernel: {error}");
            return Ok(ExitCode::from(2));
        }
        outcome => outcome?,
    };
    if shows_progress {
        eprint!("\r\x1b[K");
    }
    crate::print(&report(&outcome, options.json)?)?;
    let all_well = outcome
        .reports
        .iter()
        .all(|report| report.exit_info.is_none());
    Ok(ExitCode::from(u8::from(!all_well)))
}

/// Whether an error says that the spec cannot be used, at all or on this machine.
fn is_the_specs(error: &zernel_workload::Error) -> bool {
    use zernel_workload::Error::{Invalid, SpecFile, Topology};
    matches!(error, SpecFile { .. } | Invalid { .. } | Topology { .. })
}

fn report(outcome: &Outcome, as_json: bool) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut text = Vec::new();
    if as_json {
        serde_json::to_writer_pretty(&mut text, outcome)?;
        writeln!(text)?;
    } else {
        write!(text, "{}", ReportTable(&outcome.reports))?;
        if outcome.interrupted {
            writeln!(text, "interrupted: it was ended before its time")?;
        }
        for problem in &outcome.not_applied {
            writeln!(text, "not applied: {problem}")?;
        }
    }
    Ok(text)
}

/// One line that overwrites itself.
fn show(progress: &Progress) {
    let rounds: Vec<_> = progress
        .rounds
        .iter()
        .map(|(group, rounds)| format!("{group} {rounds}"))
        .collect();
    eprint!(
        "\r\x1b[K{:.1} of {:.1} s  {}",
        progress.elapsed.as_secs_f64(),
        progress.total.as_secs_f64(),
        rounds.join("  ")
    );
}

fn list() -> Result<ExitCode, Box<dyn Error>> {
    let mut text = Vec::new();
    for about in WorkType::all().iter().map(WorkType::describe) {
        writeln!(text, "{}", about.name)?;
        writeln!(text, "    {}", about.does)?;
        writeln!(text, "    exercises: {}", about.exercises)?;
    }
    crate::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
