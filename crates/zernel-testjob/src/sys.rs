//! System calls of a job.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of a clock.
pub(crate) fn now_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Uses CPU time, and nothing else.
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

/// Forks. The child runs `act` and exits.
pub(crate) fn fork_child(act: impl FnOnce() -> io::Result<()>) -> io::Result<u32> {
    let parent = rustix::process::getpid();
    // SAFETY: as a loader of PyTorch does, the child keeps using the memory of its parent. It calls its own
    // code and libc, which keeps its locks usable after a fork.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // If the parent has already ended, the kernel sends no signal.
            let begin = || match rustix::process::getppid() == Some(parent) {
                true => act(),
                false => Err(io::Error::other("the parent has ended")),
            };
            let done = die_with_parent().and_then(|()| begin());
            // SAFETY: ends the process, and runs nothing of the parent's.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        pid => Ok(pid as u32),
    }
}

/// Scheduling priority of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThreadPriority {
    /// Below all other processes.
    Last,
    /// Like all other processes.
    Usual,
    /// Above all other processes.
    Loader,
    /// Above the loaders as well.
    Rank,
    /// Above the whole job: its observer.
    Observer,
}

/// Sets the priority of this thread and of processes that it starts, if permitted.
pub(crate) fn set_priority(priority: ThreadPriority) {
    let (policy, sched_priority) = match priority {
        ThreadPriority::Last => (libc::SCHED_IDLE, 0),
        ThreadPriority::Usual => (libc::SCHED_OTHER, 0),
        ThreadPriority::Loader => (libc::SCHED_RR, 1),
        ThreadPriority::Rank => (libc::SCHED_RR, 2),
        ThreadPriority::Observer => (libc::SCHED_RR, 3),
    };
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: valid parameters for the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
}

/// Sets the priority of this thread, if it is scheduled above other processes already.
pub(crate) fn change_priority(priority: ThreadPriority) {
    // SAFETY: asks for the calling thread.
    if unsafe { libc::sched_getscheduler(0) } == libc::SCHED_RR {
        set_priority(priority);
    }
}

/// Gives all processes that `command` starts priority over other processes, if permitted: the load of the machine must
/// not become the job's bottleneck. The processes get a session of their own, which the kernel schedules as one
/// group, with the largest weight. They exit with the thread that starts them.
pub(crate) fn prioritize_command(command: &mut Command) {
    let begin = || {
        rustix::process::setsid()?;
        // Kernels without autogroups do not have this file.
        let _ = std::fs::write("/proc/self/autogroup", "-20");
        set_priority(ThreadPriority::Observer);
        set_parent_process_death_signal(Some(Signal::TERM))?;
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls, and allocates nothing: the path is short enough
    // to be made zero-terminated on the stack.
    unsafe { command.pre_exec(begin) };
}

/// The CPUs that this process may use, `count` of them at most.
pub(crate) fn usable_cpus(count: usize) -> io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)?;
    let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    Ok(cpus.take(count).collect())
}

/// Keeps this thread, and what it will start, on one CPU.
pub(crate) fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu);
    Ok(sched_setaffinity(None, &only)?)
}

/// Waits until a descriptor has something to read.
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

/// Memory that this process shares with those that it will fork.
pub(crate) struct SharedMemory {
    address: *mut u8,
    bytes: usize,
}

impl SharedMemory {
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, wherever there is room.
        let address =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED) }?;
        Ok(Self {
            address: address.cast(),
            bytes,
        })
    }

    /// Where a part begins.
    pub(crate) fn part_address(&self, start: usize, bytes: usize) -> *mut u8 {
        assert!(start + bytes <= self.bytes, "a part of the memory");
        // SAFETY: within the mapping.
        unsafe { self.address.add(start) }
    }

    /// Fills a part.
    pub(crate) fn fill_part(&self, start: usize, bytes: usize, value: u8) {
        // SAFETY: within the mapping; the processes take turns, synchronized by their pipes.
        unsafe { self.part_address(start, bytes).write_bytes(value, bytes) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: a mapping of this object, no longer in use.
        let _ = unsafe { rustix::mm::munmap(self.address.cast(), self.bytes) };
    }
}
