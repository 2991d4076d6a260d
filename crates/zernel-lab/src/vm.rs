//! Runs a command in a virtual machine, with a kernel and files, and returns the command's output and how it ended.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::deterministic::{DeterministicRunRecord, DeterministicSettings, RunDifference};
use crate::guest::{self, GuestCommand, GuestPorts};
use crate::initramfs::Initramfs;
use crate::kernel::Kernel;
use crate::program_search::find_program;
use crate::qemu::{self, QemuPrograms};
use crate::topology::CpuTopology;

mod attempt;
mod error;

use attempt::{AttemptLimits, BootAttempt, RunFolder};
pub use error::{PartialOutput, VmError};

/// Time that KVM has to start the command before [`Accelerator::Auto`] continues without KVM. Where KVM works this
/// takes a second.
const KVM_BOOT_LIMIT: Duration = Duration::from_secs(15);

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accelerator {
    /// KVM if it works on this machine, else the emulator.
    #[default]
    Auto,
    /// KVM: the processor itself executes the guest.
    Kvm,
    /// QEMU's emulator, with one host thread for all of the guest's processors.
    Tcg,
}

impl Accelerator {
    /// The accelerators to try, in order. The emulator gets several attempts: an old one may crash a guest while it
    /// boots.
    fn accelerators_to_try(self) -> &'static [Self] {
        use Accelerator::{Auto, Kvm, Tcg};
        match self {
            Kvm => &[Kvm],
            Auto if qemu::can_open_kvm() => &[Kvm, Tcg, Tcg, Tcg, Tcg],
            Auto | Tcg => &[Tcg, Tcg, Tcg, Tcg],
        }
    }
}

/// How a command ended in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandStatus {
    /// The command returned this exit code.
    Exited(i32),
    /// A signal killed the command.
    Killed {
        /// The number of the signal.
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

/// The output of a command that ran to its end, and how it ended.
#[derive(Debug, Clone)]
pub struct CommandOutcome {
    /// How the command ended.
    pub status: CommandStatus,
    /// All bytes that the command, and what it started, wrote to stdout.
    pub stdout: Vec<u8>,
    /// All bytes that the command, and what it started, wrote to stderr.
    pub stderr: Vec<u8>,
    /// What the guest's kernel printed.
    pub console_log: String,
    /// What executed the guest: [`Accelerator::Kvm`] or [`Accelerator::Tcg`].
    pub accelerator: Accelerator,
    /// Number of boots that were needed: more than one if KVM cannot run the guest, or if the emulator crashed it
    /// before the command was started. The command itself is never started twice.
    pub boot_count: usize,
    /// Time from the start of QEMU to the start of the command.
    pub boot_time: Duration,
    /// Time from the start of QEMU to the end of the command.
    pub total_time: Duration,
    /// For a deterministic run: what can be compared with another run of the same command.
    pub deterministic_run: Option<DeterministicRunRecord>,
}

impl CommandOutcome {
    /// The first line in which each output of this run differs from that of another deterministic run of the same command.
    /// Empty if the digests of the runs are equal.
    #[must_use]
    pub fn differences(&self, other_outcome: &Self) -> Vec<RunDifference> {
        let pairs = self
            .outputs_covered_by_digest()
            .into_iter()
            .zip(other_outcome.outputs_covered_by_digest());
        let differences = pairs.filter_map(|((part, own_output), (_, other_output))| {
            RunDifference::first_difference(part, own_output, other_output)
        });
        differences.collect()
    }

    /// The outputs that a digest covers, by name.
    fn outputs_covered_by_digest(&self) -> [(&'static str, &[u8]); 4] {
        let kernel_counters = self
            .deterministic_run
            .as_ref()
            .map(|record| record.kernel_counters.as_bytes());
        [
            ("stdout", &self.stdout),
            ("stderr", &self.stderr),
            ("console", self.console_log.as_bytes()),
            ("counters", kernel_counters.unwrap_or_default()),
        ]
    }
}

/// Describes a virtual machine to run one command in. No virtual machine starts before [`VmSpec::run`], which may be called any
/// number of times; each run is a fresh boot.
#[derive(Debug, Clone)]
pub struct VmSpec {
    pub(crate) kernel: Kernel,
    pub(crate) topology: CpuTopology,
    pub(crate) memory_mib: u32,
    pub(crate) kernel_arguments: Vec<String>,
    pub(crate) deterministic_settings: Option<DeterministicSettings>,
    accelerator: Accelerator,
    boot_timeout: Duration,
    command_timeout: Duration,
    files: Initramfs,
    environment: Vec<(String, OsString)>,
    interrupt_flag: Arc<AtomicBool>,
}

impl VmSpec {
    /// A virtual machine with two processors, 1 GiB of memory, two minutes to boot, two minutes for the command, and no
    /// files but those that the command needs.
    pub fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            topology: CpuTopology::with_one_cache(2),
            memory_mib: 1024,
            kernel_arguments: Vec::new(),
            deterministic_settings: None,
            accelerator: Accelerator::default(),
            boot_timeout: Duration::from_secs(120),
            command_timeout: Duration::from_secs(120),
            files: Initramfs::new(),
            environment: Vec::new(),
            interrupt_flag: Arc::default(),
        }
    }

    /// Sets the number of processors, as cores that share one cache.
    pub fn cpus(self, cpus: u32) -> Self {
        self.topology(CpuTopology::with_one_cache(cpus))
    }

    /// Sets the processors, with their nodes, caches, cores and threads.
    pub fn topology(mut self, topology: CpuTopology) -> Self {
        self.topology = topology;
        self
    }

    /// Makes every run with the same files, command and seed the same to the last byte. The guest is emulated
    /// whatever [`VmSpec::accelerator`] says.
    pub fn deterministic(mut self, deterministic: DeterministicSettings) -> Self {
        self.deterministic_settings = Some(deterministic);
        self
    }

    /// Sets the size of the memory, which also holds the guest's files.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Adds a word to the kernel's command line.
    pub fn kernel_argument(mut self, word: impl Into<String>) -> Self {
        self.kernel_arguments.push(word.into());
        self
    }

    /// Sets what executes the guest.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = accelerator;
        self
    }

    /// Sets the time in which the guest must start the command. Under the emulator on a busy machine a boot of three
    /// seconds takes a minute.
    pub fn boot_timeout(mut self, boot_timeout: Duration) -> Self {
        self.boot_timeout = boot_timeout;
        self
    }

    /// Sets the time in which the command must end, from its start.
    pub fn command_timeout(mut self, command_timeout: Duration) -> Self {
        self.command_timeout = command_timeout;
        self
    }

    /// Sets the files of the guest. The program that is run and the files that it needs are added to these.
    pub fn files(mut self, files: Initramfs) -> Self {
        self.files = files;
        self
    }

    /// Sets a variable in the command's environment.
    pub fn environment(mut self, name: impl Into<String>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Sets a flag. When a signal handler or another thread sets it to true, the run ends.
    pub fn interrupted_by(mut self, interrupt_flag: Arc<AtomicBool>) -> Self {
        self.interrupt_flag = interrupt_flag;
        self
    }

    /// The arguments of QEMU in a deterministic run.
    pub(crate) fn deterministic_qemu_arguments(&self) -> Vec<OsString> {
        qemu::qemu_arguments(
            self,
            Accelerator::Tcg,
            GuestPorts::fastest_for_kernel(&self.kernel),
        )
    }

    /// Boots the virtual machine, runs one program as root, and waits for its end.
    ///
    /// The program is one of the guest's files, or else an executable of this machine (a path, or a name on `PATH`),
    /// which is then copied in with what it needs. Processes that the program leaves running are killed.
    pub fn run<I, A>(
        &self,
        program: impl AsRef<Path>,
        arguments: I,
    ) -> Result<CommandOutcome, VmError>
    where
        I: IntoIterator<Item = A>,
        A: AsRef<OsStr>,
    {
        let arguments: Vec<OsString> = arguments
            .into_iter()
            .map(|word| word.as_ref().to_owned())
            .collect();
        let program = program.as_ref();
        let mut outcome = self.run_without_retry(program, &arguments);
        for retry in self.specs_after_emulator_crash() {
            match &outcome {
                Err(error) if error.is_emulator_crash() => {
                    outcome = retry.run_without_retry(program, &arguments);
                }
                _ => break,
            }
        }
        outcome
    }

    /// What to boot next each time the emulator has crashed the guest. Two boots of a machine that is not deterministic differ
    /// anyway.
    fn specs_after_emulator_crash(&self) -> Vec<Self> {
        match &self.deterministic_settings {
            None => vec![self.clone(); 3],
            Some(settings) => settings
                .settings_after_emulator_crash()
                .map(|settings| self.clone().deterministic(settings))
                .collect(),
        }
    }

    fn run_without_retry(
        &self,
        program: &Path,
        arguments: &[OsString],
    ) -> Result<CommandOutcome, VmError> {
        let programs = QemuPrograms::find()?;
        let folder = RunFolder::create()?;
        let ports = GuestPorts::fastest_for_kernel(&self.kernel);
        self.write_initramfs(&folder, program, arguments, ports)?;
        self.boot_with_retries(&programs, &folder, ports)
    }

    /// Boots until the command was started, or until no accelerator is left to try.
    fn boot_with_retries(
        &self,
        programs: &QemuPrograms,
        folder: &RunFolder,
        ports: GuestPorts,
    ) -> Result<CommandOutcome, VmError> {
        let attempts = match self.deterministic_settings {
            // Another boot of a deterministic run would have the same result.
            Some(_) => &[Accelerator::Tcg],
            None => self.accelerator.accelerators_to_try(),
        };
        for (index, &accelerator) in attempts.iter().enumerate() {
            let boot_count = index + 1;
            let is_last_attempt = boot_count == attempts.len();
            let mut limits = AttemptLimits {
                boot_limit: self.boot_timeout,
                command_limit: self.command_timeout,
            };
            if accelerator == Accelerator::Kvm && !is_last_attempt {
                limits.boot_limit = limits.boot_limit.min(KVM_BOOT_LIMIT);
            }
            let arguments = qemu::qemu_arguments(self, accelerator, ports);
            let attempt = BootAttempt::boot_and_wait(programs, &arguments, folder, limits, self)?;
            if is_last_attempt || !attempt.should_boot_again(accelerator) {
                let mut outcome = attempt.into_outcome(folder, accelerator, boot_count)?;
                if self.deterministic_settings.is_some() {
                    outcome.deterministic_run = Some(folder.read_deterministic_run_record()?);
                }
                return Ok(outcome);
            }
        }
        unreachable!("there is always an attempt, and the last one returns")
    }

    fn write_initramfs(
        &self,
        folder: &RunFolder,
        program: &Path,
        arguments: &[OsString],
        ports: GuestPorts,
    ) -> Result<(), VmError> {
        let mut files = self.files.clone();
        let program = add_program_if_missing(&mut files, program)?;
        let command = GuestCommand {
            program: program.as_os_str(),
            arguments,
            environment: &self.environment,
            deterministic_settings: self.deterministic_settings.as_ref(),
        };
        guest::add_base_system(
            &mut files,
            &self.kernel,
            guest::init_script(&command, ports)?,
        )?;
        if let Some(deterministic) = &self.deterministic_settings {
            guest::add_entropy_program(&mut files, deterministic)?;
        }
        let path = folder.file_path(qemu::INITRAMFS_FILE);
        let file = File::create(&path).map_err(|source| VmError::FileUnusable { path, source })?;
        Ok(files.write_archive_to(BufWriter::new(file))?)
    }
}

/// Makes sure that the guest has the program, and returns the program's path in the guest.
fn add_program_if_missing(files: &mut Initramfs, program: &Path) -> Result<PathBuf, VmError> {
    if files.contains_path(program) {
        return Ok(program.to_owned());
    }
    let program_missing = || VmError::ProgramMissing {
        program: program.to_owned(),
    };
    let is_bare_name = program.components().count() == 1 && program.is_relative();
    let host_path = match program.to_str().filter(|_| is_bare_name) {
        Some(name) => find_program(name).ok_or_else(program_missing)?,
        None => std::path::absolute(program).map_err(|_| program_missing())?,
    };
    if !host_path.is_file() {
        return Err(program_missing());
    }
    files.add_program(&host_path)?;
    Ok(host_path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_found_in_guest_files_or_on_host() {
        let mut files = Initramfs::new();
        files
            .add_file_with_content("/in/the/guest", "", 0o755)
            .unwrap();
        assert_eq!(
            add_program_if_missing(&mut files, Path::new("/in/the/guest")).unwrap(),
            Path::new("/in/the/guest")
        );
        let cat = add_program_if_missing(&mut files, Path::new("cat")).unwrap();
        assert!(files.contains_path(&cat));
        assert_eq!(
            add_program_if_missing(&mut files, Path::new("/bin/sh")).unwrap(),
            Path::new("/bin/sh")
        );
        for missing in [
            "no-such-program",
            "/no/such/program",
            "./no-such-program",
            "",
        ] {
            let error = add_program_if_missing(&mut files, Path::new(missing)).unwrap_err();
            assert!(
                matches!(error, VmError::ProgramMissing { .. }),
                "{missing}: {error}"
            );
        }
    }
}
