//! The files of a guest: a list that the host makes, written as a cpio archive that the kernel unpacks.
//!
//! The list holds paths, not contents, so that a large program costs memory only while it is copied. The same list
//! gives the same archive.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use thiserror::Error;

use crate::cpio::CpioWriter;
pub use crate::program_dependencies::ProgramError;
use crate::program_dependencies::{dynamic_loader, needed_files};

/// The dynamic loader's index of libraries. Without it the guest would not find libraries outside the default folders.
const LOADER_INDEX_PATH: &str = "/etc/ld.so.cache";
/// Folders that the dynamic loader searches without its index. The index lists all libraries of a machine, so a guest
/// that gets it is not the same on another machine.
const LOADER_DEFAULT_FOLDERS: [&str; 6] = [
    "/lib",
    "/usr/lib",
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
];

/// Why a file could not be put into the guest.
#[derive(Debug, Error)]
pub enum InitramfsError {
    /// A path inside the guest is relative, goes upwards, or names nothing.
    #[error("{path} cannot be a path in the guest; give an absolute one without `..`", path = path.display())]
    BadGuestPath {
        /// The path that the caller gave.
        path: PathBuf,
    },
    /// Two entries of the list have the same path, or one needs a folder where the other is a file.
    #[error("{path} is in the guest already and is not of the same kind", path = path.display())]
    PathConflict {
        /// The path in the guest.
        path: PathBuf,
    },
    /// A file of this machine is not a regular file.
    #[error("{path} is not a regular file; only those can be copied into the guest", path = path.display())]
    NotAFile {
        /// The path on this machine.
        path: PathBuf,
    },
    /// A file of this machine could not be read.
    #[error("cannot copy {path} into the guest: {source}", path = path.display())]
    HostFileUnreadable {
        /// The path of the file on this machine.
        path: PathBuf,
        /// The error of reading the file.
        source: io::Error,
    },
    /// The loader and libraries that a program needs could not be determined.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The archive could not be written.
    #[error("cannot write the initramfs: {0}; is the disk full?")]
    WriteFailed(#[source] io::Error),
}

/// The files and folders that a guest sees in its root folder.
#[derive(Debug, Clone, Default)]
pub struct Initramfs {
    /// The entries by their path in the guest. Paths are ordered by component, so a folder comes before what is in it.
    entries: BTreeMap<PathBuf, InitramfsEntry>,
}

#[derive(Debug, Clone)]
enum InitramfsEntry {
    Directory { mode: u32 },
    HostFile { host_path: PathBuf, mode: u32 },
    Bytes { content: Vec<u8>, mode: u32 },
    Symlink { target: PathBuf },
}

impl InitramfsEntry {
    fn is_directory(&self) -> bool {
        matches!(self, Self::Directory { .. })
    }
}

impl Initramfs {
    /// A root folder without any file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the guest has a file or a folder at this path.
    pub fn contains_path(&self, guest_path: impl AsRef<Path>) -> bool {
        self.entries.contains_key(guest_path.as_ref())
    }

    /// Adds an empty folder with the given mode, and its parents.
    pub fn add_directory(
        &mut self,
        guest_path: impl AsRef<Path>,
        mode: u32,
    ) -> Result<(), InitramfsError> {
        self.insert_entry(guest_path.as_ref(), InitramfsEntry::Directory { mode })
    }

    /// Adds a file with this content.
    pub fn add_file_with_content(
        &mut self,
        guest_path: impl AsRef<Path>,
        content: impl Into<Vec<u8>>,
        mode: u32,
    ) -> Result<(), InitramfsError> {
        self.insert_entry(
            guest_path.as_ref(),
            InitramfsEntry::Bytes {
                content: content.into(),
                mode,
            },
        )
    }

    /// Adds a symbolic link. Its target is not checked.
    pub fn add_symlink(
        &mut self,
        guest_path: impl AsRef<Path>,
        target: impl Into<PathBuf>,
    ) -> Result<(), InitramfsError> {
        self.insert_entry(
            guest_path.as_ref(),
            InitramfsEntry::Symlink {
                target: target.into(),
            },
        )
    }

    /// Adds a copy of a file of this machine, with its mode. Symbolic links on this machine are followed.
    pub fn add_host_file(
        &mut self,
        host_path: impl AsRef<Path>,
        guest_path: impl AsRef<Path>,
    ) -> Result<(), InitramfsError> {
        let host_path = host_path.as_ref();
        let unreadable = |source| InitramfsError::HostFileUnreadable {
            path: host_path.to_owned(),
            source,
        };
        let metadata = fs::metadata(host_path).map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(InitramfsError::NotAFile {
                path: host_path.to_owned(),
            });
        }
        let host_path = std::path::absolute(host_path).map_err(unreadable)?;
        let mode = metadata.permissions().mode() & 0o7777;
        self.insert_entry(
            guest_path.as_ref(),
            InitramfsEntry::HostFile { host_path, mode },
        )
    }

    /// Adds an executable of this machine at the same path, with the loader and the libraries that it needs.
    pub fn add_program(&mut self, host_path: impl AsRef<Path>) -> Result<(), InitramfsError> {
        let host_path = std::path::absolute(host_path.as_ref()).map_err(|source| {
            InitramfsError::HostFileUnreadable {
                path: host_path.as_ref().to_owned(),
                source,
            }
        })?;
        self.add_program_at(&host_path, &host_path)
    }

    /// Adds an executable of this machine at another path, with the loader and the libraries that it needs.
    pub fn add_program_at(
        &mut self,
        host_path: impl AsRef<Path>,
        guest_path: impl AsRef<Path>,
    ) -> Result<(), InitramfsError> {
        let required_files = needed_files(host_path.as_ref())?;
        if required_files.iter().any(|path| needs_loader_index(path))
            && Path::new(LOADER_INDEX_PATH).is_file()
        {
            self.add_host_file(LOADER_INDEX_PATH, LOADER_INDEX_PATH)?;
        }
        for path in &required_files {
            self.add_host_file(path, path)?;
        }
        self.add_host_file(host_path, guest_path)
    }

    /// Adds a file of this machine at the same path; a program comes with the loader and the libraries that it needs.
    pub fn add_at_same_path(&mut self, host_path: impl AsRef<Path>) -> Result<(), InitramfsError> {
        let host_path = host_path.as_ref();
        let path = std::path::absolute(host_path).map_err(|source| {
            InitramfsError::HostFileUnreadable {
                path: host_path.to_owned(),
                source,
            }
        })?;
        match dynamic_loader(&path) {
            Ok(Some(_)) => self.add_program(path),
            // The file is not an executable: a script, a library or data is copied, a folder is refused.
            Ok(None) | Err(ProgramError::NotAnExecutable { .. }) => {
                self.add_host_file(&path, &path)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Writes all entries as a cpio archive.
    pub fn write_archive_to(&self, output: impl Write) -> Result<(), InitramfsError> {
        let mut writer = CpioWriter::new(output);
        for (guest_path, entry) in &self.entries {
            write_entry(&mut writer, guest_path, entry)?;
        }
        writer
            .finish_archive()
            .map(drop)
            .map_err(InitramfsError::WriteFailed)
    }

    fn insert_entry(
        &mut self,
        guest_path: &Path,
        entry: InitramfsEntry,
    ) -> Result<(), InitramfsError> {
        if !is_valid_guest_path(guest_path) {
            return Err(InitramfsError::BadGuestPath {
                path: guest_path.to_owned(),
            });
        }
        if let Some(existing) = self.entries.get(guest_path)
            && existing.is_directory() != entry.is_directory()
        {
            return Err(InitramfsError::PathConflict {
                path: guest_path.to_owned(),
            });
        }
        if let Some(parent) =
            parent_folders(guest_path).find(|parent| self.is_taken_by_a_non_folder(parent))
        {
            return Err(InitramfsError::PathConflict {
                path: parent.to_owned(),
            });
        }
        for parent in parent_folders(guest_path) {
            self.entries
                .entry(parent.to_owned())
                .or_insert(InitramfsEntry::Directory { mode: 0o755 });
        }
        self.entries.insert(guest_path.to_owned(), entry);
        Ok(())
    }

    /// Whether the path is already that of an entry which is not a folder.
    fn is_taken_by_a_non_folder(&self, guest_path: &Path) -> bool {
        self.entries
            .get(guest_path)
            .is_some_and(|entry| !entry.is_directory())
    }
}

/// Whether the dynamic loader finds this library only by its index.
fn needs_loader_index(library: &Path) -> bool {
    let is_searched = |folder: &Path| {
        LOADER_DEFAULT_FOLDERS
            .iter()
            .any(|known| folder == Path::new(known))
    };
    !library.parent().is_some_and(is_searched)
}

/// The folders that contain a path, without the root itself.
fn parent_folders(path: &Path) -> impl Iterator<Item = &Path> {
    path.ancestors()
        .skip(1)
        .filter(|parent| parent.parent().is_some())
}

/// Whether a path starts at the root, never goes upwards, and names something below the root.
fn is_valid_guest_path(path: &Path) -> bool {
    let mut components = path.components();
    components.next() == Some(Component::RootDir)
        && components.clone().next().is_some()
        && components.all(|component| matches!(component, Component::Normal(_)))
}

fn write_entry<W: Write>(
    writer: &mut CpioWriter<W>,
    guest_path: &Path,
    entry: &InitramfsEntry,
) -> Result<(), InitramfsError> {
    let name = guest_path
        .strip_prefix("/")
        .unwrap_or(guest_path)
        .as_os_str()
        .as_bytes();
    match entry {
        InitramfsEntry::Directory { mode } => writer.write_directory(name, *mode),
        InitramfsEntry::Symlink { target } => {
            writer.write_symlink(name, target.as_os_str().as_bytes())
        }
        InitramfsEntry::Bytes { content, mode } => {
            writer.write_file(name, *mode, content.len() as u64, &mut content.as_slice())
        }
        InitramfsEntry::HostFile { host_path, mode } => {
            return copy_host_file(writer, name, host_path, *mode);
        }
    }
    .map_err(InitramfsError::WriteFailed)
}

fn copy_host_file<W: Write>(
    writer: &mut CpioWriter<W>,
    name: &[u8],
    host_path: &Path,
    mode: u32,
) -> Result<(), InitramfsError> {
    let unreadable = |source| InitramfsError::HostFileUnreadable {
        path: host_path.to_owned(),
        source,
    };
    let mut file = File::open(host_path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    writer
        .write_file(name, mode, size, &mut file)
        .map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpio::tests::read_archive;

    fn archive_bytes(initramfs: &Initramfs) -> Vec<u8> {
        let mut archive = Vec::new();
        initramfs.write_archive_to(&mut archive).unwrap();
        archive
    }

    fn sample_initramfs() -> Initramfs {
        let mut initramfs = Initramfs::new();
        initramfs
            .add_file_with_content("/a/b/file", "content", 0o600)
            .unwrap();
        initramfs.add_symlink("/a/link", "b/file").unwrap();
        initramfs.add_directory("/tmp", 0o1777).unwrap();
        initramfs.add_program("/bin/cat").unwrap();
        initramfs
    }

    #[test]
    fn archive_lists_folders_before_contents() {
        let entries = read_archive(&archive_bytes(&sample_initramfs()));
        let position = |name: &str| entries.iter().position(|entry| entry.name == name).unwrap();
        assert!(position("a") < position("a/b"));
        assert!(position("a/b") < position("a/b/file"));
        assert_eq!(entries[position("a/b")].mode, 0o040_755);
        assert_eq!(entries[position("a/b/file")].mode, 0o100_600);
        assert_eq!(entries[position("tmp")].mode, 0o041_777);
        assert_eq!(entries[position("a/link")].content, b"b/file");
    }

    #[test]
    fn program_is_copied_to_same_guest_path() {
        let entries = read_archive(&archive_bytes(&sample_initramfs()));
        let copied = entries
            .iter()
            .find(|entry| entry.name == "bin/cat")
            .unwrap();
        assert_eq!(copied.content, fs::read("/bin/cat").unwrap());
        assert_eq!(copied.mode & 0o111, 0o111);
    }

    #[test]
    fn add_at_same_path_adds_libraries_of_programs() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let mut initramfs = Initramfs::new();
        initramfs.add_at_same_path(&script).unwrap();
        initramfs.add_at_same_path("/bin/cat").unwrap();
        let entries = read_archive(&archive_bytes(&initramfs));
        let name = script.strip_prefix("/").unwrap().to_str().unwrap();
        let copied = entries.iter().find(|entry| entry.name == name).unwrap();
        assert_eq!(copied.content, b"#!/bin/sh\n");
        assert_eq!(copied.mode, 0o100_755);
        for library in needed_files(Path::new("/bin/cat")).unwrap() {
            assert!(initramfs.contains_path(&library), "{}", library.display());
        }
        assert!(matches!(
            initramfs.add_at_same_path(folder.path()),
            Err(InitramfsError::NotAFile { .. })
        ));
        let error = initramfs.add_at_same_path("/no/such/file").unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
    }

    #[test]
    fn archive_bytes_do_not_depend_on_insertion_order() {
        let mut added_in_reverse_order = Initramfs::new();
        added_in_reverse_order.add_program("/bin/cat").unwrap();
        added_in_reverse_order
            .add_directory("/tmp", 0o1777)
            .unwrap();
        added_in_reverse_order
            .add_symlink("/a/link", "b/file")
            .unwrap();
        added_in_reverse_order
            .add_file_with_content("/a/b/file", "content", 0o600)
            .unwrap();
        assert_eq!(
            archive_bytes(&sample_initramfs()),
            archive_bytes(&added_in_reverse_order)
        );
    }

    #[test]
    fn invalid_guest_paths_are_refused() {
        let mut initramfs = Initramfs::new();
        for path in ["relative", "/", "/../up", "/a/../../b", ""] {
            let error = initramfs
                .add_file_with_content(path, "", 0o644)
                .unwrap_err();
            assert!(
                matches!(error, InitramfsError::BadGuestPath { .. }),
                "{path}: {error}"
            );
        }
    }

    #[test]
    fn file_and_folder_at_one_path_conflict() {
        let mut initramfs = Initramfs::new();
        initramfs.add_file_with_content("/a", "", 0o644).unwrap();
        assert!(matches!(
            initramfs.add_file_with_content("/a/b", "", 0o644),
            Err(InitramfsError::PathConflict { .. })
        ));
        assert!(matches!(
            initramfs.add_directory("/a", 0o755),
            Err(InitramfsError::PathConflict { .. })
        ));
    }

    #[test]
    fn missing_host_file_and_host_folder_are_errors() {
        let mut initramfs = Initramfs::new();
        let error = initramfs
            .add_host_file("/no/such/file", "/file")
            .unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
        assert!(matches!(
            initramfs.add_host_file("/proc", "/file"),
            Err(InitramfsError::NotAFile { .. })
        ));
    }
}
