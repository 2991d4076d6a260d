//! WebSocket clients: each gets a snapshot at once and then one per interval.

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::time::timeout;

use crate::Limits;
use crate::access::AccessGrant;
use crate::connection_slots::{Slot, Slots};
use crate::http_api::AppState;
use crate::shutdown::ShutdownSignal;
use crate::snapshot_stream::{LatestSnapshot, SnapshotStreams};

/// Largest message accepted from a client. Clients need to send only control frames.
const MAX_MESSAGE_BYTES: usize = 4096;

/// State shared by all WebSocket connections.
pub(crate) struct WebSocketContext {
    pub(crate) streams: SnapshotStreams,
    pub(crate) slots: Slots,
    pub(crate) shutdown: ShutdownSignal,
    pub(crate) limits: Limits,
}

/// Upgrades a request to a WebSocket, or answers 503 when all slots of its owner are taken.
pub(crate) async fn upgrade_to_websocket(
    State(state): State<AppState>,
    Extension(grant): Extension<AccessGrant>,
    upgrade: WebSocketUpgrade,
) -> Response {
    let websockets = state.websockets;
    let Some(slot) = websockets.slots.take_slot(grant.owner) else {
        return too_many_clients_response();
    };
    upgrade
        .max_frame_size(MAX_MESSAGE_BYTES)
        .max_message_size(MAX_MESSAGE_BYTES)
        .on_upgrade(async move |socket| {
            let latest = websockets.streams.subscribe_to_scope(grant.scope);
            let shutdown = websockets.shutdown.clone();
            serve_client(socket, latest, &slot, shutdown, websockets.limits).await;
        })
}

fn too_many_clients_response() -> Response {
    let text =
        "you have too many WebSocket clients, or the daemon has; close one or try again later\n";
    let retry = [(header::RETRY_AFTER, "10")];
    (StatusCode::SERVICE_UNAVAILABLE, retry, text).into_response()
}

/// Serves one client until it disconnects or the server shuts down, then performs the closing
/// handshake.
async fn serve_client(
    mut socket: WebSocket,
    latest: LatestSnapshot,
    slot: &Slot,
    mut shutdown: ShutdownSignal,
    limits: Limits,
) {
    let close = tokio::select! {
        () = slot.wait_until_evicted() => Some(close_frame(close_code::AGAIN, "another user needs the connection")),
        close = push_snapshots(&mut socket, latest) => close,
        () = shutdown.wait_until_requested() => Some(close_frame(close_code::AWAY, "the daemon is shutting down")),
    };
    let Some(close) = close else { return };
    let closing = async {
        if socket.send(Message::Close(Some(close))).await.is_ok() {
            // Wait for the client's close frame: closing a socket with unread data may make the
            // kernel discard our close frame.
            while let Some(Ok(_)) = socket.recv().await {}
        }
    };
    tokio::select! {
        _ = timeout(limits.shutdown_grace, closing) => {}
        () = shutdown.wait_until_grace_is_over() => {}
    }
}

/// Sends every new snapshot. Returns the close frame for a client that is still connected.
async fn push_snapshots(socket: &mut WebSocket, mut latest: LatestSnapshot) -> Option<CloseFrame> {
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                // The WebSocket layer answers pings and close frames; other messages are ignored.
                Some(Ok(_)) => {}
                Some(Err(_)) => {
                    return Some(close_frame(close_code::PROTOCOL, "the frame is malformed or too big"));
                }
                None => return None,
            },
            // `changed` fails only when the sender is dropped, and the sender outlives its
            // subscribers.
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
