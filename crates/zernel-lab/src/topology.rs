//! CPU topologies of the guest.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// NUMA nodes, last-level caches per node, cores per cache and threads per core. As text: `1x2x4x1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTopology {
    /// NUMA nodes.
    pub nodes: u32,
    /// Last-level caches of a node.
    pub llcs: u32,
    /// Cores that share a last-level cache.
    pub cores: u32,
    /// Hardware threads of a core.
    pub threads: u32,
}

/// A text that is not a topology.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "`{0}` is no topology; give NODES x LLCS x CORES x THREADS, each at least 1 and at most 255 CPUs in all, such as 1x2x4x1"
)]
pub struct BadTopology(String);

impl CpuTopology {
    const MOST_CPUS: u32 = 255;

    /// Some cores with one thread each, one cache, one node.
    #[must_use]
    pub fn flat(cpus: u32) -> Self {
        Self {
            nodes: 1,
            llcs: 1,
            cores: cpus,
            threads: 1,
        }
    }

    /// The number of CPUs that the guest's kernel counts.
    #[must_use]
    pub fn cpus(self) -> u32 {
        let factors = [self.nodes, self.llcs, self.cores, self.threads];
        factors.into_iter().fold(1, u32::saturating_mul)
    }

    /// QEMU's options. Each last-level cache is a socket of its own, because the emulated CPU shares its largest
    /// cache among a whole socket.
    pub(crate) fn qemu_options(self, memory_mib: u32) -> Vec<(&'static str, String)> {
        let mut options = vec![(
            "-smp",
            format!(
                "{},sockets={},cores={},threads={}",
                self.cpus(),
                self.nodes.saturating_mul(self.llcs),
                self.cores,
                self.threads
            ),
        )];
        if self.nodes < 2 {
            return options;
        }
        for node in 0..self.nodes {
            // The first node also gets what an equal division leaves over.
            let rest = if node == 0 {
                memory_mib % self.nodes
            } else {
                0
            };
            let size = memory_mib / self.nodes + rest;
            options.extend([
                (
                    "-object",
                    format!("memory-backend-ram,id=memory{node},size={size}M"),
                ),
                ("-numa", format!("node,nodeid={node},memdev=memory{node}")),
            ]);
        }
        for socket in 0..self.nodes * self.llcs {
            let node = socket / self.llcs;
            options.push(("-numa", format!("cpu,node-id={node},socket-id={socket}")));
        }
        options
    }
}

impl fmt::Display for CpuTopology {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            nodes,
            llcs,
            cores,
            threads,
        } = self;
        write!(formatter, "{nodes}x{llcs}x{cores}x{threads}")
    }
}

impl FromStr for CpuTopology {
    type Err = BadTopology;

    fn from_str(text: &str) -> Result<Self, BadTopology> {
        let bad = || BadTopology(text.to_owned());
        let numbers: Result<Vec<u32>, _> = text.split(['x', '×']).map(str::parse).collect();
        let [nodes, llcs, cores, threads] = numbers.map_err(|_| bad())?[..] else {
            return Err(bad());
        };
        let topology = Self {
            nodes,
            llcs,
            cores,
            threads,
        };
        match topology.cpus() {
            1..=Self::MOST_CPUS => Ok(topology),
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topology_is_read_from_its_own_text() {
        let topology: CpuTopology = "2x2x4x1".parse().unwrap();
        assert_eq!(topology.cpus(), 16);
        assert_eq!(topology.to_string().parse(), Ok(topology));
        assert_eq!("1×2×2×1".parse::<CpuTopology>().unwrap().llcs, 2);
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
    fn nodes_share_the_memory_and_the_sockets() {
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
