//! WebSocket clients.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};
use zernel_serve::{Expose, Secret};

use crate::client::{
    connect_with_small_buffer, http_get, read_all, request_upgrade, send_request, upgrade_request,
};
use crate::fixture::{FakeSource, start_server};

/// Interval between checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

pub(crate) async fn connect_websocket(
    address: SocketAddr,
    path: &str,
) -> Result<WebSocketStream<TcpStream>, Error> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (socket, _) = client_async(format!("ws://localhost{path}"), stream).await?;
    Ok(socket)
}

/// Connects with a small receive buffer, so that the server soon cannot write to a client that does
/// not read.
pub(crate) async fn connect_websocket_with_small_buffer(
    address: SocketAddr,
) -> WebSocketStream<TcpStream> {
    let stream = connect_with_small_buffer(address).await;
    client_async("ws://localhost/", stream).await.unwrap().0
}

/// Receives the next snapshot.
pub(crate) async fn receive_snapshot<S>(socket: &mut WebSocketStream<S>) -> Value
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match socket.next().await {
        Some(Ok(Message::Text(text))) => serde_json::from_str(&text).unwrap(),
        other => panic!("no snapshot: {other:?}"),
    }
}

/// Connects, retrying while the server answers 503.
async fn connect_when_a_slot_is_free(address: SocketAddr) -> WebSocketStream<TcpStream> {
    loop {
        match connect_websocket(address, "/").await {
            Ok(socket) => return socket,
            Err(Error::Http(answer)) if answer.status() == 503 => sleep(POLL_INTERVAL).await,
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) async fn every_websocket_path_sends_a_snapshot_at_once() {
    let server = start_server(FakeSource::default(), |_| {});
    for (address, path) in [
        (server.websocket, "/"),
        (server.websocket, "/ws"),
        (server.http, "/ws"),
    ] {
        let mut socket = connect_websocket(address, path).await.unwrap();
        assert_eq!(
            receive_snapshot(&mut socket).await["scope"],
            "All",
            "{path}"
        );
    }
}

pub(crate) async fn a_new_snapshot_follows_at_every_interval() {
    let server = start_server(FakeSource::default(), |options| {
        options.interval = Duration::from_millis(5);
    });
    let mut socket = connect_websocket(server.websocket, "/").await.unwrap();
    let mut last = 0;
    for _ in 0..20 {
        let number = receive_snapshot(&mut socket).await["number"]
            .as_u64()
            .unwrap();
        assert!(number > last, "{number} after {last}");
        last = number;
    }
}

pub(crate) async fn all_clients_share_one_snapshot() {
    let source = FakeSource::default();
    let snapshots = source.snapshot_count.clone();
    let server = start_server(source, |_| {});
    let mut sockets = Vec::new();
    for _ in 0..10 {
        sockets.push(connect_websocket(server.websocket, "/").await.unwrap());
    }
    for socket in &mut sockets {
        assert_eq!(receive_snapshot(socket).await["number"], 1);
    }
    assert_eq!(snapshots.load(Ordering::SeqCst), 1);
}

pub(crate) async fn no_snapshot_is_taken_without_clients() {
    let source = FakeSource::default();
    let snapshots = source.snapshot_count.clone();
    let server = start_server(source, |options| {
        options.interval = Duration::from_millis(1);
    });
    sleep(POLL_INTERVAL).await;
    assert_eq!(http_get(server.http, "/metrics").await.status, 200);
    assert_eq!(snapshots.load(Ordering::SeqCst), 0);

    let mut socket = connect_websocket(server.websocket, "/").await.unwrap();
    receive_snapshot(&mut socket).await;
    drop(socket);
    // Wait until the server takes no more snapshots.
    let mut before = u64::MAX;
    while before != snapshots.load(Ordering::SeqCst) {
        before = snapshots.load(Ordering::SeqCst);
        sleep(10 * POLL_INTERVAL).await;
    }
    // A new client must not get an old snapshot.
    let mut socket = connect_websocket(server.websocket, "/").await.unwrap();
    let number = receive_snapshot(&mut socket).await["number"]
        .as_u64()
        .unwrap();
    assert!(number > before, "{number} is not newer than {before}");
}

pub(crate) async fn a_slow_client_skips_snapshots_and_delays_no_other_client() {
    let long = FakeSource {
        padding: 256 << 10,
        ..FakeSource::default()
    };
    let server = start_server(long, |options| {
        options.interval = Duration::from_millis(1);
    });
    let mut slow = connect_websocket_with_small_buffer(server.websocket).await;
    let mut quick = connect_websocket(server.websocket, "/").await.unwrap();
    let mut last = 0;
    for _ in 0..100 {
        last = receive_snapshot(&mut quick).await["number"]
            .as_u64()
            .unwrap();
    }
    let (mut received, mut number) = (0, 0);
    while number < last {
        number = receive_snapshot(&mut slow).await["number"]
            .as_u64()
            .unwrap();
        received += 1;
    }
    assert!(
        received < last,
        "got {received} of {last}, so no snapshot was skipped"
    );
}

pub(crate) async fn a_client_that_reads_nothing_is_disconnected() {
    let long = FakeSource {
        padding: 256 << 10,
        ..FakeSource::default()
    };
    let server = start_server(long, |options| {
        options.interval = Duration::from_millis(1);
        options.limits.websockets = 1;
        options.limits.write_stall_timeout = Duration::from_millis(50);
    });
    let _stalled = connect_websocket_with_small_buffer(server.websocket).await;
    let mut other = connect_when_a_slot_is_free(server.websocket).await;
    receive_snapshot(&mut other).await;
}

pub(crate) async fn pings_are_answered_and_messages_ignored() {
    let server = start_server(FakeSource::default(), |_| {});
    let mut socket = connect_websocket(server.websocket, "/").await.unwrap();
    receive_snapshot(&mut socket).await;
    for message in [Message::text("hello"), Message::binary(vec![0; 4000])] {
        socket.send(message).await.unwrap();
    }
    socket.send(Message::Ping("here?".into())).await.unwrap();
    let answer = socket.next().await.unwrap().unwrap();
    assert_eq!(answer, Message::Pong("here?".into()));
    socket.close(None).await.unwrap();
    assert!(matches!(socket.next().await, Some(Ok(Message::Close(_)))));
    assert!(socket.next().await.is_none());
}

pub(crate) async fn malformed_and_oversized_frames_end_the_connection() {
    let server = start_server(FakeSource::default(), |_| {});
    let big_header = [
        0x82, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0,
    ];
    let mut too_big = vec![0x82, 0xfe, 0x20, 0x00, 0, 0, 0, 0];
    too_big.resize(too_big.len() + 0x2000, 0);
    // The message is larger than what one read takes, so that part of it stays in the kernel.
    let mut much_too_big = big_header.to_vec();
    much_too_big.resize(1 << 20, 0);
    let frames: [(&str, &[u8]); 9] = [
        ("unmasked", &[0x81, 0x01, b'x']),
        ("reserved opcode", &[0x83, 0x80, 0, 0, 0, 0]),
        ("reserved bits", &[0xf1, 0x80, 0, 0, 0, 0]),
        ("fragmented ping", &[0x09, 0x80, 0, 0, 0, 0]),
        ("continuation without a start", &[0x80, 0x80, 0, 0, 0, 0]),
        ("not UTF-8", &[0x81, 0x81, 0, 0, 0, 0, 0xff]),
        ("announced as huge", &big_header),
        ("too big", &too_big),
        ("much too big", &much_too_big),
    ];
    for (what, bytes) in frames {
        let mut stream = TcpStream::connect(server.websocket).await.unwrap();
        let request = upgrade_request("/", "Host: localhost\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        while stream.read_u8().await.unwrap() != b'}' {}
        stream.write_all(bytes).await.unwrap();
        // The read returns only when the server closes the connection, after a close frame with
        // code 1002.
        let close = read_all(&mut stream).await;
        assert_eq!(close.first(), Some(&0x88), "{what}: {close:?}");
        assert_eq!(close[2..4], 1002_u16.to_be_bytes(), "{what}");
    }
    connect_websocket(server.websocket, "/").await.unwrap();
}

pub(crate) async fn websocket_client_65_gets_503() {
    let server = start_server(FakeSource::default(), |_| {});
    let mut sockets = Vec::new();
    for index in 0..64 {
        let (address, path) = match index % 2 {
            0 => (server.websocket, "/"),
            _ => (server.http, "/ws"),
        };
        sockets.push(connect_websocket(address, path).await.unwrap());
    }
    let answer = request_upgrade(server.websocket, "/", "Host: localhost\r\n").await;
    assert_eq!(answer.status, 503);
    assert!(answer.find_header("retry-after").is_some());
    assert_eq!(http_get(server.http, "/metrics").await.status, 200);
    sockets.pop();
    connect_when_a_slot_is_free(server.websocket).await;
}

pub(crate) async fn websockets_of_foreign_origins_are_refused() {
    let server = start_server(FakeSource::default(), |_| {});
    for (address, path) in [(server.websocket, "/"), (server.http, "/ws")] {
        for (headers, status) in [
            ("Host: localhost\r\nOrigin: http://localhost:3000\r\n", 101),
            ("Host: localhost\r\nOrigin: http://evil.example\r\n", 403),
            ("Host: evil.example\r\nOrigin: http://evil.example\r\n", 403),
            ("Host: evil.example\r\n", 403),
        ] {
            assert_eq!(
                request_upgrade(address, path, headers).await.status,
                status,
                "{headers}"
            );
        }
    }
}

pub(crate) async fn a_websocket_may_pass_the_token_in_the_query() {
    let server = start_server(FakeSource::default(), |options| {
        options.expose = Expose::Token;
        options.token = Some(Secret::new("0123456789abcd/+").unwrap());
    });
    for (path, status) in [
        ("/", 401),
        ("/?token=wrong", 401),
        ("/?token=0123456789abcd%2F%2B", 101),
    ] {
        let answer = request_upgrade(server.websocket, path, "Host: localhost\r\n").await;
        assert_eq!(answer.status, status, "{path}");
    }
    let headers = "Host: localhost\r\nAuthorization: Bearer 0123456789abcd/+\r\n";
    assert_eq!(
        request_upgrade(server.websocket, "/", headers).await.status,
        101
    );
}

pub(crate) async fn plain_requests_to_the_websocket_port_get_a_hint() {
    let server = start_server(FakeSource::default(), |_| {});
    assert_eq!(http_get(server.websocket, "/").await.status, 400);
    assert_eq!(
        send_request(server.websocket, "POST /", "Host: localhost\r\n")
            .await
            .status,
        405
    );
    let hint = http_get(server.websocket, "/metrics").await;
    assert!(hint.body.contains("WebSocket"), "{}", hint.body);
}
