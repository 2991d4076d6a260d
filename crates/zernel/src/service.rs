//! What a service manager is told: systemd's notification protocol, of which only readiness is used.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells whoever started us, if they want to know, that the daemon serves. An error is theirs to notice: they wait.
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
    fn a_manager_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        notify(path.as_os_str()).unwrap();
        assert_eq!(received(&manager), "READY=1");
    }

    #[test]
    fn a_manager_may_have_an_abstract_name() {
        let name = format!("zernel-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        notify(OsStr::new(&format!("@{name}"))).unwrap();
        assert_eq!(received(&manager), "READY=1");
    }

    #[test]
    fn a_manager_that_is_gone_is_an_error() {
        assert!(notify(OsStr::new("/nowhere/notify")).is_err());
    }

    fn received(manager: &UnixDatagram) -> String {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    }
}
