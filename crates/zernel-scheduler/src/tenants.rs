//! What each tenant took and owes. A tenant is the privileged cgroup, or any cgroup where all tasks are privileged.

use std::collections::HashMap;
use std::fs;
use std::mem::offset_of;
use std::os::unix::fs::DirEntryExt;
use std::path::Path;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapFlags};
use zernel_model::scheduler::{SchedulerStatistics, TenantStatistics};

use crate::cgroup_limits::CGROUP_ROOT;
use crate::scheduler::skeleton::{MainSkel, types};

/// Index of the root, as in `cgroup.bpf.h`.
const ROOT_CGROUP_INDEX: u32 = 0;
/// Time between two searches for the paths of cgroups.
const PATH_SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// Reads tenants, and remembers the paths of their cgroups.
#[derive(Debug, Default)]
pub(crate) struct TenantReader {
    paths_by_cgroup_id: HashMap<u64, String>,
    last_search: Option<Instant>,
}

/// The account of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CgroupAccount {
    /// 0 for the root.
    cgroup_id: u64,
    run_ns: u64,
    debt_ns: u64,
}

impl TenantReader {
    /// The tenants that took most time, at most [`SchedulerStatistics::MAX_PUBLISHED_TENANTS`].
    pub(crate) fn read_tenants(&mut self, skel: &MainSkel<'_>) -> Vec<TenantStatistics> {
        let accounts = accounts_with_most_time(read_accounts(skel));
        let has_path =
            |account: &CgroupAccount| self.paths_by_cgroup_id.contains_key(&account.cgroup_id);
        let is_search_due = self
            .last_search
            .is_none_or(|last_search| last_search.elapsed() >= PATH_SEARCH_INTERVAL);
        if is_search_due && !accounts.iter().all(has_path) {
            self.last_search = Some(Instant::now());
            self.paths_by_cgroup_id = find_cgroup_paths(Path::new(CGROUP_ROOT));
        }
        let accounts = accounts.into_iter();
        accounts
            .map(|account| self.tenant_statistics(account))
            .collect()
    }

    /// A cgroup whose path is unknown has its id instead.
    fn tenant_statistics(&self, account: CgroupAccount) -> TenantStatistics {
        let path = self.paths_by_cgroup_id.get(&account.cgroup_id);
        TenantStatistics {
            cgroup: path.map_or_else(|| format!("id {}", account.cgroup_id), String::clone),
            run_ns: account.run_ns,
            debt_ns: account.debt_ns,
        }
    }
}

/// The accounts with the most time, in this order.
fn accounts_with_most_time(mut accounts: Vec<CgroupAccount>) -> Vec<CgroupAccount> {
    accounts.retain(|account| account.run_ns > 0);
    accounts.sort_by_key(|account| std::cmp::Reverse((account.run_ns, account.cgroup_id)));
    accounts.truncate(SchedulerStatistics::MAX_PUBLISHED_TENANTS);
    accounts
}

/// The accounts of all cgroups that the scheduler has room for.
fn read_accounts(skel: &MainSkel<'_>) -> Vec<CgroupAccount> {
    let index_of_cgroup = &skel.maps.node_of_cgroup;
    let account_of_cgroup = |key: Vec<u8>| {
        let index = index_of_cgroup.lookup(&key, MapFlags::ANY).ok()??;
        read_account(skel, read_u64_at(&key, 0)?, &index)
    };
    let root = read_account(skel, 0, &ROOT_CGROUP_INDEX.to_ne_bytes());
    root.into_iter()
        .chain(index_of_cgroup.keys().filter_map(account_of_cgroup))
        .collect()
}

fn read_account(skel: &MainSkel<'_>, cgroup_id: u64, index: &[u8]) -> Option<CgroupAccount> {
    let node = skel.maps.cgroup_nodes.lookup(index, MapFlags::ANY).ok()??;
    Some(CgroupAccount {
        cgroup_id,
        run_ns: read_u64_at(&node, offset_of!(types::cgroup_node, run_ns))?,
        debt_ns: read_u64_at(&node, offset_of!(types::cgroup_node, debt_ns))?,
    })
}

fn read_u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let bytes = bytes.get(offset..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*bytes))
}

/// The paths of all cgroups by id: the inode number of a folder. The root has the id 0 here.
fn find_cgroup_paths(root: &Path) -> HashMap<u64, String> {
    let mut paths = HashMap::from([(0, "/".to_owned())]);
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let path = entry.path();
            if let Ok(relative_path) = path.strip_prefix(root) {
                paths.insert(entry.ino(), format!("/{}", relative_path.display()));
            }
            folders.push(path);
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn account_with(cgroup_id: u64, run_ns: u64) -> CgroupAccount {
        CgroupAccount {
            cgroup_id,
            run_ns,
            debt_ns: 0,
        }
    }

    #[test]
    fn tenants_with_most_time_are_published() {
        let accounts = accounts_with_most_time((0..100).map(|id| account_with(id, id)).collect());
        assert_eq!(accounts.len(), SchedulerStatistics::MAX_PUBLISHED_TENANTS);
        assert_eq!(accounts[0], account_with(99, 99));
        assert_eq!(accounts_with_most_time(vec![account_with(1, 0)]), []);
    }

    #[test]
    fn root_cgroup_index_matches_cgroup_bpf_h() {
        let root = format!("#define ROOT_CGROUP_INDEX {ROOT_CGROUP_INDEX}\n");
        assert!(include_str!("bpf/cgroup.bpf.h").contains(&root));
    }

    #[test]
    fn cgroup_paths_are_found_by_id() {
        let root = tempfile::tempdir().unwrap();
        let nested = root.path().join("pods/one");
        fs::create_dir_all(&nested).unwrap();
        let reader = TenantReader {
            paths_by_cgroup_id: find_cgroup_paths(root.path()),
            last_search: None,
        };
        let cgroup = |id| reader.tenant_statistics(account_with(id, 1)).cgroup;
        assert_eq!(cgroup(nested.metadata().unwrap().ino()), "/pods/one");
        assert_eq!(cgroup(0), "/");
        assert_eq!(cgroup(1), "id 1");
    }
}
