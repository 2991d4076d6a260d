//! One boot of the virtual machine: its start, its end, and what the end means.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::deterministic::{DeterministicRunRecord, RunDigest};
use crate::guest::{self, GuestProgress};
use crate::qemu::{self, QemuProcess, QemuPrograms};

use super::{Accelerator, CommandOutcome, CommandStatus, PartialOutput, VmError, VmSpec};

/// Time between two checks of the guest's progress.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How long a guest may take to switch itself off after the command of a deterministic run. The guest prints to the
/// console while it switches itself off, so the console is complete only after QEMU's exit.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(60);

/// Time limits of a boot: until the command starts, and from then on.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttemptLimits {
    pub(super) boot_limit: Duration,
    pub(super) command_limit: Duration,
}

/// A boot that has ended, and what it left.
#[derive(Debug)]
pub(super) struct BootAttempt {
    ending: BootEnding,
    /// When the command was started; `None` if it never was.
    boot_time: Option<Duration>,
    total_time: Duration,
}

#[derive(Debug)]
enum BootEnding {
    CommandEnded(CommandStatus),
    QemuExited(ExitStatus),
    KvmFailed,
    BootTimedOut(Duration),
    CommandTimedOut(Duration),
    PowerOffTimedOut,
    VirtualTimeLimitReached,
    Interrupted,
}

impl BootAttempt {
    /// Boots the virtual machine and waits for its end. QEMU has exited when this function returns.
    pub(super) fn boot_and_wait(
        programs: &QemuPrograms,
        arguments: &[OsString],
        folder: &RunFolder,
        limits: AttemptLimits,
        spec: &VmSpec,
    ) -> Result<Self, VmError> {
        folder.clear_output_files()?;
        let folder_unusable = |source| VmError::FileUnusable {
            path: folder.folder_path().to_owned(),
            source,
        };
        let start = Instant::now();
        let mut qemu = QemuProcess::start(
            programs,
            arguments,
            folder.folder_path(),
            spec.deterministic_settings.is_some(),
        )
        .map_err(folder_unusable)?;
        let mut boot_time = None;
        let mut command_end = None;
        loop {
            // Whether QEMU has exited is checked before the files are read, because QEMU writes nothing after its exit.
            let qemu_exit_status = qemu.exit_status().map_err(folder_unusable)?;
            let progress = GuestProgress::parse_status(&folder.read_file_text(guest::STATUS_FILE)?);
            let now = start.elapsed();
            if progress != GuestProgress::Booting {
                boot_time = boot_time.or(Some(now));
            }
            let ending = match (progress, qemu_exit_status) {
                (GuestProgress::CommandEnded(status), _) => {
                    let end = *command_end.get_or_insert(now);
                    let is_over =
                        spec.deterministic_settings.is_none() || qemu_exit_status.is_some();
                    ending_once_command_is_done(status, is_over, now - end)
                }
                (GuestProgress::VirtualTimeLimitReached, _) => {
                    Some(BootEnding::VirtualTimeLimitReached)
                }
                (_, Some(status)) => Some(BootEnding::QemuExited(status)),
                _ if qemu::kvm_failed(&folder.read_file_text(qemu::QEMU_LOG_FILE)?) => {
                    Some(BootEnding::KvmFailed)
                }
                _ if spec.interrupt_flag.load(Ordering::Relaxed) => Some(BootEnding::Interrupted),
                _ => ending_if_limit_exceeded(now, boot_time, limits),
            };
            if let Some(ending) = ending {
                return Ok(Self {
                    ending,
                    boot_time,
                    total_time: command_end.unwrap_or(now),
                });
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Whether another boot may start the command: this boot did not, and KVM failed in any way or the emulated kernel
    /// crashed. If a boot is only slow, the next one would be slow too.
    pub(super) fn should_boot_again(&self, accelerator: Accelerator) -> bool {
        let has_crashed = matches!(self.ending, BootEnding::QemuExited(status) if status.success());
        let was_interrupted = matches!(self.ending, BootEnding::Interrupted);
        let uses_kvm = accelerator == Accelerator::Kvm;
        self.boot_time.is_none() && !was_interrupted && (uses_kvm || has_crashed)
    }

    /// Turns the end of this boot into the result of the run.
    pub(super) fn into_outcome(
        self,
        folder: &RunFolder,
        accelerator: Accelerator,
        boot_count: usize,
    ) -> Result<CommandOutcome, VmError> {
        let partial_output = folder.read_partial_output()?;
        let message = folder
            .read_file_text(qemu::QEMU_LOG_FILE)?
            .trim()
            .to_owned();
        match self.ending {
            BootEnding::CommandEnded(status) => Ok(CommandOutcome {
                status,
                stdout: partial_output.stdout,
                stderr: partial_output.stderr,
                console_log: partial_output.console_log,
                accelerator,
                boot_count,
                boot_time: self.boot_time.unwrap_or(self.total_time),
                total_time: self.total_time,
                deterministic_run: None,
            }),
            BootEnding::QemuExited(status) if status.success() => {
                Err(error_of_guest_that_stopped_early(partial_output))
            }
            BootEnding::QemuExited(status) => Err(VmError::QemuFailed {
                status,
                message,
                partial_output,
            }),
            BootEnding::KvmFailed => Err(VmError::KvmUnusable { message }),
            BootEnding::BootTimedOut(limit) => Err(VmError::BootTimedOut {
                limit,
                partial_output,
            }),
            BootEnding::CommandTimedOut(limit) => Err(VmError::CommandTimedOut {
                limit,
                partial_output,
            }),
            BootEnding::PowerOffTimedOut => Err(VmError::PowerOffTimedOut {
                limit: POWER_OFF_LIMIT,
                partial_output,
            }),
            BootEnding::VirtualTimeLimitReached => {
                Err(VmError::VirtualTimeLimitReached { partial_output })
            }
            BootEnding::Interrupted => Err(VmError::Interrupted { partial_output }),
        }
    }
}

fn ending_once_command_is_done(
    status: CommandStatus,
    is_over: bool,
    since_end: Duration,
) -> Option<BootEnding> {
    match is_over {
        true => Some(BootEnding::CommandEnded(status)),
        false => (since_end >= POWER_OFF_LIMIT).then_some(BootEnding::PowerOffTimedOut),
    }
}

fn ending_if_limit_exceeded(
    elapsed: Duration,
    boot_time: Option<Duration>,
    limits: AttemptLimits,
) -> Option<BootEnding> {
    match boot_time {
        None if elapsed >= limits.boot_limit => Some(BootEnding::BootTimedOut(limits.boot_limit)),
        Some(boot_time) if elapsed - boot_time >= limits.command_limit => {
            Some(BootEnding::CommandTimedOut(limits.command_limit))
        }
        _ => None,
    }
}

/// The error for a guest that ended before the command: its kernel crashed (which ends QEMU), or it switched itself
/// off.
fn error_of_guest_that_stopped_early(partial_output: Box<PartialOutput>) -> VmError {
    let panic = partial_output
        .console_log
        .lines()
        .find_map(|line| line.split_once("Kernel panic - "));
    match panic.map(|(_, message)| message.to_owned()) {
        Some(message) => VmError::KernelPanic {
            message,
            partial_output,
        },
        None => VmError::GuestStopped { partial_output },
    }
}

/// The folder with the files of one run, removed on drop.
#[derive(Debug)]
pub(super) struct RunFolder {
    folder: TempDir,
}

impl RunFolder {
    pub(super) fn create() -> Result<Self, VmError> {
        match tempfile::Builder::new().prefix("zernel-lab-").tempdir() {
            Ok(folder) => Ok(Self { folder }),
            Err(source) => Err(VmError::FileUnusable {
                path: std::env::temp_dir(),
                source,
            }),
        }
    }

    pub(super) fn file_path(&self, name: &str) -> PathBuf {
        self.folder_path().join(name)
    }

    fn folder_path(&self) -> &Path {
        self.folder.path()
    }

    /// Empties the files that an earlier boot wrote.
    fn clear_output_files(&self) -> Result<(), VmError> {
        for name in [
            guest::STDOUT_FILE,
            guest::STDERR_FILE,
            guest::STATUS_FILE,
            qemu::CONSOLE_FILE,
        ] {
            let path = self.file_path(name);
            File::create(&path).map_err(|source| VmError::FileUnusable { path, source })?;
        }
        Ok(())
    }

    fn read_file_bytes(&self, name: &str) -> Result<Vec<u8>, VmError> {
        let path = self.file_path(name);
        fs::read(&path).map_err(|source| VmError::FileUnusable { path, source })
    }

    fn read_file_text(&self, name: &str) -> Result<String, VmError> {
        Ok(String::from_utf8_lossy(&self.read_file_bytes(name)?).into_owned())
    }

    /// What can be compared with another run. QEMU must have exited, so that it has written everything.
    pub(super) fn read_deterministic_run_record(&self) -> Result<DeterministicRunRecord, VmError> {
        if !self.file_path(qemu::QEMU_THREADS_LOADED_FILE).exists() {
            let message = self.read_file_text(qemu::QEMU_LOG_FILE)?.trim().to_owned();
            return Err(VmError::NotDeterministic { message });
        }
        let partial_output = self.read_partial_output()?;
        let status = self.read_file_text(guest::STATUS_FILE)?;
        let texts = [
            &partial_output.stdout,
            &partial_output.stderr,
            partial_output.console_log.as_bytes(),
            status.as_bytes(),
        ];
        Ok(DeterministicRunRecord {
            digest: RunDigest::of_texts(texts),
            virtual_run_time: guest::virtual_time_in_status(&status).unwrap_or_default(),
            kernel_counters: status,
        })
    }

    fn read_partial_output(&self) -> Result<Box<PartialOutput>, VmError> {
        Ok(Box::new(PartialOutput {
            console_log: self.read_file_text(qemu::CONSOLE_FILE)?.replace('\r', ""),
            stdout: self.read_file_bytes(guest::STDOUT_FILE)?,
            stderr: self.read_file_bytes(guest::STDERR_FILE)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_panic_is_distinguished_from_shutdown() {
        let partial_output = |console_log: &str| {
            Box::new(PartialOutput {
                console_log: console_log.to_owned(),
                stdout: Vec::new(),
                stderr: Vec::new(),
            })
        };
        let console = "[    1.0] Booting\n[    1.2] Kernel panic - not syncing: sysrq triggered crash\nmore\n";
        let error = error_of_guest_that_stopped_early(partial_output(console));
        assert!(
            matches!(&error, VmError::KernelPanic { message, .. } if message == "not syncing: sysrq triggered crash")
        );
        assert!(error.to_string().contains("Booting"), "{error}");
        assert!(matches!(
            error_of_guest_that_stopped_early(partial_output("all fine\n")),
            VmError::GuestStopped { .. }
        ));
    }

    #[test]
    fn guest_that_does_not_power_off_is_error() {
        let ending = |is_over, since_end| {
            ending_once_command_is_done(CommandStatus::Exited(0), is_over, since_end)
        };
        assert!(ending(false, Duration::from_secs(59)).is_none());
        assert!(matches!(
            ending(false, POWER_OFF_LIMIT),
            Some(BootEnding::PowerOffTimedOut)
        ));
        assert!(matches!(
            ending(true, POWER_OFF_LIMIT),
            Some(BootEnding::CommandEnded(CommandStatus::Exited(0)))
        ));
    }

    #[test]
    fn boot_and_command_have_separate_time_limits() {
        let seconds = Duration::from_secs;
        let limits = AttemptLimits {
            boot_limit: seconds(10),
            command_limit: seconds(3),
        };
        assert!(ending_if_limit_exceeded(seconds(9), None, limits).is_none());
        assert!(matches!(
            ending_if_limit_exceeded(seconds(10), None, limits),
            Some(BootEnding::BootTimedOut(_))
        ));
        assert!(ending_if_limit_exceeded(seconds(11), Some(seconds(9)), limits).is_none());
        assert!(matches!(
            ending_if_limit_exceeded(seconds(12), Some(seconds(9)), limits),
            Some(BootEnding::CommandTimedOut(_))
        ));
    }
}
