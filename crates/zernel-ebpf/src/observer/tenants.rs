//! The tenants of observed processes, and their shares of the tables in the kernel. The rule is in `bpf/tenants.h`.

use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::batch;
use super::mapped::MappedArray;
use crate::probes::layout::{self, ALL_TENANTS, FIRST_TENANT, TENANTS};

/// A table in the kernel that tenants share.
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

/// Number of tenants that a problem names.
const NAMED_TENANTS: usize = 8;

/// The tenants of observed processes.
pub(crate) struct Tenants {
    counts: MappedArray<layout::Tenant>,
    indices: MapHandle,
    free: MapHandle,
    /// Indices that were deleted from `indices` and are not free yet: a program may have read one just before.
    unlisted: Mutex<Vec<u32>>,
}

impl Tenants {
    /// All indices are free at first.
    pub(super) fn new(
        counts: &MapHandle,
        indices: MapHandle,
        free: MapHandle,
    ) -> libbpf_rs::Result<Self> {
        let tenants = Self {
            counts: MappedArray::new(counts, TENANTS)?,
            indices,
            free,
            unlisted: Mutex::default(),
        };
        for index in FIRST_TENANT..TENANTS {
            tenants.free_index(index as u32)?;
        }
        Ok(tenants)
    }

    fn free_index(&self, index: u32) -> libbpf_rs::Result<()> {
        self.free.update(&[], &index.to_ne_bytes(), MapFlags::ANY)
    }

    /// Counts entries of a tenant that userspace has deleted from a table.
    pub(super) fn count_deleted(&self, tenant: u32, table: Table, entries: u64) {
        let offset = offset_of!(layout::Tenant, used) + table as usize * size_of::<u64>();
        for index in [ALL_TENANTS, tenant as usize] {
            let used = self.counts.word(index, offset);
            used.fetch_sub(entries, Ordering::Relaxed);
        }
    }

    /// Number of events that were refused because the rest of a table is reserved.
    pub(super) fn refused(&self, table: Table) -> u64 {
        self.counts.read(ALL_TENANTS).refused[table as usize]
    }

    /// Frees the indices of tenants without entries when more than half of all indices are in use. Until then a problem can
    /// name tenants whose processes have exited.
    pub(super) fn free_unused(&self) -> libbpf_rs::Result<()> {
        let mut unlisted = self.unlisted.lock().unwrap_or_else(PoisonError::into_inner);
        // Unlisted in an earlier round, so no program counts anything under it from now on.
        for index in unlisted.extract_if(.., |index| self.is_unused(*index)) {
            self.counts.write(index as usize, &layout::Tenant::EMPTY);
            self.free_index(index)?;
        }
        let listed: Vec<(u32, u32)> = batch::entries(&self.indices)?;
        if listed.len() <= TENANTS / 2 {
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
        let tenants: Vec<layout::Tenant> = (FIRST_TENANT..TENANTS)
            .map(|index| self.counts.read(index))
            .collect();
        let tables = Table::ALL.into_iter().map(move |table| {
            let refused = self.refused(table);
            let events = table.refused_events();
            let names = names_of(&tenants, table);
            (refused > 0).then(|| {
                let why = "used all of the table that is not reserved for other tenants";
                format!("{refused} {events} lost: {names} {why}")
            })
        });
        tables.flatten()
    }
}

/// The tenants that a table refused, those with the most refusals first.
fn names_of(tenants: &[layout::Tenant], table: Table) -> String {
    let refused = |tenant: &&layout::Tenant| tenant.refused[table as usize];
    let mut tenants: Vec<_> = tenants
        .iter()
        .filter(|tenant| refused(tenant) > 0)
        .collect();
    tenants.sort_by_key(|tenant| std::cmp::Reverse(refused(tenant)));
    let named = tenants.iter().take(NAMED_TENANTS);
    let names: Vec<String> = named.map(|tenant| tenant.uid.to_string()).collect();
    let names = names.join(", ");
    match tenants.len() {
        0 => "some tenants".to_owned(),
        1 => format!("user {names}"),
        2..=NAMED_TENANTS => format!("users {names}"),
        all => format!("users {names} and {} more", all - NAMED_TENANTS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32, refused: u64) -> layout::Tenant {
        layout::Tenant {
            uid,
            refused: [refused, 0],
            ..layout::Tenant::EMPTY
        }
    }

    #[test]
    fn tenants_with_most_refusals_are_named() {
        let name = |tenants: &[layout::Tenant]| names_of(tenants, Table::Processes);
        assert_eq!(name(&[user(5, 0), user(7, 3)]), "user 7");
        assert_eq!(name(&[user(5, 2), user(7, 3)]), "users 7, 5");
        let many: Vec<_> = (1..=10).map(|uid| user(uid, uid.into())).collect();
        assert_eq!(name(&many), "users 10, 9, 8, 7, 6, 5, 4, 3 and 2 more");
        assert_eq!(names_of(&many, Table::Allocations), "some tenants");
    }
}
