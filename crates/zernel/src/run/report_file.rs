//! The files of `--json` and `--html`.
//!
//! A report is written to a temporary file beside its destination, which it replaces when it is complete: a full disk
//! leaves an older report as it was. In a directory that the user cannot write to, an existing file is overwritten after
//! its space is reserved. Under sudo all of this happens with the rights of the caller, so the report belongs
//! to the caller and root follows no link that the caller could not follow. A link of another user is never followed.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use super::sudo_caller::{SudoCaller, run_with_rights_of};

/// The most symbolic links of the user that are followed, one to the next.
const MAX_FOLLOWED_LINKS: usize = 8;
const STICKY_BIT: u32 = 0o1000;

/// Checks that a report can be written, without changing or creating it.
pub(crate) fn check_report_file(path: &Path, caller: Option<&SudoCaller>) -> io::Result<()> {
    run_with_rights_of(caller, || {
        match ReportDestination::follow_own_links(path)? {
            ReportDestination::File(path) => {
                check_replaceable(&path)?;
                match TemporaryFile::create(parent_folder_of(&path)) {
                    Err(error) if forbids_new_files(&error) && path.exists() => {
                        open_existing_for_writing(&path).map(drop)
                    }
                    created => created.map(drop),
                }
            }
            // A pipe is not opened for the check, because opening may wait for the pipe's reader.
            ReportDestination::Device(_) => Ok(()),
        }
    })
}

/// Writes a report. If writing fails, an older report stays as it was.
pub(crate) fn write_report_file(
    path: &Path,
    text: &[u8],
    caller: Option<&SudoCaller>,
) -> io::Result<()> {
    run_with_rights_of(caller, || {
        match ReportDestination::follow_own_links(path)? {
            ReportDestination::File(path) => match TemporaryFile::create(parent_folder_of(&path)) {
                Err(error) if forbids_new_files(&error) && path.exists() => {
                    overwrite_existing(&path, text)
                }
                created => created?.write_and_rename_to(&path, text),
            },
            ReportDestination::Device(path) => open_device(&path)?.write_all(text),
        }
    })
}

/// Where a report goes.
enum ReportDestination {
    /// A regular file that exists or not.
    File(PathBuf),
    /// A device or a pipe, such as /dev/stdout, which must not be replaced.
    Device(PathBuf),
}

impl ReportDestination {
    /// Follows links that belong to the user.
    fn follow_own_links(path: &Path) -> io::Result<Self> {
        if is_device(path) {
            return Ok(Self::Device(path.to_owned()));
        }
        let mut path = path.to_owned();
        for _ in 0..MAX_FOLLOWED_LINKS {
            let metadata = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(Self::File(path));
                }
                metadata => metadata?,
            };
            if metadata.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            if !metadata.is_symlink() {
                return Ok(Self::File(path));
            }
            if metadata.uid() != geteuid().as_raw() {
                return Err(io::Error::other("it is a symbolic link of another user"));
            }
            path = parent_folder_of(&path).join(fs::read_link(&path)?);
        }
        Err(io::Error::other("it is a chain of too many symbolic links"))
    }
}

fn is_device(path: &Path) -> bool {
    let is_special = |metadata: &Metadata| {
        let kind = metadata.file_type();
        kind.is_char_device() || kind.is_block_device() || kind.is_fifo() || kind.is_socket()
    };
    fs::metadata(path).is_ok_and(|metadata| is_special(&metadata))
}

/// Whether an error means that the user can create no file in a directory.
fn forbids_new_files(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}

fn open_existing_for_writing(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    OpenOptions::new()
        .write(true)
        .custom_flags(flags)
        .open(path)
}

/// Overwrites an existing file, once there is space for the text.
fn overwrite_existing(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = open_existing_for_writing(path)?;
    let length = text.len() as u64;
    match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, length) {
        // If this file system cannot reserve space, the report is written without a reservation.
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error.into()),
    }
    file.write_all(text)?;
    file.set_len(length)
}

/// Opens a device or a pipe. The kernel's rules for symbolic links in directories that all users can write to apply.
fn open_device(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOCTTY.bits().cast_signed();
    OpenOptions::new()
        .write(true)
        .custom_flags(flags)
        .open(path)
}

/// Checks that a file may be replaced. In a directory with the sticky bit, only root and the owners of the file and
/// of the directory may replace it.
fn check_replaceable(path: &Path) -> io::Result<()> {
    let user = geteuid();
    let Ok(file) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    let folder = fs::metadata(parent_folder_of(path))?;
    let is_owner = [file.uid(), folder.uid()].contains(&user.as_raw());
    match folder.mode() & STICKY_BIT == 0 || is_owner || user.is_root() {
        true => Ok(()),
        false => Err(io::Error::other("it belongs to another user")),
    }
}

fn parent_folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// A file without a final name, removed on drop.
struct TemporaryFile {
    file: File,
    path: PathBuf,
    is_renamed: bool,
}

impl TemporaryFile {
    fn create(folder: &Path) -> io::Result<Self> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let path = folder.join(format!(".zernel-{:016x}", u64::from_ne_bytes(random)));
        Ok(Self {
            file: OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&path)?,
            path,
            is_renamed: false,
        })
    }

    fn write_and_rename_to(mut self, path: &Path, text: &[u8]) -> io::Result<()> {
        self.file.write_all(text)?;
        // Some file systems report a full disk only when data is synced.
        self.file.sync_data()?;
        fs::rename(&self.path, path)?;
        self.is_renamed = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.is_renamed {
            // A temporary file that cannot be removed stays.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    const NOBODY_UID: u32 = 65534;

    fn write_report_as_self(path: &Path, text: &str) -> io::Result<()> {
        check_report_file(path, None)?;
        write_report_file(path, text.as_bytes(), None)
    }

    #[test]
    fn a_report_replaces_an_older_one_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report");
        for text in ["old", "new"] {
            write_report_as_self(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let error = write_report_as_self(folder.path(), "text").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    }

    #[test]
    fn own_links_are_followed_and_those_of_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (link, target) = (folder.path().join("link"), folder.path().join("target"));
        symlink("target", &link).unwrap();
        write_report_as_self(&link, "text").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&target).unwrap(), "text");
        if geteuid().is_root() {
            std::os::unix::fs::lchown(&link, Some(NOBODY_UID), None).unwrap();
            let error = write_report_as_self(&link, "planted")
                .unwrap_err()
                .to_string();
            assert!(error.contains("another user"), "{error}");
            assert_eq!(fs::read_to_string(&target).unwrap(), "text");
        }
        fs::remove_file(&link).unwrap();
        symlink("link", &link).unwrap();
        assert!(write_report_as_self(&link, "text").is_err());
    }

    #[test]
    fn a_device_is_written_and_not_replaced() {
        let null = Path::new("/dev/null");
        write_report_as_self(null, "text").unwrap();
        assert!(is_device(null));
    }

    #[test]
    fn the_rights_of_another_user_are_those_of_the_whole_path() {
        if !geteuid().is_root() {
            return; // only root can act as another user
        }
        let nobody = SudoCaller::test_caller(NOBODY_UID);
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("report");
        let denied = |path: &Path| {
            let error = check_report_file(path, Some(&nobody)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            assert!(write_report_file(path, b"text", Some(&nobody)).is_err());
        };
        denied(&inside);
        denied(Path::new("/etc/zernel-report"));
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        denied(&inside);
        // An existing file that the user can write to is overwritten in place.
        fs::write(&inside, "a longer text").unwrap();
        denied(&inside);
        fs::set_permissions(&inside, fs::Permissions::from_mode(0o666)).unwrap();
        check_report_file(&inside, Some(&nobody)).unwrap();
        write_report_file(&inside, b"text", Some(&nobody)).unwrap();
        assert_eq!(fs::read_to_string(&inside).unwrap(), "text");
        chown(folder.path(), Some(NOBODY_UID), None).unwrap();
        write_report_file(&inside, b"text", Some(&nobody)).unwrap();
        let written = fs::metadata(&inside).unwrap();
        assert_eq!((written.uid(), written.gid()), (NOBODY_UID, NOBODY_UID));
        // Writing the file as another user did not change the user of this thread.
        assert!(geteuid().is_root());
    }
}
