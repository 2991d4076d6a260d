//! A source that is not one, and a server that runs beside the test.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zernel_serve::{
    Addresses, Health, Limits, Options, Scope, ServeError, Server, Source, TextFormat,
};

/// An interval after which no test waits for anything.
pub(crate) const LONGER_THAN_ANY_TEST: Duration = Duration::from_secs(100_000);

/// Answers with what it was asked.
#[derive(Clone, Default)]
pub(crate) struct FakeSource {
    /// How many snapshots were taken.
    pub(crate) snapshots: Arc<AtomicU64>,
    /// Added to snapshots and ledgers to make them long.
    pub(crate) padding: usize,
    pub(crate) problems: Vec<String>,
    /// Makes the ledger panic.
    pub(crate) broken: Arc<AtomicBool>,
    /// Makes the ledger wait until it is opened.
    pub(crate) gate: Option<Gate>,
}

#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<GateState>, Condvar)>);

#[derive(Default)]
struct GateState {
    reached: Option<oneshot::Sender<()>>,
    open: bool,
}

impl Gate {
    /// A shut gate, and what happens when someone stands before it.
    pub(crate) fn shut() -> (Self, oneshot::Receiver<()>) {
        let gate = Self::default();
        let (sender, receiver) = oneshot::channel();
        gate.0.0.lock().unwrap().reached = Some(sender);
        (gate, receiver)
    }

    pub(crate) fn open(&self) {
        self.0.0.lock().unwrap().open = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let mut state = self.0.0.lock().unwrap();
        if let Some(reached) = state.reached.take() {
            // The test may not care.
            let _ = reached.send(());
        }
        drop(self.0.1.wait_while(state, |state| !state.open).unwrap());
    }
}

impl Source for FakeSource {
    fn metrics(&self, scope: Scope, format: TextFormat) -> String {
        format!("{scope:?} {format:?}\n")
    }

    fn snapshot(&self, scope: Scope) -> String {
        let number = self.snapshots.fetch_add(1, Ordering::SeqCst) + 1;
        let padding = "x".repeat(self.padding);
        json!({ "number": number, "scope": format!("{scope:?}"), "padding": padding }).to_string()
    }

    fn ledger(&self, scope: Scope) -> Value {
        assert!(!self.broken.load(Ordering::SeqCst), "broken on purpose");
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        json!({ "ledger": format!("{scope:?}"), "padding": "x".repeat(self.padding) })
    }

    fn health(&self) -> Health {
        Health {
            ok: self.problems.is_empty(),
            problems: self.problems.clone(),
        }
    }
}

/// A server beside the test, in a folder of its own.
pub(crate) struct RunningServer {
    pub(crate) http: SocketAddr,
    pub(crate) websocket: SocketAddr,
    pub(crate) unix: PathBuf,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
    folder: TempDir,
}

/// What does not disturb another server of the same machine, and is patient where that is busy.
pub(crate) fn options(folder: &TempDir) -> Options {
    Options {
        http: Some("127.0.0.1:0".parse().unwrap()),
        websocket: Some("127.0.0.1:0".parse().unwrap()),
        unix: Some(folder.path().join("observe.sock")),
        interval: LONGER_THAN_ANY_TEST,
        limits: Limits {
            request_head: LONGER_THAN_ANY_TEST,
            stall: LONGER_THAN_ANY_TEST,
            ..Limits::default()
        },
        ..Options::default()
    }
}

/// Starts a server with what the test changes of the options.
pub(crate) fn start(source: FakeSource, change: impl FnOnce(&mut Options)) -> RunningServer {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&folder);
    change(&mut options);
    let server = Server::bind(options, source).unwrap();
    let Addresses {
        http,
        websocket,
        unix,
    } = server.local_addresses();
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(server.run(async {
        // A test that is over needs no server either.
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
    /// Tells the server to end. What is returned waits until it has, and keeps its folder.
    pub(crate) fn stop(self) -> impl Future<Output = TempDir> {
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
