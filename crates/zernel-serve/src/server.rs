//! The server: binds all its addresses, then serves until shutdown.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::access::AccessPolicy;
use crate::connection::Acceptor;
use crate::connection_slots::{FullSlotsPolicy, SlotLimits, Slots};
use crate::host::Host;
use crate::http_api::{self, AppState};
use crate::shutdown::{ShutdownSignal, ShutdownTrigger};
use crate::snapshot_stream::SnapshotStreams;
use crate::socket_file::SocketFile;
use crate::source_queries::{ANSWER_THREADS, SourceQueries};
use crate::websocket::WebSocketContext;
use crate::{Expose, Limits, Options, ServeError, Source};

/// Threads that query the source: those that build large texts, and one that asks for its health.
const BLOCKING_THREADS: usize = ANSWER_THREADS + 1;

/// A server that is bound to its addresses and does not serve yet.
pub struct Server {
    source: Arc<dyn Source>,
    policy: AccessPolicy,
    options: Options,
    http: Option<TcpListener>,
    websocket: Option<TcpListener>,
    unix: Option<(UnixListener, SocketFile)>,
}

/// The addresses that a server is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundAddresses {
    /// HTTP address.
    pub http: Option<SocketAddr>,
    /// WebSocket address.
    pub websocket: Option<SocketAddr>,
    /// Path of the unix socket.
    pub unix: Option<PathBuf>,
}

impl Server {
    /// Binds every address in `options`. On an error, nothing stays bound.
    pub fn bind_addresses(options: Options, source: impl Source) -> Result<Self, ServeError> {
        let policy = AccessPolicy {
            expose: options.expose,
            token: options.token.clone(),
            hosts: parse_hosts(&options.hosts)?,
        };
        if options.interval.is_zero() {
            return Err(ServeError::ZeroInterval);
        }
        check_exposure(&options)?;
        // Bind the ports first: of two daemons that start at once, one fails here, before it could
        // take the other's unix socket for a stale one.
        Ok(Self {
            source: Arc::new(source),
            policy,
            http: options.http.map(bind_tcp_listener).transpose()?,
            websocket: options.websocket.map(bind_tcp_listener).transpose()?,
            unix: options
                .unix
                .as_deref()
                .map(SocketFile::bind_listener)
                .transpose()?,
            options,
        })
    }

    /// Returns the bound addresses, with the port that the kernel chose where the option was port
    /// 0.
    #[must_use]
    pub fn local_addresses(&self) -> BoundAddresses {
        let address = |listener: &Option<TcpListener>| listener.as_ref()?.local_addr().ok();
        BoundAddresses {
            http: address(&self.http),
            websocket: address(&self.websocket),
            unix: self.unix.as_ref().map(|(_, file)| file.path().to_owned()),
        }
    }

    /// Serves until `shutdown` completes.
    ///
    /// At shutdown the server stops accepting, sends a close frame to WebSocket clients, and waits
    /// up to [`Limits::shutdown_grace`] for requests in flight.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        let limits = self.options.limits;
        let (trigger, signal) = ShutdownTrigger::new();
        let websocket_slots = new_websocket_slots(limits);
        let state = self.app_state(&websocket_slots, &signal);
        let policy = Arc::new(self.policy);
        let http = http_api::http_router(state.clone(), Arc::clone(&policy));
        let websocket = http_api::websocket_router(state, policy);

        let mut acceptors = AcceptLoops::new(limits, signal);
        acceptors.accept_tcp(self.http, &http)?;
        acceptors.accept_tcp(self.websocket, &websocket)?;
        let file = acceptors.accept_unix(self.unix, &http)?;

        shutdown.await;
        // Remove the socket file while the listener still accepts. Another daemon would take a socket file without a
        // listener for a stale one.
        drop(file);
        trigger.request_shutdown();
        // Dropping `trigger` ends the connections that outlast the grace period.
        let _ = timeout(limits.shutdown_grace, async {
            acceptors.wait_until_closed().await;
            websocket_slots.wait_until_all_free().await;
        })
        .await;
        Ok(())
    }

    /// Runs [`Server::run`] on a runtime of its own, for a caller without one.
    pub fn run_on_this_thread(self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(BLOCKING_THREADS)
            .enable_all()
            .build()?;
        let result = runtime.block_on(self.run(shutdown));
        // A source that hangs must not block the return.
        runtime.shutdown_background();
        result
    }

    fn app_state(&self, websocket_slots: &Slots, shutdown: &ShutdownSignal) -> AppState {
        let queries = Arc::new(SourceQueries::new(Arc::clone(&self.source)));
        let websockets = Arc::new(WebSocketContext {
            streams: SnapshotStreams::new(Arc::clone(&queries), self.options.interval),
            slots: websocket_slots.clone(),
            shutdown: shutdown.clone(),
            limits: self.options.limits,
        });
        AppState {
            queries,
            websockets,
        }
    }
}

/// The accept loops of all addresses. Each address has its own connection slots, so clients of one
/// address cannot use up those of another.
struct AcceptLoops {
    limits: Limits,
    shutdown: ShutdownSignal,
    slots: Vec<Slots>,
    tasks: JoinSet<()>,
}

impl AcceptLoops {
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
            let acceptor = self.new_connection_acceptor(router);
            self.tasks.spawn(acceptor.accept_connections(listener));
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
        let acceptor = self.new_connection_acceptor(router);
        self.tasks.spawn(acceptor.accept_connections(listener));
        Ok(Some(file))
    }

    fn new_connection_acceptor(&mut self, router: &Router) -> Acceptor {
        let slots = new_connection_slots(self.limits);
        self.slots.push(slots.clone());
        Acceptor {
            router: router.clone(),
            slots,
            limits: self.limits,
            shutdown: self.shutdown.clone(),
        }
    }

    /// Waits until all accept loops and all connections have ended.
    async fn wait_until_closed(&mut self) {
        while self.tasks.join_next().await.is_some() {}
        for slots in &self.slots {
            slots.wait_until_all_free().await;
        }
    }
}

fn new_connection_slots(limits: Limits) -> Slots {
    let slot_limits = SlotLimits {
        trusted_slots: limits.connections,
        other_slots: limits.connections,
        tenant_slots: limits.connections_per_tenant,
    };
    // The oldest client is ended, because a new client is more likely to send requests.
    Slots::new(slot_limits, FullSlotsPolicy::EndOldest)
}

fn new_websocket_slots(limits: Limits) -> Slots {
    let slot_limits = SlotLimits {
        trusted_slots: limits.websockets,
        other_slots: limits.websockets,
        tenant_slots: limits.websockets_per_tenant,
    };
    // WebSocket clients stay connected for long.
    Slots::new(slot_limits, FullSlotsPolicy::Refuse)
}

/// Refuses options that show processes to other machines without a token, and options that lack a required token.
fn check_exposure(options: &Options) -> Result<(), ServeError> {
    let addresses = [options.http, options.websocket];
    let addresses: Vec<SocketAddr> = addresses.into_iter().flatten().collect();
    let is_foreign = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
    let foreign = addresses.iter().copied().find(is_foreign);
    match (options.expose, foreign) {
        (Expose::All, Some(address)) => Err(ServeError::ExposedWithoutToken { address }),
        (Expose::Token | Expose::Aggregate, _)
            if options.token.is_none() && !addresses.is_empty() =>
        {
            Err(ServeError::TokenRequired)
        }
        _ => Ok(()),
    }
}

fn bind_tcp_listener(address: SocketAddr) -> Result<TcpListener, ServeError> {
    let refused = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => ServeError::PortInUse { address },
        _ => ServeError::CannotListen { address, source },
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    Ok(listener)
}

fn parse_hosts(names: &[String]) -> Result<Vec<Host>, ServeError> {
    let parse = |name: &String| {
        Host::parse(name).ok_or_else(|| ServeError::InvalidHost { name: name.clone() })
    };
    names.iter().map(parse).collect()
}
