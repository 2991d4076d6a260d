//! Connections: accepted, limited and ended.

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

/// The most a request's head may take.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// The most headers a request may have.
const MAX_HEADERS: usize = 64;
/// How long to wait when the system has no more file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Something clients connect to.
pub(crate) trait Accept: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Send + 'static;

    /// The next client.
    fn accept_client(&self) -> impl Future<Output = io::Result<(Self::Stream, Peer)>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept_client(&self) -> io::Result<(TcpStream, Peer)> {
        let (stream, _) = self.accept().await?;
        // What is sent is whole, so there is nothing to wait for; but without it all works as well.
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

/// What a user may see of a daemon that runs as `own`.
fn scope_for_user(user: u32, own: u32) -> Scope {
    match user == 0 || user == own {
        true => Scope::All,
        false => Scope::User(user),
    }
}

/// How connections to one address are served.
#[derive(Clone)]
pub(crate) struct Acceptor {
    pub(crate) router: Router,
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) limits: Limits,
    pub(crate) shutdown: ShutdownSignal,
}

impl Acceptor {
    /// Serves all who connect until the end begins.
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
                // Too many open files, as a rule. That passes.
                Err(_) => sleep(ACCEPT_RETRY_DELAY).await,
            }
        }
    }

    /// Answers one client's requests until it goes, turns to WebSocket, or the end begins.
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
        // What goes wrong on a connection is its client's affair.
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

/// The next client, once there is room for one.
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
