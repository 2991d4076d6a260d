//! `zernel sched --replace`: ends the `zernel sched` that is loaded, once its successor is ready.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use zernel_scheduler::sched_ext::SchedExtState;

use super::policy_options::COMMAND_PRIVILEGE_PREFIX;
use super::published_statistics;

/// The name under which the kernel lists this scheduler.
pub(super) const SCHEDULER_NAME: &str = "zernel";
/// The kernel's name of this program's processes.
const PROGRAM_COMM: &str = "zernel";
/// Time that the loaded scheduler has to exit.
const EXIT_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// The `zernel sched` that is loaded now.
#[derive(Debug)]
pub(super) struct Predecessor {
    pub(super) pid: u32,
    process: OwnedFd,
}

impl Predecessor {
    /// Finds the loaded `zernel sched`. `None`: no scheduler is loaded.
    ///
    /// # Errors
    /// The loaded scheduler cannot be replaced.
    pub(super) fn find_loaded() -> Result<Option<Self>, String> {
        let state = SchedExtState::read_current().map_err(|error| error.to_string())?;
        let SchedExtState::Loaded { scheduler, .. } = state else {
            return Ok(None);
        };
        if scheduler != SCHEDULER_NAME {
            return Err(format!(
                "the scheduler {scheduler} is loaded, and --replace ends only `zernel sched`; stop it first"
            ));
        }
        let loaded = published_statistics::read_statistics(Path::new(
            published_statistics::STATISTICS_DIRECTORY,
        ))
        .map_err(|problem| {
            format!(
                "the process that has loaded the scheduler is unknown ({problem}); stop it first"
            )
        })?;
        let pid = loaded.pid;
        if loaded.privilege.starts_with(COMMAND_PRIVILEGE_PREFIX) {
            return Err(format!(
                "`zernel run --sched` (pid {pid}) has loaded the scheduler; it is unloaded when its command exits"
            ));
        }
        let process = open_pidfd(pid).map_err(|error| format!("pid {pid}: {error}"))?;
        // The name is checked while the pidfd holds the process: the published file may be seconds old, or from another
        // pid namespace.
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if name.trim_end() != PROGRAM_COMM {
            return Err(format!(
                "the process that has loaded the scheduler is unknown (pid {pid} is `{}`); stop it first",
                name.trim_end()
            ));
        }
        Ok(Some(Self { pid, process }))
    }

    /// Asks the predecessor to end and waits until it has. Returns how long that took.
    pub(super) fn terminate_and_wait(&self) -> Result<Duration, String> {
        let begin = Instant::now();
        let pid = self.pid;
        match pidfd_send_signal(&self.process, Signal::TERM) {
            // The predecessor has ended by itself.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(format!("pid {pid}: {error}")),
        }
        // A pidfd becomes readable when its process exits.
        let mut exits = [PollFd::new(&self.process, PollFlags::IN)];
        loop {
            match poll(&mut exits, Some(&EXIT_TIMEOUT)) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(format!("pid {pid} was asked to end: {error}")),
                Ok(0) => {
                    return Err(format!(
                        "pid {pid} was asked to end and did not within 10 s"
                    ));
                }
                Ok(_) => return Ok(begin.elapsed()),
            }
        }
    }
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}
