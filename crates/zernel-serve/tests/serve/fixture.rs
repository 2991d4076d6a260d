//! A fake source, and a server that runs during a test.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zernel_serve::{
    BoundAddresses, Expose, Health, Limits, Options, Scope, Secret, ServeError, Server, Source,
    TextFormat,
};

/// A timeout that never fires during a test.
pub(crate) const NEVER_EXPIRING_TIMEOUT: Duration = Duration::from_secs(100_000);

/// A source whose answers contain the requested scope and format.
#[derive(Clone, Default)]
pub(crate) struct FakeSource {
    /// Snapshots taken so far.
    pub(crate) snapshot_count: Arc<AtomicU64>,
    /// Bytes of padding in snapshots and ledgers.
    pub(crate) padding: usize,
    pub(crate) problems: Vec<String>,
    /// Whether the ledger panics.
    pub(crate) panics: Arc<AtomicBool>,
    /// A gate that the ledger waits at.
    pub(crate) gate: Option<SourceGate>,
}

#[derive(Clone, Default)]
pub(crate) struct SourceGate(Arc<(Mutex<SourceGateState>, Condvar)>);

#[derive(Default)]
struct SourceGateState {
    reached: Option<oneshot::Sender<()>>,
    is_open: bool,
}

impl SourceGate {
    /// Returns a closed gate, and a receiver that completes when a thread reaches it.
    pub(crate) fn new_closed() -> (Self, oneshot::Receiver<()>) {
        let gate = Self::default();
        let (sender, receiver) = oneshot::channel();
        gate.0.0.lock().unwrap().reached = Some(sender);
        (gate, receiver)
    }

    pub(crate) fn open(&self) {
        self.0.0.lock().unwrap().is_open = true;
        self.0.1.notify_all();
    }

    fn wait_until_open(&self) {
        let mut state = self.0.0.lock().unwrap();
        if let Some(reached) = state.reached.take() {
            // The test may have dropped the receiver.
            let _ = reached.send(());
        }
        drop(self.0.1.wait_while(state, |state| !state.is_open).unwrap());
    }
}

impl Source for FakeSource {
    fn metrics(&self, scope: Scope, format: TextFormat) -> String {
        format!("{scope:?} {format:?}\n")
    }

    fn snapshot(&self, scope: Scope) -> String {
        let number = self.snapshot_count.fetch_add(1, Ordering::SeqCst) + 1;
        let padding = "x".repeat(self.padding);
        json!({ "number": number, "scope": format!("{scope:?}"), "padding": padding }).to_string()
    }

    fn ledger(&self, scope: Scope) -> String {
        assert!(!self.panics.load(Ordering::SeqCst), "broken on purpose");
        if let Some(gate) = &self.gate {
            gate.wait_until_open();
        }
        let padding = "x".repeat(self.padding);
        json!({ "ledger": format!("{scope:?}"), "padding": padding }).to_string()
    }

    fn health(&self) -> Health {
        Health {
            ok: self.problems.is_empty(),
            problems: self.problems.clone(),
        }
    }
}

/// A running server with its own folder.
pub(crate) struct RunningServer {
    pub(crate) http: SocketAddr,
    pub(crate) websocket: SocketAddr,
    pub(crate) unix: PathBuf,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
    folder: TempDir,
}

/// Returns options that expose everything, with free ports, a private socket path and no timeouts, so
/// that tests can run in parallel on a busy machine.
pub(crate) fn test_options(folder: &TempDir) -> Options {
    Options {
        http: Some("127.0.0.1:0".parse().unwrap()),
        websocket: Some("127.0.0.1:0".parse().unwrap()),
        unix: Some(folder.path().join("observe.sock")),
        expose: Expose::All,
        interval: NEVER_EXPIRING_TIMEOUT,
        limits: Limits {
            request_head_timeout: NEVER_EXPIRING_TIMEOUT,
            write_stall_timeout: NEVER_EXPIRING_TIMEOUT,
            ..Limits::default()
        },
        ..Options::default()
    }
}

/// The token of [`require_token`].
pub(crate) const TEST_TOKEN: &str = "0123456789abcdef";

/// Makes the server require the token from TCP clients.
pub(crate) fn require_token(options: &mut Options) {
    options.expose = Expose::Token;
    options.token = Some(Secret::new(TEST_TOKEN).unwrap());
}

/// Starts a server with the default test options after `change`.
pub(crate) fn start_server(source: FakeSource, change: impl FnOnce(&mut Options)) -> RunningServer {
    let folder = tempfile::tempdir().unwrap();
    let mut options = test_options(&folder);
    change(&mut options);
    let server = Server::bind_addresses(options, source).unwrap();
    let BoundAddresses {
        http,
        websocket,
        unix,
    } = server.local_addresses();
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(server.run(async {
        // A dropped sender stops the server too.
        let _ = stopped.await;
    }));
    RunningServer {
        http: http.unwrap(),
        websocket: websocket.unwrap(),
        unix: unix.unwrap(),
        stop,
        task,
        folder,
    }
}

impl RunningServer {
    /// Requests shutdown. The returned future completes when the server has stopped, and returns the server's folder.
    pub(crate) fn shut_down(self) -> impl Future<Output = TempDir> {
        let Self {
            stop, task, folder, ..
        } = self;
        stop.send(()).unwrap();
        async move {
            task.await.unwrap().unwrap();
            folder
        }
    }
}
