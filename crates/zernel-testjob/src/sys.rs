//! System calls that the processes of a job make.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

/// The time of `clock` in nanoseconds.
pub(crate) fn now_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Keeps the CPU busy until the calling thread has used `how_long` of CPU time.
pub(crate) fn burn_cpu(how_long: Duration) {
    let end = now_ns(ClockId::ThreadCPUTime) + how_long.as_nanos() as u64;
    while now_ns(ClockId::ThreadCPUTime) < end {
        std::hint::spin_loop();
    }
}

/// Makes the kernel kill this process when the thread that started it ends.
pub(crate) fn die_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Forks a child, which runs `act` and exits. Returns the pid of the child.
pub(crate) fn fork_child(act: impl FnOnce() -> io::Result<()>) -> io::Result<u32> {
    let parent = rustix::process::getpid();
    // SAFETY: as a loader of PyTorch does, the child keeps using the memory of its parent. The child calls its own code
    // and libc, which keeps its locks usable after a fork.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // If the parent has already ended, the kernel sends no signal.
            let begin = || match rustix::process::getppid() == Some(parent) {
                true => act(),
                false => Err(io::Error::other("the parent has ended")),
            };
            let done = die_with_parent().and_then(|()| begin());
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        pid => Ok(pid as u32),
    }
}

/// Scheduling priority of a thread of the job, from low to high.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThreadPriority {
    /// The priority of threads that run only when no other process wants the CPU.
    SchedIdle,
    /// The usual priority of processes.
    SchedOther,
    /// The priority of loaders: above all processes that are not part of the job.
    Loader,
    /// The priority of training threads: above the loaders.
    Rank,
    /// The priority of a process that observes the job: above all processes of the job.
    Observer,
}

/// Sets the priority of the calling thread and of processes that it starts, if the kernel permits it.
pub(crate) fn set_priority(priority: ThreadPriority) {
    let (policy, sched_priority) = match priority {
        ThreadPriority::SchedIdle => (libc::SCHED_IDLE, 0),
        ThreadPriority::SchedOther => (libc::SCHED_OTHER, 0),
        ThreadPriority::Loader => (libc::SCHED_RR, 1),
        ThreadPriority::Rank => (libc::SCHED_RR, 2),
        ThreadPriority::Observer => (libc::SCHED_RR, 3),
    };
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: valid parameters for the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
}

/// Sets the priority of the calling thread if it already has one above other processes.
pub(crate) fn change_priority(priority: ThreadPriority) {
    // SAFETY: the call reads the scheduling policy of the calling thread.
    if unsafe { libc::sched_getscheduler(0) } == libc::SCHED_RR {
        set_priority(priority);
    }
}

/// Gives all processes that `command` starts priority over other processes, if the kernel permits it: the load of the
/// machine must not become the job's bottleneck. The processes get a session of their own, which the kernel schedules
/// as one group, with the largest weight. They exit with the thread that starts them.
pub(crate) fn prioritize_job_command(command: &mut Command) {
    let begin = || {
        rustix::process::setsid()?;
        // Kernels without autogroups do not have the file that sets the group's weight.
        let _ = std::fs::write("/proc/self/autogroup", "-20");
        set_priority(ThreadPriority::Observer);
        set_parent_process_death_signal(Some(Signal::TERM))?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls, and allocates nothing: the path is short enough to
    // be made zero-terminated on the stack.
    unsafe { command.pre_exec(begin) };
}

/// The CPUs that this process may use; only the first `count` of them.
pub(crate) fn usable_cpus(count: usize) -> io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)?;
    let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    Ok(cpus.take(count).collect())
}

/// Keeps the calling thread, and processes that it will start, on one CPU.
pub(crate) fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu);
    Ok(sched_setaffinity(None, &only)?)
}

/// Waits until there is something to read from a file descriptor.
pub(crate) fn wait_until_readable(file: &impl std::os::fd::AsFd) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, poll};
    loop {
        let mut polled = [PollFd::new(file, PollFlags::IN)];
        match poll(&mut polled, None) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Memory that this process shares with the processes that it forks later.
pub(crate) struct SharedMemory {
    address: *mut u8,
    bytes: usize,
}

impl SharedMemory {
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED) }?;
        Ok(Self {
            address: address.cast(),
            bytes,
        })
    }

    /// The address of the part that begins at the offset `start`.
    pub(crate) fn address_of_range(&self, start: usize, bytes: usize) -> *mut u8 {
        assert!(start + bytes <= self.bytes, "a part of the memory");
        // SAFETY: the address is inside the mapping.
        unsafe { self.address.add(start) }
    }

    /// Fills the part that begins at the offset `start` with a value.
    pub(crate) fn fill_range(&self, start: usize, bytes: usize, value: u8) {
        // SAFETY: the part is inside the mapping; the processes take turns, synchronized by their pipes.
        unsafe {
            self.address_of_range(start, bytes)
                .write_bytes(value, bytes);
        }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, which is no longer in use.
        let _ = unsafe { rustix::mm::munmap(self.address.cast(), self.bytes) };
    }
}
