//! Queries to the source. Concurrent equal queries share one call.

use std::sync::Arc;

use axum::extract::ws::Utf8Bytes;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::answer_cache::AnswerCache;
use crate::peer::ConnectionOwner;
use crate::single_flight::{SingleFlight, WorkPanicked};
use crate::unread_answers::UnreadAnswerCounts;
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
pub(crate) const ANSWER_THREADS: usize = 2;

/// Queries the source on blocking threads. A request for the source's health does not wait until texts are built.
pub(crate) struct SourceQueries {
    source: Arc<dyn Source>,
    texts: SingleFlight<(TextQuery, Scope), Utf8Bytes>,
    health: SingleFlight<(), Health>,
    answer_cache: Arc<AnswerCache>,
    unread_answers: UnreadAnswerCounts,
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
            texts: SingleFlight::new(ANSWER_THREADS),
            health: SingleFlight::new(1),
            answer_cache: Arc::default(),
            unread_answers: UnreadAnswerCounts::default(),
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
        let version = self.source.answers_version();
        if let Some(text) =
            version.and_then(|it| self.answer_cache.find_cached_answer(query, scope, it))
        {
            return Ok(text);
        }
        let live = self.unread_answers.reserve_answer(query, owner);
        let live = live.ok_or(QueryError::TooManyUnread)?;
        let (source, recent) = (Arc::clone(&self.source), Arc::clone(&self.answer_cache));
        let work = move || {
            let text = live.attach_answer_text(match query {
                TextQuery::Metrics(format) => source.metrics(scope, format),
                TextQuery::Snapshot => source.snapshot(scope),
                TextQuery::Ledger => source.ledger(scope),
            });
            if let Some(version) = version {
                recent.cache_answer(query, scope, version, text.clone());
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
