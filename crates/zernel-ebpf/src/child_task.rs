//! Work on files of other users, in a child process with a deadline.
//!
//! A file may be on a file system that never answers: FUSE, or NFS with a dead server. A thread that waits for such a file
//! system cannot be killed. While the thread waits, its process cannot exit, and its probes stay attached. So work that
//! opens, reads, closes or attaches to a file of another user runs in a child process. The child has none of its parent's
//! descriptors but those that the work needs, and a limit on its memory. A child that misses its deadline is killed. If a
//! killed child cannot die, the daemon goes on without it. A child hands each link over to its parent at once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libbpf_rs::{Link, Object, Program, libbpf_sys};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions};
use serde::Serialize;
use serde::de::DeserializeOwned;
use zernel_identity::Tenant;

use crate::probe_link::ProbeLink;

/// Memory that a child may allocate.
const MAX_CHILD_MEMORY_BYTES: u64 = 64 << 20;
/// Largest result.
const MAX_RESULT_BYTES: usize = 16 << 20;
/// Interval at which a thread that waits for a child process checks whether the thread is asked to stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The byte that lets a child begin, sent once the parent has a handle of it: a child that ended may have none.
const BEGIN_BYTE: u8 = 1;

/// The most children that work for one tenant at a time. Child processes that cannot be killed count too.
const MAX_CHILDREN_OF_TENANT: usize = 16;
/// Most child processes of all tenants together.
const MAX_CHILDREN: usize = 64;
/// Children that only tenants may have that have fewer than the minimum.
const RESERVED_CHILDREN: usize = 16;
const MIN_CHILDREN_OF_TENANT: usize = 2;

/// All child processes that have not ended.
static LIVING_CHILDREN: Mutex<LivingChildren> = Mutex::new(LivingChildren {
    tenants: BTreeMap::new(),
    ending_children: Vec::new(),
});

#[derive(Debug)]
struct LivingChildren {
    /// Number of children by tenant.
    tenants: BTreeMap<Tenant, usize>,
    /// Child processes that were killed or have sent their results, and have not ended yet.
    ending_children: Vec<Child>,
}

const NO_WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

thread_local! {
    /// The flag that asks this thread to stop; `None` for a thread that cannot be asked.
    static THREAD_STOP_FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// From now on this thread stops waiting for child processes when `stop` is set.
pub(crate) fn set_thread_stop_flag(stop: Arc<AtomicBool>) {
    THREAD_STOP_FLAG.with_borrow_mut(|own| *own = Some(stop));
}

/// The flag that asks this thread to stop; `None` if the thread has no such flag.
pub(crate) fn stop_flag() -> Option<Arc<AtomicBool>> {
    THREAD_STOP_FLAG.with_borrow(Clone::clone)
}

/// Whether this thread is asked to stop.
pub(crate) fn is_asked_to_stop() -> bool {
    THREAD_STOP_FLAG.with_borrow(|stop| {
        let stop = stop.as_ref();
        stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    })
}

/// Why a task has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChildTaskError {
    /// The child was killed at its deadline.
    #[error("its file system did not answer within {:.1} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The child died, for example because its memory is limited.
    #[error("the process that read it died")]
    ChildDied,
    /// Too many children work on files of the tenant, or cannot die.
    #[error("too many other files of its tenant are being read, or do not answer")]
    TooManyChildren,
    /// `fork` failed: the system has no room for another process.
    #[error("no process could be started to read it")]
    ChildNotStarted,
}

/// What a task returns: a value, and the links that the child handed over.
#[derive(Debug)]
pub(crate) struct ChildOutcome<T> {
    pub(crate) value: T,
    pub(crate) links: Vec<ProbeLink>,
}

/// Work that runs in a child process.
#[derive(Debug)]
pub(crate) struct ChildTask<T> {
    child: Option<Child>,
    socket: OwnedFd,
    received_bytes: Vec<u8>,
    links: Vec<ProbeLink>,
    started_at: Instant,
    time_limit: Duration,
    result: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> ChildTask<T> {
    /// Runs `work` on a file of `tenant` in a child process, which is killed after `limit`. The child keeps the descriptors
    /// `kept` and closes all others.
    pub(crate) fn start(
        tenant: &Tenant,
        limit: Duration,
        kept: &[BorrowedFd<'_>],
        work: impl FnOnce(&DescriptorHandover<'_>) -> T,
    ) -> Result<Self, ChildTaskError> {
        if !has_room_for_child_of(tenant) {
            return Err(ChildTaskError::TooManyChildren);
        }
        Self::fork_child(tenant, limit, kept, work).map_err(|_| ChildTaskError::ChildNotStarted)
    }

    fn fork_child(
        tenant: &Tenant,
        limit: Duration,
        kept: &[BorrowedFd<'_>],
        work: impl FnOnce(&DescriptorHandover<'_>) -> T,
    ) -> io::Result<Self> {
        let (socket, remote) = socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let mut kept: Vec<i32> = kept.iter().map(AsRawFd::as_raw_fd).collect();
        kept.push(remote.as_raw_fd());
        let started = Instant::now();
        // SAFETY: the child shares no memory with this process and has one thread; `fork` keeps locks of the C library
        // usable. If another lock stays locked, the child is killed at its deadline, an error that callers handle.
        let pid = match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()),
            0 => run_and_exit(&remote, &kept, work),
            pid => Pid::from_raw(pid).ok_or(io::ErrorKind::Other)?,
        };
        drop(remote);
        let child = adopt_child(pid, tenant, &socket).inspect_err(|_| {
            // The child waits for its first byte, so it dies at once.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
        })?;
        Ok(Self {
            child: Some(child),
            socket,
            received_bytes: Vec::new(),
            links: Vec::new(),
            started_at: started,
            time_limit: limit,
            result: PhantomData,
        })
    }

    /// Takes the result of the child's work without waiting; `None` if the child still works.
    pub(crate) fn poll_result(&mut self) -> Option<Result<ChildOutcome<T>, ChildTaskError>> {
        match self.receive_result() {
            Ok(true) => Some(self.take_outcome().ok_or(ChildTaskError::ChildDied)),
            Ok(false) if self.started_at.elapsed() < self.time_limit => None,
            Ok(false) => Some(Err(ChildTaskError::TimedOut(self.time_limit))),
            Err(_) => Some(Err(ChildTaskError::ChildDied)),
        }
    }

    /// Waits for the result for at most `patience`, and until its thread is asked to stop.
    pub(crate) fn wait_for_result(
        &mut self,
        patience: Duration,
    ) -> Option<Result<ChildOutcome<T>, ChildTaskError>> {
        let until = (Instant::now() + patience).min(self.started_at + self.time_limit);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let result = self.poll_result();
            if result.is_some() || left.is_zero() || is_asked_to_stop() {
                return result;
            }
            wait_until_readable(self.socket.as_fd(), left.min(STOP_CHECK_INTERVAL));
        }
    }

    fn take_outcome(&mut self) -> Option<ChildOutcome<T>> {
        // The received bytes begin with one zero byte for each descriptor that the child handed over.
        let start = self.received_bytes.iter().position(|byte| *byte != 0)?;
        let value = serde_json::from_slice(&self.received_bytes[start..]).ok()?;
        Some(ChildOutcome {
            value,
            links: std::mem::take(&mut self.links),
        })
    }
}

impl<T> ChildTask<T> {
    /// Reads what the child has sent; true if that was all.
    fn receive_result(&mut self) -> io::Result<bool> {
        let mut bytes = vec![0; 64 * 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        loop {
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let length = match recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
                Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) => {
                    // The message had no room for the descriptor.
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(message) => message.bytes,
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    self.links.extend(descriptors.map(ProbeLink::new));
                }
            }
            self.received_bytes.extend_from_slice(&bytes[..length]);
            if length == 0 {
                return Ok(true);
            }
            if self.received_bytes.len() > MAX_RESULT_BYTES {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
        }
    }
}

impl<T> Drop for ChildTask<T> {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            child.kill();
            // Links in the socket would be detached, one after the other, when it is closed.
            let _ = self.receive_result();
            lock_living_children().ending_children.push(child);
        }
    }
}

/// Waits until a descriptor is readable, for at most `time`. A signal ends the wait early.
pub(crate) fn wait_until_readable(descriptor: BorrowedFd<'_>, time: Duration) {
    let timeout = Timespec::try_from(time).unwrap_or_default();
    let mut descriptors = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    let _ = poll(&mut descriptors, Some(&timeout));
}

/// Opens a handle of a new child, counts it, and lets it begin.
fn adopt_child(pid: Pid, tenant: &Tenant, socket: &OwnedFd) -> io::Result<Child> {
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    rustix::io::write(socket, &[BEGIN_BYTE])?;
    rustix::io::ioctl_fionbio(socket, true)?;
    *lock_living_children()
        .tenants
        .entry(tenant.clone())
        .or_default() += 1;
    Ok(Child {
        pid,
        pidfd,
        tenant: tenant.clone(),
    })
}

/// Locks the list of child processes, after removing those that have ended.
fn lock_living_children() -> MutexGuard<'static, LivingChildren> {
    let mut children = LIVING_CHILDREN
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let LivingChildren {
        tenants,
        ending_children: ending,
    } = &mut *children;
    ending.retain(|child| {
        let has_ended = child.has_ended();
        if has_ended && let Some(count) = tenants.get_mut(&child.tenant) {
            *count -= 1;
        }
        !has_ended
    });
    tenants.retain(|_, count| *count > 0);
    children
}

/// Whether another child process may start to work on files of this tenant.
pub(crate) fn has_room_for_child_of(tenant: &Tenant) -> bool {
    let children = lock_living_children();
    let of_tenant = children.tenants.get(tenant).copied().unwrap_or(0);
    let limit = match of_tenant < MIN_CHILDREN_OF_TENANT {
        true => MAX_CHILDREN,
        false => MAX_CHILDREN - RESERVED_CHILDREN,
    };
    of_tenant < MAX_CHILDREN_OF_TENANT && children.tenants.values().sum::<usize>() < limit
}

impl<T> AsFd for ChildTask<T> {
    /// A descriptor that is readable when the child may have sent its result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A child process.
#[derive(Debug)]
struct Child {
    pid: Pid,
    pidfd: OwnedFd,
    /// The tenant that the child process works for.
    tenant: Tenant,
}

impl Child {
    fn kill(&self) {
        // The child may have exited already.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Whether it has ended. A child that waits for a file system may live long after it was killed.
    fn has_ended(&self) -> bool {
        let mut handle = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let polled = poll(&mut handle, Some(&NO_WAIT));
        let has_ended = polled.is_ok() && handle[0].revents().contains(PollFlags::IN);
        if has_ended {
            // `waitpid` fails if SIGCHLD is ignored, because the kernel then reaps children.
            let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG);
        }
        has_ended
    }
}

/// The descriptors of the programs of an object, for a child that attaches them.
pub(crate) fn program_descriptors(object: &Object) -> Vec<BorrowedFd<'_>> {
    // SAFETY: the descriptors belong to the object, which outlives the borrow.
    let borrow =
        |program: Program<'_>| unsafe { BorrowedFd::borrow_raw(program.as_fd().as_raw_fd()) };
    object.progs().map(borrow).collect()
}

/// The socket through which a child process hands descriptors over to its parent.
pub(crate) struct DescriptorHandover<'a> {
    socket: &'a OwnedFd,
}

impl DescriptorHandover<'_> {
    /// Gives a descriptor to the parent, and closes the child's.
    fn send_descriptor(&self, descriptor: OwnedFd) -> io::Result<()> {
        let descriptors = [descriptor.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let byte = [IoSlice::new(&[0])];
        sendmsg(self.socket, &byte, &mut ancillary, SendFlags::NOSIGNAL)?;
        drop(descriptor);
        Ok(())
    }

    /// Attaches probes without libbpf's messages, and gives each link to the parent at once. If the child then waits for a
    /// file system and cannot die, the parent still can detach the probes. Returns how many links were handed over.
    pub(crate) fn attach_and_hand_over(
        &self,
        attach: impl FnOnce(TakeLink<'_>) -> libbpf_rs::Result<()>,
    ) -> (usize, libbpf_rs::Result<()>) {
        // SAFETY: the child has one thread. libbpf-rs's own function takes a lock that the parent may hold.
        unsafe { libbpf_sys::libbpf_set_print(None) };
        let mut count = 0;
        let attached = attach(&mut |link: Link| {
            let descriptor = link.as_fd().as_raw_fd();
            // The destructor of the link would detach the probes.
            std::mem::forget(link);
            // SAFETY: the link that owned the descriptor is forgotten.
            let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
            self.send_descriptor(descriptor)?;
            count += 1;
            Ok(())
        });
        (count, attached)
    }
}

/// Takes over a link as soon as its probes are attached.
pub(crate) type TakeLink<'a> = &'a mut dyn FnMut(Link) -> libbpf_rs::Result<()>;

/// Runs `work` in the child process, sends the result to the parent, and ends the process.
fn run_and_exit<T: Serialize>(
    socket: &OwnedFd,
    kept: &[i32],
    work: impl FnOnce(&DescriptorHandover<'_>) -> T,
) -> ! {
    let run = AssertUnwindSafe(|| {
        confine_child(kept);
        let mut begin = [0];
        if rustix::io::read(socket, &mut begin)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let value = work(&DescriptorHandover { socket });
        send_result(socket, &value)
    });
    let is_sent = matches!(panic::catch_unwind(run), Ok(Ok(())));
    // SAFETY: ends this process at once. Destructors and handlers belong to the parent.
    unsafe { libc::_exit(i32::from(!is_sent)) }
}

/// Closes the descriptors that the child's work does not need, silences stderr, and limits memory.
fn confine_child(kept: &[i32]) {
    close_all_but(kept);
    // A child that cannot die would keep the daemon's output open. No other thread of the child opens files.
    if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
        // SAFETY: the child uses no descriptor with the number of stderr.
        unsafe { libc::dup2(null.as_raw_fd(), libc::STDERR_FILENO) };
    }
    // Errors of these calls are ignored: the child could do nothing about them.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    if let Some(limit) = child_memory_limit() {
        let _ = rustix::process::setrlimit(Resource::As, limit);
    }
}

/// Limit of a child's address space: what this process has mapped, plus [`MAX_CHILD_MEMORY_BYTES`].
fn child_memory_limit() -> Option<Rlimit> {
    let sizes = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = sizes.split(' ').next()?.parse().ok()?;
    let bytes = pages * rustix::param::page_size() as u64 + MAX_CHILD_MEMORY_BYTES;
    Some(Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    })
}

/// Closes all descriptors but those in `kept`.
fn close_all_but(kept: &[i32]) {
    let mut kept: Vec<u32> = kept.iter().map(|kept| kept.cast_unsigned()).collect();
    kept.sort_unstable();
    let mut next = 0;
    for descriptor in kept.into_iter().chain([u32::MAX]) {
        if descriptor > next {
            // SAFETY: the child does not use the descriptors that this call closes.
            unsafe { libc::close_range(next, descriptor - 1, 0) };
        }
        next = next.max(descriptor.saturating_add(1));
    }
}

/// Sends a result to the parent as JSON, after the zero bytes that carried descriptors.
fn send_result<T: Serialize>(socket: &OwnedFd, value: &T) -> io::Result<()> {
    let value = serde_json::to_vec(value)?;
    let mut stream = std::os::unix::net::UnixStream::from(socket.try_clone()?);
    stream.write_all(&value)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::thread::sleep;

    use super::*;

    const LONG_PATIENCE: Duration = Duration::from_secs(30);
    const NOBODY_TENANT: Tenant = Tenant::User(65534);

    fn run_child_task<T: Serialize + DeserializeOwned>(
        work: impl FnOnce(&DescriptorHandover<'_>) -> T,
    ) -> Result<ChildOutcome<T>, ChildTaskError> {
        let mut task = ChildTask::start(&NOBODY_TENANT, LONG_PATIENCE, &[], work).unwrap();
        task.wait_for_result(LONG_PATIENCE).unwrap()
    }

    #[test]
    fn a_result_comes_back_with_its_descriptors() {
        let outcome = run_child_task(|handover| {
            for _ in 0..300 {
                let file = File::open("/proc/version").unwrap();
                handover.send_descriptor(file.into()).unwrap();
            }
            "x".repeat(300_000)
        });
        let outcome = outcome.unwrap();
        assert_eq!(outcome.value.len(), 300_000);
        assert_eq!(outcome.links.len(), 300);
        let mut text = String::new();
        let last = outcome.links.into_iter().next_back().unwrap();
        File::from(last.into_descriptor().unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert!(!text.is_empty());
    }

    #[test]
    fn a_task_that_does_not_end_is_killed_at_its_deadline() {
        let (tenant, limit) = (Tenant::User(1), Duration::from_millis(100));
        let mut task = ChildTask::start(&tenant, limit, &[], |_| sleep(LONG_PATIENCE)).unwrap();
        assert!(task.poll_result().is_none());
        assert_eq!(
            task.wait_for_result(LONG_PATIENCE).unwrap().unwrap_err(),
            ChildTaskError::TimedOut(limit)
        );
        drop(task);
        zernel_testkit::eventually("the child ends", || {
            !lock_living_children().tenants.contains_key(&tenant)
        });
    }

    #[test]
    fn descriptors_of_a_child_that_does_not_end_belong_to_the_parent() {
        let (mut reader, writer) = io::pipe().unwrap();
        let limit = Duration::from_millis(500);
        let writer = OwnedFd::from(writer);
        let mut task = ChildTask::start(&Tenant::User(4), limit, &[writer.as_fd()], |handover| {
            // SAFETY: the descriptor of the child's own end of the socket, which this process has kept open.
            let own = unsafe { OwnedFd::from_raw_fd(writer.as_raw_fd()) };
            handover.send_descriptor(own).unwrap();
            sleep(LONG_PATIENCE);
        })
        .unwrap();
        drop(writer);
        assert!(task.wait_for_result(LONG_PATIENCE).unwrap().is_err());
        assert_eq!(task.links.len(), 1);
        // The child closed its own descriptor, so the pipe ends although the child may still run.
        task.links.clear();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_thread_that_is_asked_to_stop_does_not_wait() {
        let mut task = ChildTask::start(&Tenant::User(5), LONG_PATIENCE, &[], |_| {
            sleep(LONG_PATIENCE);
        })
        .unwrap();
        set_thread_stop_flag(Arc::new(AtomicBool::new(true)));
        assert!(task.wait_for_result(LONG_PATIENCE).is_none());
        THREAD_STOP_FLAG.with_borrow_mut(Option::take);
    }

    #[test]
    fn a_task_that_panics_or_takes_too_much_memory_is_an_error() {
        let panics = run_child_task(|_| -> () { panic!("on purpose") });
        assert_eq!(panics.unwrap_err(), ChildTaskError::ChildDied);
        let greedy = run_child_task(|_| vec![1_u8; 2 * MAX_CHILD_MEMORY_BYTES as usize].len());
        assert_eq!(greedy.unwrap_err(), ChildTaskError::ChildDied);
    }

    #[test]
    fn a_tenant_has_a_number_of_children_at_a_time() {
        let tenant = Tenant::User(2);
        let start = || ChildTask::start(&tenant, LONG_PATIENCE, &[], |_| sleep(LONG_PATIENCE));
        let tasks: Vec<_> = (0..MAX_CHILDREN_OF_TENANT)
            .map(|_| start().unwrap())
            .collect();
        assert_eq!(start().unwrap_err(), ChildTaskError::TooManyChildren);
        assert!(has_room_for_child_of(&Tenant::User(3)));
        drop(tasks);
        zernel_testkit::eventually("they end", || has_room_for_child_of(&tenant));
    }

    #[test]
    fn a_child_has_only_the_descriptors_it_needs() {
        let secret = File::open("/proc/self/stat").unwrap();
        let needed = File::open("/proc/self/status").unwrap();
        let (secret_number, needed_number) = (secret.as_raw_fd(), needed.as_raw_fd());
        let mut task = ChildTask::start(&NOBODY_TENANT, LONG_PATIENCE, &[needed.as_fd()], |_| {
            let open: Vec<i32> = std::fs::read_dir("/proc/self/fd")
                .unwrap()
                .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
                .collect();
            open
        })
        .unwrap();
        let open = task.wait_for_result(LONG_PATIENCE).unwrap().unwrap().value;
        assert!(open.contains(&needed_number), "{open:?}");
        assert!(!open.contains(&secret_number), "{open:?}");
    }
}
