//! The users of observed processes, and their shares of the tables in the kernel. The rule is in `bpf/users.h`.

use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::batch;
use super::mapped::MappedArray;
use crate::probes::layout::{self, ALL_USERS, FIRST_USER, USERS};

/// A table in the kernel that users share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Table {
    Processes,
    Allocations,
}

impl Table {
    pub(crate) const ALL: [Self; 2] = [Self::Processes, Self::Allocations];

    /// What a refused event wanted to record.
    fn refused_events(self) -> &'static str {
        match self {
            Self::Processes => "events of new processes",
            Self::Allocations => "GPU memory allocations",
        }
    }
}

/// Number of users that a problem names.
const NAMED_USERS: usize = 8;

/// The users of observed processes.
pub(crate) struct Users {
    counts: MappedArray<layout::User>,
    indices: MapHandle,
    free: MapHandle,
    /// Indices that were deleted from `indices` and are not free yet: a program may have read one just before.
    unlisted: Mutex<Vec<u32>>,
}

impl Users {
    /// All indices are free at first.
    pub(super) fn new(
        counts: &MapHandle,
        indices: MapHandle,
        free: MapHandle,
    ) -> libbpf_rs::Result<Self> {
        let users = Self {
            counts: MappedArray::new(counts, USERS)?,
            indices,
            free,
            unlisted: Mutex::default(),
        };
        for index in FIRST_USER..USERS {
            users.free_index(index as u32)?;
        }
        Ok(users)
    }

    fn free_index(&self, index: u32) -> libbpf_rs::Result<()> {
        self.free.update(&[], &index.to_ne_bytes(), MapFlags::ANY)
    }

    /// Counts entries of a user that userspace has deleted from a table.
    pub(super) fn count_deleted(&self, user: u32, table: Table, entries: u64) {
        let offset = offset_of!(layout::User, used) + table as usize * size_of::<u64>();
        for index in [ALL_USERS, user as usize] {
            let used = self.counts.word(index, offset);
            used.fetch_sub(entries, Ordering::Relaxed);
        }
    }

    /// Number of events that were refused because the rest of a table is reserved.
    pub(super) fn refused(&self, table: Table) -> u64 {
        self.counts.read(ALL_USERS).refused[table as usize]
    }

    /// Frees the indices of users without entries when more than half of all indices are in use. Until then a problem can
    /// name users whose processes have exited.
    pub(super) fn free_unused(&self) -> libbpf_rs::Result<()> {
        let mut unlisted = self.unlisted.lock().unwrap_or_else(PoisonError::into_inner);
        // Unlisted in an earlier round, so no program counts anything under it from now on.
        for index in unlisted.extract_if(.., |index| self.is_unused(*index)) {
            self.counts.write(index as usize, &layout::User::EMPTY);
            self.free_index(index)?;
        }
        let listed: Vec<(u32, u32)> = batch::entries(&self.indices)?;
        if listed.len() <= USERS / 2 {
            return Ok(());
        }
        for (uid, index) in listed {
            if self.is_unused(index) && self.indices.delete(&uid.to_ne_bytes()).is_ok() {
                unlisted.push(index);
            }
        }
        Ok(())
    }

    fn is_unused(&self, index: u32) -> bool {
        self.counts.read(index as usize).used == [0; Table::ALL.len()]
    }

    /// What was refused, one sentence per table.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let users: Vec<layout::User> = (FIRST_USER..USERS)
            .map(|index| self.counts.read(index))
            .collect();
        let tables = Table::ALL.into_iter().map(move |table| {
            let refused = self.refused(table);
            let events = table.refused_events();
            let names = names_of(&users, table);
            (refused > 0).then(|| {
                let why = "used all of the table that is not reserved for other users";
                format!("{refused} {events} lost: {names} {why}")
            })
        });
        tables.flatten()
    }
}

/// The users that a table refused, those with the most refusals first.
fn names_of(users: &[layout::User], table: Table) -> String {
    let refused = |user: &&layout::User| user.refused[table as usize];
    let mut users: Vec<_> = users.iter().filter(|user| refused(user) > 0).collect();
    users.sort_by_key(|user| std::cmp::Reverse(refused(user)));
    let named = users.iter().take(NAMED_USERS);
    let names: Vec<String> = named.map(|user| user.uid.to_string()).collect();
    let names = names.join(", ");
    match users.len() {
        0 => "some users".to_owned(),
        1 => format!("user {names}"),
        2..=NAMED_USERS => format!("users {names}"),
        all => format!("users {names} and {} more", all - NAMED_USERS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32, refused: u64) -> layout::User {
        layout::User {
            uid,
            refused: [refused, 0],
            ..layout::User::EMPTY
        }
    }

    #[test]
    fn users_with_most_refusals_are_named() {
        let name = |users: &[layout::User]| names_of(users, Table::Processes);
        assert_eq!(name(&[user(5, 0), user(7, 3)]), "user 7");
        assert_eq!(name(&[user(5, 2), user(7, 3)]), "users 7, 5");
        let many: Vec<_> = (1..=10).map(|uid| user(uid, uid.into())).collect();
        assert_eq!(name(&many), "users 10, 9, 8, 7, 6, 5, 4, 3 and 2 more");
        assert_eq!(names_of(&many, Table::Allocations), "some users");
    }
}
