//! Zernel: see what ML processes do, understand it, and let the CPU scheduler act on it.

mod client;
mod doctor;
mod hang;
mod interrupt;
mod lab;
mod observe;
mod ps;
mod run;
mod text;
mod workload;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "zernel", version, about, long_about = None)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Attach(run::attach::Options),
    Doctor(doctor::Options),
    Hang(hang::Options),
    Lab(lab::Options),
    Observe(observe::Options),
    Ps(ps::Options),
    Run(run::Options),
    Workload(workload::Options),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Attach(options) => run::attach::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Hang(options) => hang::run(&options),
        Command::Lab(options) => lab::run(&options),
        Command::Observe(options) => observe::run(&options),
        Command::Ps(options) => ps::run(&options),
        Command::Run(options) => run::run(&options),
        Command::Workload(options) => workload::run(&options),
    };
    result.unwrap_or_else(|error| {
        eprintln!("zernel: {error}");
        ExitCode::FAILURE
    })
}

/// Writes to stdout, in colour only where that is wanted. A reader that has seen enough is no error.
fn print(text: &[u8]) -> io::Result<()> {
    let mut out = anstream::AutoStream::auto(io::stdout().lock());
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
