//! Which NUMA nodes CPUs and GPUs belong to, from sysfs and the NVIDIA driver.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const NODE_FOLDER: &str = "/sys/devices/system/node";
const PCI_FOLDER: &str = "/sys/bus/pci/devices";
/// Has one folder for each GPU of NVIDIA's driver, named by its PCI address.
const GPU_FOLDER: &str = "/proc/driver/nvidia/gpus";

/// NUMA nodes and what belongs to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NumaTopology {
    /// The node of each CPU, if it is known.
    pub(crate) node_of_cpu: Vec<Option<u32>>,
    /// The CPUs of each node that has any.
    pub(crate) cpus_of_node: BTreeMap<u32, Vec<usize>>,
    /// The node of each GPU, in NVML's order, if it is known.
    pub(crate) node_of_gpu: Vec<Option<u32>>,
}

impl NumaTopology {
    /// Reads the running machine. `gpu_nodes` replaces what the kernel reports of GPUs.
    pub(crate) fn read_current(gpu_nodes: Option<&[u32]>) -> Self {
        let mut topology = Self::default();
        topology.read_cpus(Path::new(NODE_FOLDER));
        topology.node_of_gpu = match gpu_nodes {
            Some(nodes) => nodes.iter().copied().map(Some).collect(),
            None => nodes_of_gpus(Path::new(GPU_FOLDER), Path::new(PCI_FOLDER)),
        };
        topology
    }

    /// A node of a GPU that does not exist, or that has no CPUs.
    pub(crate) fn missing_gpu_node(&self) -> Option<u32> {
        let mut nodes = self.node_of_gpu.iter().flatten();
        nodes
            .find(|node| !self.cpus_of_node.contains_key(node))
            .copied()
    }

    fn read_cpus(&mut self, node_folder: &Path) {
        let folders = fs::read_dir(node_folder).into_iter().flatten().flatten();
        for folder in folders {
            let name = folder.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("node"));
            let Some(node) = number.and_then(|number| number.parse::<u32>().ok()) else {
                continue;
            };
            let list = fs::read_to_string(folder.path().join("cpulist")).unwrap_or_default();
            for cpu in cpus_of_list(list.trim()) {
                if self.node_of_cpu.len() <= cpu {
                    self.node_of_cpu.resize(cpu + 1, None);
                }
                self.node_of_cpu[cpu] = Some(node);
                self.cpus_of_node.entry(node).or_default().push(cpu);
            }
        }
    }
}

/// The numbers in a list of CPUs such as `0-3,8-11`.
fn cpus_of_list(list: &str) -> impl Iterator<Item = usize> {
    let ranges = list.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    });
    ranges.flatten()
}

/// The nodes of GPUs in the order of their PCI addresses, which is NVML's.
fn nodes_of_gpus(gpu_folder: &Path, pci_folder: &Path) -> Vec<Option<u32>> {
    let folders = fs::read_dir(gpu_folder).into_iter().flatten().flatten();
    let mut addresses: Vec<_> = folders.map(|folder| folder.file_name()).collect();
    addresses.sort();
    let nodes = addresses.iter().map(|address| {
        let node = fs::read_to_string(pci_folder.join(address).join("numa_node")).ok()?;
        // -1: the machine does not report it.
        node.trim().parse().ok()
    });
    nodes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_and_gpus_have_the_nodes_that_sysfs_reports() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("node/node0/cpulist", "0-1,4\n");
        write("node/node1/cpulist", "2-3\n");
        write("node/node2/cpulist", "\n"); // memory only
        write("node/online", "0-2\n");
        write("pci/0000:81:00.0/numa_node", "1\n");
        write("pci/0000:01:00.0/numa_node", "0\n");
        write("pci/0000:c1:00.0/numa_node", "-1\n");
        for address in ["0000:c1:00.0", "0000:81:00.0", "0000:01:00.0"] {
            write(&format!("gpus/{address}/information"), "");
        }
        let mut topology = NumaTopology::default();
        topology.read_cpus(&root.path().join("node"));
        assert_eq!(topology.node_of_cpu, [0, 0, 1, 1, 0].map(Some));
        assert_eq!(
            topology.cpus_of_node,
            [(0, vec![0, 1, 4]), (1, vec![2, 3])].into()
        );
        let gpus = nodes_of_gpus(&root.path().join("gpus"), &root.path().join("pci"));
        assert_eq!(gpus, [Some(0), Some(1), None]);
        topology.node_of_gpu = gpus;
        assert_eq!(topology.missing_gpu_node(), None);
        topology.node_of_gpu.push(Some(2));
        assert_eq!(topology.missing_gpu_node(), Some(2));
    }
}
