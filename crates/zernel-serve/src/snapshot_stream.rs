//! Periodic snapshots for WebSocket clients: one stream per scope, shared by its subscribers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::Scope;
use crate::peer::ConnectionOwner;
use crate::source_queries::{SourceQueries, TextQuery};

/// Receiver of the latest snapshot of one scope. A slow client skips the snapshots in between.
pub(crate) type LatestSnapshot = watch::Receiver<Option<Utf8Bytes>>;

/// The snapshot streams. A scope has a stream only while it has subscribers.
#[derive(Clone)]
pub(crate) struct SnapshotStreams {
    queries: Arc<SourceQueries>,
    interval: Duration,
    streams: Arc<Mutex<StreamsByScope>>,
}

type StreamsByScope = HashMap<Scope, Arc<watch::Sender<Option<Utf8Bytes>>>>;

impl SnapshotStreams {
    pub(crate) fn new(queries: Arc<SourceQueries>, interval: Duration) -> Self {
        Self {
            queries,
            interval,
            streams: Arc::default(),
        }
    }

    /// Subscribes to a scope. The receiver reports an existing snapshot as changed, so a new client
    /// gets it at once.
    pub(crate) fn subscribe_to_scope(&self, scope: Scope) -> LatestSnapshot {
        let mut streams = self.lock_streams();
        let stream = streams.entry(scope).or_insert_with(|| {
            let stream = Arc::new(watch::Sender::new(None));
            tokio::spawn(self.clone().publish_snapshots(scope, Arc::clone(&stream)));
            stream
        });
        let mut latest = stream.subscribe();
        latest.mark_changed();
        latest
    }

    /// Takes a snapshot at every interval until the stream has no subscribers.
    async fn publish_snapshots(self, scope: Scope, stream: Arc<watch::Sender<Option<Utf8Bytes>>>) {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = stream.closed() => if self.remove_if_unused(scope, &stream) { return },
            }
            // A stream holds one text at a time, however many of its clients are slow.
            let text = self.queries.answer_text_query(
                TextQuery::Snapshot,
                scope,
                ConnectionOwner::Trusted,
            );
            // A panic in the source is not final: the next tick queries it again.
            if let Ok(text) = text.await {
                stream.send_replace(Some(text));
            }
        }
    }

    /// Removes the stream if it has no subscribers. The check runs under the lock, so no client can
    /// subscribe to a stream that is being removed.
    fn remove_if_unused(&self, scope: Scope, stream: &watch::Sender<Option<Utf8Bytes>>) -> bool {
        let mut streams = self.lock_streams();
        let is_unused = stream.receiver_count() == 0;
        if is_unused {
            streams.remove(&scope);
        }
        is_unused
    }

    fn lock_streams(&self) -> MutexGuard<'_, StreamsByScope> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
