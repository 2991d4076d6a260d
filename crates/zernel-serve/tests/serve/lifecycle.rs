//! From binding to the end.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use zernel_serve::{Secret, ServeError, Server};

use crate::client::{Answer, exchange, get, read_all, upgrade_request};
use crate::fixture::{Fake, Gate, NEVER, options, start};
use crate::websocket;

pub(crate) async fn a_port_in_use_is_named_and_nothing_is_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    // An address of this test's own, so that no other takes the port that is free.
    let bind = || TcpListener::bind("127.0.0.77:0").unwrap();
    let taken = bind();
    let free = bind().local_addr().unwrap();
    let mut options = options(&folder);
    options.http = Some(free);
    options.websocket = Some(taken.local_addr().unwrap());
    let error = Server::bind(options.clone(), Fake::default())
        .err()
        .unwrap();
    assert!(matches!(error, ServeError::PortInUse { .. }), "{error}");
    let address = taken.local_addr().unwrap().to_string();
    assert!(error.to_string().contains(&address), "{error}");
    assert!(!options.unix.clone().unwrap().exists());
    drop(taken);
    Server::bind(options, Fake::default()).unwrap();
}

pub(crate) async fn the_open_network_needs_a_token() {
    for address in [
        "0.0.0.0:0",
        "[::]:0",
        "192.0.2.1:9091",
        "[::ffff:192.0.2.1]:0",
    ] {
        for http in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let mut options = options(&folder);
            match http {
                true => options.http = Some(address.parse().unwrap()),
                false => options.websocket = Some(address.parse().unwrap()),
            }
            let error = Server::bind(options, Fake::default()).err().unwrap();
            assert!(matches!(error, ServeError::TokenRequired { .. }), "{error}");
            assert!(error.to_string().contains("token"), "{error}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let mut wrapped = options(&folder);
    wrapped.http = Some("[::ffff:127.0.0.1]:0".parse().unwrap());
    // Where there is no IPv6, it fails for that.
    let result = Server::bind(wrapped, Fake::default());
    assert!(!matches!(result, Err(ServeError::TokenRequired { .. })));
    let server = start(Fake::default(), |options| {
        options.http = Some("0.0.0.0:0".parse().unwrap());
        options.token = Some(Secret::new("0123456789abcdef").unwrap());
    });
    let address = ([127, 0, 0, 1], server.http.port()).into();
    assert_eq!(get(address, "/metrics").await.status, 401);
}

pub(crate) async fn an_address_that_is_not_ours_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&folder);
    options.http = Some("192.0.2.1:9091".parse().unwrap());
    options.token = Some(Secret::new("0123456789abcdef").unwrap());
    let error = Server::bind(options, Fake::default()).err().unwrap();
    assert!(error.to_string().contains("192.0.2.1:9091"), "{error}");
}

pub(crate) async fn senseless_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut without_pause = options(&folder);
    without_pause.interval = Duration::ZERO;
    let error = Server::bind(without_pause, Fake::default()).err().unwrap();
    assert!(matches!(error, ServeError::NoInterval), "{error}");
    let mut no_host = options(&folder);
    no_host.hosts = vec!["http://gpu7/".into()];
    let error = Server::bind(no_host, Fake::default()).err().unwrap();
    assert!(error.to_string().contains("http://gpu7/"), "{error}");
}

pub(crate) async fn two_servers_cannot_share_a_socket() {
    let server = start(Fake::default(), |_| {});
    let folder = tempfile::tempdir().unwrap();
    let mut second = options(&folder);
    second.unix = Some(server.unix.clone());
    let error = Server::bind(second.clone(), Fake::default()).err().unwrap();
    assert!(matches!(error, ServeError::SocketInUse { .. }), "{error}");
    let stream = UnixStream::connect(&server.unix).await.unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n";
    let answer = Answer::parse(&exchange(stream, request).await);
    assert_eq!(answer.status, 200);
    server.stop().await;

    // One whose daemon is dead stands in no one's way.
    let dead = folder.path().join("dead.sock");
    drop(UnixListener::bind(&dead).unwrap());
    second.unix = Some(dead);
    Server::bind(second, Fake::default()).unwrap();
}

pub(crate) async fn the_socket_goes_with_the_server() {
    let server = start(Fake::default(), |_| {});
    let (unix, http) = (server.unix.clone(), server.http);
    assert_eq!(get(http, "/").await.status, 200);
    assert!(unix.exists());
    let folder = server.stop().await;
    assert!(folder.path().exists() && !unix.exists());
    assert!(TcpStream::connect(http).await.is_err());
}

pub(crate) async fn requests_in_flight_end_first() {
    let (gate, reached) = Gate::shut();
    let source = Fake {
        gate: Some(gate.clone()),
        ..Fake::default()
    };
    let server = start(source, |options| options.limits.grace = NEVER);
    let http = server.http;
    let request = tokio::spawn(get(http, "/api/v1/ledger"));
    reached.await.unwrap();
    let stopped = tokio::spawn(server.stop());
    // The port is shut before the request has ended.
    while TcpStream::connect(http).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!request.is_finished());
    gate.open();
    assert_eq!(request.await.unwrap().status, 200);
    stopped.await.unwrap();
}

pub(crate) async fn a_source_that_hangs_does_not_keep_the_server() {
    let (gate, reached) = Gate::shut();
    let source = Fake {
        gate: Some(gate.clone()),
        ..Fake::default()
    };
    let server = start(source, |options| {
        options.limits.grace = Duration::from_millis(50);
    });
    let mut stream = TcpStream::connect(server.http).await.unwrap();
    let request = b"GET /api/v1/ledger HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    reached.await.unwrap();
    server.stop().await;
    assert_eq!(read_all(&mut stream).await, b"");
    gate.open();
}

pub(crate) async fn live_clients_get_a_farewell() {
    let server = start(Fake::default(), |options| options.limits.grace = NEVER);
    let mut socket = websocket::connect(server.websocket, "/").await.unwrap();
    websocket::next(&mut socket).await;
    let stopped = tokio::spawn(server.stop());
    match socket.next().await {
        Some(Ok(Message::Close(Some(frame)))) => assert_eq!(frame.code, CloseCode::Away),
        other => panic!("no farewell: {other:?}"),
    }
    assert!(socket.next().await.is_none());
    stopped.await.unwrap();
}

pub(crate) async fn a_farewell_waits_for_its_answer() {
    let server = start(Fake::default(), |options| options.limits.grace = NEVER);
    let mut stream = TcpStream::connect(server.websocket).await.unwrap();
    let request = upgrade_request("/", "Host: localhost\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    while stream.read_u8().await.unwrap() != b'}' {}
    let stopped = tokio::spawn(server.stop());
    assert_eq!(stream.read_u8().await.unwrap(), 0x88);
    let mut farewell = vec![0; stream.read_u8().await.unwrap().into()];
    stream.read_exact(&mut farewell).await.unwrap();
    sleep(Duration::from_millis(50)).await;
    assert!(!stopped.is_finished());
    stream.write_all(&[0x88, 0x80, 0, 0, 0, 0]).await.unwrap();
    stopped.await.unwrap();
    assert_eq!(read_all(&mut stream).await, b"");
}

pub(crate) async fn one_that_lags_behind_gets_it_too() {
    let long = Fake {
        padding: 12 << 20,
        ..Fake::default()
    };
    let server = start(long, |options| options.limits.grace = NEVER);
    let mut socket = websocket::connect_slow(server.websocket).await;
    // In the middle of the snapshot, which is more than the kernel takes.
    socket.get_mut().readable().await.unwrap();
    let stopped = tokio::spawn(server.stop());
    sleep(Duration::from_millis(50)).await;
    websocket::next(&mut socket).await;
    let farewell = socket.next().await;
    assert!(
        matches!(farewell, Some(Ok(Message::Close(_)))),
        "{farewell:?}"
    );
    assert!(socket.next().await.is_none());
    stopped.await.unwrap();
}

pub(crate) async fn idle_and_half_begun_connections_do_not_keep_it() {
    let server = start(Fake::default(), |options| {
        options.limits.grace = Duration::from_millis(50);
    });
    let _silent = TcpStream::connect(server.http).await.unwrap();
    let mut half = TcpStream::connect(server.http).await.unwrap();
    half.write_all(b"GET / HT").await.unwrap();
    let mut idle = TcpStream::connect(server.http).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    idle.write_all(request).await.unwrap();
    idle.read_u8().await.unwrap();
    server.stop().await;
    read_all(&mut half).await;
    read_all(&mut idle).await;
}

pub(crate) async fn a_thread_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::bind(options(&folder), Fake::default()).unwrap();
    let http = server.local_addresses().http.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::spawn(|| {
        server.run_on_this_thread(async {
            let _ = stopped.await;
        })
    });
    assert_eq!(get(http, "/metrics").await.status, 200);
    stop.send(()).unwrap();
    thread.join().unwrap().unwrap();
}

pub(crate) async fn a_crowd_at_one_address_keeps_no_one_from_another() {
    let server = start(Fake::default(), |options| {
        options.limits.connections = 2;
    });
    let mut crowd = Vec::new();
    for _ in 0..10 {
        crowd.push(TcpStream::connect(server.http).await.unwrap());
    }
    websocket::connect(server.websocket, "/").await.unwrap();
    // Who waits is served when the others go.
    let waiting = tokio::spawn(get(server.http, "/metrics"));
    drop(crowd);
    assert_eq!(waiting.await.unwrap().status, 200);
}
