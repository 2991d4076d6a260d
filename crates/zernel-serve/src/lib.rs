//! What the daemon serves, over HTTP, WebSocket and a unix socket.
//!
//! A [`Source`] knows the numbers; a [`Server`] hands them out. It asks the source only when someone
//! asks it, never twice at a time for the same thing, and off the thread that talks to the clients.
//! By default it listens on loopback addresses and on a unix socket. Whoever connects over TCP sees
//! everything; whoever connects over the unix socket sees what belongs to the user they are.
//!
//! ```no_run
//! use zernel_serve::{Options, Server};
//! # fn serve(source: impl zernel_serve::Source) -> Result<(), zernel_serve::ServeError> {
//! let server = Server::bind(Options::default(), source)?;
//! println!("serving on {:?}", server.local_addresses());
//! server.run_on_this_thread(std::future::pending())
//! # }
//! ```

mod access;
mod api;
mod connection;
mod content_negotiation;
mod error;
mod host;
mod options;
mod secret;
mod server;
mod shared_work;
mod shutdown;
mod snapshot_stream;
mod socket_file;
mod source;
mod source_queries;
mod websocket;

pub use error::ServeError;
pub use options::{Limits, Options};
pub use secret::{Secret, SecretError};
pub use server::{Addresses, Server};
pub use source::{Health, Scope, Source, TextFormat};
