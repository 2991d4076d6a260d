//! Notifications to a service manager, by systemd's protocol: that the daemon serves, and that it still works.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// The service manager that started the daemon.
pub(crate) struct ServiceManager {
    socket: OsString,
    watchdog: Option<ServiceWatchdog>,
}

/// The watchdog of the service manager, which restarts the daemon unless it is notified in time.
struct ServiceWatchdog {
    /// Time between notifications: half of the time that the manager waits.
    interval: Duration,
    last_notified: Option<Instant>,
}

impl ServiceManager {
    /// The manager that the environment names.
    pub(crate) fn from_environment() -> Option<Self> {
        let variable = |name| env::var(name).ok();
        let is_for_us =
            variable("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        let limit = variable("WATCHDOG_USEC").and_then(|limit| limit.parse().ok());
        let limit = limit.filter(|limit| is_for_us && *limit > 0);
        Some(Self::new(env::var_os("NOTIFY_SOCKET")?, limit))
    }

    fn new(socket: OsString, watchdog_us: Option<u64>) -> Self {
        let watchdog = watchdog_us.map(|limit| ServiceWatchdog {
            interval: Duration::from_micros(limit) / 2,
            last_notified: None,
        });
        Self { socket, watchdog }
    }

    /// Notifies the manager that the daemon serves.
    pub(crate) fn notify_ready(&self) -> io::Result<()> {
        send_notification(&self.socket, b"READY=1")
    }

    /// Notifies the manager that the daemon still works, if a notification is due. Call this function often, and only
    /// while the daemon works.
    pub(crate) fn notify_watchdog_if_due(&mut self) -> io::Result<()> {
        let Some(watchdog) = &mut self.watchdog else {
            return Ok(());
        };
        if watchdog
            .last_notified
            .is_some_and(|last| last.elapsed() < watchdog.interval)
        {
            return Ok(());
        }
        watchdog.last_notified = Some(Instant::now());
        send_notification(&self.socket, b"WATCHDOG=1")
    }
}

fn send_notification(socket: &OsStr, message: &[u8]) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let client = UnixDatagram::unbound()?;
    // A manager that reads nothing must not block the daemon.
    client.set_nonblocking(true)?;
    client.send_to_addr(message, &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake_manager() -> (tempfile::TempDir, UnixDatagram, OsString) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        (folder, socket, path.into_os_string())
    }

    fn received_message(manager: &UnixDatagram) -> Option<String> {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).ok()?;
        Some(String::from_utf8(message[..length].to_vec()).unwrap())
    }

    #[test]
    fn a_service_manager_is_notified() {
        let (_folder, socket, path) = fake_manager();
        ServiceManager::new(path, None).notify_ready().unwrap();
        assert_eq!(received_message(&socket).as_deref(), Some("READY=1"));
    }

    #[test]
    fn an_abstract_socket_is_notified() {
        let name = format!("zernel-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        let manager = ServiceManager::new(format!("@{name}").into(), None);
        manager.notify_ready().unwrap();
        assert_eq!(received_message(&socket).as_deref(), Some("READY=1"));
    }

    #[test]
    fn a_missing_socket_is_an_error() {
        let manager = ServiceManager::new("/nowhere/notify".into(), None);
        assert!(manager.notify_ready().is_err());
    }

    #[test]
    fn a_watchdog_is_notified_twice_in_its_time() {
        let (_folder, socket, path) = fake_manager();
        let mut manager = ServiceManager::new(path.clone(), Some(3_600_000_000));
        for _ in 0..10 {
            manager.notify_watchdog_if_due().unwrap();
        }
        assert_eq!(received_message(&socket).as_deref(), Some("WATCHDOG=1"));
        assert_eq!(received_message(&socket), None);
        let watchdog = manager.watchdog.as_mut().unwrap();
        assert_eq!(watchdog.interval, Duration::from_secs(1800));
        watchdog.last_notified = Instant::now().checked_sub(watchdog.interval);
        manager.notify_watchdog_if_due().unwrap();
        assert_eq!(received_message(&socket).as_deref(), Some("WATCHDOG=1"));
        // Without a watchdog there is nothing to notify.
        ServiceManager::new(path, None)
            .notify_watchdog_if_due()
            .unwrap();
        assert_eq!(received_message(&socket), None);
    }
}
