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
use crate::api::Serving;
use crate::ending::Ending;
use crate::feed::{Feeds, Newest};
use crate::guard::Peer;

/// Clients have nothing to say to us, so what they say is short.
const LONGEST_MESSAGE: usize = 4096;

/// Where live clients are.
pub(crate) struct Lounge {
    pub(crate) feeds: Feeds,
    pub(crate) seats: Arc<Semaphore>,
    pub(crate) ending: Ending,
    pub(crate) limits: Limits,
}

/// Turns a request into a live client, while there are seats.
pub(crate) async fn upgrade(
    State(serving): State<Serving>,
    Extension(peer): Extension<Peer>,
    upgrade: WebSocketUpgrade,
) -> Response {
    let lounge = serving.lounge;
    let Ok(seat) = Arc::clone(&lounge.seats).try_acquire_owned() else {
        return full(lounge.limits.websockets);
    };
    upgrade
        .max_frame_size(LONGEST_MESSAGE)
        .max_message_size(LONGEST_MESSAGE)
        .on_upgrade(async move |socket| {
            let newest = lounge.feeds.watch(peer.scope());
            attend(socket, newest, lounge.ending.clone(), lounge.limits).await;
            drop(seat);
        })
}

fn full(seats: usize) -> Response {
    let text = format!("all {seats} places for live clients are taken; try again later\n");
    let retry = [(header::RETRY_AFTER, "10")];
    (StatusCode::SERVICE_UNAVAILABLE, retry, text).into_response()
}

/// Serves one client until it or the server ends, and parts in the way WebSockets do.
async fn attend(mut socket: WebSocket, newest: Newest, mut ending: Ending, limits: Limits) {
    let farewell = tokio::select! {
        farewell = converse(&mut socket, newest) => farewell,
        () = ending.begun() => Some(farewell(close_code::AWAY, "the daemon ends")),
    };
    let Some(farewell) = farewell else { return };
    let parting = async {
        if socket.send(Message::Close(Some(farewell))).await.is_ok() {
            // Its answer is the proof that it arrived: closing with something unread could make the
            // kernel throw the farewell away.
            while let Some(Ok(_)) = socket.recv().await {}
        }
    };
    tokio::select! {
        _ = timeout(limits.grace, parting) => {}
        () = ending.over() => {}
    }
}

/// Sends what is newest whenever there is something new. Returns what is left to say to a client
/// that is still there.
async fn converse(socket: &mut WebSocket, mut newest: Newest) -> Option<CloseFrame> {
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                // Pings and farewells are answered one level below; the rest means nothing.
                Some(Ok(_)) => {}
                Some(Err(_)) => {
                    return Some(farewell(close_code::PROTOCOL, "that frame was malformed or too big"));
                }
                None => return None,
            },
            // Fails only with the feed, which outlives those who watch it.
            Ok(()) = newest.changed() => {
                let text = newest.borrow_and_update().clone();
                if let Some(text) = text && socket.send(Message::Text(text)).await.is_err() {
                    return None;
                }
            }
        }
    }
}

fn farewell(code: u16, reason: &'static str) -> CloseFrame {
    CloseFrame {
        code,
        reason: Utf8Bytes::from_static(reason),
    }
}
