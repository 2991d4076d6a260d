//! `zernel attach`: reports on a job that runs already.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use procfs::process::Process;
use zernel_report::Report;

use super::ReportOptions;
use super::recorder::RecordedRoot;
use super::sudo_caller::SudoCaller;
use crate::interrupt_flags;

/// How often the end of the job, of the time and Ctrl-C are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Observe a running job and report where its training time goes
///
/// Observes process PID and its descendants until the time is over, PID exits or Ctrl-C is pressed, then prints the
/// report of `zernel run`. PID is a training process or its parent, such as torchrun. The job keeps running.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Process to observe, with its descendants
    #[arg(value_name = "PID")]
    pid: u32,
    /// Observe for TIME, such as 60s, 5m or 1h [default: until PID exits]
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    time: Option<Duration>,
    #[command(flatten)]
    report: ReportOptions,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let caller = SudoCaller::from_environment()?;
    options.report.check_report_files(caller.as_ref())?;
    let interrupted = interrupt_flags::interrupt_flag()?;
    let process = i32::try_from(options.pid).map(Process::new);
    let Ok(Ok(process)) = process else {
        return Err(format!("there is no process {}", options.pid).into());
    };
    let command = process.cmdline().unwrap_or_default();
    let recorder = options
        .report
        .start_recorder(RecordedRoot::RunningProcess(options.pid));
    if let Some(reason) = recorder.unavailable_reason() {
        return Err(format!("cannot observe: {reason}").into());
    }
    let owner = process.uid().unwrap_or_default();
    let caller_id = rustix::process::geteuid();
    let is_hidden = recorder.uses_daemon() && !caller_id.is_root() && owner != caller_id.as_raw();
    let hidden_text = format!(
        "process {} belongs to another user (uid {owner}), and the daemon shows a user's own processes only; attach as root",
        options.pid
    );
    if is_hidden {
        eprintln!("zernel: {hidden_text}");
    }
    if io::stderr().is_terminal() {
        eprintln!("zernel: observing {}; press Ctrl-C to stop", options.pid);
    }
    let started = Instant::now();
    let is_over = || options.time.is_some_and(|time| started.elapsed() >= time);
    while process.is_alive() && !is_over() && !interrupted.load(Ordering::Relaxed) {
        thread::sleep(POLL_INTERVAL);
    }
    let wall = started.elapsed();
    let mut outcome = recorder.stop_and_collect();
    if let Ok(observation) = &mut outcome {
        observation
            .problems
            .extend(is_hidden.then_some(hidden_text));
    }
    let report = Report::new(command, wall, None, outcome);
    options.report.write_reports(&report, caller.as_ref());
    Ok(ExitCode::SUCCESS)
}

/// Parses a number of seconds, or a number with a unit.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(number) => (number, &text[number.len()..]),
        None => (text, "s"),
    };
    let seconds = match unit {
        "m" => 60.0,
        "h" => 3600.0,
        _ => 1.0,
    };
    let number: f64 = number
        .parse()
        .map_err(|_| "expected a time such as 60s, 5m or 1h".to_owned())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [
            ("60s", 60.0),
            ("2", 2.0),
            ("0.5s", 0.5),
            ("5m", 300.0),
            ("1h", 3600.0),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_secs_f64(seconds)),
                "{text}"
            );
        }
        for text in ["", "s", "-1s", "1d", "NaN", "1e400h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
