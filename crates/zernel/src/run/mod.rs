//! `zernel run`: observes one command and all that it starts, and says in the end where the time went.
//!
//! | part | subject |
//! |---|---|
//! | `child` | the command as a process: signals in, exit code out |
//! | `caller` | who the command runs as under sudo |
//! | `watch` | observing, and telling the command's processes from others |
//! | `rank` | what was seen of one process |
//! | `parts` | its time, in parts that do not overlap |
//! | `verdict` | what the numbers say |
//! | `report` | all of it, as data; `render` as text |

mod caller;
mod child;
mod parts;
mod rank;
mod render;
mod report;
mod verdict;
mod watch;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use zernel_ebpf::observer::{self, GovernorOptions};

use crate::observe::parse_budget;
use caller::Caller;
use child::{CaughtSignals, Child};
use report::Report;
use watch::Watch;

/// Run a command, and say where the time of its training processes went
///
/// The command keeps its input and output, its environment and its signals, and its exit code is passed on.
/// When it has ended, a report goes to stderr: the phases of each rank, what it waited for, what bounds it,
/// and what observing cost. Under sudo the command runs as the user who called sudo.
///
/// Without privilege the command runs all the same, and the report says what could not be seen.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The command and its arguments
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
    /// Write the report as JSON to this file too; `-` is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Under sudo, run the command as root too
    #[arg(long)]
    as_root: bool,
    /// The share of its time that any observed thread may pay, such as 0.5%; `none`: whatever it takes
    #[arg(long, value_name = "SHARE", default_value = "0.5%", value_parser = parse_budget)]
    budget: f64,
    /// A library to attach to at once, before any process uses it
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let signals = CaughtSignals::catch()?;
    let caller = match options.as_root {
        true => None,
        false => Caller::from_environment()?,
    };
    let watch = Watch::start(&observer_options(options));
    if io::stderr().is_terminal() {
        match watch.refusal() {
            None => eprintln!("zernel: observing; the report comes when the command has ended"),
            Some(reason) => eprintln!("zernel: not observing: {reason}"),
        }
    }
    let started = Instant::now();
    let child = Child::spawn(&options.command, caller.as_ref(), signals);
    let ended = child.map(Child::wait);
    let wall = started.elapsed();
    // Whatever became of the command, nothing stays attached.
    let outcome = watch.finish();
    let ended = match ended {
        Ok(ended) => ended?,
        Err(error) => {
            eprintln!("zernel: {error}");
            return Ok(ExitCode::from(error.exit_code()));
        }
    };
    let report = Report::new(&options.command, wall, ended, outcome);
    tell(&report, options.json.as_deref());
    Ok(ExitCode::from(ended.exit_code()))
}

fn observer_options(options: &Options) -> observer::Options {
    let governor = GovernorOptions::default();
    observer::Options {
        libraries: options.libraries.clone(),
        governor: GovernorOptions {
            budget: options.budget,
            ceiling: governor.ceiling.max(10.0 * options.budget),
        },
        ..observer::Options::default()
    }
}

/// A report that cannot be written is a pity, but the command's exit code is still passed on.
fn tell(report: &Report, json: Option<&Path>) {
    let mut err = anstream::AutoStream::auto(io::stderr().lock());
    let _ = err.write_all(render::text(report).as_bytes());
    let Some(file) = json else { return };
    let text = match serde_json::to_string_pretty(report) {
        Ok(text) => text + "\n",
        Err(error) => {
            let _ = writeln!(err, "zernel: the report cannot be written as JSON: {error}");
            return;
        }
    };
    let written = match file.as_os_str() == "-" {
        true => crate::print(text.as_bytes()),
        false => std::fs::write(file, text),
    };
    if let Err(error) = written {
        let _ = writeln!(err, "zernel: cannot write {}: {error}", file.display());
    }
}
