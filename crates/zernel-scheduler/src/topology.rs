//! Which CPUs share a last-level cache, from sysfs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const CPUS: &str = "/sys/devices/system/cpu";

/// CPUs and their last-level caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheTopology {
    /// Numbers of possible CPUs are below this.
    pub(crate) cpus: usize,
    /// Number of last-level caches.
    pub(crate) llcs: usize,
    /// Index of each CPU's cache; 0 for CPUs that are offline.
    pub(crate) llc_of_cpu: Vec<usize>,
}

impl CacheTopology {
    /// Reads the running machine.
    pub(crate) fn current() -> Self {
        Self::read(Path::new(CPUS))
    }

    fn read(sysfs: &Path) -> Self {
        let possible = fs::read_to_string(sysfs.join("possible")).unwrap_or_default();
        let cpus = count_of(possible.trim());
        let mut index_of_id = BTreeMap::new();
        let llc_of_cpu = (0..cpus).map(|cpu| {
            let Some(id) = last_level_cache(&sysfs.join(format!("cpu{cpu}/cache"))) else {
                return 0;
            };
            let next = index_of_id.len();
            *index_of_id.entry(id).or_insert(next)
        });
        let llc_of_cpu = llc_of_cpu.collect();
        Self {
            cpus,
            llcs: index_of_id.len().max(1),
            llc_of_cpu,
        }
    }
}

/// The number after the largest in a list of CPUs such as `0-3,8-11`.
fn count_of(list: &str) -> usize {
    let last = list.rsplit([',', '-']).next().unwrap_or_default();
    last.parse().map_or(1, |last: usize| last + 1)
}

/// CPUs that share the cache of the highest level, as the kernel lists them.
fn last_level_cache(caches: &Path) -> Option<String> {
    let indexes = fs::read_dir(caches).ok()?.flatten();
    let levels = indexes.filter_map(|entry| {
        let level = fs::read_to_string(entry.path().join("level")).ok()?;
        let shared = fs::read_to_string(entry.path().join("shared_cpu_list")).ok()?;
        Some((level.trim().parse::<u32>().ok()?, shared))
    });
    levels.max().map(|(_, shared)| shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_cache(sysfs: &Path, cpu: usize, level: u32, shared: &str) {
        let folder = sysfs.join(format!("cpu{cpu}/cache/index{level}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("level"), format!("{level}\n")).unwrap();
        fs::write(folder.join("shared_cpu_list"), format!("{shared}\n")).unwrap();
    }

    #[test]
    fn cpus_are_grouped_by_their_largest_cache() {
        let sysfs = tempfile::tempdir().unwrap();
        fs::write(sysfs.path().join("possible"), "0-4\n").unwrap();
        for (cpu, shared) in [(0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")] {
            write_cache(sysfs.path(), cpu, 1, &cpu.to_string());
            write_cache(sysfs.path(), cpu, 3, shared);
        }
        let topology = CacheTopology::read(sysfs.path());
        assert_eq!((topology.cpus, topology.llcs), (5, 2));
        assert_eq!(topology.llc_of_cpu, [0, 1, 0, 1, 0]);
    }

    #[test]
    fn a_machine_without_cache_information_has_one_cache() {
        let sysfs = tempfile::tempdir().unwrap();
        fs::write(sysfs.path().join("possible"), "0-1,4-7\n").unwrap();
        let topology = CacheTopology::read(sysfs.path());
        assert_eq!((topology.cpus, topology.llcs), (8, 1));
    }
}
