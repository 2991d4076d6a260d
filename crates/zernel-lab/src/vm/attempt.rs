//! One boot: started, watched to its end, and judged.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::deterministic::{Determinism, Digest};
use crate::guest::{self, Progress};
use crate::qemu::{self, Programs, Qemu};

use super::{Accelerator, CommandOutcome, CommandStatus, Remains, VmError, VmSpec};

/// How often the guest's progress is looked at.
const POLL: Duration = Duration::from_millis(10);

/// How long a guest may take to switch itself off after the command of a deterministic run. It prints to the console
/// then, so the console is complete only after QEMU's exit.
const POWER_OFF_PATIENCE: Duration = Duration::from_secs(60);

/// How long an attempt may take until the command starts, and the command from then on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) boot: Duration,
    pub(super) command: Duration,
}

/// One boot that is over.
#[derive(Debug)]
pub(super) struct Attempt {
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
    BootTimedOut(Duration),
    TimedOut(Duration),
    VirtualLimitReached,
    Interrupted,
}

impl Attempt {
    /// Boots the machine and waits for its end. QEMU has exited when this returns.
    pub(super) fn make(
        programs: &Programs,
        arguments: &[OsString],
        folder: &RunFolder,
        limits: Limits,
        spec: &VmSpec,
    ) -> Result<Self, VmError> {
        folder.clear_outputs()?;
        let here = |source| VmError::File {
            path: folder.folder().to_owned(),
            source,
        };
        let start = Instant::now();
        let mut qemu = Qemu::start(
            programs,
            arguments,
            folder.folder(),
            spec.deterministic.is_some(),
        )
        .map_err(here)?;
        let mut boot_time = None;
        let mut command_end = None;
        loop {
            // Checked before the files are read, because QEMU writes nothing after its exit.
            let exited = qemu.exited().map_err(here)?;
            let progress = Progress::read(&folder.text(guest::STATUS)?);
            let now = start.elapsed();
            if progress != Progress::Booting {
                boot_time = boot_time.or(Some(now));
            }
            let ending = match (progress, exited) {
                (Progress::Done(status), _) => {
                    let end = *command_end.get_or_insert(now);
                    let is_over = spec.deterministic.is_none()
                        || exited.is_some()
                        || now - end >= POWER_OFF_PATIENCE;
                    is_over.then_some(Ending::Finished(status))
                }
                (Progress::VirtualLimitReached, _) => Some(Ending::VirtualLimitReached),
                (_, Some(status)) => Some(Ending::QemuExited(status)),
                _ if qemu::kvm_gave_up(&folder.text(qemu::LOG)?) => Some(Ending::KvmGaveUp),
                _ if spec.interrupt.load(Ordering::Relaxed) => Some(Ending::Interrupted),
                _ => overdue(now, boot_time, limits),
            };
            if let Some(ending) = ending {
                return Ok(Self {
                    ending,
                    boot_time,
                    total_time: command_end.unwrap_or(now),
                });
            }
            thread::sleep(POLL);
        }
    }

    /// Whether another boot may end better: the command was not started, and KVM failed in any way or the
    /// emulated kernel crashed. A boot that is only slow would be slow again.
    pub(super) fn deserves_another(&self, accelerator: Accelerator) -> bool {
        let crashed = matches!(self.ending, Ending::QemuExited(status) if status.success());
        let interrupted = matches!(self.ending, Ending::Interrupted);
        let kvm = accelerator == Accelerator::Kvm;
        self.boot_time.is_none() && !interrupted && (kvm || crashed)
    }

    /// What the boot's end means to the caller.
    pub(super) fn outcome(
        self,
        folder: &RunFolder,
        accelerator: Accelerator,
        boots: usize,
    ) -> Result<CommandOutcome, VmError> {
        let remains = folder.remains()?;
        let message = folder.text(qemu::LOG)?.trim().to_owned();
        match self.ending {
            Ending::Finished(status) => Ok(CommandOutcome {
                status,
                stdout: remains.stdout,
                stderr: remains.stderr,
                console_log: remains.console_log,
                accelerator,
                boots,
                boot_time: self.boot_time.unwrap_or(self.total_time),
                total_time: self.total_time,
                determinism: None,
            }),
            Ending::QemuExited(status) if status.success() => Err(guest_ended(remains)),
            Ending::QemuExited(status) => Err(VmError::QemuFailed {
                status,
                message,
                remains,
            }),
            Ending::KvmGaveUp => Err(VmError::KvmUnusable { message }),
            Ending::BootTimedOut(limit) => Err(VmError::BootTimedOut { limit, remains }),
            Ending::TimedOut(limit) => Err(VmError::TimedOut { limit, remains }),
            Ending::VirtualLimitReached => Err(VmError::VirtualLimitReached { remains }),
            Ending::Interrupted => Err(VmError::Interrupted { remains }),
        }
    }
}

fn overdue(elapsed: Duration, boot_time: Option<Duration>, limits: Limits) -> Option<Ending> {
    match boot_time {
        None if elapsed >= limits.boot => Some(Ending::BootTimedOut(limits.boot)),
        Some(boot_time) if elapsed - boot_time >= limits.command => {
            Some(Ending::TimedOut(limits.command))
        }
        _ => None,
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

/// The files of one run, removed on drop.
#[derive(Debug)]
pub(super) struct RunFolder {
    folder: TempDir,
}

impl RunFolder {
    pub(super) fn create() -> Result<Self, VmError> {
        match tempfile::Builder::new().prefix("zernel-lab-").tempdir() {
            Ok(folder) => Ok(Self { folder }),
            Err(source) => Err(VmError::File {
                path: std::env::temp_dir(),
                source,
            }),
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    fn folder(&self) -> &Path {
        self.folder.path()
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

    /// What to compare with another run. QEMU must have written everything.
    pub(super) fn determinism(&self) -> Result<Determinism, VmError> {
        if !self.path(qemu::THREADS_EVIDENCE).exists() {
            let message = self.text(qemu::LOG)?.trim().to_owned();
            return Err(VmError::NotDeterministic { message });
        }
        let remains = self.remains()?;
        let status = self.text(guest::STATUS)?;
        let texts = [
            &remains.stdout,
            &remains.stderr,
            remains.console_log.as_bytes(),
            status.as_bytes(),
        ];
        Ok(Determinism {
            digest: Digest::of(texts),
            virtual_time: guest::virtual_time(&status).unwrap_or_default(),
            counters: status,
        })
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
    fn a_crash_is_distinguished_from_a_shutdown() {
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
    fn boot_and_command_have_limits_of_their_own() {
        let seconds = Duration::from_secs;
        let limits = Limits {
            boot: seconds(10),
            command: seconds(3),
        };
        assert!(overdue(seconds(9), None, limits).is_none());
        assert!(matches!(
            overdue(seconds(10), None, limits),
            Some(Ending::BootTimedOut(_))
        ));
        assert!(overdue(seconds(11), Some(seconds(9)), limits).is_none());
        assert!(matches!(
            overdue(seconds(12), Some(seconds(9)), limits),
            Some(Ending::TimedOut(_))
        ));
    }
}
