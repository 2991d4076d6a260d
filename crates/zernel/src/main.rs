//! Zernel: observes ML training through eBPF and reports where its time goes.

mod daemon_client;
mod doctor;
#[cfg(test)]
mod documented;
mod generate_manuals;
mod hang;
mod help;
mod interrupt_flags;
mod lab;
mod observe;
mod ps;
mod run;
mod sched;
mod service_manager;
mod truth;
mod workload;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "zernel", version, about, long_about = None, after_help = help::ZERNEL_EXAMPLES)]
#[command(max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(after_help = help::ATTACH_EXAMPLES)]
    Attach(run::attach::Options),
    #[command(after_help = help::DOCTOR_EXAMPLES)]
    Doctor(doctor::Options),
    #[command(hide = true)]
    Generate(generate_manuals::Options),
    #[command(after_help = help::HANG_EXAMPLES)]
    Hang(hang::Options),
    #[command(after_help = help::LAB_EXAMPLES)]
    Lab(lab::Options),
    #[command(after_help = help::OBSERVE_EXAMPLES)]
    Observe(observe::Options),
    #[command(after_help = help::PS_EXAMPLES)]
    Ps(ps::Options),
    #[command(after_help = help::RUN_EXAMPLES)]
    Run(run::Options),
    #[command(after_help = help::SCHED_EXAMPLES)]
    Sched(sched::Options),
    #[command(after_help = help::TRUTH_EXAMPLES)]
    Truth(truth::Options),
    #[command(after_help = help::WORKLOAD_EXAMPLES)]
    Workload(workload::Options),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Attach(options) => run::attach::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Generate(options) => generate_manuals::run(&options, Cli::command()),
        Command::Hang(options) => hang::run(&options),
        Command::Lab(options) => lab::run(&options),
        Command::Observe(options) => observe::run(&options),
        Command::Ps(options) => ps::run(&options),
        Command::Run(options) => run::run(&options),
        Command::Sched(options) => sched::run(&options),
        Command::Truth(options) => truth::run(&options),
        Command::Workload(options) => workload::run(&options),
    };
    result.unwrap_or_else(|error| {
        print_error(&*error);
        ExitCode::FAILURE
    })
}

/// Prints an error to stderr. Control characters are escaped, because the text of an error may quote files and names
/// of other users.
fn print_error(error: &dyn std::error::Error) {
    let text = error.to_string();
    eprintln!(
        "zernel: {}",
        zernel_report::text::replace_control_characters(&text)
    );
}

/// Writes to stdout, in colour if the terminal and the environment allow it. A closed pipe is not an error.
fn print_to_stdout(text: &[u8]) -> io::Result<()> {
    let mut out = anstream::AutoStream::auto(io::stdout().lock());
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
