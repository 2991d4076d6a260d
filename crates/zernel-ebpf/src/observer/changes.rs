//! Tells at once when somebody writes to a library file that probes are attached to, or removes it.
//!
//! A file is watched as it is mapped, and under the name that its users have for it: in an overlay file
//! system those are two inodes, and older kernels do not tell at the first of a write to the second. What is
//! written through a shared mapping, by another host of a network file system, or past the kernel
//! shows nowhere: whoever looks at all files now and then still finds it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

/// Content, and links to the file: a file that is open is never said to be deleted.
const CHANGES: WatchFlags = WatchFlags::MODIFY.union(WatchFlags::ATTRIB);

/// What the kernel calls a watched inode.
pub(crate) type WatchId = i32;

/// The kernel's notes of changes.
#[derive(Debug)]
pub(crate) struct Changes {
    descriptor: OwnedFd,
    watched: BTreeSet<WatchId>,
}

impl Changes {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            descriptor: inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?,
            watched: BTreeSet::new(),
        })
    }

    /// Watches an open file, which was found at `access` and is called `path` by its users. What cannot
    /// be watched is left out: a user has only so many watches.
    pub(crate) fn watch(&mut self, file: &File, access: &Path, path: &Path) -> Vec<WatchId> {
        let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let named = path_in_user_root(access, path);
        let paths = [open, named].into_iter();
        let watched: Vec<WatchId> = paths
            .filter_map(|path| inotify::add_watch(&self.descriptor, path, CHANGES).ok())
            .collect();
        self.watched.extend(&watched);
        watched
    }

    /// Watches nothing else any more.
    pub(crate) fn retain(&mut self, needed: &BTreeSet<WatchId>) {
        for unneeded in self.watched.difference(needed) {
            // It is gone already if its inode is.
            let _ = inotify::remove_watch(&self.descriptor, *unneeded);
        }
        self.watched.retain(|watched| needed.contains(watched));
    }

    /// Whether something changed since the last time. What is said of a watch that has ended does not
    /// count.
    pub(crate) fn take(&mut self) -> bool {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.descriptor, &mut buffer);
        let mut changed = false;
        loop {
            match reader.next() {
                Ok(event) => changed |= !event.events().contains(ReadFlags::IGNORED),
                Err(Errno::INTR) => {}
                Err(_) => return changed,
            }
        }
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Where the users of a file have it, seen from here: they may have another root.
fn path_in_user_root(access: &Path, path: &Path) -> PathBuf {
    let mapped = access
        .parent()
        .filter(|it| it.file_name() == Some(OsStr::new("map_files")));
    let relative = path.strip_prefix("/").ok();
    match (mapped.and_then(Path::parent), relative) {
        (Some(process), Some(relative)) => process.join("root").join(relative),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_name_is_looked_up_under_the_root_of_its_user() {
        let of = |access, path| path_in_user_root(Path::new(access), Path::new(path));
        let inside = of("/proc/7/map_files/1000-2000", "/lib/libcuda.so.1");
        assert_eq!(inside, Path::new("/proc/7/root/lib/libcuda.so.1"));
        assert_eq!(of("/a/b", "/a/b"), Path::new("/a/b"));
    }

    #[test]
    fn writing_and_removing_is_told_once_and_only_of_what_is_watched() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_owned();
        let mut changes = Changes::new().unwrap();
        let watched = changes.watch(file.as_file(), &path, &path);
        assert_eq!(watched[0], watched[1], "one inode");
        assert!(!changes.take());
        file.write_all(b"new").unwrap();
        assert!(changes.take());
        assert!(!changes.take());
        std::fs::remove_file(&path).unwrap();
        assert!(changes.take());
        changes.retain(&BTreeSet::new());
        file.write_all(b"newer").unwrap();
        assert!(!changes.take());
    }
}
