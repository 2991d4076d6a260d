//! Notices when a library file with probes is written to or removed, through inotify.
//!
//! Two inodes are watched per file: the one that is mapped, and the one at the path that its users see. On an overlay
//! file system these are two different inodes, and older kernels do not report a write to the file at the path as a
//! change of the mapped one. inotify does not report writes through a shared mapping or from another host of a network
//! file system. The regular scan finds these writes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::foreign_file::ForeignFile;

/// Changes of content and of the link count. The kernel does not report an open file as deleted.
const WATCHED_CHANGES: WatchFlags = WatchFlags::MODIFY.union(WatchFlags::ATTRIB);

/// inotify watch descriptor.
pub(crate) type WatchId = i32;

/// How long a watch that a child process added may stay without being taken over: longer than such a child lives. An older
/// watch was added by a child that did not finish, and is removed.
const MAX_ORPHAN_AGE: Duration = Duration::from_secs(30);

/// An inotify instance with its watches.
#[derive(Debug)]
pub(crate) struct FileChanges {
    descriptor: OwnedFd,
    watched_ids: BTreeSet<WatchId>,
    /// Watches that child processes added and nobody has taken over, with the time when they were found.
    unclaimed_since: BTreeMap<WatchId, Instant>,
}

impl FileChanges {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            descriptor: inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?,
            watched_ids: BTreeSet::new(),
            unclaimed_since: BTreeMap::new(),
        })
    }

    /// Takes over watches that [`watch_file`] added.
    pub(crate) fn take_over_watches(&mut self, watches: impl Iterator<Item = WatchId>) {
        self.watched_ids.extend(watches);
    }

    /// Removes all watches except the needed ones.
    pub(crate) fn keep_only_watches(&mut self, needed: &BTreeSet<WatchId>) {
        for unneeded in self.watched_ids.difference(needed) {
            // Removing fails if the kernel has removed the watch already, because the inode was deleted.
            let _ = inotify::remove_watch(&self.descriptor, *unneeded);
        }
        self.watched_ids.retain(|watched| needed.contains(watched));
        self.remove_orphaned_watches(Instant::now());
    }

    /// Removes watches that child processes added and the observer has not taken over for a while.
    fn remove_orphaned_watches(&mut self, now: Instant) {
        let all = self.all_watches().unwrap_or_default();
        self.unclaimed_since.retain(|watch, _| all.contains(watch));
        for watch in all.difference(&self.watched_ids) {
            let found = *self.unclaimed_since.entry(*watch).or_insert(now);
            if now.saturating_duration_since(found) >= MAX_ORPHAN_AGE {
                let _ = inotify::remove_watch(&self.descriptor, *watch);
            }
        }
        self.unclaimed_since
            .retain(|watch, _| !self.watched_ids.contains(watch));
    }

    /// All watches of the inotify instance, those of child processes included. `/proc/self/fdinfo` lists them as
    /// `inotify wd:NUMBER …`.
    fn all_watches(&self) -> std::io::Result<BTreeSet<WatchId>> {
        let path = format!("/proc/self/fdinfo/{}", self.descriptor.as_raw_fd());
        let text = std::fs::read_to_string(path)?;
        let numbers = text.lines().filter_map(|line| {
            let (number, _) = line.strip_prefix("inotify wd:")?.split_once(' ')?;
            WatchId::from_str_radix(number, 16).ok()
        });
        Ok(numbers.collect())
    }

    /// Whether a file changed since the last call. An event that reports the removal of a watch is no change of a
    /// file.
    pub(crate) fn take_change(&mut self) -> bool {
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

impl AsFd for FileChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Watches a file that was found at `access`, through the descriptor of [`FileChanges`]. Watches that cannot be added are
/// left out: the number of watches per user is limited. Runs in a child process, because it walks paths of another user.
pub(crate) fn watch_file(
    changes: BorrowedFd<'_>,
    file: &ForeignFile,
    access: &Path,
) -> Vec<WatchId> {
    let named = path_in_user_root(access, &file.path);
    // A user may have put a link to any other file at this path.
    let paths = [
        (file.reopen_path(), WATCHED_CHANGES),
        (named, WATCHED_CHANGES | WatchFlags::DONT_FOLLOW),
    ];
    paths
        .into_iter()
        .filter_map(|(path, flags)| inotify::add_watch(changes, path, flags).ok())
        .collect()
}

/// The path of a file in the root directory of the process that maps it.
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
    fn a_path_is_resolved_in_the_root_of_its_user() {
        let of = |access, path| path_in_user_root(Path::new(access), Path::new(path));
        let inside = of("/proc/7/map_files/1000-2000", "/lib/libcuda.so.1");
        assert_eq!(inside, Path::new("/proc/7/root/lib/libcuda.so.1"));
        assert_eq!(of("/a/b", "/a/b"), Path::new("/a/b"));
    }

    #[test]
    fn writes_and_removals_of_watched_files_are_reported_once() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_owned();
        let mut changes = FileChanges::new().unwrap();
        let foreign = ForeignFile::open(&path).unwrap();
        let watched = watch_file(changes.as_fd(), &foreign, &path);
        changes.take_over_watches(watched.iter().copied());
        assert_eq!(watched[0], watched[1], "one inode");
        assert!(!changes.take_change());
        file.write_all(b"new").unwrap();
        assert!(changes.take_change());
        assert!(!changes.take_change());
        std::fs::remove_file(&path).unwrap();
        assert!(changes.take_change());
        changes.keep_only_watches(&BTreeSet::new());
        file.write_all(b"newer").unwrap();
        assert!(!changes.take_change());
    }

    #[test]
    fn watches_of_a_child_that_did_not_finish_are_removed() {
        let files = [(); 40].map(|()| tempfile::NamedTempFile::new().unwrap());
        let mut changes = FileChanges::new().unwrap();
        let watch_one = |changes: &FileChanges, file: &tempfile::NamedTempFile| {
            let foreign = ForeignFile::open(file.path()).unwrap();
            watch_file(changes.as_fd(), &foreign, file.path())[0]
        };
        let known = watch_one(&changes, &files[0]);
        changes.take_over_watches([known].into_iter());
        for file in &files[1..] {
            watch_one(&changes, file);
        }
        let needed = BTreeSet::from([known]);
        changes.keep_only_watches(&needed);
        assert_eq!(
            changes.all_watches().unwrap().len(),
            files.len(),
            "a child may still finish"
        );
        changes.remove_orphaned_watches(Instant::now() + MAX_ORPHAN_AGE);
        assert_eq!(changes.all_watches().unwrap(), needed);
    }
}
