//! Readiness notification to a service manager, by systemd's protocol.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Notifies the service manager, if there is one, that the daemon serves.
pub(crate) fn ready() -> io::Result<()> {
    match env::var_os("NOTIFY_SOCKET") {
        Some(socket) => notify(&socket),
        None => Ok(()),
    }
}

fn notify(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_manager_is_notified() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        notify(path.as_os_str()).unwrap();
        assert_eq!(received(&manager), "READY=1");
    }

    #[test]
    fn an_abstract_socket_is_notified() {
        let name = format!("zernel-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        notify(OsStr::new(&format!("@{name}"))).unwrap();
        assert_eq!(received(&manager), "READY=1");
    }

    #[test]
    fn a_missing_socket_is_an_error() {
        assert!(notify(OsStr::new("/nowhere/notify")).is_err());
    }

    fn received(manager: &UnixDatagram) -> String {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    }
}
