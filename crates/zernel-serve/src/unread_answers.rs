//! Texts that still exist: those that were just built, and those that clients have not read yet.
//!
//! A client that reads slowly keeps the text of its answer in memory, and every newer snapshot of the source makes another
//! text. So the number of texts of each kind that the clients of one owner may keep in memory is limited. An owner sees its
//! own processes and files, which are limited too, so the memory of all texts is bounded, and a user whose clients do not
//! read keeps no other user from an answer. Root and clients with the token have no limit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use axum::extract::ws::Utf8Bytes;

use crate::peer::ConnectionOwner;
use crate::source_queries::TextQuery;

/// The most texts of one kind that may exist for one owner.
pub(crate) const MAX_UNREAD_ANSWERS_PER_OWNER: u32 = 8;

/// Counts, by kind and owner, the answers that are being built or that clients have not read yet.
#[derive(Clone, Default)]
pub(crate) struct UnreadAnswerCounts(Arc<Mutex<HashMap<(TextQuery, ConnectionOwner), u32>>>);

impl UnreadAnswerCounts {
    /// Counts a text that is about to be built; `None` if there are too many.
    pub(crate) fn reserve_answer(
        &self,
        query: TextQuery,
        owner: ConnectionOwner,
    ) -> Option<AnswerReservation> {
        let is_limited = owner != ConnectionOwner::Trusted;
        let key = (query, owner);
        let mut counts = self.lock_counts();
        let count = counts.entry(key.clone()).or_default();
        if is_limited && *count == MAX_UNREAD_ANSWERS_PER_OWNER {
            return None;
        }
        *count += 1;
        let texts = self.clone();
        Some(AnswerReservation {
            answer_counts: texts,
            key,
        })
    }

    fn lock_counts(&self) -> MutexGuard<'_, HashMap<(TextQuery, ConnectionOwner), u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of the limited places for texts. Dropping the value frees the place.
pub(crate) struct AnswerReservation {
    answer_counts: UnreadAnswerCounts,
    key: (TextQuery, ConnectionOwner),
}

impl AnswerReservation {
    /// Returns the text so that its place stays taken until the last copy of the text is dropped.
    pub(crate) fn attach_answer_text(self, text: String) -> Utf8Bytes {
        let owner = ReservedAnswer { text, _place: self };
        Utf8Bytes::try_from(Bytes::from_owner(owner)).expect("a String is UTF-8")
    }
}

impl Drop for AnswerReservation {
    fn drop(&mut self) {
        let mut counts = self.answer_counts.lock_counts();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

struct ReservedAnswer {
    text: String,
    _place: AnswerReservation,
}

impl AsRef<[u8]> for ReservedAnswer {
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
        let texts = UnreadAnswerCounts::default();
        let begin =
            |user, query| texts.reserve_answer(query, ConnectionOwner::Tenant(Tenant::User(user)));
        let hold =
            |_| begin(1, TextQuery::Ledger).map(|text| text.attach_answer_text("text".to_owned()));
        let mut held: Vec<_> = (0..MAX_UNREAD_ANSWERS_PER_OWNER).map(hold).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(begin(1, TextQuery::Ledger).is_none());
        assert!(begin(1, TextQuery::Snapshot).is_some());
        assert!(begin(2, TextQuery::Ledger).is_some());
        let copy = held.pop().flatten().expect("it was built");
        assert_eq!(copy, "text");
        assert!(
            begin(1, TextQuery::Ledger).is_none(),
            "a copy is not read yet"
        );
        drop(copy);
        assert!(begin(1, TextQuery::Ledger).is_some());
        drop(held);
        let trusted: Vec<_> = (0..100)
            .filter_map(|_| texts.reserve_answer(TextQuery::Ledger, ConnectionOwner::Trusted))
            .collect();
        assert_eq!(trusted.len(), 100);
        drop(trusted);
        assert!(texts.lock_counts().is_empty());
    }
}
