//! Arbitrary bytes from clients of the HTTP address, the WebSocket address and the unix socket.
//!
//! The server runs on the thread of the test, so that its CPU time and memory are counted. Of the server, only calls of
//! the source run on another thread.

use std::io;
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use zernel_serve::{
    BoundAddresses, Expose, Health, Limits, Options, Scope, Server, Source, TextFormat,
};
use zernel_testkit::allocation::CountingAllocator;
use zernel_testkit::fuzz::FuzzTarget;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Longer than an answer takes on any machine. The server ends a connection when its client closes it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Panics on any thread. The runtime catches the panic of a connection.
static PANIC_COUNT: AtomicU64 = AtomicU64::new(0);

struct FixedSource;

impl Source for FixedSource {
    fn metrics(&self, _: Scope, _: TextFormat) -> String {
        "up 1\n".to_owned()
    }

    fn snapshot(&self, _: Scope) -> String {
        "{}".to_owned()
    }

    fn ledger(&self, _: Scope) -> String {
        "{}".to_owned()
    }

    fn health(&self) -> Health {
        Health {
            ok: true,
            problems: Vec::new(),
        }
    }
}

/// A server on the thread of its runtime.
struct LocalServer {
    runtime: Runtime,
    addresses: BoundAddresses,
    _folder: TempDir,
}

impl LocalServer {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let options = Options {
            http: Some("127.0.0.1:0".parse().expect("an address")),
            websocket: Some("127.0.0.1:0".parse().expect("an address")),
            unix: Some(folder.path().join("observe.sock")),
            expose: Expose::All,
            interval: Duration::from_millis(1),
            limits: Limits {
                request_head_timeout: ANSWER_TIMEOUT,
                write_stall_timeout: ANSWER_TIMEOUT,
                ..Limits::default()
            },
            ..Options::default()
        };
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let server = Server::bind_addresses(options, FixedSource).expect("free addresses");
        let addresses = server.local_addresses();
        runtime.spawn(server.run(std::future::pending()));
        Self {
            runtime,
            addresses,
            _folder: folder,
        }
    }

    /// Sends bytes to the unix socket and returns the first bytes of the answer.
    fn ask_on_unix_socket(&self, bytes: &[u8]) -> Vec<u8> {
        let path = self.addresses.unix.as_ref().expect("bound");
        self.runtime.block_on(async {
            let stream = UnixStream::connect(path).await.expect("it listens");
            send_and_read_answer(stream, bytes).await
        })
    }

    /// Sends bytes to the WebSocket address and returns the first bytes of the answer.
    fn ask_on_websocket_address(&self, bytes: &[u8]) -> Vec<u8> {
        let address = self.addresses.websocket.expect("bound");
        self.runtime.block_on(async {
            let stream = TcpStream::connect(address).await.expect("it listens");
            send_and_read_answer(stream, bytes).await
        })
    }
}

/// Sends bytes, closes that direction, and reads until the server closes the other one. Returns the first kilobyte.
async fn send_and_read_answer(stream: impl AsyncRead + AsyncWrite, bytes: &[u8]) -> Vec<u8> {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let write = async {
        // The server may close the connection before it has read everything.
        let _ = writer.write_all(bytes).await;
        let _ = writer.shutdown().await;
    };
    let read = async {
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            match reader.read(&mut buffer).await {
                Ok(0) => break answer,
                Ok(length) if answer.len() < 1024 => answer.extend(&buffer[..length]),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break answer,
                Err(error) => panic!("{error}"),
            }
        }
    };
    let both = async { tokio::join!(write, read).1 };
    timeout(ANSWER_TIMEOUT, both)
        .await
        .expect("the server closes the connection")
}

/// Counts panics on all threads from now on.
fn count_panics() {
    static SET_HOOK_ONCE: Once = Once::new();
    SET_HOOK_ONCE.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANIC_COUNT.fetch_add(1, Ordering::SeqCst);
            print(info);
        }));
    });
}

const REQUEST_WORDS: [&str; 14] = [
    "GET ",
    "HEAD ",
    " HTTP/1.1\r\n",
    "\r\n",
    "Host: ",
    "localhost",
    "Content-Length: ",
    "18446744073709551615",
    "Transfer-Encoding: chunked\r\n",
    "Upgrade: websocket\r\n",
    "Authorization: Bearer ",
    "Accept: ",
    "%00",
    "//",
];

const UPGRADE_REQUEST: &str = "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

#[test]
fn fuzz_http() {
    count_panics();
    let server = LocalServer::start();
    let target = FuzzTarget::new("http", 20_000)
        .input("GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text;q=0.5\r\n\r\n")
        .input("GET /api/v1/snapshot HTTP/1.1\r\nHost: localhost:9091\r\nOrigin: http://localhost\r\n\r\n")
        .input("POST /healthz?token=x HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 3\r\n\r\nabc")
        .input("GET /api/v1/ledger HTTP/1.0\r\nAuthorization: Bearer abc\r\n\r\n")
        .words(REQUEST_WORDS);
    let mut answers = 0_u64;
    let outcome = target.run(|bytes| {
        answers += u64::from(server.ask_on_unix_socket(bytes).starts_with(b"HTTP/1."));
        assert_eq!(PANIC_COUNT.load(Ordering::SeqCst), 0, "in the server");
    });
    assert!(
        answers > outcome.inputs / 4,
        "{answers} answers: {outcome:?}"
    );
}

#[test]
fn fuzz_websocket() {
    count_panics();
    let server = LocalServer::start();
    let with_frames = |frames: &[u8]| [UPGRADE_REQUEST.as_bytes(), frames].concat();
    let target = FuzzTarget::new("websocket", 20_000)
        .input(with_frames(b"\x81\x85\x01\x02\x03\x04iejhn"))
        .input(with_frames(b"\x89\x80\0\0\0\0\x88\x82\0\0\0\0\x03\xe8"))
        .input(with_frames(b"\x82\xfe\x00\x80\0\0\0\0binary"))
        .input(with_frames(
            b"\x01\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0",
        ))
        .words(REQUEST_WORDS);
    let mut upgrades = 0_u64;
    let outcome = target.run(|bytes| {
        upgrades += u64::from(
            server
                .ask_on_websocket_address(bytes)
                .starts_with(b"HTTP/1.1 101"),
        );
        assert_eq!(PANIC_COUNT.load(Ordering::SeqCst), 0, "in the server");
    });
    assert!(
        upgrades > outcome.inputs / 20,
        "{upgrades} upgrades: {outcome:?}"
    );
}
