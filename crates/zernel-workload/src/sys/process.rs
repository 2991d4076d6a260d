//! Child processes: `fork`, death with the parent, waiting for the children of one thread only,
//! signals.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::pid_t;

/// How a child process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChildEnd {
    /// The child called `exit` with this code.
    Exited(i32),
    /// A signal ended the child.
    Signaled {
        /// The number of the signal.
        signal: i32,
        /// Whether a core dump was written.
        core_dumped: bool,
    },
}

/// Forks, runs `child` in the new process and ends it with the code that `child` returns.
///
/// A panic of `child` ends the process by `SIGABRT` in builds that unwind as well as in builds that abort.
pub(crate) fn fork(child: impl FnOnce() -> i32) -> io::Result<pid_t> {
    // SAFETY: the child runs `child` and then `_exit`: it never returns into the caller's code.
    // libc's fork (not the bare system call) is used so that the allocator is usable in the child
    // if a custom work function needs it.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = catch_unwind(AssertUnwindSafe(child));
            match code {
                // SAFETY: ends the process without running the parent's exit handlers.
                Ok(code) => unsafe { libc::_exit(code) },
                // SAFETY: as above.
                Err(_) => unsafe { libc::abort() },
            }
        }
        pid => Ok(pid),
    }
}

/// Makes the kernel kill this process when the *thread* that forked it ends. Returns whether `parent` still
/// lives: a parent that died before this call sends no signal. Fork safe.
///
/// Setting a uid or gid cancels this, so call it again afterwards.
pub(crate) fn die_with_parent(parent: pid_t) -> bool {
    // SAFETY: plain system calls with integer arguments.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::getppid() == parent
    }
}

fn wait_for_child(kind: libc::idtype_t, pid: pid_t, options: i32) -> io::Result<(pid_t, ChildEnd)> {
    // SAFETY: `siginfo_t` is plain data for which zeros are valid, and the kernel fills it.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: `info` is valid for writing.
        let result = unsafe {
            libc::waitid(
                kind,
                pid as libc::id_t,
                &raw mut info,
                libc::WEXITED | options,
            )
        };
        if result == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: a successful `waitid` filled the fields of a child's status.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    let end = match info.si_code {
        libc::CLD_EXITED => ChildEnd::Exited(status),
        code => ChildEnd::Signaled {
            signal: status,
            core_dumped: code == libc::CLD_DUMPED,
        },
    };
    Ok((pid, end))
}

/// Waits until a child *of the calling thread* has ended, and leaves it unreaped. Other children of
/// the process are not touched.
pub(crate) fn wait_own_child() -> io::Result<pid_t> {
    Ok(wait_for_child(libc::P_ALL, 0, libc::WNOWAIT | libc::__WNOTHREAD)?.0)
}

/// Reaps a child that has ended, and returns how it ended.
pub(crate) fn reap_child(pid: pid_t) -> io::Result<ChildEnd> {
    Ok(wait_for_child(libc::P_PID, pid, 0)?.1)
}

/// Whether the child `pid` has ended and waits to be reaped.
pub(crate) fn has_child_ended(pid: pid_t) -> bool {
    // SAFETY: plain data for which zeros are valid; the pid stays 0 when no child has ended.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
    // SAFETY: `info` is valid for writing, and its pid field was zeroed or filled.
    unsafe {
        libc::waitid(libc::P_PID, pid as libc::id_t, &raw mut info, options) == 0
            && info.si_pid() == pid
    }
}

/// Sends `signal` to a process.
pub(crate) fn send_signal(pid: pid_t, signal: i32) {
    // SAFETY: a plain system call; that the process may have exited is no error here.
    unsafe { libc::kill(pid, signal) };
}

/// Sends `signal` to one thread. Fork safe.
pub(crate) fn send_signal_to_thread(process: pid_t, thread: pid_t, signal: i32) {
    // SAFETY: a plain system call; that the thread may have exited is no error here.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
}

/// Forks a child that exits at once, and reaps it. Fork safe in a process with one thread.
pub(crate) fn fork_and_exit() -> Result<(), rustix::io::Errno> {
    // SAFETY: the child only ends itself.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(last_errno()),
        // SAFETY: ends the child.
        0 => unsafe { libc::_exit(0) },
        pid => {
            let mut status = 0;
            // SAFETY: `status` is valid for writing.
            while unsafe { libc::waitpid(pid, &raw mut status, 0) } == -1
                && last_errno() == rustix::io::Errno::INTR
            {}
            Ok(())
        }
    }
}

/// The error number of the calling thread's last libc call. Fork safe.
pub(crate) fn last_errno() -> rustix::io::Errno {
    // SAFETY: libc's per-thread error number is always readable.
    rustix::io::Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forking_thread_waits_for_its_own_children_only() {
        let elsewhere = fork(|| 3).unwrap();
        let here = std::thread::spawn(|| {
            let own = fork(|| 7).unwrap();
            assert_eq!(wait_own_child().unwrap(), own);
            assert_eq!(reap_child(own).unwrap(), ChildEnd::Exited(7));
            assert_eq!(
                wait_own_child().unwrap_err().raw_os_error(),
                Some(libc::ECHILD)
            );
        });
        here.join().unwrap();
        assert_eq!(reap_child(elsewhere).unwrap(), ChildEnd::Exited(3));
    }

    #[test]
    fn a_panicking_child_ends_by_sigabrt() {
        let pid = fork(|| std::panic::resume_unwind(Box::new(()))).unwrap();
        assert!(matches!(
            reap_child(pid).unwrap(),
            ChildEnd::Signaled {
                signal: libc::SIGABRT,
                ..
            }
        ));
    }
}
