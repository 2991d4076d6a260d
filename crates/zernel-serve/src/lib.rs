//! Serves metrics and snapshots over HTTP, WebSocket and a unix socket.
//!
//! A [`Source`] provides the data; a [`Server`] answers clients with it. The server calls the
//! source only when a client needs an answer. Concurrent requests for the same answer share one
//! call, which runs on a separate thread so that a slow source does not block other clients.
//!
//! By default the server listens on loopback addresses and on a unix socket. A TCP client with the
//! token sees all processes, one without it sees what [`Expose`] allows. A unix socket client sees
//! the processes of its own user.
//!
//! ```no_run
//! use zernel_serve::{Options, Secret, Server};
//! # fn serve(source: impl zernel_serve::Source) -> Result<(), Box<dyn std::error::Error>> {
//! let token = Secret::from_file_or_new("/var/lib/zernel/token".as_ref())?;
//! let options = Options { token: Some(token), ..Options::default() };
//! let server = Server::bind_addresses(options, source)?;
//! println!("serving on {:?}", server.local_addresses());
//! server.run_on_this_thread(std::future::pending())?;
//! # Ok(())
//! # }
//! ```

mod access;
mod answer_cache;
mod connection;
mod connection_slots;
mod content_negotiation;
mod error;
mod host;
mod http_api;
mod options;
mod peer;
mod secret;
mod server;
mod shutdown;
mod single_flight;
mod snapshot_stream;
mod socket_file;
mod source;
mod source_queries;
mod token_file;
mod unread_answers;
mod websocket;

pub use error::ServeError;
pub use options::{Expose, Limits, Options};
pub use secret::{Secret, SecretError};
pub use server::{BoundAddresses, Server};
pub use source::{Health, Scope, Source, TextFormat};
