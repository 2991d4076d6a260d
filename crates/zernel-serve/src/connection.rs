//! Accepts connections and serves HTTP on them, within the limits.

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::sleep;
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

use crate::Limits;
use crate::connection_slots::{Slot, Slots};
use crate::peer::ConnectedClient;
use crate::shutdown::ShutdownSignal;

/// Largest request head.
const MAX_REQUEST_HEAD_BYTES: usize = 16 * 1024;
/// The most headers that one request may have.
const MAX_HEADERS: usize = 64;
/// Delay before the next `accept` after an `accept` failed, usually for want of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A listener that also identifies the client of each connection.
pub(crate) trait ClientListener: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Send + 'static;

    /// Accepts the next connection.
    fn accept_client(
        &self,
    ) -> impl Future<Output = io::Result<(Self::Stream, ConnectedClient)>> + Send;
}

impl ClientListener for TcpListener {
    type Stream = TcpStream;

    async fn accept_client(&self) -> io::Result<(TcpStream, ConnectedClient)> {
        let (stream, _) = self.accept().await?;
        // Responses are written whole, so Nagle's delay only adds latency. A failure is harmless.
        let _ = stream.set_nodelay(true);
        let client = ConnectedClient::from_tcp_stream(&stream)?;
        Ok((stream, client))
    }
}

impl ClientListener for UnixListener {
    type Stream = UnixStream;

    async fn accept_client(&self) -> io::Result<(UnixStream, ConnectedClient)> {
        let (stream, _) = self.accept().await?;
        let client = ConnectedClient::from_unix_stream(&stream)?;
        Ok((stream, client))
    }
}

/// Accepts and serves the connections of one address.
#[derive(Clone)]
pub(crate) struct Acceptor {
    pub(crate) router: Router,
    pub(crate) slots: Slots,
    pub(crate) limits: Limits,
    pub(crate) shutdown: ShutdownSignal,
}

impl Acceptor {
    /// Accepts connections until shutdown is requested.
    pub(crate) async fn accept_connections(mut self, listener: impl ClientListener) {
        loop {
            let next = tokio::select! {
                biased;
                () = self.shutdown.wait_until_requested() => return,
                next = listener.accept_client() => next,
            };
            match next {
                Ok((stream, client)) => {
                    // A client without a slot is disconnected.
                    if let Some(slot) = self.slots.take_slot(client.initial_owner()) {
                        tokio::spawn(
                            self.clone()
                                .serve_until_slot_is_needed(stream, client, slot),
                        );
                    }
                }
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                // The process usually has too many open files; the next `accept` comes later.
                Err(_) => sleep(ACCEPT_RETRY_DELAY).await,
            }
        }
    }

    /// Serves one connection, unless another client needs its slot.
    async fn serve_until_slot_is_needed<S>(self, stream: S, client: ConnectedClient, slot: Slot)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let slot = Arc::new(slot);
        tokio::select! {
            biased;
            () = slot.wait_until_evicted() => {}
            () = self.serve_connection(stream, client, Arc::clone(&slot)) => {}
        }
    }

    /// Serves one connection until the client closes it, it becomes a WebSocket, or shutdown is
    /// requested.
    async fn serve_connection<S>(self, stream: S, client: ConnectedClient, slot: Arc<Slot>)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let Self {
            router,
            limits,
            mut shutdown,
            ..
        } = self;
        let client = Arc::new(client);
        let service = service_fn(move |request| {
            answer_request(
                router.clone(),
                request,
                Arc::clone(&client),
                Arc::clone(&slot),
            )
        });
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(limits.write_stall_timeout));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.request_head_timeout)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_REQUEST_HEAD_BYTES)
            .serve_connection(TokioIo::new(Box::pin(stream)), service)
            .with_upgrades();
        tokio::pin!(connection);
        // An error on a connection is not reported, because it concerns only the client.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = shutdown.wait_until_requested() => connection.as_mut().graceful_shutdown(),
        }
        tokio::select! {
            _ = connection => {}
            () = shutdown.wait_until_grace_is_over() => {}
        }
    }
}

async fn answer_request(
    router: Router,
    request: Request<Incoming>,
    client: Arc<ConnectedClient>,
    slot: Arc<Slot>,
) -> Result<Response, Infallible> {
    let mut request = request.map(Body::new);
    let Some(peer) = client.read_peer() else {
        // The client has exited. Another process may hold the client's socket now.
        return Ok(StatusCode::FORBIDDEN.into_response());
    };
    request.extensions_mut().insert(peer);
    request.extensions_mut().insert(slot);
    router.oneshot(request).await
}
