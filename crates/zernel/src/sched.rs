//! `zernel sched`: scheduling by what the probes see.

mod dry_run;
mod explain;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Show how ML threads would be scheduled by their classes
///
/// Every thread of an ML process has a class: critical (the step waits for it), feed (the next batch
/// waits for it), GPU wait (it spins until the GPU is done) or other.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Option<SchedCommand>,
    /// Schedule nothing; count what would have been decided, until Ctrl-C
    #[arg(long, required = true)]
    dry_run: bool,
    #[command(flatten)]
    dry_run_options: dry_run::DryRunOptions,
}

#[derive(Debug, Subcommand)]
enum SchedCommand {
    /// Print the class of each thread of a process, and why
    Explain(explain::ExplainOptions),
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    match &options.command {
        Some(SchedCommand::Explain(explain)) => explain::run(explain),
        None => dry_run::run(&options.dry_run_options),
    }
}
