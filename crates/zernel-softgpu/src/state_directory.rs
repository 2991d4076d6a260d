//! The directory of the node's state. The directory belongs to one user, and the last process that uses it removes it.
//!
//! The default name of the directory can be guessed, and every user can create names beside it. So no file in it is
//! touched before the opened directory is known to belong to this user and to be closed to others.
//!
//! Every process that uses the directory holds a shared lock on it. The kernel releases the lock of a dead
//! process. A process that leaves tries to take an exclusive lock. If a process gets that lock, it is the last one,
//! and no other process can enter while it removes the state.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, open, openat, unlinkat,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, geteuid, getpid};

/// Name of the state file in the directory.
pub(crate) const STATE_FILE_NAME: &str = "node";
/// Attempts to open the directory, which another process may remove meanwhile. After this number of lost races in a
/// row, the directory counts as impossible to open.
const MAX_OPEN_ATTEMPTS: usize = 1000;

/// What the last process that leaves does with the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterLastProcess {
    /// The last process keeps the directory, empty.
    Keep,
    /// The last process removes the directory.
    Remove,
}

/// An open state directory that other users cannot write to.
#[derive(Debug)]
pub(crate) struct StateDirectory {
    directory: OwnedFd,
    path: PathBuf,
    after_last_process: AfterLastProcess,
    opener_pid: Pid,
}

impl StateDirectory {
    /// Opens the state directory and the file in it, and creates both if they do not exist.
    pub(crate) fn enter(path: &Path, afterwards: AfterLastProcess) -> io::Result<(Self, File)> {
        // The path is used without a slash at the end, which would follow a link in spite of NOFOLLOW.
        let path: PathBuf = path.components().collect();
        let (directory, file) = open_directory_and_file(&path)?;
        let entered = Self {
            directory,
            path,
            after_last_process: afterwards,
            opener_pid: getpid(),
        };
        Ok((entered, file))
    }

    /// Leaves the state directory. If no other process uses it, removes its file. Open files stay usable.
    pub(crate) fn leave(&self) {
        // A forked child does not leave: it shares the lock with its parent, and the parent still needs the lock.
        if getpid() != self.opener_pid {
            return;
        }
        // The request for an exclusive lock releases the shared lock first, even if it fails. So of several processes
        // that leave at once the last one succeeds.
        if flock(&self.directory, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        // A file or directory that cannot be removed stays, and is used again.
        let _ = unlinkat(&self.directory, STATE_FILE_NAME, AtFlags::empty());
        if self.after_last_process == AfterLastProcess::Remove {
            let _ = rustix::fs::rmdir(&self.path);
        }
        let _ = flock(&self.directory, FlockOperation::Unlock);
    }
}

impl Drop for StateDirectory {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Opens and locks the directory, and opens the file in it. "Not found" means that another process removed them
/// meanwhile.
fn open_directory_and_file(path: &Path) -> io::Result<(OwnedFd, File)> {
    let attempt = || -> io::Result<_> {
        let directory = open_directory(path)?;
        let file = open_file(&directory, path)?;
        Ok((directory, file))
    };
    for _ in 1..MAX_OPEN_ATTEMPTS {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => return result,
        }
    }
    attempt()
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    match DirBuilder::new().recursive(true).mode(0o700).create(path) {
        // If the directory cannot be created, the open below finds out what exists at the path.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => result?,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(path, flags, Mode::empty()).map_err(|error| open_error(path, error))?;
    let stat = fstat(&directory)?;
    check_owner(path, &stat)?;
    if Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
        return Err(refusal_error(path, "others may write to it"));
    }
    retry_on_intr(|| flock(&directory, FlockOperation::LockShared))?;
    Ok(directory)
}

fn open_file(directory: &OwnedFd, path: &Path) -> io::Result<File> {
    let path = path.join(STATE_FILE_NAME);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(directory, STATE_FILE_NAME, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|error| open_error(&path, error))?;
    let stat = fstat(&file)?;
    check_owner(&path, &stat)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(refusal_error(&path, "it is not a plain file"));
    }
    Ok(File::from(file))
}

fn check_owner(path: &Path, stat: &Stat) -> io::Result<()> {
    match stat.st_uid == geteuid().as_raw() {
        true => Ok(()),
        false => Err(refusal_error(path, "it belongs to another user")),
    }
}

fn open_error(path: &Path, error: Errno) -> io::Error {
    let problem = format!(
        "{}: cannot be opened without links: {error}",
        path.display()
    );
    io::Error::new(io::Error::from(error).kind(), problem)
}

fn refusal_error(path: &Path, reason: &str) -> io::Error {
    let problem = format!("{}: {reason}", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, problem)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use super::*;
    use crate::test_directory::TestDirectory;

    #[track_caller]
    fn assert_refused<T>(result: io::Result<T>, reason: &str) {
        let error = result.err().expect("refused").to_string();
        assert!(error.contains(reason), "{error}");
    }

    fn enter_directory(path: &Path) -> io::Result<(StateDirectory, File)> {
        StateDirectory::enter(path, AfterLastProcess::Keep)
    }

    #[test]
    fn state_directory_and_file_have_private_modes() {
        let test = TestDirectory::new("state-new");
        let path = test.path().join("new");
        let _entered = enter_directory(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o700);
        assert_eq!(mode(&path.join(STATE_FILE_NAME)), 0o600);
    }

    #[test]
    fn linked_or_writable_state_directory_is_refused() {
        let test = TestDirectory::new("state-directory");
        let (real, link) = (test.path().join("real"), test.path().join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        assert_refused(enter_directory(&link), "without links");
        assert_refused(enter_directory(&link.join("")), "without links");
        for mode in [0o720, 0o702] {
            fs::set_permissions(&real, Permissions::from_mode(mode)).unwrap();
            assert_refused(enter_directory(&real), "others may write");
        }
        fs::set_permissions(&real, Permissions::from_mode(0o755)).unwrap();
        enter_directory(&real).unwrap();
    }

    #[test]
    fn state_directory_of_other_user_is_refused() {
        let test = TestDirectory::new("state-owner");
        // Only root can change the owner of a file. The tests of other users use a directory of root.
        if !geteuid().is_root() {
            return assert_refused(enter_directory(Path::new("/")), "another user");
        }
        let file = test.path().join(STATE_FILE_NAME);
        fs::write(&file, "theirs").unwrap();
        chown(&file, Some(12345), None).unwrap();
        assert_refused(
            enter_directory(test.path()),
            "node: it belongs to another user",
        );
        chown(test.path(), Some(12345), None).unwrap();
        assert_refused(enter_directory(test.path()), "another user");
    }

    #[test]
    fn linked_or_special_state_file_is_refused() {
        let test = TestDirectory::new("state-file");
        let (victim, file) = (
            test.path().join("victim"),
            test.path().join(STATE_FILE_NAME),
        );
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &file).unwrap();
        assert_refused(enter_directory(test.path()), "without links");
        fs::remove_file(&file).expect("what is refused is left alone");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &file, FileType::Fifo, mode, 0).unwrap();
        assert_refused(enter_directory(test.path()), "not a plain file");
    }

    #[test]
    fn last_process_removes_state_directory() {
        let test = TestDirectory::new("state-leave");
        for (afterwards, is_kept) in [
            (AfterLastProcess::Keep, true),
            (AfterLastProcess::Remove, false),
        ] {
            let path = test.path().join("directory");
            let first = StateDirectory::enter(&path, afterwards).unwrap();
            let second = StateDirectory::enter(&path, afterwards).unwrap();
            drop(first);
            assert!(path.join(STATE_FILE_NAME).exists());
            drop(second);
            assert!(!path.join(STATE_FILE_NAME).exists());
            assert_eq!(path.exists(), is_kept);
        }
    }

    /// Several threads enter and leave the directory at once. While a thread is inside, the name refers to its own
    /// file.
    #[test]
    fn concurrent_enter_and_leave_keep_one_state_file() {
        let test = TestDirectory::new("state-race");
        let path = test.path().join("directory");
        let come_and_go = || {
            for _ in 0..500 {
                let (_directory, file) =
                    StateDirectory::enter(&path, AfterLastProcess::Remove).unwrap();
                let named = fs::metadata(path.join(STATE_FILE_NAME)).unwrap();
                assert_eq!(named.ino(), file.metadata().unwrap().ino());
            }
        };
        std::thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(come_and_go)));
        });
        assert!(!path.exists());
    }
}
