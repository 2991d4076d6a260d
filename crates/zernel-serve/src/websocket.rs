//! Live clients: each gets a snapshot at once and then at every interval.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::Limits;
use crate::access::Peer;
use crate::api::AppState;
use crate::shutdown::ShutdownSignal;
use crate::snapshot_stream::{LatestSnapshot, SnapshotStreams};

/// Clients have nothing to say to us, so what they say is short.
const MAX_MESSAGE_BYTES: usize = 4096;

/// Where live clients are.
pub(crate) struct WebSocketContext {
    pub(crate) streams: SnapshotStreams,
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) shutdown: ShutdownSignal,
    pub(crate) limits: Limits,
}

/// Turns a request into a live client, while there are seats.
pub(crate) async fn upgrade(
    State(state): State<AppState>,
    Extension(peer): Extension<Peer>,
    upgrade: WebSocketUpgrade,
) -> Response {
    let websockets = state.websockets;
    let Ok(slot) = Arc::clone(&websockets.slots).try_acquire_owned() else {
        return too_many_clients(websockets.limits.websockets);
    };
    upgrade
        .max_frame_size(MAX_MESSAGE_BYTES)
        .max_message_size(MAX_MESSAGE_BYTES)
        .on_upgrade(async move |socket| {
            let latest = websockets.streams.subscribe(peer.scope());
            serve_client(
                socket,
                latest,
                websockets.shutdown.clone(),
                websockets.limits,
            )
            .await;
            drop(slot);
        })
}

fn too_many_clients(limit: usize) -> Response {
    let text = format!("all {limit} places for live clients are taken; try again later\n");
    let retry = [(header::RETRY_AFTER, "10")];
    (StatusCode::SERVICE_UNAVAILABLE, retry, text).into_response()
}

/// Serves one client until it or the server ends, and parts in the way WebSockets do.
async fn serve_client(
    mut socket: WebSocket,
    latest: LatestSnapshot,
    mut shutdown: ShutdownSignal,
    limits: Limits,
) {
    let close = tokio::select! {
        close = push_snapshots(&mut socket, latest) => close,
        () = shutdown.requested() => Some(close_frame(close_code::AWAY, "the daemon ends")),
    };
    let Some(close) = close else { return };
    let closing = async {
        if socket.send(Message::Close(Some(close))).await.is_ok() {
            // Its answer is the proof that it arrived: closing with something unread could make the
            // kernel throw the close away.
            while let Some(Ok(_)) = socket.recv().await {}
        }
    };
    tokio::select! {
        _ = timeout(limits.grace, closing) => {}
        () = shutdown.grace_over() => {}
    }
}

/// Sends what is latest whenever there is something new. Returns what is left to say to a client
/// that is still there.
async fn push_snapshots(socket: &mut WebSocket, mut latest: LatestSnapshot) -> Option<CloseFrame> {
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                // Pings and farewells are answered one level below; the rest means nothing.
                Some(Ok(_)) => {}
                Some(Err(_)) => {
                    return Some(close_frame(close_code::PROTOCOL, "that frame was malformed or too big"));
                }
                None => return None,
            },
            // Fails only with the feed, which outlives those who watch it.
            Ok(()) = latest.changed() => {
                let text = latest.borrow_and_update().clone();
                if let Some(text) = text && socket.send(Message::Text(text)).await.is_err() {
                    return None;
                }
            }
        }
    }
}

fn close_frame(code: u16, reason: &'static str) -> CloseFrame {
    CloseFrame {
        code,
        reason: Utf8Bytes::from_static(reason),
    }
}
