//! The HTTP endpoints and their handlers.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::ws::Utf8Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router, body};
use serde_json::json;

use crate::access::{self, AccessGrant, AccessPolicy};
use crate::source_queries::{QueryError, SourceQueries, TextQuery};
use crate::websocket::{self, WebSocketContext};
use crate::{Scope, TextFormat, content_negotiation};

const INDEX_TEXT: &str = "\
zernel observe

/metrics            metrics for Prometheus; OpenMetrics 1.0 if the Accept header asks for it
/metrics/quantiles  GPU memory and durations only, with quantiles instead of histogram buckets
/api/v1/snapshot    current snapshot as JSON
/api/v1/ledger      probed functions, and why others have no probe, as JSON
/ws                 WebSocket that sends snapshots
/healthz            200 if the daemon works, else 503, and the problems
";

/// State shared by all handlers.
#[derive(Clone)]
pub(crate) struct AppState {
    pub(crate) queries: Arc<SourceQueries>,
    pub(crate) websockets: Arc<WebSocketContext>,
}

/// Returns the router of the HTTP address and of the unix socket.
pub(crate) fn http_router(state: AppState, policy: Arc<AccessPolicy>) -> Router {
    let routes = Router::new()
        .route("/", get(INDEX_TEXT))
        .route("/metrics", get(get_metrics))
        .route("/metrics/quantiles", get(get_quantiles))
        .route("/api/v1/snapshot", get(get_snapshot))
        .route("/api/v1/ledger", get(get_ledger))
        .route("/healthz", get(get_health))
        .route("/ws", get(websocket::upgrade_to_websocket));
    with_common_responses(routes, "there is nothing here; see / for the endpoints\n")
        .with_state(state)
        .layer(from_fn_with_state(policy, access::enforce_access))
}

/// Returns the router of the WebSocket address.
pub(crate) fn websocket_router(state: AppState, policy: Arc<AccessPolicy>) -> Router {
    let routes = Router::new()
        .route("/", get(websocket::upgrade_to_websocket))
        .route("/ws", get(websocket::upgrade_to_websocket));
    with_common_responses(
        routes,
        "there is nothing here; connect with a WebSocket to /\n",
    )
    .with_state(state)
    .layer(from_fn_with_state(policy, access::enforce_access))
}

/// Adds the responses for unknown paths and methods, and the headers that every response has.
fn with_common_responses(routes: Router<AppState>, hint: &'static str) -> Router<AppState> {
    routes
        .fallback(async move || (StatusCode::NOT_FOUND, hint))
        .method_not_allowed_fallback(async || {
            let text = "this endpoint is read-only: use GET or HEAD\n";
            (StatusCode::METHOD_NOT_ALLOWED, text)
        })
        .layer(map_response(forbid_caching_and_sniffing))
}

async fn forbid_caching_and_sniffing(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}

async fn get_metrics(
    State(state): State<AppState>,
    Extension(grant): Extension<AccessGrant>,
    headers: HeaderMap,
) -> Result<Response, QueryError> {
    let format = content_negotiation::metrics_format(&headers);
    let response = metrics_response(&state, grant, format).await?;
    Ok(([(header::VARY, "Accept")], response).into_response())
}

async fn get_quantiles(
    State(state): State<AppState>,
    Extension(grant): Extension<AccessGrant>,
) -> Result<Response, QueryError> {
    metrics_response(&state, grant, TextFormat::Quantiles).await
}

async fn metrics_response(
    state: &AppState,
    grant: AccessGrant,
    format: TextFormat,
) -> Result<Response, QueryError> {
    let text = state
        .queries
        .answer_text_query(TextQuery::Metrics(format), grant.scope, grant.owner)
        .await?;
    Ok(with_content_type(
        content_negotiation::content_type(format),
        text,
    ))
}

async fn get_snapshot(
    State(state): State<AppState>,
    Extension(grant): Extension<AccessGrant>,
) -> Result<Response, QueryError> {
    let text = state
        .queries
        .answer_text_query(TextQuery::Snapshot, grant.scope, grant.owner);
    let text = text.await?;
    Ok(with_content_type("application/json", text))
}

async fn get_ledger(
    State(state): State<AppState>,
    Extension(grant): Extension<AccessGrant>,
) -> Result<Response, QueryError> {
    let text = state
        .queries
        .answer_text_query(TextQuery::Ledger, grant.scope, grant.owner);
    let text = text.await?;
    Ok(with_content_type("application/json", text))
}

async fn get_health(
    State(state): State<AppState>,
    Extension(grant): Extension<AccessGrant>,
) -> Result<Response, QueryError> {
    let health = state.queries.query_health().await?;
    let status = match health.ok {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    // Only clients that see everything get these sentences, because they name processes and files.
    let body = match grant.scope {
        Scope::All => json!(health),
        Scope::User(_) | Scope::Pod(_) | Scope::Machine => {
            json!({ "ok": health.ok, "problem_count": health.problems.len() })
        }
    };
    let text = Utf8Bytes::from(body.to_string());
    Ok((status, with_content_type("application/json", text)).into_response())
}

fn with_content_type(content_type: &'static str, text: Utf8Bytes) -> Response {
    let body = body::Bytes::from(text);
    ([(header::CONTENT_TYPE, content_type)], body).into_response()
}
