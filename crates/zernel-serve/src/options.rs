//! What to serve where, to whom, and how much of it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::Secret;

/// What to serve where, and to whom.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to serve HTTP; by default 127.0.0.1:9091.
    pub http: Option<SocketAddr>,
    /// Where to serve WebSocket clients apart from HTTP; by default 127.0.0.1:9092.
    pub websocket: Option<SocketAddr>,
    /// Where to serve local users, each their own; by default /run/zernel/observe.sock.
    pub unix: Option<PathBuf>,
    /// What TCP clients must show. Required where another machine can connect.
    pub token: Option<Secret>,
    /// Further names or addresses by which clients may call this machine, as in the `Host` of their
    /// requests.
    pub hosts: Vec<String>,
    /// How often live clients get a snapshot.
    pub interval: Duration,
    /// How much is served at once, and for how long.
    pub limits: Limits,
}

/// How much is served at once, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// HTTP connections to one address; further ones wait until one is over.
    pub connections: usize,
    /// Live clients on all addresses; further ones are told 503.
    pub websockets: usize,
    /// How long a client may take to send the head of a request, and leave a connection unused.
    pub request_head: Duration,
    /// How long a client may accept nothing of what is sent to it.
    pub stall: Duration,
    /// How long requests in flight may take when the server ends.
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
