//! Links to attached probes, and how they are detached.
//!
//! The kernel detaches probes when the last reference to their link goes. If that is a descriptor, the process that closes it waits
//! for grace periods of RCU, which take a second on a busy machine. One user can make the daemon hold hundreds of links, and a process
//! that is killed closes its descriptors one after the other: it would take minutes to die, with its probes attached. If the last reference
//! is a pin in a bpffs, a work queue of the kernel detaches, hundreds of links at a time, and no process waits.
//!
//! So links are pinned in a bpffs that only this process holds, and that is mounted nowhere. When the process ends, by whatever signal,
//! the bpffs goes, and its pins with it. Without the privilege to create a bpffs, a link is pinned for a moment when it is dropped, in
//! the directory of the pinned task states. Where that does not work either, dropping a link waits.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{fs, process, thread};

use libbpf_rs::libbpf_sys;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::child_task;

/// Threads that detach links at once.
const DETACHERS: usize = 64;

/// How the names of pinned links begin.
pub(crate) const PIN_PREFIX: &str = "link-";

/// Where links are pinned.
static DIRECTORY: OnceLock<LinkDirectory> = OnceLock::new();

/// Whether this process is about to end.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// A directory in a bpffs.
#[derive(Debug)]
struct LinkDirectory {
    path: PathBuf,
    /// The bpffs, if only this process holds it.
    private: Option<OwnedFd>,
}

/// Prepares to pin links: in a bpffs of this process or, without the privilege for that, in this directory.
pub(crate) fn pin_links(shared: &Path) {
    DIRECTORY.get_or_init(|| {
        let private = create_bpffs().ok();
        let path = private.as_ref().map(|bpffs| {
            let number = bpffs.as_raw_fd();
            format!("/proc/self/fd/{number}").into()
        });
        LinkDirectory {
            path: path.unwrap_or_else(|| shared.to_owned()),
            private,
        }
    });
}

/// The descriptor of the bpffs of this process, if it has one.
pub(crate) fn bpffs() -> Option<RawFd> {
    let directory = DIRECTORY.get()?;
    directory.private.as_ref().map(AsRawFd::as_raw_fd)
}

/// Leaves links that are dropped from now on to the end of this process. That is faster than to remove their pins one by one.
pub(crate) fn leave_links_to_exit() {
    IS_ENDING.store(true, Ordering::Relaxed);
}

/// Creates a bpffs that is mounted nowhere.
fn create_bpffs() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("bpf", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// A pin of a link. Dropping it removes the pin.
#[derive(Debug)]
struct Pin {
    path: PathBuf,
}

impl Pin {
    /// Pins a link, if it can be pinned.
    fn new(directory: &LinkDirectory, link: &OwnedFd) -> Option<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PIN_PREFIX}{}-{number}", process::id());
        let path = directory.path.join(name);
        let text = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: a descriptor that is open, and a string that ends with a zero byte.
        let result = unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), text.as_ptr()) };
        (result == 0).then_some(Self { path })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // It fails only if another process removed it.
        let _ = fs::remove_file(&self.path);
    }
}

/// A link to attached probes. Dropping it detaches them, without a wait if the link can be pinned.
#[derive(Debug)]
pub(crate) struct ProbeLink {
    /// `None` only while the link is taken apart. It is closed before the pin is removed, so the pin is the last reference.
    descriptor: Option<OwnedFd>,
    pin: Option<Pin>,
}

impl ProbeLink {
    /// Takes over a link.
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        let directory = DIRECTORY.get().filter(|it| it.private.is_some());
        Self {
            pin: directory.and_then(|directory| Pin::new(directory, &descriptor)),
            descriptor: Some(descriptor),
        }
    }

    /// Pins the link, if it is not pinned. Returns whether it is pinned now.
    fn pin(&mut self) -> bool {
        if let (None, Some(directory), Some(descriptor)) =
            (&self.pin, DIRECTORY.get(), &self.descriptor)
        {
            self.pin = Pin::new(directory, descriptor);
        }
        self.pin.is_some()
    }

    /// Removes the pin. Closing the descriptor then detaches, and waits for that.
    pub(crate) fn into_descriptor(mut self) -> Option<OwnedFd> {
        self.pin.take();
        self.descriptor.take()
    }
}

impl Drop for ProbeLink {
    fn drop(&mut self) {
        let is_private = DIRECTORY.get().is_some_and(|it| it.private.is_some());
        if self.pin() && is_private && IS_ENDING.load(Ordering::Relaxed) {
            std::mem::forget((self.descriptor.take(), self.pin.take()));
        }
    }
}

/// Has the kernel detach links, and waits for none of them if they can be pinned. Probes that are attached to the same functions
/// soon after may count a call twice: see [`detach`].
pub(crate) fn release(mut links: Vec<ProbeLink>) {
    links.retain_mut(|link| !link.pin());
    close_all(links.into_iter().filter_map(ProbeLink::into_descriptor));
}

/// Detaches links and waits for that, unless this thread is asked to stop. Then the probes can be attached again.
pub(crate) fn detach(links: Vec<ProbeLink>) {
    if links.is_empty() || child_task::is_asked_to_stop() {
        return release(links);
    }
    let is_pinned = links.iter().any(|link| link.pin.is_some());
    let descriptors: Vec<OwnedFd> = links
        .into_iter()
        .filter_map(ProbeLink::into_descriptor)
        .collect();
    if is_pinned {
        wait_for_grace_period();
    }
    close_all(descriptors.into_iter());
}

/// Waits until the kernel has dropped the references of removed pins.
fn wait_for_grace_period() {
    const MEMBARRIER_CMD_GLOBAL: i64 = 1;
    // SAFETY: the call has no pointers. Without it the descriptors may be closed too early, and their probes are detached by the
    // kernel a moment later.
    unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
}

/// Closes links, many at once: each waits for grace periods, and they can share them. If this thread is asked to stop, the
/// kernel detaches the rest.
fn close_all(links: impl Iterator<Item = OwnedFd>) {
    let links: Vec<OwnedFd> = links.collect();
    let stop = child_task::stop_flag();
    let each = links.len().div_ceil(DETACHERS).max(1);
    let mut links = links.into_iter();
    thread::scope(|scope| {
        loop {
            let some: Vec<OwnedFd> = links.by_ref().take(each).collect();
            if some.is_empty() {
                break;
            }
            let stop = stop.as_deref();
            let spawned = thread::Builder::new().spawn_scoped(scope, move || close(some, stop));
            // Without another thread they are detached one after the other: dropping the closure drops them.
            drop(spawned);
        }
    });
}

fn close(links: Vec<OwnedFd>, stop: Option<&AtomicBool>) {
    for link in links {
        match stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            true => drop(ProbeLink::new(link)),
            false => drop(link),
        }
    }
}
