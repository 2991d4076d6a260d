//! Queries to the source. Concurrent equal queries share one call.

use std::sync::Arc;

use axum::extract::ws::Utf8Bytes;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::live_texts::LiveTexts;
use crate::peer::ConnectionOwner;
use crate::recent_texts::RecentTexts;
use crate::shared_work::{SharedWork, WorkPanicked};
use crate::{Health, Scope, Source, TextFormat};

/// A query whose answer is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TextQuery {
    Metrics(TextFormat),
    Snapshot,
    Ledger,
}

/// Threads that build texts. Each thread keeps memory for the large texts that it builds, so the number of threads is
/// small.
pub(crate) const TEXT_THREADS: usize = 2;

/// Queries the source on blocking threads. A request for the source's health does not wait until texts are built.
pub(crate) struct SourceQueries {
    source: Arc<dyn Source>,
    texts: SharedWork<(TextQuery, Scope), Utf8Bytes>,
    health: SharedWork<(), Health>,
    recent_texts: Arc<RecentTexts>,
    live_texts: LiveTexts,
}

/// Why a query has no answer.
#[derive(Debug)]
pub(crate) enum QueryError {
    Panicked,
    /// Clients of the same owner have not read too many earlier answers.
    TooManyUnread,
}

impl SourceQueries {
    pub(crate) fn new(source: Arc<dyn Source>) -> Self {
        Self {
            source,
            texts: SharedWork::new(TEXT_THREADS),
            health: SharedWork::new(1),
            recent_texts: Arc::default(),
            live_texts: LiveTexts::default(),
        }
    }

    /// The answer to a query of one of the owner's clients.
    pub(crate) async fn answer_text_query(
        &self,
        query: TextQuery,
        scope: Scope,
        owner: ConnectionOwner,
    ) -> Result<Utf8Bytes, QueryError> {
        // Before the text is built: a text of a newer version may be kept as one of this version, and is not reused then.
        let version = self.source.version();
        if let Some(text) = version.and_then(|it| self.recent_texts.find_answer(query, scope, it)) {
            return Ok(text);
        }
        let live = self.live_texts.reserve_place(query, owner);
        let live = live.ok_or(QueryError::TooManyUnread)?;
        let (source, recent) = (Arc::clone(&self.source), Arc::clone(&self.recent_texts));
        let work = move || {
            let text = live.hold_text(match query {
                TextQuery::Metrics(format) => source.metrics(scope, format),
                TextQuery::Snapshot => source.snapshot(scope),
                TextQuery::Ledger => source.ledger(scope),
            });
            if let Some(version) = version {
                recent.keep_answer(query, scope, version, text.clone());
            }
            text
        };
        let text = self.texts.run_or_join((query, scope), work).await?;
        Ok(text)
    }

    pub(crate) async fn query_health(&self) -> Result<Health, QueryError> {
        let source = Arc::clone(&self.source);
        let health = self.health.run_or_join((), move || source.health()).await?;
        Ok(health)
    }
}

impl From<WorkPanicked> for QueryError {
    fn from(_: WorkPanicked) -> Self {
        Self::Panicked
    }
}

impl IntoResponse for QueryError {
    fn into_response(self) -> Response {
        match self {
            Self::Panicked => {
                let text = "the daemon failed to answer; see its log\n";
                (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
            }
            Self::TooManyUnread => {
                let text = "your other clients have not read their answers; close one or try again later\n";
                let retry = [(header::RETRY_AFTER, "10")];
                (StatusCode::SERVICE_UNAVAILABLE, retry, text).into_response()
            }
        }
    }
}
