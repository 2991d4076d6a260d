//! The command as a child process: forwards signals to it and collects its exit status.

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

use zernel_report::CommandExit;

use super::sudo_caller::SudoCaller;

/// Signals that are forwarded to the command.
const FORWARDED_SIGNALS: [i32; 9] = [
    SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGCONT, SIGWINCH,
];

/// Why the command did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpawnError {
    #[error("{command}: command not found")]
    NotFound { command: String },
    #[error("cannot run {command}: {source}")]
    CannotExecute { command: String, source: io::Error },
}

impl SpawnError {
    /// The exit code that a shell returns if a command cannot be started for this reason.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::CannotExecute { .. } => 126,
        }
    }
}

/// Signals caught from the start on, so that none kills this process while probes are attached. The command gets the
/// signals that arrived before it started.
pub(crate) struct CaughtSignals(SignalsInfo<WithOrigin>);

impl CaughtSignals {
    pub(crate) fn catch_forwarded_signals() -> io::Result<Self> {
        SignalsInfo::new(forwarded_signals_not_ignored()).map(Self)
    }
}

/// The running command.
pub(crate) struct RunningCommand {
    pid: Pid,
    signal_forwarder: Handle,
    cpu_time_before_start: ChildrenCpuTime,
}

impl RunningCommand {
    pub(crate) fn spawn(
        command: &[OsString],
        caller: Option<&SudoCaller>,
        mut signals: CaughtSignals,
    ) -> Result<Self, SpawnError> {
        let [program, arguments @ ..] = command else {
            let command = String::new();
            return Err(SpawnError::NotFound { command });
        };
        let failed = |source: io::Error| {
            let command = program.to_string_lossy().into_owned();
            match source.kind() {
                io::ErrorKind::NotFound => SpawnError::NotFound { command },
                _ => SpawnError::CannotExecute { command, source },
            }
        };
        // Orphans become children of this process, so every descendant keeps a chain of parents to it.
        set_child_subreaper(Some(rustix::process::getpid())).map_err(|e| failed(e.into()))?;
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some(caller) = caller {
            caller.run_command_as_caller(&mut command);
        }
        let cpu_time_before_start = ChildrenCpuTime::of_reaped_children();
        let early: Vec<i32> = signals.0.pending().map(|origin| origin.signal).collect();
        let child = command.spawn().map_err(failed)?;
        let pid = Pid::from_child(&child);
        Ok(Self {
            pid,
            signal_forwarder: forward_signals(signals.0, early, pid).map_err(failed)?,
            cpu_time_before_start,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Waits for the command to exit, and reaps orphans meanwhile.
    pub(crate) fn wait(self) -> io::Result<CommandExit> {
        let status = loop {
            match wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) if pid == self.pid => break status,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        self.signal_forwarder.close();
        let cpu = ChildrenCpuTime::of_reaped_children();
        Ok(CommandExit {
            code: status.exit_status(),
            signal: status.terminating_signal(),
            user_seconds: (cpu.user - self.cpu_time_before_start.user).as_secs_f64(),
            system_seconds: (cpu.system - self.cpu_time_before_start.system).as_secs_f64(),
        })
    }
}

/// Forwarded signals that this process does not ignore. An ignored signal (`nohup`) stays ignored by the command.
fn forwarded_signals_not_ignored() -> Vec<i32> {
    let status = Process::myself().and_then(|process| process.status());
    let ignored = status.map_or(0, |status| status.sigign);
    let mut signals = FORWARDED_SIGNALS.to_vec();
    signals.retain(|signal| ignored >> (signal - 1) & 1 == 0);
    signals
}

/// Forwards caught signals to the command until the handle is closed, and first the early ones, which came before it
/// started.
fn forward_signals(
    mut signals: SignalsInfo<WithOrigin>,
    early: Vec<i32>,
    pid: Pid,
) -> io::Result<Handle> {
    let child = pidfd_open(pid, PidfdFlags::empty())?;
    let send = move |signal: i32| {
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = pidfd_send_signal(&child, signal);
        }
    };
    early.into_iter().for_each(&send);
    let handle = signals.handle();
    thread::spawn(move || {
        for origin in signals.forever() {
            // A terminal signals the whole process group, so the command already has this signal.
            if matches!(origin.cause, Cause::Kernel) {
                continue;
            }
            send(origin.signal);
        }
    });
    Ok(handle)
}

/// CPU time of all reaped children and their descendants.
#[derive(Debug, Clone, Copy, Default)]
struct ChildrenCpuTime {
    user: Duration,
    system: Duration,
}

impl ChildrenCpuTime {
    fn of_reaped_children() -> Self {
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
