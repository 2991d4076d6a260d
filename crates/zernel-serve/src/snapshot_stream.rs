//! Snapshots for live clients: taken once per interval, shared by all who watch the same.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::Scope;
use crate::source_queries::{Query, SourceQueries};

/// The latest snapshot of one scope; whoever is slow misses those in between.
pub(crate) type LatestSnapshot = watch::Receiver<Option<Utf8Bytes>>;

/// One stream for each scope that someone watches, and none for the others.
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

    /// Watches a scope. What is there already counts as new.
    pub(crate) fn subscribe(&self, scope: Scope) -> LatestSnapshot {
        let mut streams = self.lock();
        let stream = streams.entry(scope).or_insert_with(|| {
            let stream = Arc::new(watch::Sender::new(None));
            tokio::spawn(self.clone().publish_snapshots(scope, Arc::clone(&stream)));
            stream
        });
        let mut latest = stream.subscribe();
        latest.mark_changed();
        latest
    }

    /// Takes snapshots while someone watches.
    async fn publish_snapshots(self, scope: Scope, stream: Arc<watch::Sender<Option<Utf8Bytes>>>) {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = stream.closed() => if self.remove_if_unused(scope, &stream) { return },
            }
            // A source that fails once may answer the next time.
            if let Ok(text) = self.queries.text(Query::Snapshot, scope).await {
                stream.send_replace(Some(text));
            }
        }
    }

    /// Under the lock, so that no one can begin to watch a stream that ends.
    fn remove_if_unused(&self, scope: Scope, stream: &watch::Sender<Option<Utf8Bytes>>) -> bool {
        let mut streams = self.lock();
        let is_unused = stream.receiver_count() == 0;
        if is_unused {
            streams.remove(&scope);
        }
        is_unused
    }

    fn lock(&self) -> MutexGuard<'_, StreamsByScope> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
