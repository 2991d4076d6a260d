//! Limits on connections: no user can shut out another one.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio_tungstenite::client_async;
use zernel_serve::{Expose, Options};

use crate::client::{read_all, request_upgrade, send_request};
use crate::fixture::{FakeSource, require_token, start_server};
use crate::peers::{
    NOBODY_UID, connect_to_socket_as_user, http_get_over_unix_socket, start_server_for_all_users,
    start_server_for_all_users_with,
};
use crate::websocket;

/// A user who is neither root nor [`NOBODY_UID`].
const OTHER_UID: u32 = 65533;
const HEADERS_WITH_TOKEN: &str = "Host: localhost\r\nAuthorization: Bearer 0123456789abcdef\r\n";

/// Low limits, so that a test needs few file descriptors.
fn set_low_limits(options: &mut Options) {
    options.limits.connections = 8;
    options.limits.connections_per_tenant = 4;
    options.limits.websockets = 8;
    options.limits.websockets_per_tenant = 4;
}

pub(crate) async fn slow_clients_of_one_user_do_not_shut_out_others() {
    let server = start_server_for_all_users(set_low_limits);
    let mut slow = Vec::new();
    for _ in 0..50 {
        let mut stream = connect_to_socket_as_user(NOBODY_UID, &server.unix);
        // The server may have closed the connection already.
        let _ = stream.write_all(b"GET /metrics HT").await;
        slow.push(stream);
    }
    for (user, scope) in [
        (0, "All"),
        (OTHER_UID, "User(65533)"),
        (NOBODY_UID, "User(65534)"),
    ] {
        let answer =
            http_get_over_unix_socket(connect_to_socket_as_user(user, &server.unix), "/metrics")
                .await;
        assert_eq!(answer.body, format!("{scope} Prometheus\n"));
    }
    // The oldest were disconnected.
    read_all(&mut slow[0]).await;
}

/// Answers that were not read stay in memory. So the number of unread answers of a user is limited, and other users
/// get their answers.
pub(crate) async fn unread_answers_of_one_user_are_bounded() {
    let source = FakeSource {
        padding: 4 << 20,
        ..FakeSource::default()
    };
    let server = start_server_for_all_users_with(source, |_| {});
    let mut unread = Vec::new();
    for _ in 0..8 {
        let mut stream = connect_to_socket_as_user(NOBODY_UID, &server.unix);
        let head = b"GET /api/v1/ledger HTTP/1.1\r\nHost: localhost\r\n\r\n";
        stream.write_all(head).await.unwrap();
        // The client has begun to read its answer, so the next client gets a new text.
        stream.read_u8().await.unwrap();
        unread.push(stream);
    }
    let refused = http_get_over_unix_socket(
        connect_to_socket_as_user(NOBODY_UID, &server.unix),
        "/api/v1/ledger",
    )
    .await;
    assert_eq!(refused.status, 503);
    assert_eq!(refused.find_header("retry-after"), Some("10"));
    for (user, path) in [
        (NOBODY_UID, "/api/v1/snapshot"),
        (OTHER_UID, "/api/v1/ledger"),
        (0, "/api/v1/ledger"),
    ] {
        let answer =
            http_get_over_unix_socket(connect_to_socket_as_user(user, &server.unix), path).await;
        assert_eq!(answer.status, 200, "{user} {path}");
    }
    drop(unread);
    while http_get_over_unix_socket(
        connect_to_socket_as_user(NOBODY_UID, &server.unix),
        "/api/v1/ledger",
    )
    .await
    .status
        != 200
    {
        yield_now().await;
    }
}

pub(crate) async fn idle_websockets_of_one_user_do_not_shut_out_others() {
    let server = start_server_for_all_users(set_low_limits);
    let connect = async |user| {
        let stream = connect_to_socket_as_user(user, &server.unix);
        client_async("ws://anything/ws", stream).await
    };
    let mut idle = Vec::new();
    while let Ok((socket, _)) = connect(NOBODY_UID).await {
        idle.push(socket);
    }
    assert_eq!(idle.len(), 4);
    let (mut root, _) = connect(0).await.unwrap();
    assert_eq!(websocket::receive_snapshot(&mut root).await["scope"], "All");
    let (mut other_user, _) = connect(OTHER_UID).await.unwrap();
    assert_eq!(
        websocket::receive_snapshot(&mut other_user).await["scope"],
        "User(65533)"
    );
}

pub(crate) async fn clients_without_the_token_do_not_shut_out_clients_with_it() {
    let server = start_server(FakeSource::default(), |options| {
        set_low_limits(options);
        require_token(options);
    });
    let mut early = TcpStream::connect(server.http).await.unwrap();
    let head = format!("GET /metrics HTTP/1.1\r\n{HEADERS_WITH_TOKEN}\r\n");
    early.write_all(head.as_bytes()).await.unwrap();
    early.read_u8().await.unwrap();
    let mut slow = Vec::new();
    for _ in 0..50 {
        slow.push(TcpStream::connect(server.http).await.unwrap());
    }
    let late = send_request(server.http, "GET /metrics", HEADERS_WITH_TOKEN).await;
    assert_eq!(late.status, 200);
    // The connection that sent the token stays.
    early.write_all(head.as_bytes()).await.unwrap();
    let mut answers = String::new();
    while answers.matches("All Prometheus").count() < 2 {
        let byte = early.read_u8().await.unwrap();
        answers.push(char::from(byte));
    }
    read_all(&mut slow[0]).await;
}

pub(crate) async fn websockets_without_the_token_do_not_shut_out_clients_with_it() {
    let server = start_server(FakeSource::default(), |options| {
        set_low_limits(options);
        require_token(options);
        options.expose = Expose::Aggregate;
    });
    let mut idle = Vec::new();
    while let Ok(socket) = websocket::connect_websocket(server.websocket, "/").await {
        idle.push(socket);
    }
    assert_eq!(idle.len(), 8);
    assert_eq!(
        websocket::receive_snapshot(&mut idle[0]).await["scope"],
        "Machine"
    );
    let answer = request_upgrade(server.websocket, "/", HEADERS_WITH_TOKEN).await;
    assert_eq!(answer.status, 101);
}
