//! The command as a process: it gets our signals, and we end as it ends.

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::thread;
use std::time::Duration;

use procfs::process::Process;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, set_child_subreaper, wait,
};
use signal_hook::consts::{
    SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::iterator::{Handle, SignalsInfo};
use signal_hook::low_level::siginfo::Cause;

use zernel_report::Ended;

use super::caller::Caller;

/// What is passed on.
const FORWARDED: [i32; 9] = [
    SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGCONT, SIGWINCH,
];

/// Why the command does not run.
#[derive(Debug, thiserror::Error)]
pub(super) enum SpawnError {
    #[error("{command}: there is no such command")]
    NotFound { command: String },
    #[error("{command} cannot be run: {source}")]
    NotRun { command: String, source: io::Error },
}

impl SpawnError {
    /// The code with which shells say the same.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::NotRun { .. } => 126,
        }
    }
}

/// Our signals. They are caught from the start, so that none ends us with probes attached; the command
/// gets those that came before it.
pub(super) struct CaughtSignals(SignalsInfo<WithOrigin>);

impl CaughtSignals {
    pub(super) fn catch() -> io::Result<Self> {
        SignalsInfo::new(not_ignored()).map(Self)
    }
}

/// The running command.
pub(super) struct Child {
    pid: Pid,
    forwarding: Handle,
    cpu_before: CpuTime,
}

impl Child {
    pub(super) fn spawn(
        command: &[OsString],
        caller: Option<&Caller>,
        signals: CaughtSignals,
    ) -> Result<Self, SpawnError> {
        let [program, arguments @ ..] = command else {
            let command = String::new();
            return Err(SpawnError::NotFound { command });
        };
        let failed = |source: io::Error| {
            let command = program.to_string_lossy().into_owned();
            match source.kind() {
                io::ErrorKind::NotFound => SpawnError::NotFound { command },
                _ => SpawnError::NotRun { command, source },
            }
        };
        // What outlives its parent becomes our child, so that parent links always lead here.
        set_child_subreaper(Some(rustix::process::getpid())).map_err(|e| failed(e.into()))?;
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some(caller) = caller {
            caller.apply(&mut command);
        }
        let cpu_before = CpuTime::of_children();
        let child = command.spawn().map_err(failed)?;
        let pid = Pid::from_child(&child);
        Ok(Self {
            pid,
            forwarding: forward(signals.0, pid).map_err(failed)?,
            cpu_before,
        })
    }

    /// Waits for its end; buries what it left to us meanwhile.
    pub(super) fn wait(self) -> io::Result<Ended> {
        let status = loop {
            match wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) if pid == self.pid => break status,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        self.forwarding.close();
        let cpu = CpuTime::of_children();
        Ok(Ended {
            code: status.exit_status(),
            signal: status.terminating_signal(),
            user_seconds: (cpu.user - self.cpu_before.user).as_secs_f64(),
            system_seconds: (cpu.system - self.cpu_before.system).as_secs_f64(),
        })
    }
}

/// Signals that somebody wants this process to ignore (`nohup`) are ignored by the command too.
fn not_ignored() -> Vec<i32> {
    let status = Process::myself().and_then(|process| process.status());
    let ignored = status.map_or(0, |status| status.sigign);
    let mut signals = FORWARDED.to_vec();
    signals.retain(|signal| ignored >> (signal - 1) & 1 == 0);
    signals
}

/// Passes signals on until the handle is closed.
fn forward(mut signals: SignalsInfo<WithOrigin>, pid: Pid) -> io::Result<Handle> {
    let child = pidfd_open(pid, PidfdFlags::empty())?;
    let handle = signals.handle();
    thread::spawn(move || {
        for origin in signals.forever() {
            // A terminal sends to the whole process group: the command has it already.
            if matches!(origin.cause, Cause::Kernel) {
                continue;
            }
            if let Some(signal) = Signal::from_named_raw(origin.signal) {
                let _ = pidfd_send_signal(&child, signal);
            }
        }
    });
    Ok(handle)
}

/// CPU time of the children that were waited for, and of theirs.
#[derive(Debug, Clone, Copy, Default)]
struct CpuTime {
    user: Duration,
    system: Duration,
}

impl CpuTime {
    fn of_children() -> Self {
        let Ok(stat) = Process::myself().and_then(|process| process.stat()) else {
            return Self::default();
        };
        let ticks = |ticks: i64| {
            let ticks = ticks.unsigned_abs() as f64;
            Duration::from_secs_f64(ticks / procfs::ticks_per_second() as f64)
        };
        Self {
            user: ticks(stat.cutime),
            system: ticks(stat.cstime),
        }
    }
}
