//! Queries to the source. Concurrent equal queries share one call.

use std::sync::Arc;

use axum::extract::ws::Utf8Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::recent_texts::RecentTexts;
use crate::shared_work::{SharedWork, WorkPanicked};
use crate::{Health, Scope, Source, TextFormat};

/// A query whose answer is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Query {
    Metrics(TextFormat),
    Snapshot,
    Ledger,
}

/// Threads that build texts. Each keeps memory for the large texts it builds, so there are few.
pub(crate) const TEXT_THREADS: usize = 2;

/// Queries the source on blocking threads. A request for its health does not wait until texts are built.
pub(crate) struct SourceQueries {
    source: Arc<dyn Source>,
    texts: SharedWork<(Query, Scope), Utf8Bytes>,
    health: SharedWork<(), Health>,
    recent: Arc<RecentTexts>,
}

impl SourceQueries {
    pub(crate) fn new(source: Arc<dyn Source>) -> Self {
        Self {
            source,
            texts: SharedWork::new(TEXT_THREADS),
            health: SharedWork::new(1),
            recent: Arc::default(),
        }
    }

    pub(crate) async fn text(&self, query: Query, scope: Scope) -> Result<Utf8Bytes, WorkPanicked> {
        // Before the text is built: a text of a newer version may be kept as one of this version, and is not reused then.
        let version = self.source.version();
        if let Some(text) = version.and_then(|it| self.recent.find(query, scope, it)) {
            return Ok(text);
        }
        let (source, recent) = (Arc::clone(&self.source), Arc::clone(&self.recent));
        let work = move || {
            let text = Utf8Bytes::from(match query {
                Query::Metrics(format) => source.metrics(scope, format),
                Query::Snapshot => source.snapshot(scope),
                Query::Ledger => source.ledger(scope),
            });
            if let Some(version) = version {
                recent.keep(query, scope, version, text.clone());
            }
            text
        };
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
