//! Queries to the source. Concurrent equal queries share one call.

use std::sync::Arc;

use axum::extract::ws::Utf8Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::shared_work::{SharedWork, WorkPanicked};
use crate::{Health, Scope, Source, TextFormat};

/// A query whose answer is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Query {
    Metrics(TextFormat),
    Snapshot,
    Ledger,
}

/// Queries the source on blocking threads.
pub(crate) struct SourceQueries {
    source: Arc<dyn Source>,
    texts: SharedWork<(Query, Scope), Utf8Bytes>,
    health: SharedWork<(), Health>,
}

impl SourceQueries {
    pub(crate) fn new(source: Arc<dyn Source>) -> Self {
        Self {
            source,
            texts: SharedWork::default(),
            health: SharedWork::default(),
        }
    }

    pub(crate) async fn text(&self, query: Query, scope: Scope) -> Result<Utf8Bytes, WorkPanicked> {
        let source = Arc::clone(&self.source);
        let answer = move || match query {
            Query::Metrics(format) => source.metrics(scope, format),
            Query::Snapshot => source.snapshot(scope),
            Query::Ledger => source.ledger(scope).to_string(),
        };
        let work = move || Utf8Bytes::from(answer());
        self.texts.run_or_join((query, scope), work).await
    }

    pub(crate) async fn health(&self) -> Result<Health, WorkPanicked> {
        let source = Arc::clone(&self.source);
        self.health.run_or_join((), move || source.health()).await
    }
}

impl IntoResponse for WorkPanicked {
    fn into_response(self) -> Response {
        let text = "the daemon failed to answer; see its log\n";
        (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
    }
}
