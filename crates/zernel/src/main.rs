//! Zernel: see what ML processes do, understand it, and let the CPU scheduler act on it.

mod doctor;

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
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Doctor(options) => doctor::run(&options),
    };
    match result {
        Ok(code) => code,
        // Whoever read our output has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zernel: {error}");
            ExitCode::FAILURE
        }
    }
}
