//! The file of the unix socket: created when the server binds, removed when it stops.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::ServeError;

/// A unix socket file, removed on drop unless another process has replaced it.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    device_and_inode: (u64, u64),
}

impl SocketFile {
    /// Binds a listener to `path` that every user may connect to. Replaces a stale socket, which
    /// has no listener.
    pub(crate) fn bind_listener(path: &Path) -> Result<(UnixListener, Self), ServeError> {
        let refused = |source| ServeError::CannotBindSocket {
            path: path.to_owned(),
            source,
        };
        create_parent_folder(path).map_err(refused)?;
        remove_stale_socket(path)?;
        let listener = UnixListener::bind(path).map_err(|source| match source.kind() {
            // Another daemon bound the path first.
            ErrorKind::AddrInUse => ServeError::SocketInUse {
                path: path.to_owned(),
            },
            _ => refused(source),
        })?;
        let device_and_inode = device_and_inode(path).map_err(refused)?;
        let file = Self {
            path: path.to_owned(),
            device_and_inode,
        };
        fs::set_permissions(path, Permissions::from_mode(0o666)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        Ok((listener, file))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if device_and_inode(&self.path).is_ok_and(|current| current == self.device_and_inode) {
            // If removal fails, the next daemon finds no listener and replaces the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn device_and_inode(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

fn create_parent_folder(path: &Path) -> io::Result<()> {
    let Some(folder) = path.parent().filter(|folder| !folder.exists()) else {
        return Ok(());
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)?;
    // The umask may have cleared bits.
    fs::set_permissions(folder, Permissions::from_mode(0o755))
}

/// Removes a socket without a listener. A file at `path` that is no socket is an error.
fn remove_stale_socket(path: &Path) -> Result<(), ServeError> {
    let path_owned = || path.to_owned();
    let refused = |source| ServeError::CannotBindSocket {
        path: path_owned(),
        source,
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(refused(error)),
        Ok(there) if !there.file_type().is_socket() => {
            return Err(ServeError::NotASocket { path: path_owned() });
        }
        Ok(_) => {}
    }
    match is_listening(path) {
        Ok(true) => Err(ServeError::SocketInUse { path: path_owned() }),
        Ok(false) => fs::remove_file(path).map_err(refused),
        Err(error) => Err(refused(error)),
    }
}

/// Returns whether a process listens on the socket, without waiting if its backlog is full.
fn is_listening(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&client, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create_test_folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/observe.sock");
        (folder, path)
    }

    fn permissions_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn every_user_can_connect_and_the_file_is_removed_on_drop() {
        let (_folder, path) = create_test_folder();
        let (_listener, file) = SocketFile::bind_listener(&path).unwrap();
        assert_eq!(
            (
                permissions_of(&path),
                permissions_of(path.parent().unwrap())
            ),
            (0o666, 0o755)
        );
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_one_in_use_is_not() {
        let (_folder, path) = create_test_folder();
        let (listener, file) = SocketFile::bind_listener(&path).unwrap();
        let error = SocketFile::bind_listener(&path).unwrap_err();
        assert!(matches!(error, ServeError::SocketInUse { .. }), "{error}");
        assert!(path.exists());
        // The listener is closed and the file stays, as after `kill -9`.
        drop(listener);
        std::mem::forget(file);
        let (_listener, _file) = SocketFile::bind_listener(&path).unwrap();
    }

    #[test]
    fn a_daemon_with_a_full_backlog_counts_as_listening() {
        let (_folder, path) = create_test_folder();
        let (_listener, _file) = SocketFile::bind_listener(&path).unwrap();
        let mut waiting = Vec::new();
        // No process accepts connections, so the backlog of the socket fills up.
        for _ in 0..100_000 {
            let flags = SocketFlags::NONBLOCK;
            let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
            if connect(&client, &SocketAddrUnix::new(&path).unwrap()) == Err(Errno::AGAIN) {
                assert!(is_listening(&path).unwrap());
                return;
            }
            waiting.push(client);
        }
        panic!("the backlog never filled");
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_kept() {
        let (_folder, path) = create_test_folder();
        create_parent_folder(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        let error = SocketFile::bind_listener(&path).unwrap_err();
        assert!(matches!(error, ServeError::NotASocket { .. }), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn drop_keeps_a_socket_that_another_daemon_created() {
        let (_folder, path) = create_test_folder();
        let (_listener, file) = SocketFile::bind_listener(&path).unwrap();
        let elsewhere = path.with_extension("moved");
        fs::rename(&path, elsewhere).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn the_error_for_a_too_long_path_names_the_path() {
        let (folder, _) = create_test_folder();
        let path = folder.path().join("x".repeat(200));
        let error = SocketFile::bind_listener(&path).unwrap_err().to_string();
        assert!(error.contains("xxx"), "{error}");
    }
}
