//! Links to attached probes, and how they are detached.
//!
//! The kernel detaches probes when the last reference to their link goes. If the last reference is a descriptor, the
//! process that closes the descriptor waits for grace periods of RCU, which take a second on a busy machine. One user can
//! make the daemon hold thousands of links, and a process that is killed closes its descriptors one after the other: the
//! killed process would take minutes to die, with its probes attached. If the last reference is a pin in a bpffs, a work
//! queue of the kernel detaches, hundreds of links at a time, and no process waits.
//!
//! So a pin is the only reference to a link, and the daemon keeps no descriptor of it. A child process that the daemon
//! forks has no descriptors of links either: if the daemon is killed at that moment, no copy of a descriptor has to be
//! closed. The pins of links are in one of these places:
//!
//! 1. A bpffs that only this process holds, and that is mounted nowhere. When the process ends, by whatever signal, the bpffs goes, and
//!    its pins with it. To create a bpffs takes `CAP_SYS_ADMIN`.
//! 2. The directory [`LINKS_DIRECTORY_NAME`] beside the pinned task states, if it exists. The service manager creates it before the daemon starts, and
//!    removes it with its pins after the daemon has ended.
//! 3. Without either, a link has a descriptor, and is pinned for a moment when it is dropped, beside the pinned task
//!    states. Where links cannot be pinned, dropping a link waits until its probes are detached.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{process, thread};

use libbpf_rs::libbpf_sys;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::child_task;

/// Threads that detach links at once.
const DETACHING_THREADS: usize = 64;

/// How the names of pinned links begin.
pub(crate) const PIN_PREFIX: &str = "link-";

/// Name of the directory of links that the service manager removes. `deploy/zernel.service` has it too.
const LINKS_DIRECTORY_NAME: &str = "links";

/// Where links are pinned.
static LINK_DIRECTORY: OnceLock<LinkDirectory> = OnceLock::new();

/// Whether this process is about to end.
static IS_PROCESS_ENDING: AtomicBool = AtomicBool::new(false);

/// A directory in a bpffs.
#[derive(Debug)]
struct LinkDirectory {
    path: PathBuf,
    remover: PinRemover,
}

/// What removes the pins of a process that was killed.
#[derive(Debug)]
enum PinRemover {
    /// The kernel removes the pins, because only this process holds the bpffs.
    Kernel { _bpffs: OwnedFd },
    /// The service manager.
    ServiceManager,
    /// Nothing.
    Missing,
}

impl LinkDirectory {
    fn find_place(shared: &Path) -> Self {
        if let Ok(bpffs) = create_bpffs() {
            let number = bpffs.as_raw_fd();
            return Self {
                path: format!("/proc/self/fd/{number}").into(),
                remover: PinRemover::Kernel { _bpffs: bpffs },
            };
        }
        let links = shared.join(LINKS_DIRECTORY_NAME);
        match links.is_dir() {
            true => Self {
                path: links,
                remover: PinRemover::ServiceManager,
            },
            false => Self {
                path: shared.to_owned(),
                remover: PinRemover::Missing,
            },
        }
    }
}

/// Finds a place to pin links in. The directory is that of the pinned task states.
pub(crate) fn pin_links(shared: &Path) {
    LINK_DIRECTORY.get_or_init(|| LinkDirectory::find_place(shared));
}

/// Leaves links that are dropped from now on to the end of this process, if the kernel then removes their pins. At its end
/// the kernel removes all pins at once, which is faster than removing them one by one.
pub(crate) fn leave_links_to_exit() {
    IS_PROCESS_ENDING.store(true, Ordering::Relaxed);
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
struct LinkPin {
    path: CString,
}

impl LinkPin {
    /// Pins a link, if it can be pinned.
    fn new(directory: &LinkDirectory, link: &OwnedFd) -> Option<Self> {
        static NEXT_PIN_NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NEXT_PIN_NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PIN_PREFIX}{}-{number}", process::id());
        let path = directory.path.join(name);
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: a descriptor that is open, and a string that ends with a zero byte.
        let result = unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), path.as_ptr()) };
        (result == 0).then_some(Self { path })
    }

    /// Opens the link.
    fn open(&self) -> Option<OwnedFd> {
        // SAFETY: a string that ends with a zero byte.
        let descriptor = unsafe { libbpf_sys::bpf_obj_get(self.path.as_ptr()) };
        // SAFETY: a new descriptor, which nothing else owns.
        (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

impl Drop for LinkPin {
    fn drop(&mut self) {
        // Removing the pin fails only if another process removed it.
        let _ = rustix::fs::unlink(&self.path);
    }
}

/// A link to attached probes. Dropping it detaches the probes. Dropping a link that can be pinned does not wait until its
/// probes are detached.
#[derive(Debug)]
pub(crate) struct ProbeLink {
    /// `None` only while the link is taken apart.
    reference: Option<LinkReference>,
}

/// The only reference of this process to a link: a pin or a descriptor.
#[derive(Debug)]
enum LinkReference {
    Pinned(LinkPin),
    Open(OwnedFd),
}

impl ProbeLink {
    /// Takes over a link.
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        let directory = LINK_DIRECTORY.get();
        let directory = directory.filter(|it| !matches!(it.remover, PinRemover::Missing));
        let pin = directory.and_then(|directory| LinkPin::new(directory, &descriptor));
        let reference = match pin {
            Some(pin) => LinkReference::Pinned(pin),
            None => LinkReference::Open(descriptor),
        };
        Self {
            reference: Some(reference),
        }
    }

    /// Whether the link is pinned.
    fn is_pinned(&self) -> bool {
        matches!(self.reference, Some(LinkReference::Pinned(_)))
    }

    /// Replaces the descriptor of the link by a pin, if that is possible. Returns whether the link is pinned now.
    fn pin_or_keep_open(&mut self) -> bool {
        if let (Some(directory), Some(LinkReference::Open(descriptor))) =
            (LINK_DIRECTORY.get(), &self.reference)
            && let Some(pin) = LinkPin::new(directory, descriptor)
        {
            self.reference = Some(LinkReference::Pinned(pin));
        }
        self.is_pinned()
    }

    /// Removes the pin. Closing the descriptor then detaches the probes and waits until they are detached.
    pub(crate) fn into_descriptor(mut self) -> Option<OwnedFd> {
        match self.reference.take()? {
            LinkReference::Pinned(pin) => pin.open(),
            LinkReference::Open(descriptor) => Some(descriptor),
        }
    }
}

impl Drop for ProbeLink {
    fn drop(&mut self) {
        let is_left_to_kernel = IS_PROCESS_ENDING.load(Ordering::Relaxed)
            && LINK_DIRECTORY
                .get()
                .is_some_and(|it| matches!(it.remover, PinRemover::Kernel { .. }));
        if self.pin_or_keep_open() && is_left_to_kernel {
            std::mem::forget(self.reference.take());
        }
    }
}

/// Has the kernel detach links, and waits for none of them if they can be pinned. Probes that are attached to the same functions
/// soon after may count a call twice: see [`detach_links`].
pub(crate) fn release_links(mut links: Vec<ProbeLink>) {
    links.retain_mut(|link| !link.pin_or_keep_open());
    close_links_in_parallel(links.into_iter().filter_map(ProbeLink::into_descriptor));
}

/// Detaches links and waits until their probes are detached, unless this thread is asked to stop. Afterwards the same
/// functions can be probed again.
pub(crate) fn detach_links(links: Vec<ProbeLink>) {
    if links.is_empty() || child_task::is_asked_to_stop() {
        return release_links(links);
    }
    let is_pinned = links.iter().any(ProbeLink::is_pinned);
    let descriptors: Vec<OwnedFd> = links
        .into_iter()
        .filter_map(ProbeLink::into_descriptor)
        .collect();
    if is_pinned {
        wait_for_grace_period();
    }
    close_links_in_parallel(descriptors.into_iter());
}

/// Waits until the kernel has dropped the references of removed pins.
fn wait_for_grace_period() {
    const MEMBARRIER_CMD_GLOBAL: i64 = 1;
    // SAFETY: the call has no pointers. Without it the descriptors may be closed too early, and their probes are detached by the
    // kernel a moment later.
    unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
}

/// Closes many links at the same time: closing each waits for grace periods of RCU, and links that are closed together
/// share these. If this thread is asked to stop, the kernel detaches the rest.
fn close_links_in_parallel(links: impl Iterator<Item = OwnedFd>) {
    let links: Vec<OwnedFd> = links.collect();
    let stop = child_task::stop_flag();
    let each = links.len().div_ceil(DETACHING_THREADS).max(1);
    let mut links = links.into_iter();
    thread::scope(|scope| {
        loop {
            let some: Vec<OwnedFd> = links.by_ref().take(each).collect();
            if some.is_empty() {
                break;
            }
            let stop = stop.as_deref();
            let spawned =
                thread::Builder::new().spawn_scoped(scope, move || close_links(some, stop));
            // If no thread can be started, dropping the closure drops the links, and they are detached one after the
            // other.
            drop(spawned);
        }
    });
}

fn close_links(links: Vec<OwnedFd>, stop: Option<&AtomicBool>) {
    for link in links {
        match stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            true => drop(ProbeLink::new(link)),
            false => drop(link),
        }
    }
}
