//! `zernel sched`: scheduling by what the probes see.

mod ab;
mod config_file;
mod dry_run;
mod explain;
mod interval_table;
pub(crate) mod load_scheduler;
mod monitor;
mod paired_blocks;
mod policy_options;
mod predecessor;
pub(crate) mod published_statistics;
pub(crate) mod scheduler_session;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, Subcommand, value_parser};

/// Schedule all tasks of this machine with sched_ext
///
/// A fair scheduler that knows nice values, cgroup weights and cpu.max. The scheduler stays loaded until Ctrl-C or
/// SIGTERM. However `zernel sched` ends, the kernel returns to its own scheduler. Exit code 1: the scheduler was not
/// loaded, or the kernel ejected it; the reason is printed.
///
/// Every thread of an ML process has a class: critical (the step waits for it), feed (the next batch waits for it),
/// GPU wait (it spins until the GPU is done) or other. `zernel sched --dry-run` and `zernel sched explain` show the
/// classes.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Option<SchedCommand>,
    #[command(flatten)]
    load_options: load_scheduler::LoadOptions,
    /// Print what the loaded scheduler does, a line every SECONDS. Needs no root
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..=3600))]
    #[arg(conflicts_with_all = LOAD_OPTIONS, conflicts_with = "dry_run")]
    monitor: Option<u64>,
    /// Schedule nothing; count what would have been decided, until Ctrl-C
    #[arg(long, conflicts_with_all = LOAD_OPTIONS)]
    dry_run: bool,
    #[command(flatten)]
    ab_options: ab::AbOptions,
    #[command(flatten)]
    dry_run_options: dry_run::DryRunOptions,
}

/// Options of the scheduler that is loaded. Other modes load none.
const LOAD_OPTIONS: [&str; 11] = [
    "slice_us",
    "privilege",
    "guarantee",
    "lend",
    "config",
    "replace",
    "without",
    "gpu_nodes",
    "restart",
    "watchdog_ms",
    "stats",
];

#[derive(Debug, Subcommand)]
enum SchedCommand {
    /// Print the class of each thread of a process, and why
    Explain(explain::ExplainOptions),
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    if let Some(seconds) = options.monitor {
        return monitor::run(seconds);
    }
    if let Some(time) = options.ab_options.ab {
        return ab::run(&options.ab_options, time, &options.load_options.policy);
    }
    match &options.command {
        Some(SchedCommand::Explain(explain)) => explain::run(explain),
        None if options.dry_run => dry_run::run(&options.dry_run_options),
        None => load_scheduler::run(&options.load_options),
    }
}
