//! Texts that were built a moment ago. A client that sends requests all the time gets these texts again, and costs
//! little.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::ws::Utf8Bytes;

use crate::Scope;
use crate::source_queries::TextQuery;

/// How long a text is reused. The age that a reused snapshot states is wrong by at most this time.
const MAX_CACHED_ANSWER_AGE: Duration = Duration::from_millis(100);
/// The most texts that are kept for reuse.
const MAX_CACHED_ANSWERS: usize = 32;

/// Answers to recent queries, from the newest version of the source.
#[derive(Default)]
pub(crate) struct AnswerCache(Mutex<HashMap<(TextQuery, Scope), CachedAnswer>>);

struct CachedAnswer {
    version: u64,
    built_at: Instant,
    text: Utf8Bytes,
}

impl CachedAnswer {
    fn is_reusable(&self, version: u64) -> bool {
        self.version == version && self.built_at.elapsed() < MAX_CACHED_ANSWER_AGE
    }
}

impl AnswerCache {
    /// The answer to a query, if it was built a moment ago from this version of the source.
    pub(crate) fn find_cached_answer(
        &self,
        query: TextQuery,
        scope: Scope,
        version: u64,
    ) -> Option<Utf8Bytes> {
        let texts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = texts.get(&(query, scope))?;
        recent.is_reusable(version).then(|| recent.text.clone())
    }

    /// Keeps an answer that was built from this version, and forgets answers of other versions.
    pub(crate) fn cache_answer(
        &self,
        query: TextQuery,
        scope: Scope,
        version: u64,
        text: Utf8Bytes,
    ) {
        let mut texts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        texts.retain(|_, recent| recent.is_reusable(version));
        if texts.len() < MAX_CACHED_ANSWERS {
            let built = Instant::now();
            let recent = CachedAnswer {
                version,
                built_at: built,
                text,
            };
            texts.insert((query, scope), recent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_one_version_are_reused_for_a_moment() {
        let texts = AnswerCache::default();
        let (query, scope) = (TextQuery::Snapshot, Scope::User(1));
        texts.cache_answer(query, scope, 1, "first".into());
        assert_eq!(
            texts.find_cached_answer(query, scope, 1),
            Some("first".into())
        );
        assert_eq!(texts.find_cached_answer(query, scope, 2), None);
        assert_eq!(texts.find_cached_answer(query, Scope::User(2), 1), None);
        assert_eq!(texts.find_cached_answer(TextQuery::Ledger, scope, 1), None);
        std::thread::sleep(MAX_CACHED_ANSWER_AGE);
        assert_eq!(texts.find_cached_answer(query, scope, 1), None);
    }

    #[test]
    fn the_number_of_texts_is_bounded() {
        let texts = AnswerCache::default();
        for user in 0..1000 {
            texts.cache_answer(TextQuery::Snapshot, Scope::User(user), 1, "text".into());
        }
        assert_eq!(texts.0.lock().unwrap().len(), MAX_CACHED_ANSWERS);
    }
}
