//! A file of another user: opened once, and looked at without asking its file system.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Statx, StatxFlags, fstatfs, makedev, open, statx,
};
use zernel_elf::FileIdentity;

/// The number of FUSE file systems in `statfs`. The server of a FUSE file system cannot report another number.
const FUSE_SUPER_MAGIC: i64 = 0x6573_5546;

/// Why no probe is attached to a file on FUSE.
pub(crate) const ON_FUSE_REASON: &str = "it is on FUSE, whose server could hold up every fork of the machine while a probe is attached; \
     if you trust the server, name the file with --library";

/// A handle of a file, with the identity that the file had when it was opened.
///
/// The handle is open for its path only (`O_PATH`): neither opening nor closing it sends a request to the file system.
/// Attributes are those that the kernel has cached. So no call of this module waits for a file system that does not
/// answer, unless its comment states it.
#[derive(Debug)]
pub(crate) struct ForeignFile {
    path_descriptor: OwnedFd,
    /// Path of the file, as the processes that map it see it.
    pub(crate) path: PathBuf,
    pub(crate) identity: FileIdentity,
    is_regular: bool,
}

impl ForeignFile {
    /// Opens the file at `access`, for example `/proc/PID/map_files/START-END`. `map_files` has links to the files
    /// themselves, so the kernel walks no path.
    pub(crate) fn open(access: &Path) -> io::Result<Self> {
        let handle = open(access, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let status = cached_status(handle.as_fd())?;
        let path = fs::read_link(procfs_path(&handle))?;
        let deleted = path.as_os_str().as_bytes().strip_suffix(b" (deleted)");
        Ok(Self {
            path: deleted.map_or(path.clone(), |path| OsStr::from_bytes(path).into()),
            identity: identity_from_status(&status),
            is_regular: FileType::from_raw_mode(status.stx_mode.into()).is_file(),
            path_descriptor: handle,
        })
    }

    /// Whether the file is neither a directory, a pipe nor a device.
    pub(crate) fn is_regular(&self) -> bool {
        self.is_regular
    }

    /// Whether the file is on FUSE, or on a file system that does not report its type.
    ///
    /// While the kernel attaches a probe it reads the page of the function, and holds a lock that every fork of the machine
    /// needs. The kernel may drop a page of the file that was read before at any time. If the file is on FUSE and its
    /// server does not answer, no process of the machine can fork until then.
    ///
    /// `statfs` asks the file system, which may not answer, so only a child process may call this function.
    pub(crate) fn is_on_fuse(&self) -> bool {
        !fstatfs(&self.path_descriptor).is_ok_and(|status| status.f_type != FUSE_SUPER_MAGIC)
    }

    /// A path that opens the same file in this process and its children.
    pub(crate) fn reopen_path(&self) -> PathBuf {
        procfs_path(&self.path_descriptor)
    }

    /// Whether the file has not been written to since it was opened, as far as the kernel knows.
    pub(crate) fn is_unchanged(&self) -> bool {
        let now = cached_status(self.path_descriptor.as_fd());
        now.is_ok_and(|now| identity_from_status(&now) == self.identity)
    }

    /// Whether the file was deleted, so that no new process can map it.
    pub(crate) fn is_deleted(&self) -> bool {
        cached_status(self.path_descriptor.as_fd()).is_ok_and(|now| now.stx_nlink == 0)
    }
}

impl AsFd for ForeignFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.path_descriptor.as_fd()
    }
}

fn procfs_path(handle: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", handle.as_raw_fd()).into()
}

/// The attributes of the file that the kernel has cached, however old.
fn cached_status(handle: BorrowedFd<'_>) -> rustix::io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(handle, c"", flags, StatxFlags::BASIC_STATS)
}

fn identity_from_status(status: &Statx) -> FileIdentity {
    let modified = status.stx_mtime;
    FileIdentity {
        device: makedev(status.stx_dev_major, status.stx_dev_minor),
        inode: status.stx_ino,
        size: status.stx_size,
        modified_ns: i128::from(modified.tv_sec) * 1_000_000_000 + i128::from(modified.tv_nsec),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_handle_shows_writes_and_removal() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let foreign = ForeignFile::open(file.path()).unwrap();
        assert!(foreign.is_regular() && foreign.is_unchanged() && !foreign.is_deleted());
        assert_eq!(foreign.path, file.path());
        assert_eq!(
            foreign.identity,
            FileIdentity::read(file.as_file()).unwrap()
        );
        file.write_all(b"more").unwrap();
        assert!(!foreign.is_unchanged());
        let access = foreign.reopen_path();
        file.close().unwrap();
        assert!(foreign.is_deleted());
        assert_eq!(fs::read(&access).unwrap(), b"more");
        let again = ForeignFile::open(&access).unwrap();
        assert_eq!(
            again.path, foreign.path,
            "without the mark of deleted files"
        );
    }

    #[test]
    fn a_directory_is_no_regular_file() {
        assert!(!ForeignFile::open(Path::new("/")).unwrap().is_regular());
    }
}
