//! The tenants of observed processes, and their shares of the tables in the kernel. The rules are in `bpf/tenants.h` and
//! `bpf/tenant_of.h`.

use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use zernel_identity::{SubordinateUids, Tenant, TenantParent, tenant_parents, tenant_with_cgroup};
use zerocopy::IntoBytes;

use super::map_batches;
use super::mapped_array::MappedArray;
use crate::probes::layout::{
    self, ALL_TENANTS, FIRST_TENANT, OTHER_TENANTS, SUBORDINATE_RANGES, TENANTS,
};

/// A table in the kernel that tenants share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TenantTable {
    Processes,
    Allocations,
    Histograms,
    Communicators,
    MemoryAccounts,
}

impl TenantTable {
    pub(crate) const ALL: [Self; 5] = [
        Self::Processes,
        Self::Allocations,
        Self::Histograms,
        Self::Communicators,
        Self::MemoryAccounts,
    ];

    /// The word for the entries of this table in a sentence about refused entries.
    fn refused_entry_word(self) -> &'static str {
        match self {
            Self::Processes => "events of new processes",
            Self::Allocations => "GPU memory allocations",
            Self::Histograms => "durations",
            Self::Communicators => "NCCL communicators",
            Self::MemoryAccounts => "changes of GPU memory accounts",
        }
    }
}

/// A hierarchy of cgroups in which the kernel looks for tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CgroupHierarchy {
    /// cgroup v2.
    Unified,
    /// The memory controller, with cgroup v1.
    Memory,
}

/// Where cgroups are mounted. In a container, the mounts of the first process of the machine show all of them.
const CGROUP_MOUNTS: [&str; 2] = ["/proc/1/root/sys/fs/cgroup", "/sys/fs/cgroup"];

impl CgroupHierarchy {
    const ALL: [Self; 2] = [Self::Unified, Self::Memory];

    /// Where it is mounted.
    fn mount_point(self) -> PathBuf {
        let mounts = CGROUP_MOUNTS.map(Path::new);
        let cgroups = *mounts.iter().find(|it| it.exists()).unwrap_or(&mounts[1]);
        match self {
            Self::Unified if cgroups.join("cgroup.controllers").exists() => cgroups.to_owned(),
            Self::Unified => cgroups.join("unified"),
            Self::Memory => cgroups.join("memory"),
        }
    }

    /// The cgroups below which container and batch systems create the cgroups of tenants.
    fn tenant_parents(self) -> Vec<TenantParent> {
        tenant_parents(&self.mount_point())
    }
}

/// Identifies a tenant of the kernel's tables, also after its index was given to another tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct TenantId {
    cgroup: u64,
    hierarchy: u32,
    uid: u32,
}

/// Number of tenants that a problem names.
const MAX_NAMED_TENANTS: usize = 8;

/// The tenants of observed processes.
pub(crate) struct TenantRegistry {
    tenant_rows: MappedArray<layout::Tenant>,
    indices: MapHandle,
    free_tenant_indices: MapHandle,
    parents: MapHandle,
    subordinate_ranges: MappedArray<layout::SubordinateRange>,
    written_tables: Mutex<WrittenTables>,
    /// Indices that were deleted from `indices` and are not free yet: a program may have read one just before.
    indices_to_free: Mutex<Vec<u32>>,
}

/// The maps that hold tenants.
pub(super) struct TenantMaps {
    pub(super) tenant_rows: MapHandle,
    pub(super) indices: MapHandle,
    pub(super) free_tenant_indices: MapHandle,
    pub(super) parents: MapHandle,
    pub(super) subordinate_ranges: MapHandle,
}

/// The latest contents of the two maps by which BPF programs find the tenant of a process.
#[derive(Default)]
struct WrittenTables {
    parents: Vec<layout::CgroupKey>,
    subordinate_ranges: Option<Arc<SubordinateUids>>,
}

impl TenantRegistry {
    /// Creates a registry in which all indices of tenants are free.
    pub(super) fn new(maps: TenantMaps) -> libbpf_rs::Result<Self> {
        let tenants = Self {
            tenant_rows: MappedArray::new(&maps.tenant_rows, TENANTS)?,
            indices: maps.indices,
            free_tenant_indices: maps.free_tenant_indices,
            parents: maps.parents,
            subordinate_ranges: MappedArray::new(&maps.subordinate_ranges, SUBORDINATE_RANGES)?,
            written_tables: Mutex::default(),
            indices_to_free: Mutex::default(),
        };
        for index in FIRST_TENANT..TENANTS {
            tenants.free_index(index as u32)?;
        }
        tenants.refresh_lookup_tables()?;
        Ok(tenants)
    }

    fn free_index(&self, index: u32) -> libbpf_rs::Result<()> {
        self.free_tenant_indices
            .update(&[], &index.to_ne_bytes(), MapFlags::ANY)
    }

    /// Writes the two maps by which BPF programs find the tenant of a process, if their contents have changed.
    pub(super) fn refresh_lookup_tables(&self) -> libbpf_rs::Result<()> {
        let mut written = self
            .written_tables
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut listed = Vec::new();
        for hierarchy in CgroupHierarchy::ALL {
            for parent in hierarchy.tenant_parents() {
                let key = layout::CgroupKey {
                    cgroup_inode: parent.id,
                    hierarchy: hierarchy as u32,
                    reserved: 0,
                };
                let value = parent.levels_to_tenant.to_ne_bytes();
                self.parents.update(key.as_bytes(), &value, MapFlags::ANY)?;
                listed.push(key);
            }
        }
        let is_listed = |key: &layout::CgroupKey| {
            let mut listed = listed.iter();
            listed.any(|it| (it.cgroup_inode, it.hierarchy) == (key.cgroup_inode, key.hierarchy))
        };
        for key in written.parents.iter().filter(|key| !is_listed(key)) {
            // Its cgroup was removed. A new cgroup may get the id of the removed one.
            let _ = self.parents.delete(key.as_bytes());
        }
        written.parents = listed;
        let table = SubordinateUids::read_from_machine();
        if written.subordinate_ranges.as_ref() != Some(&table) {
            self.write_subordinates(&table);
            written.subordinate_ranges = Some(table);
        }
        Ok(())
    }

    fn write_subordinates(&self, table: &SubordinateUids) {
        const UNUSED_RANGE: layout::SubordinateRange = layout::SubordinateRange {
            first_uid: u32::MAX,
            last_uid: 0,
            owner_uid: 0,
            reserved: 0,
        };
        let mut ranges = table.ranges().to_vec();
        ranges.sort_by_key(|range| range.first_uid);
        let ranges = ranges.iter().map(|range| layout::SubordinateRange {
            first_uid: range.first_uid,
            last_uid: range.last_uid,
            owner_uid: range.owner_uid,
            reserved: 0,
        });
        let all = ranges.chain(std::iter::repeat_with(|| UNUSED_RANGE));
        for (index, range) in all.take(SUBORDINATE_RANGES).enumerate() {
            self.subordinate_ranges.write(index, &range);
        }
    }

    /// Counts entries of a tenant that userspace has deleted from a table.
    pub(super) fn count_deleted(&self, tenant: u32, table: TenantTable, entries: u64) {
        let offset = offset_of!(layout::Tenant, used_entries) + table as usize * size_of::<u64>();
        for index in [ALL_TENANTS, tenant as usize] {
            let used = self.tenant_rows.word(index, offset);
            used.fetch_sub(entries, Ordering::Relaxed);
        }
    }

    /// The tenant with an index.
    pub(super) fn tenant_id_of(&self, index: u32) -> TenantId {
        // The index comes from the kernel.
        let key = self.tenant_rows.read(index as usize % TENANTS).key;
        TenantId {
            cgroup: key.cgroup.cgroup_inode,
            hierarchy: key.cgroup.hierarchy,
            uid: key.uid,
        }
    }

    /// Number of events that were refused because the rest of a table is reserved.
    pub(super) fn refused_events_of(&self, table: TenantTable) -> u64 {
        self.tenant_rows.read(ALL_TENANTS).refused_events[table as usize]
    }

    /// Number of tenants that have an index.
    pub(super) fn tenant_count(&self) -> libbpf_rs::Result<usize> {
        let listed: Vec<(layout::TenantKey, u32)> = map_batches::read_all_entries(&self.indices)?;
        Ok(listed.len())
    }

    /// Stores the number of entries of the largest tenant, for each table. BPF programs only raise these numbers, so
    /// userspace lowers them.
    pub(super) fn update_most_entries_of_tenant(&self) {
        let tenants =
            (OTHER_TENANTS..TENANTS).map(|index| self.tenant_rows.read(index).used_entries);
        let tenants: Vec<_> = tenants.collect();
        for table in TenantTable::ALL {
            let entries = tenants.iter().map(|used| used[table as usize]);
            let largest = entries.max().unwrap_or(0).max(0);
            let offset = offset_of!(layout::Tenant, most_entries_of_tenant)
                + table as usize * size_of::<i64>();
            let word = self.tenant_rows.word(ALL_TENANTS, offset);
            word.store(largest as u64, Ordering::Relaxed);
        }
    }

    /// Lets all tenants have their share of step marks again, because all marks were read.
    pub(super) fn reset_step_mark_counts(&self) {
        let offset = offset_of!(layout::Tenant, unread_step_marks);
        for index in OTHER_TENANTS..TENANTS {
            self.tenant_rows
                .word(index, offset)
                .store(0, Ordering::Relaxed);
        }
    }

    /// Frees the indices of tenants without entries. A tenant that was refused something keeps its index, so that a problem
    /// can name it, until more than half of all indices are in use.
    pub(super) fn free_unused_indices(&self) -> libbpf_rs::Result<()> {
        let mut indices_to_free = self
            .indices_to_free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // An index that was unlisted in an earlier round is in use by no program, so nothing is counted under it from now on.
        for index in indices_to_free.extract_if(.., |index| self.is_unused(*index)) {
            self.tenant_rows
                .write(index as usize, &layout::Tenant::EMPTY);
            self.free_index(index)?;
        }
        let listed: Vec<(layout::TenantKey, u32)> = map_batches::read_all_entries(&self.indices)?;
        let keeps_refused = listed.len() <= TENANTS / 2;
        for (key, index) in listed {
            let is_kept = keeps_refused && self.was_refused(index);
            let is_free = !is_kept && self.is_unused(index);
            if is_free && self.indices.delete(key.as_bytes()).is_ok() {
                indices_to_free.push(index);
            }
        }
        Ok(())
    }

    fn was_refused(&self, index: u32) -> bool {
        let refused = self.tenant_rows.read(index as usize).refused_events;
        refused.iter().any(|events| *events > 0)
    }

    fn is_unused(&self, index: u32) -> bool {
        let used = self.tenant_rows.read(index as usize).used_entries;
        used.iter().all(|entries| *entries <= 0)
    }

    /// Events that were refused, as one sentence per table.
    pub(super) fn describe_refusals(&self) -> Vec<String> {
        let tables = TenantTable::ALL.into_iter();
        let refused = tables.map(|table| (table, self.refused_events_of(table)));
        let refused: Vec<(TenantTable, u64)> =
            refused.filter(|(_, refused)| *refused > 0).collect();
        if refused.is_empty() {
            return Vec::new();
        }
        let tenants = (FIRST_TENANT..TENANTS).map(|index| self.tenant_rows.read(index));
        let tenants: Vec<layout::Tenant> = tenants.collect();
        let sentences = refused.into_iter().map(|(table, refused)| {
            let events = table.refused_entry_word();
            let names = names_of_refused(&tenants, table);
            let why = "used all of the table that is not reserved for other tenants";
            format!("{refused} {events} lost: {names} {why}")
        });
        sentences.collect()
    }
}

/// The names of the tenants whose entries a table refused, those with the most refusals first.
fn names_of_refused(tenants: &[layout::Tenant], table: TenantTable) -> String {
    let refused = |tenant: &&layout::Tenant| tenant.refused_events[table as usize];
    let mut tenants: Vec<_> = tenants.iter().filter(|it| refused(it) > 0).collect();
    tenants.sort_by_key(|tenant| std::cmp::Reverse(refused(tenant)));
    let named = tenants.iter().take(MAX_NAMED_TENANTS);
    let names: Vec<String> = named.map(|tenant| name_of_tenant(&tenant.key)).collect();
    let names = names.join(", ");
    match tenants.len() {
        0 => "some tenants".to_owned(),
        1..=MAX_NAMED_TENANTS => names,
        all => format!("{names} and {} more", all - MAX_NAMED_TENANTS),
    }
}

fn name_of_tenant(key: &layout::TenantKey) -> String {
    if key.cgroup.cgroup_inode == 0 {
        return Tenant::User(key.uid).to_string();
    }
    let hierarchy = match key.cgroup.hierarchy == CgroupHierarchy::Memory as u32 {
        true => CgroupHierarchy::Memory,
        false => CgroupHierarchy::Unified,
    };
    let tenant = tenant_with_cgroup(
        &hierarchy.mount_point(),
        &hierarchy.tenant_parents(),
        key.cgroup.cgroup_inode,
    );
    tenant.map_or("a pod or job that has ended".to_owned(), |it| {
        it.to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant_of_user(uid: u32, refused: u64) -> layout::Tenant {
        let mut tenant = layout::Tenant::EMPTY;
        tenant.key.uid = uid;
        tenant.refused_events[TenantTable::Processes as usize] = refused;
        tenant
    }

    #[test]
    fn tenants_with_most_refusals_are_named() {
        let name = |tenants: &[layout::Tenant]| names_of_refused(tenants, TenantTable::Processes);
        assert_eq!(
            name(&[tenant_of_user(5, 0), tenant_of_user(7, 3)]),
            "user 7"
        );
        assert_eq!(
            name(&[tenant_of_user(5, 2), tenant_of_user(7, 3)]),
            "user 7, user 5"
        );
        let many: Vec<_> = (1..=10)
            .map(|uid| tenant_of_user(uid, uid.into()))
            .collect();
        let all = "user 10, user 9, user 8, user 7, user 6, user 5, user 4, user 3 and 2 more";
        assert_eq!(name(&many), all);
        assert_eq!(
            names_of_refused(&many, TenantTable::Allocations),
            "some tenants"
        );
    }

    #[test]
    fn a_tenant_whose_cgroup_was_removed_has_a_name() {
        let mut key = layout::Tenant::EMPTY.key;
        key.cgroup.cgroup_inode = u64::MAX;
        assert_eq!(name_of_tenant(&key), "a pod or job that has ended");
    }
}
