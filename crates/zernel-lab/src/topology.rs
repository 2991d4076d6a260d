//! CPU topologies of the guest.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Number of NUMA nodes, of last-level caches per node, of cores per cache and of threads per core. As text: `1x2x4x1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTopology {
    /// Number of NUMA nodes.
    pub nodes: u32,
    /// Number of last-level caches in a node.
    pub llcs_per_node: u32,
    /// Number of cores that share a last-level cache.
    pub cores_per_llc: u32,
    /// Number of hardware threads in a core.
    pub threads_per_core: u32,
}

/// The text is not a topology.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "`{0}` is no topology; give NODES x LLCS x CORES x THREADS, each at least 1 and at most 255 CPUs in all, such as 1x2x4x1"
)]
pub struct BadCpuTopology(String);

impl CpuTopology {
    const MAX_CPUS: u32 = 255;

    /// A topology of cores with one thread each, in one cache and one node.
    #[must_use]
    pub fn with_one_cache(cpus: u32) -> Self {
        Self {
            nodes: 1,
            llcs_per_node: 1,
            cores_per_llc: cpus,
            threads_per_core: 1,
        }
    }

    /// The number of CPUs that the guest's kernel counts.
    #[must_use]
    pub fn cpu_count(self) -> u32 {
        let factors = [
            self.nodes,
            self.llcs_per_node,
            self.cores_per_llc,
            self.threads_per_core,
        ];
        factors.into_iter().fold(1, u32::saturating_mul)
    }

    /// QEMU's options for this topology. Each last-level cache is a socket of its own, because the emulated CPU shares
    /// its largest cache among a whole socket.
    pub(crate) fn qemu_options(self, memory_mib: u32) -> Vec<(&'static str, String)> {
        let mut options = vec![(
            "-smp",
            format!(
                "{},sockets={},cores={},threads={}",
                self.cpu_count(),
                self.nodes.saturating_mul(self.llcs_per_node),
                self.cores_per_llc,
                self.threads_per_core
            ),
        )];
        if self.nodes < 2 {
            return options;
        }
        for node in 0..self.nodes {
            // The first node also gets the memory that an equal division leaves over.
            let remaining_mib = if node == 0 {
                memory_mib % self.nodes
            } else {
                0
            };
            let size_mib = memory_mib / self.nodes + remaining_mib;
            options.extend([
                (
                    "-object",
                    format!("memory-backend-ram,id=memory{node},size={size_mib}M"),
                ),
                ("-numa", format!("node,nodeid={node},memdev=memory{node}")),
            ]);
        }
        for socket in 0..self.nodes * self.llcs_per_node {
            let node = socket / self.llcs_per_node;
            options.push(("-numa", format!("cpu,node-id={node},socket-id={socket}")));
        }
        options
    }
}

impl fmt::Display for CpuTopology {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            nodes,
            llcs_per_node,
            cores_per_llc,
            threads_per_core,
        } = self;
        write!(
            formatter,
            "{nodes}x{llcs_per_node}x{cores_per_llc}x{threads_per_core}"
        )
    }
}

impl FromStr for CpuTopology {
    type Err = BadCpuTopology;

    fn from_str(text: &str) -> Result<Self, BadCpuTopology> {
        let bad_topology = || BadCpuTopology(text.to_owned());
        let numbers: Result<Vec<u32>, _> = text.split(['x', '×']).map(str::parse).collect();
        let [nodes, llcs_per_node, cores_per_llc, threads_per_core] =
            numbers.map_err(|_| bad_topology())?[..]
        else {
            return Err(bad_topology());
        };
        let topology = Self {
            nodes,
            llcs_per_node,
            cores_per_llc,
            threads_per_core,
        };
        match topology.cpu_count() {
            1..=Self::MAX_CPUS => Ok(topology),
            _ => Err(bad_topology()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_topology_parses_its_own_text() {
        let topology: CpuTopology = "2x2x4x1".parse().unwrap();
        assert_eq!(topology.cpu_count(), 16);
        assert_eq!(topology.to_string().parse(), Ok(topology));
        assert_eq!("1×2×2×1".parse::<CpuTopology>().unwrap().llcs_per_node, 2);
        for text in [
            "",
            "4",
            "1x2x3",
            "0x1x1x1",
            "1x1x1x1x1",
            "1x1x-1x1",
            "16x16x16x16",
            "1x1x1x99999999999",
        ] {
            let error = text.parse::<CpuTopology>().unwrap_err();
            assert!(error.to_string().contains("1x2x4x1"), "{error}");
        }
    }

    #[test]
    fn qemu_options_divide_memory_among_numa_nodes() {
        let options = |text: &str| -> Vec<String> {
            let topology: CpuTopology = text.parse().unwrap();
            let options = topology.qemu_options(1001);
            options.into_iter().map(|(_, value)| value).collect()
        };
        assert_eq!(options("1x2x2x1"), ["4,sockets=2,cores=2,threads=1"]);
        assert_eq!(
            options("2x1x2x1"),
            [
                "4,sockets=2,cores=2,threads=1",
                "memory-backend-ram,id=memory0,size=501M",
                "node,nodeid=0,memdev=memory0",
                "memory-backend-ram,id=memory1,size=500M",
                "node,nodeid=1,memdev=memory1",
                "cpu,node-id=0,socket-id=0",
                "cpu,node-id=1,socket-id=1",
            ]
        );
    }
}
