//! One run: a kernel, files and a command go in; the command's output and how it ended come out.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;

use crate::guest::{self, GuestCommand, Ports, Progress};
use crate::host::find_program;
use crate::initramfs::{Initramfs, InitramfsError};
use crate::kernel::Kernel;
use crate::qemu::{self, Programs, Qemu};

/// How often the guest's progress is looked at.
const POLL: Duration = Duration::from_millis(10);
/// How long KVM may take to start the command before [`Accelerator::Auto`] goes on without it. Where KVM
/// works this takes a second.
const KVM_PATIENCE: Duration = Duration::from_secs(15);
/// How much of the console an error repeats.
const CONSOLE_TAIL_LINES: usize = 20;

/// Why a command could not be run to its end.
#[derive(Debug, Error)]
pub enum VmError {
    /// QEMU is not installed.
    #[error(
        "{} is not on PATH; install the package qemu-system-x86",
        qemu::PROGRAM
    )]
    QemuMissing,
    /// The program that ties QEMU's life to ours is not installed.
    #[error("setpriv is not on PATH; install the package util-linux")]
    TetherMissing,
    /// There is nothing to make the guest's first process of.
    #[error("busybox is not on PATH; install the package busybox-static")]
    BusyboxMissing,
    /// A busybox that needs libraries cannot be the guest's first process.
    #[error("{path} is not statically linked; install the package busybox-static in its place", path = path.display())]
    BusyboxNotStatic {
        /// The busybox found.
        path: PathBuf,
    },
    /// The program to run is neither among the guest's files nor on this machine.
    #[error("there is no program {program} on this machine to run in the guest", program = program.display())]
    ProgramMissing {
        /// The program as it was given.
        program: PathBuf,
    },
    /// An argument or a variable's name that cannot be handed to a program.
    #[error(
        "{word:?} cannot be passed into the guest: no zero bytes, and in variable names only letters, digits and _"
    )]
    BadWord {
        /// The text.
        word: OsString,
    },
    /// The guest's files could not be put together.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// A file of the run could not be written or read.
    #[error("cannot use {path} for running a VM: {source}", path = path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// QEMU did not start, or ended by itself with an error.
    #[error("QEMU failed ({status}): {message}")]
    QemuFailed {
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        message: String,
    },
    /// KVM cannot run this guest on this machine.
    #[error(
        "KVM cannot run the guest: {message}; use the emulator instead (Accelerator::Auto or Tcg)"
    )]
    KvmUnusable {
        /// What QEMU said.
        message: String,
    },
    /// The guest's kernel crashed.
    #[error("the guest's kernel crashed: {message}\n{remains}")]
    KernelPanic {
        /// The kernel's own words.
        message: String,
        /// What is left of the run.
        remains: Box<Remains>,
    },
    /// The guest switched itself off before the command ended.
    #[error("the guest switched itself off before the command ended\n{remains}")]
    GuestStopped {
        /// What is left of the run.
        remains: Box<Remains>,
    },
    /// The command took too long.
    #[error("the command did not end within {limit:?} and was stopped with its VM\n{remains}")]
    TimedOut {
        /// The time it had, boot included.
        limit: Duration,
        /// What is left of the run.
        remains: Box<Remains>,
    },
    /// The guest never came as far as starting the command.
    #[error("the guest did not start the command within {limit:?}; give it more time\n{remains}")]
    BootTimedOut {
        /// The time it had.
        limit: Duration,
        /// What is left of the run.
        remains: Box<Remains>,
    },
}

/// What a run that failed leaves behind.
#[derive(Debug, Clone)]
pub struct Remains {
    /// What the kernel printed.
    pub console_log: String,
    /// What the command had written to its stdout.
    pub stdout: Vec<u8>,
    /// What the command had written to its stderr.
    pub stderr: Vec<u8>,
}

impl fmt::Display for Remains {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<&str> = self.console_log.lines().collect();
        writeln!(formatter, "the end of its console:")?;
        for line in &lines[lines.len().saturating_sub(CONSOLE_TAIL_LINES)..] {
            writeln!(formatter, "  {line}")?;
        }
        Ok(())
    }
}

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accelerator {
    /// KVM where it works, else the emulator.
    #[default]
    Auto,
    /// The processor itself.
    Kvm,
    /// QEMU's emulator, one thread for all of the guest's processors.
    Tcg,
}

impl Accelerator {
    /// What to try, in order.
    fn attempts(self) -> &'static [Self] {
        match self {
            Self::Kvm => &[Self::Kvm],
            Self::Auto if qemu::kvm_opens() => &[Self::Kvm, Self::Tcg],
            Self::Auto | Self::Tcg => &[Self::Tcg],
        }
    }
}

/// How a command ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandStatus {
    /// It returned this exit code.
    Exited(i32),
    /// A signal killed it.
    Killed {
        /// The signal's number.
        signal: i32,
    },
}

impl CommandStatus {
    /// Whether the command returned 0.
    pub fn success(self) -> bool {
        self == Self::Exited(0)
    }
}

impl fmt::Display for CommandStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(formatter, "exit code {code}"),
            Self::Killed { signal } => write!(formatter, "killed by signal {signal}"),
        }
    }
}

/// A command that ran to its end.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// How it ended.
    pub status: CommandStatus,
    /// Every byte it, and what it started, wrote to stdout.
    pub stdout: Vec<u8>,
    /// Every byte it, and what it started, wrote to stderr.
    pub stderr: Vec<u8>,
    /// What the kernel printed.
    pub console_log: String,
    /// What the guest ran on: [`Accelerator::Kvm`] or [`Accelerator::Tcg`].
    pub accelerator: Accelerator,
    /// From the start of QEMU to the start of the command.
    pub boot_time: Duration,
    /// From the start of QEMU to the end of the command.
    pub total_time: Duration,
}

/// A virtual machine to run one command in. Nothing starts before [`VmSpec::run`], which may be called
/// any number of times; each run is a fresh boot.
#[derive(Debug, Clone)]
pub struct VmSpec {
    pub(crate) kernel: Kernel,
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    pub(crate) command_line: Vec<String>,
    accelerator: Accelerator,
    timeout: Duration,
    files: Initramfs,
    environment: Vec<(String, OsString)>,
}

impl VmSpec {
    /// Two processors, 1 GiB of memory, two minutes, no files but the command's own.
    pub fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            cpus: 2,
            memory_mib: 1024,
            command_line: Vec::new(),
            accelerator: Accelerator::default(),
            timeout: Duration::from_secs(120),
            files: Initramfs::new(),
            environment: Vec::new(),
        }
    }

    /// The number of processors.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// The memory, which also holds the guest's files.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// One more word on the kernel's command line.
    pub fn kernel_argument(mut self, word: impl Into<String>) -> Self {
        self.command_line.push(word.into());
        self
    }

    /// What executes the guest.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = accelerator;
        self
    }

    /// How long a run may take, boot included.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The files of the guest, beside the program that is run and what it needs.
    pub fn files(mut self, files: Initramfs) -> Self {
        self.files = files;
        self
    }

    /// A variable in the command's environment.
    pub fn environment(mut self, name: impl Into<String>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Boots, runs one program as root, and waits for its end.
    ///
    /// The program is one of the guest's files, or else an executable of this machine (a path, or a name
    /// on `PATH`), which is then copied in with what it needs. What it leaves running is killed.
    pub fn run<I, A>(&self, program: impl AsRef<Path>, arguments: I) -> Result<Outcome, VmError>
    where
        I: IntoIterator<Item = A>,
        A: AsRef<OsStr>,
    {
        let programs = Programs::find()?;
        let arguments: Vec<OsString> = arguments
            .into_iter()
            .map(|word| word.as_ref().to_owned())
            .collect();
        let folder = RunFolder::create()?;
        let ports = Ports::of(&self.kernel);
        self.write_initramfs(&folder, program.as_ref(), &arguments, ports)?;
        let attempts = self.accelerator.attempts();
        for (index, &accelerator) in attempts.iter().enumerate() {
            let last = index + 1 == attempts.len();
            let limits = Limits {
                boot: if last { self.timeout } else { KVM_PATIENCE },
                total: self.timeout,
            };
            let attempt = self.attempt(&programs, &folder, ports, accelerator, limits)?;
            if last || attempt.boot_time.is_some() {
                return attempt.judge(&folder, limits);
            }
        }
        unreachable!("there is always an attempt, and the last one returns")
    }

    fn write_initramfs(
        &self,
        folder: &RunFolder,
        program: &Path,
        arguments: &[OsString],
        ports: Ports,
    ) -> Result<(), VmError> {
        let mut files = self.files.clone();
        let program = add_command(&mut files, program)?;
        let command = GuestCommand {
            program: program.as_os_str(),
            arguments,
            environment: &self.environment,
        };
        guest::add_base(
            &mut files,
            &self.kernel,
            guest::init_script(&command, ports)?,
        )?;
        let path = folder.path(qemu::INITRAMFS);
        let file = File::create(&path).map_err(|source| VmError::File { path, source })?;
        Ok(files.write_to(BufWriter::new(file))?)
    }

    /// One boot, up to its end or its limits. QEMU is gone when this returns.
    fn attempt(
        &self,
        programs: &Programs,
        folder: &RunFolder,
        ports: Ports,
        accelerator: Accelerator,
        limits: Limits,
    ) -> Result<Attempt, VmError> {
        folder.clear_outputs()?;
        let start = Instant::now();
        let arguments = qemu::arguments(self, accelerator, ports);
        let here = |source| VmError::File {
            path: folder.path(""),
            source,
        };
        let mut qemu = Qemu::start(programs, &arguments, folder.folder.path()).map_err(here)?;
        let mut boot_time = None;
        loop {
            // Looked at before the files are read: a QEMU that is gone writes no more.
            let exited = qemu.exited().map_err(here)?;
            let progress = Progress::read(&folder.text(guest::STATUS)?);
            if progress != Progress::Booting {
                boot_time = boot_time.or(Some(start.elapsed()));
            }
            let ending = match (progress, exited) {
                (Progress::Done(status), _) => Some(Ending::Finished(status)),
                (_, Some(status)) => Some(Ending::QemuExited(status)),
                _ if qemu::kvm_gave_up(&folder.text(qemu::LOG)?) => Some(Ending::KvmGaveUp),
                _ if boot_time.is_none() && start.elapsed() >= limits.boot => {
                    Some(Ending::BootTimedOut)
                }
                _ if start.elapsed() >= limits.total => Some(Ending::TimedOut),
                _ => None,
            };
            if let Some(ending) = ending {
                return Ok(Attempt {
                    accelerator,
                    ending,
                    boot_time,
                    total_time: start.elapsed(),
                });
            }
            thread::sleep(POLL);
        }
    }
}

/// Makes sure that the guest has the program, and gives its path there.
fn add_command(files: &mut Initramfs, program: &Path) -> Result<PathBuf, VmError> {
    if files.contains(program) {
        return Ok(program.to_owned());
    }
    let missing = || VmError::ProgramMissing {
        program: program.to_owned(),
    };
    let is_name = program.components().count() == 1 && program.is_relative();
    let host = match program.to_str().filter(|_| is_name) {
        Some(name) => find_program(name).ok_or_else(missing)?,
        None => std::path::absolute(program).map_err(|_| missing())?,
    };
    if !host.is_file() {
        return Err(missing());
    }
    files.add_program(&host)?;
    Ok(host)
}

/// How long an attempt may take until the command starts, and until it ends.
#[derive(Debug, Clone, Copy)]
struct Limits {
    boot: Duration,
    total: Duration,
}

/// One boot that is over.
#[derive(Debug)]
struct Attempt {
    accelerator: Accelerator,
    ending: Ending,
    /// None when the command was never started.
    boot_time: Option<Duration>,
    total_time: Duration,
}

#[derive(Debug)]
enum Ending {
    Finished(CommandStatus),
    QemuExited(ExitStatus),
    KvmGaveUp,
    BootTimedOut,
    TimedOut,
}

impl Attempt {
    /// What the boot's end means to the caller.
    fn judge(self, folder: &RunFolder, limits: Limits) -> Result<Outcome, VmError> {
        let message = || folder.text(qemu::LOG).map(|log| log.trim().to_owned());
        match self.ending {
            Ending::Finished(status) => self.outcome(status, folder),
            Ending::KvmGaveUp => Err(VmError::KvmUnusable {
                message: message()?,
            }),
            Ending::QemuExited(status) if !status.success() => Err(VmError::QemuFailed {
                status,
                message: message()?,
            }),
            Ending::QemuExited(_) => Err(guest_ended(folder.remains()?)),
            Ending::BootTimedOut => Err(VmError::BootTimedOut {
                limit: limits.boot,
                remains: folder.remains()?,
            }),
            Ending::TimedOut => Err(VmError::TimedOut {
                limit: limits.total,
                remains: folder.remains()?,
            }),
        }
    }

    fn outcome(&self, status: CommandStatus, folder: &RunFolder) -> Result<Outcome, VmError> {
        let Remains {
            console_log,
            stdout,
            stderr,
        } = *folder.remains()?;
        Ok(Outcome {
            status,
            stdout,
            stderr,
            console_log,
            accelerator: self.accelerator,
            boot_time: self.boot_time.unwrap_or(self.total_time),
            total_time: self.total_time,
        })
    }
}

/// A guest that went away in good order: crashed (which restarts it, which ends QEMU), or switched off.
fn guest_ended(remains: Box<Remains>) -> VmError {
    let panic = remains
        .console_log
        .lines()
        .find_map(|line| line.split_once("Kernel panic - "));
    match panic.map(|(_, message)| message.to_owned()) {
        Some(message) => VmError::KernelPanic { message, remains },
        None => VmError::GuestStopped { remains },
    }
}

/// The files of one run, gone when dropped.
#[derive(Debug)]
struct RunFolder {
    folder: TempDir,
}

impl RunFolder {
    fn create() -> Result<Self, VmError> {
        let folder = tempfile::Builder::new().prefix("zernel-lab-").tempdir();
        folder
            .map(|folder| Self { folder })
            .map_err(|source| VmError::File {
                path: std::env::temp_dir(),
                source,
            })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Empties what an earlier attempt wrote.
    fn clear_outputs(&self) -> Result<(), VmError> {
        for name in [guest::STDOUT, guest::STDERR, guest::STATUS, qemu::CONSOLE] {
            let path = self.path(name);
            File::create(&path).map_err(|source| VmError::File { path, source })?;
        }
        Ok(())
    }

    fn bytes(&self, name: &str) -> Result<Vec<u8>, VmError> {
        let path = self.path(name);
        fs::read(&path).map_err(|source| VmError::File { path, source })
    }

    fn text(&self, name: &str) -> Result<String, VmError> {
        Ok(String::from_utf8_lossy(&self.bytes(name)?).into_owned())
    }

    fn remains(&self) -> Result<Box<Remains>, VmError> {
        Ok(Box::new(Remains {
            console_log: self.text(qemu::CONSOLE)?.replace('\r', ""),
            stdout: self.bytes(guest::STDOUT)?,
            stderr: self.bytes(guest::STDERR)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_among_the_files_on_the_path_or_by_path() {
        let mut files = Initramfs::new();
        files.add_bytes("/in/the/guest", "", 0o755).unwrap();
        assert_eq!(
            add_command(&mut files, Path::new("/in/the/guest")).unwrap(),
            Path::new("/in/the/guest")
        );
        let cat = add_command(&mut files, Path::new("cat")).unwrap();
        assert!(files.contains(&cat));
        assert_eq!(
            add_command(&mut files, Path::new("/bin/sh")).unwrap(),
            Path::new("/bin/sh")
        );
        for missing in [
            "no-such-program",
            "/no/such/program",
            "./no-such-program",
            "",
        ] {
            let error = add_command(&mut files, Path::new(missing)).unwrap_err();
            assert!(
                matches!(error, VmError::ProgramMissing { .. }),
                "{missing}: {error}"
            );
        }
    }

    #[test]
    fn a_crash_is_told_from_a_shutdown() {
        let remains = |console_log: &str| {
            Box::new(Remains {
                console_log: console_log.to_owned(),
                stdout: Vec::new(),
                stderr: Vec::new(),
            })
        };
        let console = "[    1.0] Booting\n[    1.2] Kernel panic - not syncing: sysrq triggered crash\nmore\n";
        let error = guest_ended(remains(console));
        assert!(
            matches!(&error, VmError::KernelPanic { message, .. } if message == "not syncing: sysrq triggered crash")
        );
        assert!(error.to_string().contains("Booting"), "{error}");
        assert!(matches!(
            guest_ended(remains("all fine\n")),
            VmError::GuestStopped { .. }
        ));
    }

    #[test]
    fn an_error_repeats_only_the_end_of_the_console() {
        let console_log = (0..100).map(|line| format!("line {line}\n")).collect();
        let text = Remains {
            console_log,
            stdout: Vec::new(),
            stderr: Vec::new(),
        }
        .to_string();
        assert!(
            text.contains("line 99") && text.contains("line 80") && !text.contains("line 79"),
            "{text}"
        );
    }
}
