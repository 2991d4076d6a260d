//! Addresses, access and limits of a server.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::Secret;

/// Configuration of a [`Server`](crate::Server).
#[derive(Debug, Clone)]
pub struct Options {
    /// HTTP address; 127.0.0.1:9091 by default, `None` for no HTTP.
    pub http: Option<SocketAddr>,
    /// Address only for WebSocket clients; 127.0.0.1:9092 by default, `None` for none.
    pub websocket: Option<SocketAddr>,
    /// Path of the unix socket; /run/zernel/observe.sock by default, `None` for none. Each client
    /// sees the processes of its user.
    pub unix: Option<PathBuf>,
    /// Token that TCP clients must send. Required for addresses that other machines can reach.
    pub token: Option<Secret>,
    /// Further names or addresses of this machine that are accepted in `Host` headers.
    pub hosts: Vec<String>,
    /// Interval between snapshots to WebSocket clients.
    pub interval: Duration,
    /// Connection limits and timeouts.
    pub limits: Limits,
}

/// Connection limits and timeouts of a server.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most connections per address; further connections wait.
    pub connections: usize,
    /// Most WebSocket clients on all addresses; further clients get status 503.
    pub websockets: usize,
    /// Time for a client to send the head of its next request, idle time included.
    pub request_head: Duration,
    /// Time without progress after which a write to a client fails.
    pub stall: Duration,
    /// Time that requests in flight get to finish at shutdown.
    pub grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let loopback = |port| Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        Self {
            http: loopback(9091),
            websocket: loopback(9092),
            unix: Some("/run/zernel/observe.sock".into()),
            token: None,
            hosts: Vec::new(),
            interval: Duration::from_secs(1),
            limits: Limits::default(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            websockets: 64,
            request_head: Duration::from_secs(10),
            stall: Duration::from_secs(10),
            grace: Duration::from_secs(2),
        }
    }
}
