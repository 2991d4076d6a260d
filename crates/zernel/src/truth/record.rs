//! `zernel truth record`: traces a command, or a process that runs already.

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use procfs::process::Process;
use zernel_ebpf::observer::{GovernorOptions, ObserverOptions};

use super::gzip;
use super::recording::TraceRecorderThread;
use crate::observe::parse_budget;
use crate::run::attach::parse_duration;
use crate::run::recorder::RecordedRoot;
use crate::run::report_file::{check_report_file, write_report_file};
use crate::run::running_command::{CaughtSignals, RunningCommand};
use crate::run::sudo_caller::SudoCaller;
use crate::{help, interrupt_flags};

/// How often the end of an observed process is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Run a command and write the events and phases of all its threads to a file
///
/// Observes COMMAND as `zernel run` does. FILE is compressed if its name ends in .gz. With --pid, observes until that
/// process exits, the time is over or Ctrl-C is pressed. Needs root.
#[derive(Debug, Args)]
#[command(after_help = help::TRUTH_RECORD_EXAMPLES)]
pub(super) struct Options {
    /// File to write
    #[arg(short, long, value_name = "FILE", default_value = "zernel.trace.gz")]
    output: PathBuf,
    /// Observe this process instead of running COMMAND
    #[arg(
        long,
        value_name = "PID",
        conflicts_with = "command",
        required_unless_present = "command"
    )]
    pid: Option<u32>,
    /// With --pid: observe for TIME, such as 60s, 5m or 1h
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration, conflicts_with = "command")]
    time: Option<Duration>,
    /// Largest overhead of any observed thread, such as 0.5%; `none` for no limit
    #[arg(long, value_name = "SHARE", default_value = "0.5%", value_parser = parse_budget)]
    budget: f64,
    /// Attach to this library before any process loads it; may be repeated
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
    /// Under sudo, run COMMAND as root
    #[arg(long)]
    as_root: bool,
    /// Command to run, with its arguments
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    command: Vec<OsString>,
}

pub(super) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let caller = match SudoCaller::from_environment() {
        Err(_) if options.as_root => None,
        caller => caller?,
    };
    let output = &options.output;
    check_report_file(output, caller.as_ref())
        .map_err(|error| format!("cannot write {}: {error}", output.display()))?;
    let observer = ObserverOptions {
        libraries: options.libraries.clone(),
        governor: GovernorOptions::with_budget(options.budget),
        traces_events: true,
        ..ObserverOptions::default()
    };
    let (recording, code) = match options.pid {
        Some(pid) => record_running_process(options, pid, &observer)?,
        None => record_command(options, caller.as_ref(), &observer)?,
    };
    let file = recording.stop_and_collect()?;
    eprintln!("zernel: {}", file.summary);
    write_trace(output, &file.bytes, caller.as_ref())
        .map_err(|error| format!("cannot write {}: {error}", output.display()))?;
    Ok(code)
}

/// Runs the command and records its events and phases.
fn record_command(
    options: &Options,
    caller: Option<&SudoCaller>,
    observer: &ObserverOptions,
) -> Result<(TraceRecorderThread, ExitCode), Box<dyn Error>> {
    let signals = CaughtSignals::catch_forwarded_signals()?;
    let words = options.command.iter();
    let command = words.map(|word| word.to_string_lossy().into_owned());
    let recording =
        TraceRecorderThread::start(observer, command.collect(), RecordedRoot::SpawnedCommand)?;
    let command_user = caller.filter(|_| !options.as_root);
    let code = match RunningCommand::spawn(&options.command, command_user, signals) {
        Ok(child) => ExitCode::from(child.wait()?.exit_code()),
        Err(error) => {
            eprintln!("zernel: {error}");
            ExitCode::from(error.exit_code())
        }
    };
    Ok((recording, code))
}

/// Records a process that runs already.
fn record_running_process(
    options: &Options,
    pid: u32,
    observer: &ObserverOptions,
) -> Result<(TraceRecorderThread, ExitCode), Box<dyn Error>> {
    let interrupted = interrupt_flags::interrupt_flag()?;
    let process = i32::try_from(pid).map(Process::new);
    let Ok(Ok(process)) = process else {
        return Err(format!("there is no process {pid}").into());
    };
    let command = process.cmdline().unwrap_or_default();
    let recording =
        TraceRecorderThread::start(observer, command, RecordedRoot::RunningProcess(pid))?;
    let started = Instant::now();
    let is_over = || options.time.is_some_and(|time| started.elapsed() >= time);
    while process.is_alive() && !is_over() && !interrupted.load(Ordering::Relaxed) {
        thread::sleep(POLL_INTERVAL);
    }
    Ok((recording, ExitCode::SUCCESS))
}

fn write_trace(path: &Path, bytes: &[u8], caller: Option<&SudoCaller>) -> std::io::Result<()> {
    match gzip::has_gzip_extension(path) {
        true => write_report_file(path, &gzip::compress_bytes(bytes)?, caller),
        false => write_report_file(path, bytes, caller),
    }
}
