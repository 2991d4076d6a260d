//! The directory of the node's state: ours alone.
//!
//! Its default name can be guessed, and lies where anybody may create names. So nothing in it is
//! touched before the directory itself, opened once, turns out to be ours and closed to others.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, openat};
use rustix::process::geteuid;

/// An open directory that nobody else can put anything into.
#[derive(Debug)]
pub(crate) struct StateDirectory {
    directory: OwnedFd,
    path: PathBuf,
}

impl StateDirectory {
    /// Opens the directory, and makes it if there is none.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // Without a slash at the end, which would follow a link in spite of NOFOLLOW.
        let path: PathBuf = path.components().collect();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = open(&path, flags, Mode::empty())
            .map_err(|error| refused(&path, &format!("cannot be opened without links: {error}")))?;
        let stat = fstat(&directory)?;
        check_owner(&path, &stat)?;
        if Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
            return Err(refused(&path, "others may write to it"));
        }
        Ok(Self { directory, path })
    }

    /// Opens the file `name` in it, and makes it if there is none.
    pub(crate) fn file(&self, name: &str) -> io::Result<File> {
        let path = self.path.join(name);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.directory, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| refused(&path, &format!("cannot be opened without links: {error}")))?;
        let stat = fstat(&file)?;
        check_owner(&path, &stat)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused(&path, "it is not a plain file"));
        }
        Ok(File::from(file))
    }
}

fn check_owner(path: &Path, stat: &Stat) -> io::Result<()> {
    match stat.st_uid == geteuid().as_raw() {
        true => Ok(()),
        false => Err(refused(path, "it belongs to another user")),
    }
}

fn refused(path: &Path, reason: &str) -> io::Error {
    let problem = format!("{}: {reason}", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, problem)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;
    use crate::test_directory::TestDirectory;

    #[track_caller]
    fn assert_refused<T>(result: io::Result<T>, reason: &str) {
        let error = result.err().expect("refused").to_string();
        assert!(error.contains(reason), "{error}");
    }

    #[test]
    fn what_it_makes_is_closed_to_others() {
        let test = TestDirectory::new("state-new");
        let path = test.path().join("new");
        StateDirectory::open(&path).unwrap().file("node").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o700);
        assert_eq!(mode(&path.join("node")), 0o600);
    }

    #[test]
    fn a_directory_behind_a_link_or_open_to_others_is_refused() {
        let test = TestDirectory::new("state-directory");
        let (real, link) = (test.path().join("real"), test.path().join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        assert_refused(StateDirectory::open(&link), "without links");
        assert_refused(StateDirectory::open(&link.join("")), "without links");
        for mode in [0o720, 0o702] {
            fs::set_permissions(&real, Permissions::from_mode(mode)).unwrap();
            assert_refused(StateDirectory::open(&real), "others may write");
        }
        fs::set_permissions(&real, Permissions::from_mode(0o755)).unwrap();
        StateDirectory::open(&real).unwrap();
    }

    #[test]
    fn a_directory_or_file_of_another_user_is_refused() {
        let test = TestDirectory::new("state-owner");
        let file = test.path().join("node");
        fs::write(&file, "theirs").unwrap();
        // Only root can give files away; for everybody else root's own directory is another user's.
        if !geteuid().is_root() {
            return assert_refused(StateDirectory::open(Path::new("/")), "another user");
        }
        chown(&file, Some(12345), None).unwrap();
        let directory = StateDirectory::open(test.path()).unwrap();
        assert_refused(directory.file("node"), "another user");
        chown(test.path(), Some(12345), None).unwrap();
        assert_refused(StateDirectory::open(test.path()), "another user");
    }

    #[test]
    fn a_file_that_is_a_link_or_no_plain_file_is_refused() {
        let test = TestDirectory::new("state-file");
        fs::write(test.path().join("victim"), "precious").unwrap();
        symlink("victim", test.path().join("link")).unwrap();
        let directory = StateDirectory::open(test.path()).unwrap();
        assert_refused(directory.file("link"), "without links");
        let pipe = rustix::fs::mknodat(
            &directory.directory,
            "pipe",
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        );
        pipe.unwrap();
        assert_refused(directory.file("pipe"), "not a plain file");
    }
}
