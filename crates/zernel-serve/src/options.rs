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
    /// Path of the unix socket; /run/zernel/observe.sock by default, `None` for none. Each client of the socket sees
    /// the processes of its user.
    pub unix: Option<PathBuf>,
    /// What TCP clients see without the token; [`Expose::Token`] by default.
    pub expose: Expose,
    /// Token of TCP clients. Required unless everything is exposed.
    pub token: Option<Secret>,
    /// Names or addresses of this machine that are accepted in `Host` headers, besides those of loopback addresses.
    pub hosts: Vec<String>,
    /// Interval between snapshots to WebSocket clients.
    pub interval: Duration,
    /// Connection limits and timeouts.
    pub limits: Limits,
}

/// What TCP clients see. Unix socket clients always see the processes of their user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expose {
    /// With the token everything, without it only whether the source is healthy.
    Token,
    /// With the token everything, without it figures that name no process, user, cgroup or job.
    Aggregate,
    /// Everything, without a token.
    All,
}

/// Connection limits and timeouts of a server.
///
/// Root, the daemon's user and clients with the token have connections of their own: the limits of
/// other clients do not count them.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most connections per address. A further connection ends the oldest connection of the same tenant, or of the
    /// tenant with the most connections.
    pub connections: usize,
    /// Most connections of one tenant on the unix socket.
    pub connections_per_tenant: usize,
    /// Most WebSocket clients on all addresses; further clients get status 503.
    pub websockets: usize,
    /// Most WebSocket clients of one tenant on the unix socket.
    pub websockets_per_tenant: usize,
    /// Time for a client to send the head of its next request, idle time included.
    pub request_head_timeout: Duration,
    /// Time without progress after which a write to a client fails.
    pub write_stall_timeout: Duration,
    /// Time that requests in flight get to finish at shutdown.
    pub shutdown_grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let loopback = |port| Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        Self {
            http: loopback(9091),
            websocket: loopback(9092),
            unix: Some("/run/zernel/observe.sock".into()),
            expose: Expose::Token,
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
            connections_per_tenant: 32,
            websockets: 64,
            websockets_per_tenant: 8,
            request_head_timeout: Duration::from_secs(10),
            write_stall_timeout: Duration::from_secs(10),
            shutdown_grace: Duration::from_secs(1),
        }
    }
}
