//! Accepts connections and serves HTTP on them, within the limits.

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

use crate::access::Peer;
use crate::shutdown::ShutdownSignal;
use crate::{Limits, Scope};

/// Largest request head.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Most headers in one request.
const MAX_HEADERS: usize = 64;
/// Delay before the next `accept` after it failed, usually for want of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A listener that also identifies the client of each connection.
pub(crate) trait Accept: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Send + 'static;

    /// Accepts the next connection.
    fn accept_client(&self) -> impl Future<Output = io::Result<(Self::Stream, Peer)>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept_client(&self) -> io::Result<(TcpStream, Peer)> {
        let (stream, _) = self.accept().await?;
        // Responses are written whole, so Nagle's delay only adds latency. A failure is harmless.
        let _ = stream.set_nodelay(true);
        let local = stream.local_addr()?.ip().to_canonical();
        Ok((stream, Peer::Tcp { local }))
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    async fn accept_client(&self) -> io::Result<(UnixStream, Peer)> {
        let (stream, _) = self.accept().await?;
        let scope = scope_for_user(stream.peer_cred()?.uid(), geteuid().as_raw());
        Ok((stream, Peer::Unix { scope }))
    }
}

/// Returns which processes `user` may see, if the daemon runs as user `own`.
fn scope_for_user(user: u32, own: u32) -> Scope {
    match user == 0 || user == own {
        true => Scope::All,
        false => Scope::User(user),
    }
}

/// Accepts and serves the connections of one address.
#[derive(Clone)]
pub(crate) struct Acceptor {
    pub(crate) router: Router,
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) limits: Limits,
    pub(crate) shutdown: ShutdownSignal,
}

impl Acceptor {
    /// Accepts connections until shutdown is requested.
    pub(crate) async fn serve(mut self, listener: impl Accept) {
        loop {
            let next = tokio::select! {
                biased;
                () = self.shutdown.requested() => return,
                next = accept_with_slot(&listener, &self.slots) => next,
            };
            match next {
                Ok((stream, peer, slot)) => {
                    let connection = self.clone().serve_connection(stream, peer);
                    tokio::spawn(async move {
                        connection.await;
                        drop(slot);
                    });
                }
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                // Usually too many open files; retry later.
                Err(_) => sleep(ACCEPT_RETRY_DELAY).await,
            }
        }
    }

    /// Serves one connection until the client closes it, it becomes a WebSocket, or shutdown is
    /// requested.
    async fn serve_connection<S>(self, stream: S, peer: Peer)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let Self {
            router,
            limits,
            mut shutdown,
            ..
        } = self;
        let service = service_fn(move |request| answer(router.clone(), request, peer));
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(limits.stall));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.request_head)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(Box::pin(stream)), service)
            .with_upgrades();
        tokio::pin!(connection);
        // An error on a connection concerns only its client.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = shutdown.requested() => connection.as_mut().graceful_shutdown(),
        }
        tokio::select! {
            _ = connection => {}
            () = shutdown.grace_over() => {}
        }
    }
}

/// Waits for a free slot, then accepts the next connection.
async fn accept_with_slot<L: Accept>(
    listener: &L,
    slots: &Arc<Semaphore>,
) -> io::Result<(L::Stream, Peer, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await;
    let slot = slot.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept_client().await?;
    Ok((stream, peer, slot))
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    peer: Peer,
) -> Result<Response, Infallible> {
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(peer);
    router.oneshot(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_daemons_user_see_all_processes() {
        assert_eq!(scope_for_user(0, 0), Scope::All);
        assert_eq!(scope_for_user(0, 7), Scope::All);
        assert_eq!(scope_for_user(7, 7), Scope::All);
        assert_eq!(scope_for_user(8, 7), Scope::User(8));
        assert_eq!(scope_for_user(8, 0), Scope::User(8));
    }
}
