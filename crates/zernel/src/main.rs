//! Zernel: see what ML processes do, understand it, and let the CPU scheduler act on it.

mod doctor;
mod lab;

use std::error::Error;
use std::io;
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
    Doctor(doctor::Options),
    Lab(lab::Options),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Doctor(options) => doctor::run(&options),
        Command::Lab(options) => lab::run(&options),
    };
    match result {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zernel: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether whoever read our output has seen enough.
fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
