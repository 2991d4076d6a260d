//! The CPUs that the workers of a group may use: as the user states them, and as sets of CPU numbers once a
//! [`Topology`] is known.

use std::collections::BTreeSet;

use crate::shared_state::MAX_CPUS;
use crate::spec_keys::spec_choice;
use crate::topology::{CpuSet, Topology};

spec_choice! {
    /// The CPUs that a group's workers may use.
    ///
    /// [`Inherit`](Self::Inherit), [`Exact`](Self::Exact) and [`PerWorker`](Self::PerWorker) name CPUs. The other
    /// variants depend on the machine: [`WorkSpec::resolve`](crate::WorkSpec::resolve) turns them into `PerWorker`
    /// before a workload is spawned.
    pub enum Affinity, default Inherit {
        /// The CPUs of the thread that spawns the workers.
        Inherit,
        /// Every worker may use these CPUs.
        Exact(CpuSet),
        /// One set of CPUs per worker, in the order of the workers.
        PerWorker(Vec<CpuSet>),
        /// A random set of CPUs per worker. The same seed gives the same sets.
        RandomSubset {
            /// Number of CPUs of each worker.
            count: usize,
            /// Seed of the random choice of CPUs.
            seed: u64 = default,
        },
        /// One CPU per worker; the workers take the CPUs in turn.
        SingleCpu,
        /// The CPUs of one last-level cache per worker; the workers take the caches in turn.
        LlcAligned,
        /// One core with two hardware threads per pair of workers; the pairs take the cores in turn.
        SmtSiblingPair,
        /// The CPUs of the NUMA node with this number.
        NumaNode(usize),
    }
}

impl Affinity {
    /// Whether the affinity does not depend on the machine: it names CPUs, or inherits them.
    #[must_use]
    pub fn is_resolved(&self) -> bool {
        matches!(self, Self::Inherit | Self::Exact(_) | Self::PerWorker(_))
    }

    /// Returns an error if the affinity cannot apply to `workers` workers.
    pub(crate) fn check_for_workers(&self, workers: usize) -> Result<(), String> {
        let check_set = |cpus: &CpuSet| match cpus.last() {
            None => Err("an empty set of CPUs; name at least one".to_owned()),
            Some(&cpu) if cpu >= MAX_CPUS => Err(format!(
                "CPU {cpu} is beyond {}, the largest that can be named",
                MAX_CPUS - 1
            )),
            Some(_) => Ok(()),
        };
        match self {
            Self::Exact(cpus) => check_set(cpus),
            Self::PerWorker(sets) if sets.len() != workers => Err(format!(
                "{} sets of CPUs for {workers} workers; give one for each",
                sets.len()
            )),
            Self::PerWorker(sets) => sets.iter().try_for_each(check_set),
            Self::RandomSubset { count: 0, .. } => {
                Err("`count` is 0; choose at least one CPU".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// The affinity with machine-dependent sets replaced by CPUs of `topology`.
    pub(crate) fn resolve_on_topology(
        &self,
        workers: usize,
        topology: &Topology,
    ) -> Result<Self, String> {
        let cpus: Vec<usize> = topology.cpus.iter().copied().collect();
        let sets = match self {
            Self::Inherit | Self::Exact(_) | Self::PerWorker(_) => return Ok(self.clone()),
            Self::RandomSubset { count, .. } if *count > cpus.len() => {
                return Err(format!(
                    "a subset of {count} CPUs is asked for, but only {} are usable",
                    cpus.len()
                ));
            }
            Self::RandomSubset { count, seed } => random_subsets(&cpus, *count, *seed, workers),
            Self::SingleCpu => assign_cpu_sets_round_robin(
                &cpus.iter().map(|cpu| [*cpu].into()).collect::<Vec<_>>(),
                workers,
                1,
            ),
            Self::LlcAligned => {
                assign_cpu_sets_round_robin(&topology.last_level_caches, workers, 1)
            }
            Self::SmtSiblingPair => assign_cpu_sets_round_robin(&smt_cores(topology)?, workers, 2),
            Self::NumaNode(node) => vec![node_cpus(topology, *node)?; workers],
        };
        Ok(Self::PerWorker(sets))
    }

    /// The CPUs of one worker; `None` means that the worker keeps the CPUs of the thread that spawned it.
    pub(crate) fn of_worker(&self, worker: usize) -> Option<&CpuSet> {
        match self {
            Self::Exact(cpus) => Some(cpus),
            Self::PerWorker(sets) => sets.get(worker),
            _ => None,
        }
    }
}

fn assign_cpu_sets_round_robin(sets: &[CpuSet], workers: usize, neighbours: usize) -> Vec<CpuSet> {
    (0..workers)
        .filter_map(|worker| sets.get((worker / neighbours) % sets.len().max(1)).cloned())
        .collect()
}

fn smt_cores(topology: &Topology) -> Result<Vec<CpuSet>, String> {
    let cores: Vec<CpuSet> = topology
        .cores
        .iter()
        .filter(|core| core.len() > 1)
        .cloned()
        .collect();
    if cores.is_empty() {
        return Err("no core of this machine has two usable hardware threads".to_owned());
    }
    Ok(cores)
}

fn node_cpus(topology: &Topology, node: usize) -> Result<CpuSet, String> {
    let found = topology
        .numa_nodes
        .iter()
        .find(|(number, cpus)| *number == node && !cpus.is_empty());
    let known = || {
        topology
            .numa_nodes
            .iter()
            .map(|(number, _)| *number)
            .collect::<BTreeSet<_>>()
    };
    found.map(|(_, cpus)| cpus.clone()).ok_or_else(|| {
        format!(
            "NUMA node {node} has no usable CPU; this machine has the nodes {:?}",
            known()
        )
    })
}

fn random_subsets(cpus: &[usize], count: usize, seed: u64, workers: usize) -> Vec<CpuSet> {
    let mut random = SplitMix64(seed);
    let mut subset = |_| {
        let mut left = cpus.to_vec();
        (0..count)
            .map(|_| left.swap_remove(random.random_below(left.len())))
            .collect()
    };
    (0..workers).map(&mut subset).collect()
}

/// A small random number generator (splitmix64): the same seed gives the same numbers everywhere.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    pub(crate) fn next_random(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A random number below `limit`, which must not be 0.
    pub(crate) fn random_below(&mut self, limit: usize) -> usize {
        (self.next_random() % limit.max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::tests::topology_with_two_nodes;

    fn resolved_sets(affinity: &Affinity, workers: usize) -> Vec<CpuSet> {
        match affinity
            .resolve_on_topology(workers, &topology_with_two_nodes())
            .unwrap()
        {
            Affinity::PerWorker(sets) => sets,
            other => panic!("not resolved: {other:?}"),
        }
    }

    #[test]
    fn affinities_resolve_to_cpus_of_topology() {
        assert_eq!(resolved_sets(&Affinity::SingleCpu, 9)[8], [0].into());
        assert_eq!(
            resolved_sets(&Affinity::LlcAligned, 3),
            [[0, 1, 4, 5], [2, 3, 6, 7], [0, 1, 4, 5]].map(CpuSet::from)
        );
        assert_eq!(
            resolved_sets(&Affinity::SmtSiblingPair, 4),
            [[0, 4], [0, 4], [1, 5], [1, 5]].map(CpuSet::from)
        );
        assert_eq!(
            resolved_sets(&Affinity::NumaNode(1), 1),
            [CpuSet::from([2, 3, 6, 7])]
        );
    }

    #[test]
    fn random_subset_has_requested_size_and_follows_seed() {
        let subset = |seed| resolved_sets(&Affinity::RandomSubset { count: 3, seed }, 16);
        assert!(subset(1).iter().all(|cpus| cpus.len() == 3));
        assert_eq!(subset(1), subset(1));
        assert_ne!(subset(1), subset(2));
    }

    #[test]
    fn affinity_beyond_topology_is_error() {
        let error = Affinity::NumaNode(7)
            .resolve_on_topology(1, &topology_with_two_nodes())
            .unwrap_err();
        assert!(
            error.contains("node 7") && error.contains("{0, 1}"),
            "{error}"
        );
        let error = Affinity::RandomSubset { count: 9, seed: 0 }
            .resolve_on_topology(1, &topology_with_two_nodes())
            .unwrap_err();
        assert!(error.contains("only 8"), "{error}");
        let no_smt = Topology {
            cores: vec![[0].into()],
            ..topology_with_two_nodes()
        };
        assert!(
            Affinity::SmtSiblingPair
                .resolve_on_topology(2, &no_smt)
                .is_err()
        );
    }

    #[test]
    fn invalid_cpu_sets_are_refused() {
        assert!(Affinity::Exact(CpuSet::new()).check_for_workers(1).is_err());
        assert!(Affinity::Exact([5000].into()).check_for_workers(1).is_err());
        assert!(
            Affinity::PerWorker(vec![[0].into()])
                .check_for_workers(2)
                .is_err()
        );
        assert!(Affinity::Exact([0].into()).check_for_workers(2).is_ok());
    }
}
