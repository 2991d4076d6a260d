//! Stops one thread of another process while its other threads run, to test what waits for that thread.

use std::fs;
use std::io;
use std::marker::PhantomData;

/// A thread of another process that is stopped until this value is dropped. Needs root.
pub struct StoppedThread {
    tid: libc::pid_t,
    /// Keeps this value on its thread: only the thread that stopped another one may let it run again.
    stays_on_thread: PhantomData<*const ()>,
}

impl StoppedThread {
    /// Stops the thread with this name in a process.
    pub fn stop_named(pid: u32, name: &str) -> io::Result<Self> {
        for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
            let comm = fs::read_to_string(task.path().join("comm"))?;
            if comm.trim_end() == name {
                let tid = task.file_name().to_string_lossy().parse();
                return Self::stop_tid(tid.map_err(io::Error::other)?);
            }
        }
        Err(io::Error::other(format!(
            "process {pid} has no thread {name}"
        )))
    }

    fn stop_tid(tid: libc::pid_t) -> io::Result<Self> {
        ptrace(libc::PTRACE_SEIZE, tid)?;
        let stopped = Self {
            tid,
            stays_on_thread: PhantomData,
        };
        ptrace(libc::PTRACE_INTERRUPT, tid)?;
        let mut status = 0;
        // SAFETY: the system call writes one integer.
        match unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(stopped),
        }
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        // If the thread was killed meanwhile, it needs no release.
        let _ = ptrace(libc::PTRACE_DETACH, self.tid);
    }
}

fn ptrace(request: libc::c_uint, tid: libc::pid_t) -> io::Result<()> {
    // SAFETY: the requests that are passed here read and write no memory.
    match unsafe { libc::ptrace(request, tid, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
