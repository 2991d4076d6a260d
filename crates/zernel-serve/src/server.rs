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

use crate::api::{self, Serving};
use crate::connection::Front;
use crate::desk::Desk;
use crate::ending::{End, Ending};
use crate::feed::Feeds;
use crate::guard::Guard;
use crate::host::Host;
use crate::socket_file::SocketFile;
use crate::websocket::Lounge;
use crate::{Limits, Options, ServeError, Source};

/// How many threads ask the source. Texts are large, and each thread keeps memory of its own for them.
const ASKING: usize = 2;

/// A server that listens everywhere it was told to, and does not yet answer.
pub struct Server {
    source: Arc<dyn Source>,
    guard: Guard,
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
        let guard = Guard {
            token: options.token.clone(),
            hosts: parse_hosts(&options.hosts)?,
        };
        if options.interval.is_zero() {
            return Err(ServeError::NoInterval);
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
            guard,
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
        let (end, ending) = End::new();
        let seats = Arc::new(Semaphore::new(limits.websockets));
        let serving = self.serving(&seats, &ending);
        let guard = Arc::new(self.guard);
        let http = api::http(serving.clone(), Arc::clone(&guard));
        let live = api::live(serving, guard);

        let mut fronts = Fronts::new(limits, ending);
        fronts.open_tcp(self.http, &http)?;
        fronts.open_tcp(self.websocket, &live)?;
        let file = fronts.open_unix(self.unix, &http)?;

        shutdown.await;
        // While there still is someone to answer, so that it never looks dead to another daemon.
        drop(file);
        end.begin();
        // What has not ended by then is cut off when `end` goes.
        let _ = timeout(limits.grace, async {
            fronts.close().await;
            all_back(&seats, limits.websockets).await;
        })
        .await;
        Ok(())
    }

    /// [`Server::run`] on a runtime of its own, for those who have none.
    pub fn run_on_this_thread(self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(ASKING)
            .enable_all()
            .build()?;
        let result = runtime.block_on(self.run(shutdown));
        // A source that hangs must not keep us here.
        runtime.shutdown_background();
        result
    }

    fn serving(&self, seats: &Arc<Semaphore>, ending: &Ending) -> Serving {
        let desk = Arc::new(Desk::new(Arc::clone(&self.source)));
        let lounge = Arc::new(Lounge {
            feeds: Feeds::new(Arc::clone(&desk), self.options.interval),
            seats: Arc::clone(seats),
            ending: ending.clone(),
            limits: self.options.limits,
        });
        Serving { desk, lounge }
    }
}

/// All that accepts connections. Each address has slots of its own, so that a crowd at one keeps no
/// one from another.
struct Fronts {
    limits: Limits,
    ending: Ending,
    slots: Vec<Arc<Semaphore>>,
    tasks: JoinSet<()>,
}

impl Fronts {
    fn new(limits: Limits, ending: Ending) -> Self {
        Self {
            limits,
            ending,
            slots: Vec::new(),
            tasks: JoinSet::new(),
        }
    }

    fn open_tcp(&mut self, listener: Option<TcpListener>, router: &Router) -> io::Result<()> {
        if let Some(listener) = listener {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let front = self.front(router);
            self.tasks.spawn(front.serve(listener));
        }
        Ok(())
    }

    fn open_unix(
        &mut self,
        unix: Option<(UnixListener, SocketFile)>,
        router: &Router,
    ) -> io::Result<Option<SocketFile>> {
        let Some((listener, file)) = unix else {
            return Ok(None);
        };
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let front = self.front(router);
        self.tasks.spawn(front.serve(listener));
        Ok(Some(file))
    }

    fn front(&mut self, router: &Router) -> Front {
        let slots = Arc::new(Semaphore::new(self.limits.connections));
        self.slots.push(Arc::clone(&slots));
        Front {
            router: router.clone(),
            slots,
            limits: self.limits,
            ending: self.ending.clone(),
        }
    }

    /// Until no one is accepted and all who were have gone.
    async fn close(&mut self) {
        while self.tasks.join_next().await.is_some() {}
        for slots in &self.slots {
            all_back(slots, self.limits.connections).await;
        }
    }
}

/// Until all permits of a semaphore are back.
async fn all_back(semaphore: &Semaphore, permits: usize) {
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
