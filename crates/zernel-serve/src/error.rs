//! Errors that keep a server from starting.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The reason why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// With these options, other machines could read everything without a token.
    #[error(
        "cannot expose everything on {address}, because other machines can reach it; use --expose token, or listen \
         on 127.0.0.1"
    )]
    ExposedWithoutToken {
        /// The requested address.
        address: SocketAddr,
    },
    /// With these options, no client could see any process.
    #[error(
        "there is no token, so no TCP client could see a process; set a token file, or use --expose all"
    )]
    TokenRequired,
    /// Another process listens on the port.
    #[error(
        "cannot listen on {address}: the port is in use, perhaps by another zernel observe; stop it, or choose \
         another port"
    )]
    PortInUse {
        /// The requested address.
        address: SocketAddr,
    },
    /// The system refused the address.
    #[error("cannot listen on {address}: {source}")]
    CannotListen {
        /// The requested address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// Another daemon listens on the socket.
    #[error(
        "cannot listen on {}: another daemon listens there; stop it, or choose another path", path.display()
    )]
    SocketInUse {
        /// The requested path.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("cannot listen on {}: the path exists and is not a socket; remove it, or choose another path", path.display())]
    NotASocket {
        /// The requested path.
        path: PathBuf,
    },
    /// The system refused the path.
    #[error("cannot listen on {}: {source}", path.display())]
    CannotBindSocket {
        /// The requested path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A configured host is not a valid host name or address.
    #[error("{name:?} is not a host name or address; give it without scheme and port")]
    InvalidHost {
        /// The configured host.
        name: String,
    },
    /// The interval between snapshots is zero.
    #[error("the interval between snapshots is 0; set a longer one")]
    ZeroInterval,
    /// The asynchronous runtime does not start.
    #[error("cannot start serving: {0}")]
    CannotStartRuntime(#[from] io::Error),
}
