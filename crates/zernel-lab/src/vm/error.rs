//! Why a run can fail, and what a failed run leaves.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use thiserror::Error;

use crate::initramfs::InitramfsError;
use crate::qemu;

/// Number of bytes of the console that an error message contains.
const CONSOLE_TAIL_LINES: usize = 20;

/// Why a command could not be run to its end.
#[derive(Debug, Error)]
pub enum VmError {
    /// QEMU is not installed.
    #[error(
        "{} is not on PATH; install the package qemu-system-x86",
        qemu::QEMU_PROGRAM
    )]
    QemuMissing,
    /// The program setpriv, by which QEMU dies with its parent, is not installed.
    #[error("setpriv is not on PATH; install the package util-linux")]
    SetprivMissing,
    /// The guest's first process needs a busybox, and none is installed.
    #[error("busybox is not on PATH; install the package busybox-static")]
    BusyboxMissing,
    /// The busybox of this machine is linked dynamically, so it cannot be the guest's first process.
    #[error("{path} is not statically linked; install the package busybox-static in its place", path = path.display())]
    BusyboxNotStatic {
        /// The path of the busybox that was found.
        path: PathBuf,
    },
    /// The program to run is neither among the guest's files nor on this machine.
    #[error("there is no program {program} on this machine to run in the guest", program = program.display())]
    ProgramMissing {
        /// The program that the caller gave.
        program: PathBuf,
    },
    /// An argument, or the name of a variable, cannot be passed to a program in the guest.
    #[error(
        "{word:?} cannot be passed into the guest: no zero bytes, and in variable names only letters, digits and _"
    )]
    BadArgumentOrVariableName {
        /// The argument or the name.
        word: OsString,
    },
    /// The archive with the guest's files could not be made.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// A file of the run could not be written or read.
    #[error("cannot use {path} for running a VM: {source}", path = path.display())]
    FileUnusable {
        /// The path of the file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// QEMU did not start, or exited by itself with an error.
    #[error("QEMU failed ({status}): {message}\n{partial_output}")]
    QemuFailed {
        /// The exit status of QEMU.
        status: ExitStatus,
        /// The error output of QEMU.
        message: String,
        /// What the command and the kernel had printed.
        partial_output: Box<PartialOutput>,
    },
    /// KVM cannot run this guest on this machine.
    #[error(
        "KVM cannot run the guest: {message}; use the emulator instead (Accelerator::Auto or Tcg)"
    )]
    KvmUnusable {
        /// The error output of QEMU.
        message: String,
    },
    /// The guest's kernel crashed.
    #[error("the guest's kernel crashed: {message}\n{partial_output}")]
    KernelPanic {
        /// The kernel's message about the crash.
        message: String,
        /// What the command and the kernel had printed.
        partial_output: Box<PartialOutput>,
    },
    /// The guest switched itself off before the command ended.
    #[error("the guest switched itself off before the command ended\n{partial_output}")]
    GuestStopped {
        /// What the command and the kernel had printed.
        partial_output: Box<PartialOutput>,
    },
    /// The command did not end within its time limit.
    #[error(
        "the command did not end within {limit:?} and was stopped with its VM\n{partial_output}"
    )]
    CommandTimedOut {
        /// The time limit of the command.
        limit: Duration,
        /// What the command and the kernel had printed.
        partial_output: Box<PartialOutput>,
    },
    /// The guest of a deterministic run did not switch itself off after the command.
    #[error(
        "the guest did not switch itself off within {limit:?} after the command, so its console is not complete\n{partial_output}"
    )]
    PowerOffTimedOut {
        /// The time it had.
        limit: Duration,
        /// What is left of the run.
        partial_output: Box<PartialOutput>,
    },
    /// The command of a deterministic run took too much virtual time.
    #[error(
        "the command reached the limit of virtual time and was stopped with its VM; shorten it or raise the limit\n{partial_output}"
    )]
    VirtualTimeLimitReached {
        /// What the command and the kernel had printed.
        partial_output: Box<PartialOutput>,
    },
    /// QEMU ran without the preloaded library that makes a run deterministic.
    #[error(
        "the run is not deterministic: QEMU did not load a library of the lab, because it is not linked dynamically to glibc, or no \
         program in the temporary directory may be executed (then set TMPDIR); QEMU's messages: {message}"
    )]
    NotDeterministic {
        /// The error output of QEMU.
        message: String,
    },
    /// The guest did not start the command within the time limit of a boot.
    #[error(
        "the guest did not start the command within {limit:?}; give it more time\n{partial_output}"
    )]
    BootTimedOut {
        /// The time limit of the boot.
        limit: Duration,
        /// What the command and the kernel had printed.
        partial_output: Box<PartialOutput>,
    },
    /// The caller's interrupt flag ended the run.
    #[error("interrupted")]
    Interrupted {
        /// What the command and the kernel had printed.
        partial_output: Box<PartialOutput>,
    },
}

impl VmError {
    /// What the command and the kernel had printed, if the command was started at all.
    #[must_use]
    pub fn partial_output(&self) -> Option<&PartialOutput> {
        match self {
            Self::QemuFailed { partial_output, .. }
            | Self::KernelPanic { partial_output, .. }
            | Self::GuestStopped { partial_output }
            | Self::CommandTimedOut { partial_output, .. }
            | Self::PowerOffTimedOut { partial_output, .. }
            | Self::VirtualTimeLimitReached { partial_output }
            | Self::BootTimedOut { partial_output, .. }
            | Self::Interrupted { partial_output } => Some(partial_output),
            _ => None,
        }
    }

    /// Whether the emulator crashed the guest: after cmpxchg16b, QEMU 7.2 computes the flags from those of an
    /// earlier instruction, and an interrupt right after it saves flags that no processor has.
    pub(crate) fn is_emulator_crash(&self) -> bool {
        let console = self
            .partial_output()
            .map_or("", |partial_output| &partial_output.console_log);
        matches!(self, Self::KernelPanic { .. }) && has_undefined_cpu_flags(console)
    }
}

fn has_undefined_cpu_flags(console: &str) -> bool {
    /// The bits of the flags register that a processor has. All other bits are always 0.
    const DEFINED_FLAGS: u32 = 0x003f_7fd7;
    let flags = |rest: &str| u32::from_str_radix(rest.get(..8)?, 16).ok();
    let printed = console.split("EFLAGS: ").skip(1).filter_map(flags);
    printed.into_iter().any(|flags| flags & !DEFINED_FLAGS != 0)
}

/// What the command and the kernel had printed before a run failed.
#[derive(Debug, Clone)]
pub struct PartialOutput {
    /// What the guest's kernel had printed.
    pub console_log: String,
    /// What the command had written to its stdout.
    pub stdout: Vec<u8>,
    /// What the command had written to its stderr.
    pub stderr: Vec<u8>,
}

impl fmt::Display for PartialOutput {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<&str> = self.console_log.lines().collect();
        if lines.is_empty() {
            return write!(formatter, "its console is empty");
        }
        let start = lines.len().saturating_sub(CONSOLE_TAIL_LINES);
        writeln!(formatter, "the end of its console:")?;
        for line in &lines[start..] {
            writeln!(formatter, "  {line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulator_crash_is_recognised_by_undefined_flags() {
        let garbage = "[ 2.8] RSP: 0018:ffa00000003d7ad0 EFLAGS: 04ce2be2\n[ 2.8] RSP: 002b:00 EFLAGS: 00000293";
        assert!(has_undefined_cpu_flags(garbage));
        assert!(!has_undefined_cpu_flags(
            "[ 2.8] RSP: 002b:00 EFLAGS: 00010246\nEFLAGS: 0"
        ));
    }

    #[test]
    fn partial_output_prints_last_console_lines() {
        let console_log = (0..100).map(|line| format!("line {line}\n")).collect();
        let text = PartialOutput {
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
