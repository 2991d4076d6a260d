//! The CPUs of the machine as `/sys` describes them: which of them share a core, a last-level cache or a NUMA node.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::error::{Error, Result};

/// A set of CPU numbers.
pub type CpuSet = BTreeSet<usize>;

/// The usable CPUs of a machine, grouped three ways. Groups and CPUs are in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Every CPU that is online and that the calling thread may use.
    pub cpus: CpuSet,
    /// CPUs of each core: its hardware threads.
    pub cores: Vec<CpuSet>,
    /// CPUs that share each last-level cache.
    pub last_level_caches: Vec<CpuSet>,
    /// The number of each NUMA node, and its CPUs.
    pub numa_nodes: Vec<(usize, CpuSet)>,
}

impl Topology {
    /// Reads the topology of this machine, limited to the CPUs that the calling thread may use.
    pub fn read() -> Result<Self> {
        Self::read_from(Path::new("/sys/devices/system"), Some(&allowed_cpus()))
    }

    /// Reads a topology from a folder laid out like `/sys/devices/system`, limited to the CPUs in `allowed` if it is
    /// given.
    pub fn read_from(root: &Path, allowed: Option<&CpuSet>) -> Result<Self> {
        let usable = |cpus: CpuSet| match allowed {
            Some(allowed) => cpus.intersection(allowed).copied().collect(),
            None => cpus,
        };
        let cpus: CpuSet = usable(read_cpu_list(&root.join("cpu/online"))?);
        let mut cores = BTreeSet::new();
        let mut caches = BTreeSet::new();
        for cpu in &cpus {
            let folder = root.join(format!("cpu/cpu{cpu}"));
            // Without these files a CPU counts as a core of its own, and all CPUs share one cache.
            let core = read_cpu_list(&folder.join("topology/thread_siblings_list"));
            cores.insert(usable(core.unwrap_or_else(|_| [*cpu].into())));
            caches.insert(usable(
                last_level_cache(&folder).unwrap_or_else(|| cpus.clone()),
            ));
        }
        Ok(Self {
            numa_nodes: numa_nodes(root)?
                .into_iter()
                .map(|(node, cpus)| (node, usable(cpus)))
                .collect(),
            cores: cores.into_iter().collect(),
            last_level_caches: caches.into_iter().collect(),
            cpus,
        })
    }
}

fn last_level_cache(cpu_folder: &Path) -> Option<CpuSet> {
    let indexes = fs::read_dir(cpu_folder.join("cache")).ok()?;
    let caches = indexes.flatten().filter_map(|entry| {
        let level: u32 = fs::read_to_string(entry.path().join("level"))
            .ok()?
            .trim()
            .parse()
            .ok()?;
        Some((
            level,
            read_cpu_list(&entry.path().join("shared_cpu_list")).ok()?,
        ))
    });
    caches
        .max_by_key(|(level, cpus)| (*level, cpus.len()))
        .map(|(_, cpus)| cpus)
}

fn numa_nodes(root: &Path) -> Result<Vec<(usize, CpuSet)>> {
    let nodes = root.join("node/online");
    if !nodes.exists() {
        return Ok(Vec::new());
    }
    let with_cpus = |node| {
        Ok((
            node,
            read_cpu_list(&root.join(format!("node/node{node}/cpulist")))?,
        ))
    };
    read_cpu_list(&nodes)?.into_iter().map(with_cpus).collect()
}

/// The CPUs that the calling thread may use.
fn allowed_cpus() -> CpuSet {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return (0..rustix::thread::CpuSet::MAX_CPU).collect();
    };
    (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect()
}

fn read_cpu_list(path: &Path) -> Result<CpuSet> {
    let failed = |problem: String| Error::Topology {
        path: path.display().to_string(),
        problem,
    };
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    parse_cpu_list(text.trim())
        .ok_or_else(|| failed(format!("`{}` is not a list such as `0-3,8`", text.trim())))
}

/// Parses the kernel's format of a CPU list: `0-3,8,10-11`.
fn parse_cpu_list(text: &str) -> Option<CpuSet> {
    let parts = text.split(',').filter(|part| !part.is_empty());
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (
            first.trim().parse::<usize>().ok()?,
            last.trim().parse::<usize>().ok()?,
        );
        (first <= last && last - first < 1 << 16).then_some(first..=last)
    };
    parts
        .map(range)
        .collect::<Option<Vec<_>>>()
        .map(|ranges| ranges.into_iter().flatten().collect())
}

/// Formats a set of CPUs as the kernel's CPU list.
pub(crate) fn format_cpu_list(cpus: &CpuSet) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let texts = ranges.into_iter().map(|(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    texts.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two nodes with two cores of two threads each: CPUs 0,4 and 1,5 on node 0, 2,6 and 3,7 on
    /// node 1.
    pub(crate) fn topology_with_two_nodes() -> Topology {
        let root = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("cpu/online".into(), "0-7\n");
        write("node/online".into(), "0-1\n");
        write("node/node0/cpulist".into(), "0-1,4-5\n");
        write("node/node1/cpulist".into(), "2-3,6-7\n");
        for cpu in 0..8 {
            let core = cpu % 4;
            write(
                format!("cpu/cpu{cpu}/topology/thread_siblings_list"),
                &format!("{core},{}\n", core + 4),
            );
            write(format!("cpu/cpu{cpu}/cache/index0/level"), "1\n");
            write(
                format!("cpu/cpu{cpu}/cache/index0/shared_cpu_list"),
                &format!("{core},{}\n", core + 4),
            );
            write(format!("cpu/cpu{cpu}/cache/index3/level"), "3\n");
            let shared = if core < 2 { "0-1,4-5\n" } else { "2-3,6-7\n" };
            write(format!("cpu/cpu{cpu}/cache/index3/shared_cpu_list"), shared);
        }
        Topology::read_from(root.path(), None).unwrap()
    }

    #[test]
    fn cores_caches_and_nodes_are_read() {
        let topology = topology_with_two_nodes();
        assert_eq!(topology.cpus, (0..8).collect());
        assert_eq!(
            topology.cores,
            [[0, 4], [1, 5], [2, 6], [3, 7]].map(CpuSet::from)
        );
        assert_eq!(
            topology.last_level_caches,
            [[0, 1, 4, 5], [2, 3, 6, 7]].map(CpuSet::from)
        );
        assert_eq!(topology.numa_nodes[1], (1, CpuSet::from([2, 3, 6, 7])));
    }

    #[test]
    fn topology_without_cache_files_has_one_cache() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("cpu")).unwrap();
        fs::write(root.path().join("cpu/online"), "0-1").unwrap();
        let topology = Topology::read_from(root.path(), None).unwrap();
        assert_eq!(topology.cores.len(), 2);
        assert_eq!(topology.last_level_caches, [CpuSet::from([0, 1])]);
        assert!(topology.numa_nodes.is_empty());
    }

    #[test]
    fn missing_or_malformed_topology_file_is_named() {
        let root = tempfile::tempdir().unwrap();
        let error = Topology::read_from(root.path(), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("cpu/online"), "{error}");
        fs::create_dir_all(root.path().join("cpu")).unwrap();
        fs::write(root.path().join("cpu/online"), "many").unwrap();
        let error = Topology::read_from(root.path(), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("`many` is not a list"), "{error}");
    }

    #[test]
    fn topology_of_this_machine_is_read() {
        let topology = Topology::read().unwrap();
        assert!(!topology.cpus.is_empty());
        assert!(topology.cores.iter().all(|core| !core.is_empty()));
    }

    #[test]
    fn cpu_lists_round_trip() {
        for text in ["0", "0-3", "0-3,8,10-11", ""] {
            assert_eq!(format_cpu_list(&parse_cpu_list(text).unwrap()), text);
        }
    }
}
