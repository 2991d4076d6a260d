//! The process at the other end of a unix socket.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::Tenant;

/// `SO_PEERPIDFD` of Linux 6.5. The C library does not define `SO_PEERPIDFD` yet.
const SO_PEERPIDFD: libc::c_int = 77;

/// What is known of the process that connected to a unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerProcess {
    /// The tenant that the requests of the process count for.
    pub tenant: Tenant,
    /// Whether the client is in the user namespace of this process.
    pub shares_user_namespace: bool,
}

/// A handle of the process that connected to a unix socket.
#[derive(Debug)]
pub struct PeerHandle(OwnedFd);

impl PeerHandle {
    /// Opens a handle of the process that connected. Returns `None` if the kernel cannot identify the process: before Linux
    /// 6.5. Returns an error of the kind `ConnectionAborted` if the process has exited.
    pub fn open(socket: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        match open_peer(socket) {
            Ok(handle) => Ok(Some(Self(handle))),
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
            Err(_) => Err(exited_error()),
        }
    }

    /// Reads what is known of the process. Returns an error of the kind `ConnectionAborted` if the process has
    /// exited.
    pub fn read(&self) -> io::Result<PeerProcess> {
        let pid = pid_of(&self.0).ok_or_else(exited_error)?;
        let own = fs::metadata("/proc/self/ns/user")?.ino();
        let namespace = fs::metadata(format!("/proc/{pid}/ns/user")).map_err(|_| exited_error())?;
        let tenant = Tenant::of_pid(pid).map_err(|_| exited_error())?;
        // If the client still runs, its pid was not reused while `/proc` was read.
        if pid_of(&self.0) != Some(pid) {
            return Err(exited_error());
        }
        Ok(PeerProcess {
            tenant,
            shares_user_namespace: namespace.ino() == own,
        })
    }
}

fn exited_error() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

fn open_peer(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut descriptor: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes one descriptor of this length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut length,
        )
    };
    match result {
        // SAFETY: the kernel has just opened this descriptor for this process.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The pid of a process, if it runs and has a pid in the namespace of this process.
fn pid_of(handle: &OwnedFd) -> Option<u32> {
    let path = format!("/proc/self/fdinfo/{}", handle.as_raw_fd());
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    let pid = lines.find_map(|line| line.strip_prefix("Pid:"))?;
    // The pid in `fdinfo` is -1 if the process has exited, and 0 if it is in another pid namespace.
    pid.trim().parse().ok().filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::Command;

    use super::*;

    #[test]
    fn the_process_that_connected_is_identified() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let Some(handle) = PeerHandle::open(accepted.as_fd()).unwrap() else {
            return; // a kernel before 6.5
        };
        let peer = handle.read().unwrap();
        assert!(peer.shares_user_namespace);
        assert_eq!(peer.tenant, Tenant::of_pid(std::process::id()).unwrap());
    }

    #[test]
    fn a_process_that_has_exited_is_not_identified() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])";
        let Ok(status) = Command::new("python3")
            .args(["-c", connect])
            .arg(&path)
            .status()
        else {
            return; // no Python here
        };
        assert!(status.success());
        let (accepted, _) = listener.accept().unwrap();
        let error = match PeerHandle::open(accepted.as_fd()) {
            Ok(None) => return, // a kernel before 6.5
            Ok(Some(handle)) => handle.read().unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }
}
