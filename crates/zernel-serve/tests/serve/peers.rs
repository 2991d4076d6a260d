//! Unix socket clients: each user sees only their own processes.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use rustix::process::Uid;
use rustix::thread::set_thread_uid;
use serde_json::Value;
use tokio_tungstenite::client_async;
use zernel_serve::Options;

use crate::client::{Response, send_and_read_all};
use crate::fixture::{FakeSource, RunningServer, start_server};
use crate::websocket;

pub(crate) const NOBODY_UID: u32 = 65534;

/// Connects as another user. Linux keeps the uid per thread, so a thread suffices.
pub(crate) fn connect_to_socket_as_user(user: u32, path: &Path) -> tokio::net::UnixStream {
    let path = path.to_owned();
    let thread = thread::spawn(move || {
        set_thread_uid(Uid::from_raw(user)).unwrap();
        UnixStream::connect(path).unwrap()
    });
    let stream = thread.join().unwrap();
    stream.set_nonblocking(true).unwrap();
    tokio::net::UnixStream::from_std(stream).unwrap()
}

/// Starts a server whose socket folder every user can enter.
pub(crate) fn start_server_for_all_users(change: impl FnOnce(&mut Options)) -> RunningServer {
    start_server_for_all_users_with(source_with_a_problem(), change)
}

/// Starts a server as `start_server_for_all_users` does, with another source.
pub(crate) fn start_server_for_all_users_with(
    source: FakeSource,
    change: impl FnOnce(&mut Options),
) -> RunningServer {
    let server = start_server(source, change);
    let folder = server.unix.parent().unwrap();
    set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    server
}

fn source_with_a_problem() -> FakeSource {
    FakeSource {
        problems: vec!["the overhead of process 4711 exceeded the ceiling".into()],
        ..FakeSource::default()
    }
}

pub(crate) async fn http_get_over_unix_socket(
    stream: tokio::net::UnixStream,
    path: &str,
) -> Response {
    let request = format!("GET {path} HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n");
    Response::parse(&send_and_read_all(stream, request.as_bytes()).await)
}

pub(crate) async fn the_daemons_user_sees_all_processes() {
    let server = start_server(FakeSource::default(), |_| {});
    let stream = tokio::net::UnixStream::connect(&server.unix).await.unwrap();
    assert_eq!(
        http_get_over_unix_socket(stream, "/metrics").await.body,
        "All Prometheus\n"
    );
}

pub(crate) async fn other_users_see_only_their_processes() {
    let server = start_server_for_all_users(|_| {});
    let stream = || connect_to_socket_as_user(NOBODY_UID, &server.unix);
    let metrics = http_get_over_unix_socket(stream(), "/metrics").await;
    assert_eq!(metrics.body, "User(65534) Prometheus\n");
    let quantiles = http_get_over_unix_socket(stream(), "/metrics/quantiles").await;
    assert_eq!(quantiles.body, "User(65534) Quantiles\n");
    for (path, key) in [("/api/v1/snapshot", "scope"), ("/api/v1/ledger", "ledger")] {
        let answer: Value =
            serde_json::from_str(&http_get_over_unix_socket(stream(), path).await.body).unwrap();
        assert_eq!(answer[key], "User(65534)", "{path}");
    }
    let root = || connect_to_socket_as_user(0, &server.unix);
    assert_eq!(
        http_get_over_unix_socket(root(), "/metrics").await.body,
        "All Prometheus\n"
    );
    // Problems name processes of other users.
    let health = http_get_over_unix_socket(stream(), "/healthz").await;
    assert_eq!(health.body, "{\"ok\":false,\"problem_count\":1}");
    assert!(
        http_get_over_unix_socket(root(), "/healthz")
            .await
            .body
            .contains("4711")
    );
}

pub(crate) async fn other_users_stream_only_their_processes() {
    let server = start_server_for_all_users(|_| {});
    let mut all_users = websocket::connect_websocket(server.websocket, "/")
        .await
        .unwrap();
    let stream = connect_to_socket_as_user(NOBODY_UID, &server.unix);
    let (mut nobody, _) = client_async("ws://anything/ws", stream).await.unwrap();
    assert_eq!(
        websocket::receive_snapshot(&mut nobody).await["scope"],
        "User(65534)"
    );
    assert_eq!(
        websocket::receive_snapshot(&mut all_users).await["scope"],
        "All"
    );
}
