//! `zernel run` and `zernel attach`: observe a command or a running process with its descendants, and print a report.
//!
//! | module | subject |
//! |---|---|
//! | `running_command` | the command as a child process: signals and exit code |
//! | `sudo_caller` | the user that the command runs as under sudo |
//! | `attach` | `zernel attach` |
//! | `job_scheduler` | the scheduler of `--sched` |
//! | `report_file` | the files of `--json` and `--html` |
//! | `recorder` | observes, or asks the daemon, and records the descendants of the command |

pub(crate) mod attach;
mod cpu_limit;
mod job_scheduler;
pub(crate) mod recorder;
pub(crate) mod report_file;
pub(crate) mod running_command;
pub(crate) mod sudo_caller;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use zernel_ebpf::observer::{self, GovernorOptions};

use zernel_report::Report;

use crate::daemon_client::DaemonSocket;
use crate::observe::parse_budget;
use crate::sched::load_scheduler::describe_counters;
use job_scheduler::JobScheduler;
use recorder::{RecordedRoot, RunRecorder};
use report_file::{check_report_file, write_report_file};
use running_command::{CaughtSignals, RunningCommand};
use sudo_caller::SudoCaller;

/// Run a command and report where its training time goes
///
/// Runs COMMAND unchanged and prints a report to stderr when it exits: phases, steps and waits of each rank, what
/// bounds the run, and the overhead of observing. Input, output, environment and signals are those of COMMAND, and
/// its exit code is passed on. Under sudo, COMMAND runs as the user who called sudo.
///
/// Observing needs root or a running `zernel observe`. Without either, COMMAND runs anyway, and the report states
/// what is missing.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Command to run, with its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
    /// Under sudo, run COMMAND as root
    #[arg(long)]
    as_root: bool,
    /// Schedule all tasks with `zernel sched` meanwhile; COMMAND's critical threads go first. Needs root
    ///
    /// If the scheduler cannot be loaded, COMMAND runs without it. If `zernel sched` is loaded already, its configuration decides
    /// whose threads go first.
    #[arg(long)]
    sched: bool,
    #[command(flatten)]
    report: ReportOptions,
}

/// How to observe, and where to write reports.
#[derive(Debug, Args)]
struct ReportOptions {
    /// Also write the report as JSON to FILE; `-` for stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write the report as a self-contained HTML page to FILE; `-` for stdout
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Largest overhead of any observed thread, such as 0.5%; `none` for no limit
    #[arg(long, value_name = "SHARE", default_value = "0.5%", value_parser = parse_budget)]
    budget: f64,
    /// Attach to this library before any process loads it; may be repeated
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
    #[command(flatten)]
    socket: DaemonSocket,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn std::error::Error>> {
    // With --as-root, it is no error if the caller of sudo is unknown. The reports belong to root then.
    let caller = match SudoCaller::from_environment() {
        Err(_) if options.as_root => None,
        caller => caller?,
    };
    options.report.check_report_files(caller.as_ref())?;
    let signals = CaughtSignals::catch_forwarded_signals()?;
    let recorder = options.report.start_recorder(RecordedRoot::SpawnedCommand);
    if io::stderr().is_terminal() {
        match recorder.unavailable_reason() {
            None => eprintln!("zernel: observing; the report follows when the command exits"),
            Some(reason) => eprintln!("zernel: not observing: {reason}"),
        }
    }
    let scheduler = options.sched.then(start_scheduler).flatten();
    let started = Instant::now();
    let command_user = caller.as_ref().filter(|_| !options.as_root);
    let child = RunningCommand::spawn(&options.command, command_user, signals);
    if let Ok(child) = &child {
        recorder.set_command_pid(child.pid());
    }
    let ended = child.map(RunningCommand::wait);
    let wall = started.elapsed();
    match scheduler.map(JobScheduler::unload) {
        None => {}
        Some(Ok(counters)) => eprint!("{}", describe_counters(&counters)),
        Some(Err(error)) => eprintln!("zernel: {error}; the command ran on without it"),
    }
    // Detach all probes, even if the command did not start.
    let outcome = recorder.stop_and_collect();
    let ended = match ended {
        Ok(ended) => ended?,
        Err(error) => {
            eprintln!("zernel: {error}");
            return Ok(ExitCode::from(error.exit_code()));
        }
    };
    let words = options.command.iter();
    let command = words.map(|word| word.to_string_lossy().into_owned());
    let report = Report::new(command.collect(), wall, Some(ended), outcome);
    options.report.write_reports(&report, caller.as_ref());
    Ok(ExitCode::from(ended.exit_code()))
}

/// Loads the scheduler, if that is possible.
fn start_scheduler() -> Option<JobScheduler> {
    match JobScheduler::start() {
        Ok(scheduler) => Some(scheduler),
        Err(reason) => {
            eprintln!("zernel: the command is not privileged: {reason}");
            None
        }
    }
}

impl ReportOptions {
    fn start_recorder(&self, root: RecordedRoot) -> RunRecorder {
        let options = observer::ObserverOptions {
            libraries: self.libraries.clone(),
            governor: GovernorOptions::with_budget(self.budget),
            ..observer::ObserverOptions::default()
        };
        RunRecorder::start(&options, root, &self.socket)
    }

    /// Checks that the reports can be written, before the command runs.
    fn check_report_files(&self, caller: Option<&SudoCaller>) -> Result<(), String> {
        let files: Vec<&Path> = self
            .json
            .iter()
            .chain(&self.html)
            .map(PathBuf::as_path)
            .collect();
        if files.len() == 2 && files[0] == files[1] {
            return Err(format!(
                "{} cannot be both JSON and HTML",
                files[0].display()
            ));
        }
        for file in files.into_iter().filter(|file| file.as_os_str() != "-") {
            check_report_file(file, caller)
                .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        }
        Ok(())
    }

    /// Prints the report and writes the files, which belong to the caller of sudo. If a report cannot be written, the
    /// exit code stays that of the command.
    fn write_reports(&self, report: &Report, caller: Option<&SudoCaller>) {
        let mut err = anstream::AutoStream::auto(io::stderr().lock());
        let text = zernel_report::render_text(report, terminal_width());
        let _ = err.write_all(text.as_bytes());
        let json = |file: &Path| {
            let text = serde_json::to_string_pretty(report)?;
            write_file_or_stdout(file, &(text + "\n"), caller)
        };
        let page =
            |file: &Path| write_file_or_stdout(file, &zernel_report::render_html(report), caller);
        let json = self.json.as_deref().map(|file| (file, json(file)));
        let page = self.html.as_deref().map(|file| (file, page(file)));
        for (file, written) in json.into_iter().chain(page) {
            if let Err(error) = written {
                let _ = writeln!(err, "zernel: cannot write {}: {error}", file.display());
            }
        }
    }
}

/// Columns of the terminal on stderr. `None` if stderr is no terminal, or its width is unknown.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stderr()).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

fn write_file_or_stdout(file: &Path, text: &str, caller: Option<&SudoCaller>) -> io::Result<()> {
    match file.as_os_str() == "-" {
        true => crate::print_to_stdout(text.as_bytes()),
        false => write_report_file(file, text.as_bytes(), caller),
    }
}
