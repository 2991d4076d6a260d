//! `zernel run` and `zernel attach`: observe one command or one running process and all that it starts, and say in
//! the end where the time went.
//!
//! | part | subject |
//! |---|---|
//! | `child` | the command as a process: signals in, exit code out |
//! | `caller` | who the command runs as under sudo |
//! | `attach` | a process that runs already |
//! | `watch` | observing, by itself or through the daemon, and telling the wanted processes from others |

pub(crate) mod attach;
mod caller;
mod child;
mod recorder;

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use zernel_ebpf::observer::{self, GovernorOptions};

use zernel_report::Report;

use crate::client::Socket;
use crate::observe::parse_budget;
use caller::Caller;
use child::{CaughtSignals, Child};
use recorder::{Recorder, Root};

/// Run a command, and say where the time of its training processes went
///
/// The command keeps its input and output, its environment and its signals, and its exit code is passed on.
/// When it has ended, a report goes to stderr: the phases of each rank, what it waited for, what bounds it,
/// and what observing cost. Under sudo the command runs as the user who called sudo.
///
/// Without privilege the daemon of the machine is asked (`zernel observe`). If there is none, the command runs
/// all the same, and the report says what could not be seen.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The command and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
    /// Under sudo, run the command as root too
    #[arg(long)]
    as_root: bool,
    #[command(flatten)]
    report: ReportOptions,
}

/// How to observe, and where to tell of it.
#[derive(Debug, Args)]
struct ReportOptions {
    /// Write the report as JSON to this file too; `-` is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as a self-contained HTML page to this file too; `-` is stdout
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// The share of its time that any observed thread may pay, such as 0.5%; `none`: whatever it takes
    #[arg(long, value_name = "SHARE", default_value = "0.5%", value_parser = parse_budget)]
    budget: f64,
    /// A library to attach to at once, before any process uses it
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
    #[command(flatten)]
    socket: Socket,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn std::error::Error>> {
    options.report.check_files()?;
    let signals = CaughtSignals::catch()?;
    let caller = match options.as_root {
        true => None,
        false => Caller::from_environment()?,
    };
    let recorder = options.report.start(Root::SpawnedCommand);
    if io::stderr().is_terminal() {
        match recorder.unavailable_reason() {
            None => eprintln!("zernel: observing; the report comes when the command has ended"),
            Some(reason) => eprintln!("zernel: not observing: {reason}"),
        }
    }
    let started = Instant::now();
    let child = Child::spawn(&options.command, caller.as_ref(), signals);
    let ended = child.map(Child::wait);
    let wall = started.elapsed();
    // Whatever became of the command, nothing stays attached.
    let outcome = recorder.finish();
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
    options.report.write(&report);
    Ok(ExitCode::from(ended.exit_code()))
}

impl ReportOptions {
    fn start(&self, root: Root) -> Recorder {
        let options = observer::Options {
            libraries: self.libraries.clone(),
            governor: GovernorOptions::with_budget(self.budget),
            ..observer::Options::default()
        };
        Recorder::start(&options, root, &self.socket)
    }

    /// Finds out whether reports can be written, before the work that they are about.
    fn check_files(&self) -> Result<(), String> {
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
            check_writable(file)
                .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        }
        Ok(())
    }

    /// A report that cannot be written is a pity, but the command's exit code is still passed on.
    fn write(&self, report: &Report) {
        let mut err = anstream::AutoStream::auto(io::stderr().lock());
        let text = zernel_report::render_text(report, terminal_width());
        let _ = err.write_all(text.as_bytes());
        let json = |file: &Path| {
            let text = serde_json::to_string_pretty(report)?;
            write_file_or_stdout(file, text + "\n")
        };
        let page = |file: &Path| write_file_or_stdout(file, zernel_report::html(report));
        let json = self.json.as_deref().map(|file| (file, json(file)));
        let page = self.html.as_deref().map(|file| (file, page(file)));
        for (file, written) in json.into_iter().chain(page) {
            if let Err(error) = written {
                let _ = writeln!(err, "zernel: cannot write {}: {error}", file.display());
            }
        }
    }
}

/// How many characters a line of stderr has; `None`: it is no terminal, or does not say.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stderr()).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

/// Finds out whether a file can be written, and leaves it as it is; one that is not there is not there afterwards.
fn check_writable(file: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).open(file) {
        Ok(_) => std::fs::remove_file(file),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            // A link may lead to where there is no file yet.
            let opened = OpenOptions::new().create(true).append(true).open(file);
            opened.map(drop)
        }
        Err(error) => Err(error),
    }
}

fn write_file_or_stdout(file: &Path, text: String) -> io::Result<()> {
    match file.as_os_str() == "-" {
        true => crate::print(text.as_bytes()),
        false => std::fs::write(file, text),
    }
}
