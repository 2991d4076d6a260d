//! Binding and shutdown.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use zernel_serve::{Expose, ServeError, Server};

use crate::client::{Response, http_get, read_all, send_and_read_all, upgrade_request};
use crate::fixture::{
    FakeSource, NEVER_EXPIRING_TIMEOUT, SourceGate, require_token, start_server, test_options,
};
use crate::websocket;

pub(crate) async fn a_port_in_use_is_reported_and_nothing_stays_bound() {
    let folder = tempfile::tempdir().unwrap();
    // An address only this test uses, so that no other test takes the free port.
    let bind = || TcpListener::bind("127.0.0.77:0").unwrap();
    let taken = bind();
    let free = bind().local_addr().unwrap();
    let mut options = test_options(&folder);
    options.http = Some(free);
    options.websocket = Some(taken.local_addr().unwrap());
    let error = Server::bind_addresses(options.clone(), FakeSource::default())
        .err()
        .unwrap();
    assert!(matches!(error, ServeError::PortInUse { .. }), "{error}");
    let address = taken.local_addr().unwrap().to_string();
    assert!(error.to_string().contains(&address), "{error}");
    assert!(!options.unix.clone().unwrap().exists());
    drop(taken);
    Server::bind_addresses(options, FakeSource::default()).unwrap();
}

pub(crate) async fn an_address_other_machines_reach_needs_a_token() {
    for address in [
        "0.0.0.0:0",
        "[::]:0",
        "192.0.2.1:9091",
        "[::ffff:192.0.2.1]:0",
    ] {
        for http in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let mut options = test_options(&folder);
            match http {
                true => options.http = Some(address.parse().unwrap()),
                false => options.websocket = Some(address.parse().unwrap()),
            }
            let error = Server::bind_addresses(options, FakeSource::default())
                .err()
                .unwrap();
            let is_named = matches!(error, ServeError::ExposedWithoutToken { .. });
            assert!(is_named && error.to_string().contains("token"), "{error}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let mut wrapped = test_options(&folder);
    wrapped.http = Some("[::ffff:127.0.0.1]:0".parse().unwrap());
    // On a machine without IPv6, binding fails for another reason.
    let result = Server::bind_addresses(wrapped, FakeSource::default());
    assert!(!matches!(
        result,
        Err(ServeError::ExposedWithoutToken { .. })
    ));
    let server = start_server(FakeSource::default(), |options| {
        options.http = Some("0.0.0.0:0".parse().unwrap());
        require_token(options);
    });
    let address = ([127, 0, 0, 1], server.http.port()).into();
    assert_eq!(http_get(address, "/metrics").await.status, 401);
}

pub(crate) async fn a_server_without_a_token_must_expose_everything() {
    for expose in [Expose::Token, Expose::Aggregate] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = test_options(&folder);
        options.expose = expose;
        let error = Server::bind_addresses(options.clone(), FakeSource::default()).err();
        assert!(
            matches!(error, Some(ServeError::TokenRequired)),
            "{error:?}"
        );
        // Unix socket clients need no token.
        (options.http, options.websocket) = (None, None);
        Server::bind_addresses(options, FakeSource::default()).unwrap();
    }
}

pub(crate) async fn the_error_for_a_foreign_address_names_the_address() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = test_options(&folder);
    options.http = Some("192.0.2.1:9091".parse().unwrap());
    require_token(&mut options);
    let error = Server::bind_addresses(options, FakeSource::default())
        .err()
        .unwrap();
    assert!(error.to_string().contains("192.0.2.1:9091"), "{error}");
}

pub(crate) async fn a_zero_interval_and_a_bad_host_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut without_pause = test_options(&folder);
    without_pause.interval = Duration::ZERO;
    let error = Server::bind_addresses(without_pause, FakeSource::default())
        .err()
        .unwrap();
    assert!(matches!(error, ServeError::ZeroInterval), "{error}");
    let mut no_host = test_options(&folder);
    no_host.hosts = vec!["http://gpu7/".into()];
    let error = Server::bind_addresses(no_host, FakeSource::default())
        .err()
        .unwrap();
    assert!(error.to_string().contains("http://gpu7/"), "{error}");
}

pub(crate) async fn a_unix_socket_in_use_is_refused_and_a_stale_one_replaced() {
    let server = start_server(FakeSource::default(), |_| {});
    let folder = tempfile::tempdir().unwrap();
    let mut second = test_options(&folder);
    second.unix = Some(server.unix.clone());
    let error = Server::bind_addresses(second.clone(), FakeSource::default())
        .err()
        .unwrap();
    assert!(matches!(error, ServeError::SocketInUse { .. }), "{error}");
    let stream = UnixStream::connect(&server.unix).await.unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n";
    let answer = Response::parse(&send_and_read_all(stream, request).await);
    assert_eq!(answer.status, 200);
    server.shut_down().await;

    // A socket without a listener is replaced.
    let dead = folder.path().join("dead.sock");
    drop(UnixListener::bind(&dead).unwrap());
    second.unix = Some(dead);
    Server::bind_addresses(second, FakeSource::default()).unwrap();
}

pub(crate) async fn shutdown_removes_the_unix_socket_and_closes_the_port() {
    let server = start_server(FakeSource::default(), |_| {});
    let (unix, http) = (server.unix.clone(), server.http);
    assert_eq!(http_get(http, "/").await.status, 200);
    assert!(unix.exists());
    let folder = server.shut_down().await;
    assert!(folder.path().exists() && !unix.exists());
    assert!(TcpStream::connect(http).await.is_err());
}

pub(crate) async fn shutdown_waits_for_requests_in_flight() {
    let (gate, reached) = SourceGate::new_closed();
    let source = FakeSource {
        gate: Some(gate.clone()),
        ..FakeSource::default()
    };
    let server = start_server(source, |options| {
        options.limits.shutdown_grace = NEVER_EXPIRING_TIMEOUT;
    });
    let http = server.http;
    let request = tokio::spawn(http_get(http, "/api/v1/ledger"));
    reached.await.unwrap();
    let stopped = tokio::spawn(server.shut_down());
    // The port is closed before the request has finished.
    while TcpStream::connect(http).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!request.is_finished());
    gate.open();
    assert_eq!(request.await.unwrap().status, 200);
    stopped.await.unwrap();
}

pub(crate) async fn a_hanging_source_does_not_block_shutdown() {
    let (gate, reached) = SourceGate::new_closed();
    let source = FakeSource {
        gate: Some(gate.clone()),
        ..FakeSource::default()
    };
    let server = start_server(source, |options| {
        options.limits.shutdown_grace = Duration::from_millis(50);
    });
    let mut stream = TcpStream::connect(server.http).await.unwrap();
    let request = b"GET /api/v1/ledger HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    reached.await.unwrap();
    server.shut_down().await;
    assert_eq!(read_all(&mut stream).await, b"");
    gate.open();
}

pub(crate) async fn websocket_clients_get_a_close_frame_at_shutdown() {
    let server = start_server(FakeSource::default(), |options| {
        options.limits.shutdown_grace = NEVER_EXPIRING_TIMEOUT;
    });
    let mut socket = websocket::connect_websocket(server.websocket, "/")
        .await
        .unwrap();
    websocket::receive_snapshot(&mut socket).await;
    let stopped = tokio::spawn(server.shut_down());
    match socket.next().await {
        Some(Ok(Message::Close(Some(frame)))) => assert_eq!(frame.code, CloseCode::Away),
        other => panic!("no close frame: {other:?}"),
    }
    assert!(socket.next().await.is_none());
    stopped.await.unwrap();
}

pub(crate) async fn shutdown_waits_for_the_clients_close_frame() {
    let server = start_server(FakeSource::default(), |options| {
        options.limits.shutdown_grace = NEVER_EXPIRING_TIMEOUT;
    });
    let mut stream = TcpStream::connect(server.websocket).await.unwrap();
    let request = upgrade_request("/", "Host: localhost\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    while stream.read_u8().await.unwrap() != b'}' {}
    let stopped = tokio::spawn(server.shut_down());
    assert_eq!(stream.read_u8().await.unwrap(), 0x88);
    let mut payload = vec![0; stream.read_u8().await.unwrap().into()];
    stream.read_exact(&mut payload).await.unwrap();
    sleep(Duration::from_millis(50)).await;
    assert!(!stopped.is_finished());
    stream.write_all(&[0x88, 0x80, 0, 0, 0, 0]).await.unwrap();
    stopped.await.unwrap();
    assert_eq!(read_all(&mut stream).await, b"");
}

pub(crate) async fn a_slow_websocket_client_gets_the_close_frame_too() {
    let long = FakeSource {
        padding: 12 << 20,
        ..FakeSource::default()
    };
    let server = start_server(long, |options| {
        options.limits.shutdown_grace = NEVER_EXPIRING_TIMEOUT;
    });
    let mut socket = websocket::connect_websocket_with_small_buffer(server.websocket).await;
    // The server is now in the middle of a snapshot that exceeds the kernel's buffers.
    socket.get_mut().readable().await.unwrap();
    let stopped = tokio::spawn(server.shut_down());
    sleep(Duration::from_millis(50)).await;
    websocket::receive_snapshot(&mut socket).await;
    let close = socket.next().await;
    assert!(matches!(close, Some(Ok(Message::Close(_)))), "{close:?}");
    assert!(socket.next().await.is_none());
    stopped.await.unwrap();
}

pub(crate) async fn idle_and_half_sent_requests_do_not_block_shutdown() {
    let server = start_server(FakeSource::default(), |options| {
        options.limits.shutdown_grace = Duration::from_millis(50);
    });
    let _silent = TcpStream::connect(server.http).await.unwrap();
    let mut half = TcpStream::connect(server.http).await.unwrap();
    half.write_all(b"GET / HT").await.unwrap();
    let mut idle = TcpStream::connect(server.http).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    idle.write_all(request).await.unwrap();
    idle.read_u8().await.unwrap();
    server.shut_down().await;
    read_all(&mut half).await;
    read_all(&mut idle).await;
}

pub(crate) async fn the_server_runs_on_a_plain_thread() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::bind_addresses(test_options(&folder), FakeSource::default()).unwrap();
    let http = server.local_addresses().http.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::spawn(|| {
        server.run_on_this_thread(async {
            let _ = stopped.await;
        })
    });
    assert_eq!(http_get(http, "/metrics").await.status, 200);
    stop.send(()).unwrap();
    thread.join().unwrap().unwrap();
}

pub(crate) async fn a_full_address_does_not_block_another_address() {
    let server = start_server(FakeSource::default(), |options| {
        options.limits.connections = 2;
    });
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(TcpStream::connect(server.http).await.unwrap());
    }
    websocket::connect_websocket(server.websocket, "/")
        .await
        .unwrap();
    // The oldest clients make room for a new one.
    assert_eq!(http_get(server.http, "/metrics").await.status, 200);
    read_all(&mut clients[0]).await;
}
