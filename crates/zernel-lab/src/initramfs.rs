//! The files of a guest: a list made on the host, written as a cpio archive that the kernel unpacks.
//!
//! The list holds paths, not contents, so that a large program costs memory only while it is copied.
//! The same list gives the same bytes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use thiserror::Error;

use crate::cpio::CpioWriter;
pub use crate::program::ProgramError;
use crate::program::{loader, needs};

/// The loader's index of libraries; without it the guest would not find those outside the default folders.
const LOADER_INDEX: &str = "/etc/ld.so.cache";
/// Folders that the loader searches without its index. The index lists all libraries of a machine, so a guest that gets
/// it is not the same on another machine.
const LOADER_FOLDERS: [&str; 6] = [
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
        /// The path as it was given.
        path: PathBuf,
    },
    /// Two entries want the same path, or one needs a folder where the other is a file.
    #[error("{path} is in the guest already and is not of the same kind", path = path.display())]
    Conflict {
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
    Unreadable {
        /// The path on this machine.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The needs of a program could not be determined.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The archive could not be written.
    #[error("cannot write the initramfs: {0}; is the disk full?")]
    Write(#[source] io::Error),
}

/// What a guest sees in its root folder.
#[derive(Debug, Clone, Default)]
pub struct Initramfs {
    /// By path in the guest. Paths order by component, so a folder comes before what is in it.
    entries: BTreeMap<PathBuf, Entry>,
}

#[derive(Debug, Clone)]
enum Entry {
    Directory { mode: u32 },
    HostFile { host: PathBuf, mode: u32 },
    Bytes { content: Vec<u8>, mode: u32 },
    Symlink { target: PathBuf },
}

impl Entry {
    fn is_directory(&self) -> bool {
        matches!(self, Self::Directory { .. })
    }
}

impl Initramfs {
    /// A guest without any file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the guest has something at this path.
    pub fn contains(&self, guest: impl AsRef<Path>) -> bool {
        self.entries.contains_key(guest.as_ref())
    }

    /// An empty folder with the given mode, and its parents.
    pub fn add_directory(
        &mut self,
        guest: impl AsRef<Path>,
        mode: u32,
    ) -> Result<(), InitramfsError> {
        self.insert(guest.as_ref(), Entry::Directory { mode })
    }

    /// A file with this content.
    pub fn add_bytes(
        &mut self,
        guest: impl AsRef<Path>,
        content: impl Into<Vec<u8>>,
        mode: u32,
    ) -> Result<(), InitramfsError> {
        self.insert(
            guest.as_ref(),
            Entry::Bytes {
                content: content.into(),
                mode,
            },
        )
    }

    /// A symbolic link; the target is not checked.
    pub fn add_symlink(
        &mut self,
        guest: impl AsRef<Path>,
        target: impl Into<PathBuf>,
    ) -> Result<(), InitramfsError> {
        self.insert(
            guest.as_ref(),
            Entry::Symlink {
                target: target.into(),
            },
        )
    }

    /// A copy of a file of this machine, with its mode. Symbolic links on this machine are followed.
    pub fn add_file(
        &mut self,
        host: impl AsRef<Path>,
        guest: impl AsRef<Path>,
    ) -> Result<(), InitramfsError> {
        let host = host.as_ref();
        let unreadable = |source| InitramfsError::Unreadable {
            path: host.to_owned(),
            source,
        };
        let metadata = fs::metadata(host).map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(InitramfsError::NotAFile {
                path: host.to_owned(),
            });
        }
        let host = std::path::absolute(host).map_err(unreadable)?;
        let mode = metadata.permissions().mode() & 0o7777;
        self.insert(guest.as_ref(), Entry::HostFile { host, mode })
    }

    /// An executable of this machine, at the same path, with the loader and the libraries it needs.
    pub fn add_program(&mut self, host: impl AsRef<Path>) -> Result<(), InitramfsError> {
        let host =
            std::path::absolute(host.as_ref()).map_err(|source| InitramfsError::Unreadable {
                path: host.as_ref().to_owned(),
                source,
            })?;
        self.add_program_at(&host, &host)
    }

    /// An executable of this machine, at another path, with the loader and the libraries it needs.
    pub fn add_program_at(
        &mut self,
        host: impl AsRef<Path>,
        guest: impl AsRef<Path>,
    ) -> Result<(), InitramfsError> {
        let needs = needs(host.as_ref())?;
        if needs.iter().any(|path| needs_index(path)) && Path::new(LOADER_INDEX).is_file() {
            self.add_file(LOADER_INDEX, LOADER_INDEX)?;
        }
        for path in &needs {
            self.add_file(path, path)?;
        }
        self.add_file(host, guest)
    }

    /// A file of this machine, at the same path; a program comes with the loader and the libraries it needs.
    pub fn add_same(&mut self, host: impl AsRef<Path>) -> Result<(), InitramfsError> {
        let host = host.as_ref();
        let path = std::path::absolute(host).map_err(|source| InitramfsError::Unreadable {
            path: host.to_owned(),
            source,
        })?;
        match loader(&path) {
            Ok(Some(_)) => self.add_program(path),
            // A script, a library, data; or a folder, which is refused.
            Ok(None) | Err(ProgramError::NotAnExecutable { .. }) => self.add_file(&path, &path),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the archive.
    pub fn write_to(&self, sink: impl Write) -> Result<(), InitramfsError> {
        let mut writer = CpioWriter::new(sink);
        for (guest, entry) in &self.entries {
            write_entry(&mut writer, guest, entry)?;
        }
        writer.finish().map(drop).map_err(InitramfsError::Write)
    }

    fn insert(&mut self, guest: &Path, entry: Entry) -> Result<(), InitramfsError> {
        if !is_plain_absolute(guest) {
            return Err(InitramfsError::BadGuestPath {
                path: guest.to_owned(),
            });
        }
        if let Some(existing) = self.entries.get(guest)
            && existing.is_directory() != entry.is_directory()
        {
            return Err(InitramfsError::Conflict {
                path: guest.to_owned(),
            });
        }
        if let Some(parent) = parents(guest).find(|parent| self.is_something_else(parent)) {
            return Err(InitramfsError::Conflict {
                path: parent.to_owned(),
            });
        }
        for parent in parents(guest) {
            self.entries
                .entry(parent.to_owned())
                .or_insert(Entry::Directory { mode: 0o755 });
        }
        self.entries.insert(guest.to_owned(), entry);
        Ok(())
    }

    /// Whether the path is taken by something that is not a folder.
    fn is_something_else(&self, guest: &Path) -> bool {
        self.entries
            .get(guest)
            .is_some_and(|entry| !entry.is_directory())
    }
}

/// Whether the loader finds a library only by its index.
fn needs_index(library: &Path) -> bool {
    let is_searched = |folder: &Path| {
        LOADER_FOLDERS
            .iter()
            .any(|known| folder == Path::new(known))
    };
    !library.parent().is_some_and(is_searched)
}

/// The folders a path lies in, without the root itself.
fn parents(path: &Path) -> impl Iterator<Item = &Path> {
    path.ancestors()
        .skip(1)
        .filter(|parent| parent.parent().is_some())
}

/// Whether a path starts at the root, goes only downwards, and names something below the root.
fn is_plain_absolute(path: &Path) -> bool {
    let mut components = path.components();
    components.next() == Some(Component::RootDir)
        && components.clone().next().is_some()
        && components.all(|component| matches!(component, Component::Normal(_)))
}

fn write_entry<W: Write>(
    writer: &mut CpioWriter<W>,
    guest: &Path,
    entry: &Entry,
) -> Result<(), InitramfsError> {
    let name = guest
        .strip_prefix("/")
        .unwrap_or(guest)
        .as_os_str()
        .as_bytes();
    match entry {
        Entry::Directory { mode } => writer.directory(name, *mode),
        Entry::Symlink { target } => writer.symlink(name, target.as_os_str().as_bytes()),
        Entry::Bytes { content, mode } => {
            writer.file(name, *mode, content.len() as u64, &mut content.as_slice())
        }
        Entry::HostFile { host, mode } => return copy_host_file(writer, name, host, *mode),
    }
    .map_err(InitramfsError::Write)
}

fn copy_host_file<W: Write>(
    writer: &mut CpioWriter<W>,
    name: &[u8],
    host: &Path,
    mode: u32,
) -> Result<(), InitramfsError> {
    let unreadable = |source| InitramfsError::Unreadable {
        path: host.to_owned(),
        source,
    };
    let mut file = File::open(host).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    writer.file(name, mode, size, &mut file).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpio::tests::read;

    fn written(initramfs: &Initramfs) -> Vec<u8> {
        let mut archive = Vec::new();
        initramfs.write_to(&mut archive).unwrap();
        archive
    }

    fn sample() -> Initramfs {
        let mut initramfs = Initramfs::new();
        initramfs.add_bytes("/a/b/file", "content", 0o600).unwrap();
        initramfs.add_symlink("/a/link", "b/file").unwrap();
        initramfs.add_directory("/tmp", 0o1777).unwrap();
        initramfs.add_program("/bin/cat").unwrap();
        initramfs
    }

    #[test]
    fn folders_come_before_their_contents() {
        let entries = read(&written(&sample()));
        let position = |name: &str| entries.iter().position(|entry| entry.name == name).unwrap();
        assert!(position("a") < position("a/b"));
        assert!(position("a/b") < position("a/b/file"));
        assert_eq!(entries[position("a/b")].mode, 0o040_755);
        assert_eq!(entries[position("a/b/file")].mode, 0o100_600);
        assert_eq!(entries[position("tmp")].mode, 0o041_777);
        assert_eq!(entries[position("a/link")].content, b"b/file");
    }

    #[test]
    fn a_program_is_copied_whole_at_the_same_path() {
        let entries = read(&written(&sample()));
        let copied = entries
            .iter()
            .find(|entry| entry.name == "bin/cat")
            .unwrap();
        assert_eq!(copied.content, fs::read("/bin/cat").unwrap());
        assert_eq!(copied.mode & 0o111, 0o111);
    }

    #[test]
    fn any_file_is_taken_along_and_a_program_with_its_libraries() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let mut initramfs = Initramfs::new();
        initramfs.add_same(&script).unwrap();
        initramfs.add_same("/bin/cat").unwrap();
        let entries = read(&written(&initramfs));
        let name = script.strip_prefix("/").unwrap().to_str().unwrap();
        let copied = entries.iter().find(|entry| entry.name == name).unwrap();
        assert_eq!(copied.content, b"#!/bin/sh\n");
        assert_eq!(copied.mode, 0o100_755);
        for library in needs(Path::new("/bin/cat")).unwrap() {
            assert!(initramfs.contains(&library), "{}", library.display());
        }
        assert!(matches!(
            initramfs.add_same(folder.path()),
            Err(InitramfsError::NotAFile { .. })
        ));
        let error = initramfs.add_same("/no/such/file").unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
    }

    #[test]
    fn the_same_list_gives_the_same_bytes_in_any_order() {
        let mut backwards = Initramfs::new();
        backwards.add_program("/bin/cat").unwrap();
        backwards.add_directory("/tmp", 0o1777).unwrap();
        backwards.add_symlink("/a/link", "b/file").unwrap();
        backwards.add_bytes("/a/b/file", "content", 0o600).unwrap();
        assert_eq!(written(&sample()), written(&backwards));
    }

    #[test]
    fn paths_that_leave_the_guest_are_refused() {
        let mut initramfs = Initramfs::new();
        for path in ["relative", "/", "/../up", "/a/../../b", ""] {
            let error = initramfs.add_bytes(path, "", 0o644).unwrap_err();
            assert!(
                matches!(error, InitramfsError::BadGuestPath { .. }),
                "{path}: {error}"
            );
        }
    }

    #[test]
    fn a_file_cannot_become_a_folder() {
        let mut initramfs = Initramfs::new();
        initramfs.add_bytes("/a", "", 0o644).unwrap();
        assert!(matches!(
            initramfs.add_bytes("/a/b", "", 0o644),
            Err(InitramfsError::Conflict { .. })
        ));
        assert!(matches!(
            initramfs.add_directory("/a", 0o755),
            Err(InitramfsError::Conflict { .. })
        ));
    }

    #[test]
    fn a_missing_file_and_a_folder_are_named_in_the_error() {
        let mut initramfs = Initramfs::new();
        let error = initramfs.add_file("/no/such/file", "/file").unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
        assert!(matches!(
            initramfs.add_file("/proc", "/file"),
            Err(InitramfsError::NotAFile { .. })
        ));
    }
}
