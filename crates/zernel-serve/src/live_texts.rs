//! Texts that still exist: those that were just built, and those that clients have not read yet.
//!
//! A client that reads slowly keeps the text of its answer in memory, and every newer snapshot of the source makes another text.
//! So the clients of one owner have a limited number of texts of each kind. An owner sees its own processes and files, which are limited
//! too, so the memory of all texts is bounded, and a user whose clients do not read keeps no other user from an answer. Root and clients
//! with the token have no limit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use axum::extract::ws::Utf8Bytes;

use crate::peer::Owner;
use crate::source_queries::Query;

/// Texts of one kind that may exist for one owner.
pub(crate) const MAX_TEXTS_OF_OWNER: u32 = 8;

/// Counts the texts that exist.
#[derive(Clone, Default)]
pub(crate) struct LiveTexts(Arc<Mutex<HashMap<(Query, Owner), u32>>>);

impl LiveTexts {
    /// Counts a text that is about to be built; `None` if there are too many.
    pub(crate) fn begin(&self, query: Query, owner: Owner) -> Option<LiveText> {
        let is_limited = owner != Owner::Trusted;
        let key = (query, owner);
        let mut counts = self.lock();
        let count = counts.entry(key.clone()).or_default();
        if is_limited && *count == MAX_TEXTS_OF_OWNER {
            return None;
        }
        *count += 1;
        let texts = self.clone();
        Some(LiveText { texts, key })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(Query, Owner), u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one text. Dropping it frees the place.
pub(crate) struct LiveText {
    texts: LiveTexts,
    key: (Query, Owner),
}

impl LiveText {
    /// The text, which keeps its place until the last copy is dropped.
    pub(crate) fn hold(self, text: String) -> Utf8Bytes {
        let owner = HeldText { text, _place: self };
        Utf8Bytes::try_from(Bytes::from_owner(owner)).expect("a String is UTF-8")
    }
}

impl Drop for LiveText {
    fn drop(&mut self) {
        let mut counts = self.texts.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

struct HeldText {
    text: String,
    _place: LiveText,
}

impl AsRef<[u8]> for HeldText {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use zernel_identity::Tenant;

    use super::*;

    #[test]
    fn an_owner_has_a_limited_number_of_texts_of_each_kind() {
        let texts = LiveTexts::default();
        let begin = |user, query| texts.begin(query, Owner::Tenant(Tenant::User(user)));
        let hold = |_| begin(1, Query::Ledger).map(|text| text.hold("text".to_owned()));
        let mut held: Vec<_> = (0..MAX_TEXTS_OF_OWNER).map(hold).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(begin(1, Query::Ledger).is_none());
        assert!(begin(1, Query::Snapshot).is_some());
        assert!(begin(2, Query::Ledger).is_some());
        let copy = held.pop().flatten().expect("it was built");
        assert_eq!(copy, "text");
        assert!(begin(1, Query::Ledger).is_none(), "a copy is not read yet");
        drop(copy);
        assert!(begin(1, Query::Ledger).is_some());
        drop(held);
        let trusted: Vec<_> = (0..100)
            .filter_map(|_| texts.begin(Query::Ledger, Owner::Trusted))
            .collect();
        assert_eq!(trusted.len(), 100);
        drop(trusted);
        assert!(texts.lock().is_empty());
    }
}
