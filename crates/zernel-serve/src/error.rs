//! Why a server does not start.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Everyone on the network could read what is served.
    #[error(
        "refusing to listen on {address}, which other machines can reach, without a token: give a token file, \
         or listen on 127.0.0.1"
    )]
    TokenRequired {
        /// The address that was asked for.
        address: SocketAddr,
    },
    /// Someone else has the port.
    #[error(
        "cannot listen on {address}: the port is in use, perhaps by another zernel observe; stop that one, or choose \
         another port"
    )]
    PortInUse {
        /// The address that was asked for.
        address: SocketAddr,
    },
    /// The system refuses the address.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address that was asked for.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// A daemon answers on the socket.
    #[error(
        "cannot listen on {}: another daemon answers there; stop that one, or choose another path", path.display()
    )]
    SocketInUse {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// What is there is not ours to remove.
    #[error("cannot listen on {}: there is something that is not a socket; remove it, or choose another path", path.display())]
    NotASocket {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The system refuses the path.
    #[error("cannot listen on {}: {source}", path.display())]
    Socket {
        /// The path that was asked for.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// No host is called that.
    #[error("{name:?} is not the name or address of a host: give it as clients do, without a port")]
    BadHost {
        /// What was given.
        name: String,
    },
    /// Snapshots without a pause between them.
    #[error("the interval between snapshots is 0: give one that is longer")]
    ZeroInterval,
    /// The asynchronous machinery does not start.
    #[error("cannot start serving: {0}")]
    Runtime(#[from] io::Error),
}
