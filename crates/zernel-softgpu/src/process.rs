//! Process identities that survive pid reuse, and functions for threads and forks.

use rustix::process::{Pid, getpid};

/// The identity of a process: its pid and its start time. The pid alone may be reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Pid of the process.
    pub pid: u32,
    /// Start of the process in clock ticks after boot (`/proc/PID/stat`, field 22).
    pub start_time: u64,
}

impl ProcessIdentity {
    /// The identity of the calling process.
    #[must_use]
    pub fn of_this_process() -> Self {
        let pid = getpid().as_raw_nonzero().get().cast_unsigned();
        Self {
            pid,
            start_time: start_time(pid).unwrap_or(0),
        }
    }

    /// The identity of the living process with this pid; `None` if there is none.
    #[must_use]
    pub fn of_pid(pid: u32) -> Option<Self> {
        Some(Self {
            pid,
            start_time: start_time(pid)?,
        })
    }

    /// Whether exactly this process still runs. A zombie does not run.
    #[must_use]
    pub fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }
}

/// Start time of the process with this pid; `None` if it does not exist or is a zombie.
fn start_time(pid: u32) -> Option<u64> {
    Pid::from_raw(pid.cast_signed())?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the command, in parentheses, may itself contain spaces and parentheses.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The kernel's thread id of the calling thread.
#[must_use]
pub fn thread_id() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .cast_unsigned()
}

/// Runs `handler` in the child of every later fork, before fork returns in the child.
pub fn after_fork_in_child(handler: extern "C" fn()) {
    // SAFETY: the handler stays valid, as the libraries are linked never to be unloaded, and it only
    // touches atomics.
    unsafe {
        libc::pthread_atfork(None, None, Some(handler_as_c(handler)));
    }
}

/// Runs `handler` when the process returns from `main` or calls `exit`, in forked children too.
pub fn at_exit(handler: extern "C" fn()) {
    // SAFETY: the handler stays valid, as the libraries are linked never to be unloaded. If there is
    // no room for it, it does not run, as after a crash.
    let _ = unsafe { libc::atexit(handler) };
}

fn handler_as_c(handler: extern "C" fn()) -> unsafe extern "C" fn() {
    handler
}

/// Starts a thread that takes no signals, so that the program's handlers run on the program's threads.
pub fn spawn_thread_without_signals(name: &str, body: impl FnOnce() + Send + 'static) {
    let quiet = || {
        // SAFETY: plain libc calls on a local signal set.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        }
        body();
    };
    if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(quiet) {
        eprintln!("softgpu: cannot start a thread: {error}");
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_identity_detects_exit_and_pid_reuse() {
        let own = ProcessIdentity::of_this_process();
        assert!(own.is_alive());
        let reused = ProcessIdentity {
            start_time: own.start_time + 1,
            ..own
        };
        assert!(!reused.is_alive());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        while start_time(pid).is_some() {
            std::thread::yield_now();
        }
        assert!(child.wait().unwrap().success());
    }
}
