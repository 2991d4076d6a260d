//! Asks the source, and turns what it says into text.

use std::sync::Arc;

use axum::extract::ws::Utf8Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::flights::{Crashed, Flights};
use crate::{Health, Scope, Source, TextFormat};

/// What can be asked for as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    Metrics(TextFormat),
    Snapshot,
    Ledger,
}

/// Where questions to the source are put. Each is under way at most once.
pub(crate) struct Desk {
    source: Arc<dyn Source>,
    texts: Flights<(Topic, Scope), Utf8Bytes>,
    health: Flights<(), Health>,
}

impl Desk {
    pub(crate) fn new(source: Arc<dyn Source>) -> Self {
        Self {
            source,
            texts: Flights::default(),
            health: Flights::default(),
        }
    }

    pub(crate) async fn text(&self, topic: Topic, scope: Scope) -> Result<Utf8Bytes, Crashed> {
        let source = Arc::clone(&self.source);
        let answer = move || match topic {
            Topic::Metrics(format) => source.metrics(scope, format),
            Topic::Snapshot => source.snapshot(scope),
            Topic::Ledger => source.ledger(scope).to_string(),
        };
        let work = move || Utf8Bytes::from(answer());
        self.texts.join((topic, scope), work).await
    }

    pub(crate) async fn health(&self) -> Result<Health, Crashed> {
        let source = Arc::clone(&self.source);
        self.health.join((), move || source.health()).await
    }
}

impl IntoResponse for Crashed {
    fn into_response(self) -> Response {
        let text = "the daemon failed to answer; its log says why\n";
        (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
    }
}
