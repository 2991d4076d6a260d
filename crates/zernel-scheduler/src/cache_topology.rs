//! Which CPUs share a last-level cache, from sysfs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const CPU_FOLDER: &str = "/sys/devices/system/cpu";

/// CPUs and their last-level caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheTopology {
    /// Numbers of possible CPUs are below this.
    pub(crate) cpu_count: usize,
    /// Number of last-level caches.
    pub(crate) llc_count: usize,
    /// Index of each CPU's cache; 0 for CPUs that are offline.
    pub(crate) llc_of_cpu: Vec<usize>,
}

impl CacheTopology {
    /// Reads the running machine.
    pub(crate) fn read_current() -> Self {
        Self::read_from(Path::new(CPU_FOLDER))
    }

    fn read_from(cpu_folder: &Path) -> Self {
        let possible = fs::read_to_string(cpu_folder.join("possible")).unwrap_or_default();
        let cpu_count = cpu_count_of_list(possible.trim());
        let mut llc_index_of_cpus = BTreeMap::new();
        let llc_of_cpu = (0..cpu_count).map(|cpu| {
            let Some(cpus) = cpus_of_last_level_cache(&cpu_folder.join(format!("cpu{cpu}/cache")))
            else {
                return 0;
            };
            let next_index = llc_index_of_cpus.len();
            *llc_index_of_cpus.entry(cpus).or_insert(next_index)
        });
        let llc_of_cpu = llc_of_cpu.collect();
        Self {
            cpu_count,
            llc_count: llc_index_of_cpus.len().max(1),
            llc_of_cpu,
        }
    }
}

/// The number after the largest in a list of CPUs such as `0-3,8-11`.
fn cpu_count_of_list(list: &str) -> usize {
    let last = list.rsplit([',', '-']).next().unwrap_or_default();
    last.parse().map_or(1, |last: usize| last + 1)
}

/// CPUs that share the cache of the highest level, as the kernel lists them.
fn cpus_of_last_level_cache(caches: &Path) -> Option<String> {
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

    fn write_cache(cpu_folder: &Path, cpu: usize, level: u32, shared: &str) {
        let folder = cpu_folder.join(format!("cpu{cpu}/cache/index{level}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("level"), format!("{level}\n")).unwrap();
        fs::write(folder.join("shared_cpu_list"), format!("{shared}\n")).unwrap();
    }

    #[test]
    fn cpus_are_grouped_by_their_largest_cache() {
        let cpu_folder = tempfile::tempdir().unwrap();
        fs::write(cpu_folder.path().join("possible"), "0-4\n").unwrap();
        for (cpu, shared) in [(0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")] {
            write_cache(cpu_folder.path(), cpu, 1, &cpu.to_string());
            write_cache(cpu_folder.path(), cpu, 3, shared);
        }
        let topology = CacheTopology::read_from(cpu_folder.path());
        assert_eq!((topology.cpu_count, topology.llc_count), (5, 2));
        assert_eq!(topology.llc_of_cpu, [0, 1, 0, 1, 0]);
    }

    #[test]
    fn a_machine_without_cache_information_has_one_cache() {
        let cpu_folder = tempfile::tempdir().unwrap();
        fs::write(cpu_folder.path().join("possible"), "0-1,4-7\n").unwrap();
        let topology = CacheTopology::read_from(cpu_folder.path());
        assert_eq!((topology.cpu_count, topology.llc_count), (8, 1));
    }
}
