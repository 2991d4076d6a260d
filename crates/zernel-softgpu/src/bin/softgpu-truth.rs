//! `softgpu-truth DIRECTORY`: prints the counts of a truth log, summed over all processes.

use std::path::Path;
use std::process::ExitCode;

use zernel_softgpu::truth::TruthLog;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory] = &arguments[..] else {
        eprintln!("usage: softgpu-truth DIRECTORY");
        return ExitCode::from(2);
    };
    let log = match TruthLog::read(Path::new(directory)) {
        Ok(log) => log,
        Err(error) => {
            eprintln!("softgpu-truth: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!(
        "{:<40} {:>7} {:>12} {:>20}",
        "function", "result", "calls", "bytes"
    );
    for ((symbol, result), count) in log.returned_calls() {
        println!(
            "{symbol:<40} {result:>7} {:>12} {:>20}",
            count.calls, count.bytes
        );
    }
    let events: usize = log
        .processes
        .iter()
        .map(|process| process.events.len())
        .sum();
    println!("{} process logs, {events} events", log.processes.len());
    ExitCode::SUCCESS
}
