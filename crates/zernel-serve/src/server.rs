//! The server: bound as a whole or not at all, then run until it is told to end.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::access::AccessPolicy;
use crate::api::{self, AppState};
use crate::connection::Acceptor;
use crate::host::Host;
use crate::shutdown::{ShutdownSignal, ShutdownTrigger};
use crate::snapshot_stream::SnapshotStreams;
use crate::socket_file::SocketFile;
use crate::source_queries::SourceQueries;
use crate::websocket::WebSocketContext;
use crate::{Limits, Options, ServeError, Source};

/// How many threads ask the source. Texts are large, and each thread keeps memory of its own for them.
const SOURCE_THREADS: usize = 2;

/// A server that listens everywhere it was told to, and does not yet answer.
pub struct Server {
    source: Arc<dyn Source>,
    policy: AccessPolicy,
    options: Options,
    http: Option<TcpListener>,
    websocket: Option<TcpListener>,
    unix: Option<(UnixListener, SocketFile)>,
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses {
    /// For HTTP.
    pub http: Option<SocketAddr>,
    /// For WebSocket clients.
    pub websocket: Option<SocketAddr>,
    /// For users of this machine.
    pub unix: Option<PathBuf>,
}

impl Server {
    /// Listens on all that `options` name. If one of them fails, none is left behind.
    pub fn bind(options: Options, source: impl Source) -> Result<Self, ServeError> {
        let policy = AccessPolicy {
            token: options.token.clone(),
            hosts: parse_hosts(&options.hosts)?,
        };
        if options.interval.is_zero() {
            return Err(ServeError::ZeroInterval);
        }
        for address in [options.http, options.websocket].into_iter().flatten() {
            if !address.ip().to_canonical().is_loopback() && options.token.is_none() {
                return Err(ServeError::TokenRequired { address });
            }
        }
        // The ports come first: of two daemons that start at once, one fails here, before the other's
        // socket could look dead to it.
        Ok(Self {
            source: Arc::new(source),
            policy,
            http: options.http.map(listen).transpose()?,
            websocket: options.websocket.map(listen).transpose()?,
            unix: options
                .unix
                .as_deref()
                .map(SocketFile::listen)
                .transpose()?,
            options,
        })
    }

    /// Where it listens, with the ports that the system chose where 0 was asked for.
    #[must_use]
    pub fn local_addresses(&self) -> Addresses {
        let address = |listener: &Option<TcpListener>| listener.as_ref()?.local_addr().ok();
        Addresses {
            http: address(&self.http),
            websocket: address(&self.websocket),
            unix: self.unix.as_ref().map(|(_, file)| file.path().to_owned()),
        }
    }

    /// Serves until `shutdown` is done. Then accepts no one any more, lets requests in flight end for
    /// as long as [`Limits::grace`] says, and takes leave of live clients.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        let limits = self.options.limits;
        let (trigger, signal) = ShutdownTrigger::new();
        let websocket_slots = Arc::new(Semaphore::new(limits.websockets));
        let state = self.app_state(&websocket_slots, &signal);
        let policy = Arc::new(self.policy);
        let http = api::http_router(state.clone(), Arc::clone(&policy));
        let websocket = api::websocket_router(state, policy);

        let mut acceptors = Acceptors::new(limits, signal);
        acceptors.accept_tcp(self.http, &http)?;
        acceptors.accept_tcp(self.websocket, &websocket)?;
        let file = acceptors.accept_unix(self.unix, &http)?;

        shutdown.await;
        // While there still is someone to answer, so that it never looks dead to another daemon.
        drop(file);
        trigger.request();
        // What has not ended by then is cut off when `end` goes.
        let _ = timeout(limits.grace, async {
            acceptors.wait_until_closed().await;
            wait_for_all_permits(&websocket_slots, limits.websockets).await;
        })
        .await;
        Ok(())
    }

    /// [`Server::run`] on a runtime of its own, for those who have none.
    pub fn run_on_this_thread(self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(SOURCE_THREADS)
            .enable_all()
            .build()?;
        let result = runtime.block_on(self.run(shutdown));
        // A source that hangs must not keep us here.
        runtime.shutdown_background();
        result
    }

    fn app_state(&self, websocket_slots: &Arc<Semaphore>, shutdown: &ShutdownSignal) -> AppState {
        let queries = Arc::new(SourceQueries::new(Arc::clone(&self.source)));
        let websockets = Arc::new(WebSocketContext {
            streams: SnapshotStreams::new(Arc::clone(&queries), self.options.interval),
            slots: Arc::clone(websocket_slots),
            shutdown: shutdown.clone(),
            limits: self.options.limits,
        });
        AppState {
            queries,
            websockets,
        }
    }
}

/// All that accepts connections. Each address has slots of its own, so that a crowd at one keeps no
/// one from another.
struct Acceptors {
    limits: Limits,
    shutdown: ShutdownSignal,
    slots: Vec<Arc<Semaphore>>,
    tasks: JoinSet<()>,
}

impl Acceptors {
    fn new(limits: Limits, shutdown: ShutdownSignal) -> Self {
        Self {
            limits,
            shutdown,
            slots: Vec::new(),
            tasks: JoinSet::new(),
        }
    }

    fn accept_tcp(&mut self, listener: Option<TcpListener>, router: &Router) -> io::Result<()> {
        if let Some(listener) = listener {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let acceptor = self.acceptor(router);
            self.tasks.spawn(acceptor.serve(listener));
        }
        Ok(())
    }

    fn accept_unix(
        &mut self,
        unix: Option<(UnixListener, SocketFile)>,
        router: &Router,
    ) -> io::Result<Option<SocketFile>> {
        let Some((listener, file)) = unix else {
            return Ok(None);
        };
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let acceptor = self.acceptor(router);
        self.tasks.spawn(acceptor.serve(listener));
        Ok(Some(file))
    }

    fn acceptor(&mut self, router: &Router) -> Acceptor {
        let slots = Arc::new(Semaphore::new(self.limits.connections));
        self.slots.push(Arc::clone(&slots));
        Acceptor {
            router: router.clone(),
            slots,
            limits: self.limits,
            shutdown: self.shutdown.clone(),
        }
    }

    /// Until no one is accepted and all who were have gone.
    async fn wait_until_closed(&mut self) {
        while self.tasks.join_next().await.is_some() {}
        for slots in &self.slots {
            wait_for_all_permits(slots, self.limits.connections).await;
        }
    }
}

/// Until all permits of a semaphore are back.
async fn wait_for_all_permits(semaphore: &Semaphore, permits: usize) {
    let permits = u32::try_from(permits).unwrap_or(u32::MAX);
    // Fails only where the semaphore is closed, and none is.
    let _ = semaphore.acquire_many(permits).await;
}

fn listen(address: SocketAddr) -> Result<TcpListener, ServeError> {
    let refused = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => ServeError::PortInUse { address },
        _ => ServeError::Listen { address, source },
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    Ok(listener)
}

fn parse_hosts(names: &[String]) -> Result<Vec<Host>, ServeError> {
    let parse =
        |name: &String| Host::parse(name).ok_or_else(|| ServeError::BadHost { name: name.clone() });
    names.iter().map(parse).collect()
}
