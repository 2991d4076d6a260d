//! Snapshots for live clients: taken once per interval, shared by all who watch the same.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::Scope;
use crate::desk::{Desk, Topic};

/// The newest snapshot of one scope; whoever is slow misses those in between.
pub(crate) type Newest = watch::Receiver<Option<Utf8Bytes>>;

/// One feed for each scope that someone watches, and none for the others.
#[derive(Clone)]
pub(crate) struct Feeds {
    desk: Arc<Desk>,
    interval: Duration,
    open: Arc<Mutex<Open>>,
}

type Open = HashMap<Scope, Arc<watch::Sender<Option<Utf8Bytes>>>>;

impl Feeds {
    pub(crate) fn new(desk: Arc<Desk>, interval: Duration) -> Self {
        Self {
            desk,
            interval,
            open: Arc::default(),
        }
    }

    /// Watches a scope. What is there already counts as new.
    pub(crate) fn watch(&self, scope: Scope) -> Newest {
        let mut open = self.lock();
        let feed = open.entry(scope).or_insert_with(|| {
            let feed = Arc::new(watch::Sender::new(None));
            tokio::spawn(self.clone().keep_up(scope, Arc::clone(&feed)));
            feed
        });
        let mut newest = feed.subscribe();
        newest.mark_changed();
        newest
    }

    /// Takes snapshots while someone watches.
    async fn keep_up(self, scope: Scope, feed: Arc<watch::Sender<Option<Utf8Bytes>>>) {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = feed.closed() => if self.close_unwatched(scope, &feed) { return },
            }
            // A source that fails once may answer the next time.
            if let Ok(text) = self.desk.text(Topic::Snapshot, scope).await {
                feed.send_replace(Some(text));
            }
        }
    }

    /// Under the lock, so that no one can begin to watch a feed that ends.
    fn close_unwatched(&self, scope: Scope, feed: &watch::Sender<Option<Utf8Bytes>>) -> bool {
        let mut open = self.lock();
        let unwatched = feed.receiver_count() == 0;
        if unwatched {
            open.remove(&scope);
        }
        unwatched
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
