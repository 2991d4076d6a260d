//! What is served under which path.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::ws::Utf8Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router, body};
use serde_json::json;

use crate::desk::{Desk, Topic};
use crate::flights::Crashed;
use crate::guard::{self, Guard, Peer, Trusted};
use crate::websocket::{self, Lounge};
use crate::{TextFormat, negotiate};

const INDEX: &str = "\
zernel observe

/metrics            metrics for Prometheus; OpenMetrics 1.0 if the Accept header asks for it
/metrics/quantiles  those of them that every source has, with quantiles in place of histogram buckets
/api/v1/snapshot    the state of this moment, as JSON
/api/v1/ledger      which functions are watched, and why others are not, as JSON
/ws                 a WebSocket that sends snapshots
/healthz            200 if all is well, 503 and what is wrong if not
";

/// All that handlers use.
#[derive(Clone)]
pub(crate) struct Serving {
    pub(crate) desk: Arc<Desk>,
    pub(crate) lounge: Arc<Lounge>,
}

/// What HTTP clients can ask for.
pub(crate) fn http(serving: Serving, guard: Arc<Guard>) -> Router {
    let routes = Router::new()
        .route("/", get(INDEX))
        .route("/metrics", get(metrics))
        .route("/metrics/quantiles", get(quantiles))
        .route("/api/v1/snapshot", get(snapshot))
        .route("/api/v1/ledger", get(ledger))
        .route("/healthz", get(health))
        .route("/ws", get(websocket::upgrade));
    finish(routes, "there is nothing here; / lists what there is\n")
        .with_state(serving)
        .layer(from_fn_with_state(guard, guard::check))
}

/// What there is at the address for WebSocket clients.
pub(crate) fn live(serving: Serving, guard: Arc<Guard>) -> Router {
    let routes = Router::new()
        .route("/", get(websocket::upgrade))
        .route("/ws", get(websocket::upgrade));
    finish(routes, "there is nothing here but a WebSocket at /\n")
        .with_state(serving)
        .layer(from_fn_with_state(guard, guard::check))
}

/// Adds what holds for all paths, also for those that do not exist.
fn finish(routes: Router<Serving>, hint: &'static str) -> Router<Serving> {
    routes
        .fallback(async move || (StatusCode::NOT_FOUND, hint))
        .method_not_allowed_fallback(async || {
            let text = "here one can only read: use GET or HEAD\n";
            (StatusCode::METHOD_NOT_ALLOWED, text)
        })
        .layer(map_response(stay_fresh_and_as_declared))
}

async fn stay_fresh_and_as_declared(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}

async fn metrics(
    State(serving): State<Serving>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
) -> Result<Response, Crashed> {
    let format = negotiate::preferred(&headers);
    let response = exposition(&serving, peer, format).await?;
    Ok(([(header::VARY, "Accept")], response).into_response())
}

async fn quantiles(
    State(serving): State<Serving>,
    Extension(peer): Extension<Peer>,
) -> Result<Response, Crashed> {
    exposition(&serving, peer, TextFormat::Quantiles).await
}

async fn exposition(
    serving: &Serving,
    peer: Peer,
    format: TextFormat,
) -> Result<Response, Crashed> {
    let text = serving
        .desk
        .text(Topic::Metrics(format), peer.scope())
        .await?;
    Ok(typed(negotiate::content_type(format), text))
}

async fn snapshot(
    State(serving): State<Serving>,
    Extension(peer): Extension<Peer>,
) -> Result<Response, Crashed> {
    let text = serving.desk.text(Topic::Snapshot, peer.scope()).await?;
    Ok(typed("application/json", text))
}

async fn ledger(
    State(serving): State<Serving>,
    Extension(peer): Extension<Peer>,
) -> Result<Response, Crashed> {
    let text = serving.desk.text(Topic::Ledger, peer.scope()).await?;
    Ok(typed("application/json", text))
}

async fn health(
    State(serving): State<Serving>,
    Extension(trusted): Extension<Trusted>,
) -> Result<Response, Crashed> {
    let health = serving.desk.health().await?;
    let status = match health.ok {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = match trusted {
        Trusted(true) => json!(health),
        Trusted(false) => json!({ "ok": health.ok }),
    };
    let text = Utf8Bytes::from(body.to_string());
    Ok((status, typed("application/json", text)).into_response())
}

fn typed(content_type: &'static str, text: Utf8Bytes) -> Response {
    let body = body::Bytes::from(text);
    ([(header::CONTENT_TYPE, content_type)], body).into_response()
}
