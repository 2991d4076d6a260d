//! `zernel truth`: records what the detector sees of a program, and scores it against the program's own labels.
//!
//! | module | subject |
//! |---|---|
//! | `record` | `zernel truth record` |
//! | `recording` | what is recorded while the command runs |
//! | `score` | `zernel truth score` |
//! | `gzip` | compressed files |

mod gzip;
mod record;
mod recording;
mod score;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Record the events and phases of a program, and score them against its own labels
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Record(record::Options),
    Score(score::Options),
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    match &options.command {
        Command::Record(options) => record::run(options),
        Command::Score(options) => score::run(options),
    }
}
