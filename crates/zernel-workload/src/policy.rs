//! Scheduling policies and memory policies, as a user states them and as the kernel takes them.

use std::collections::BTreeSet;

use crate::clock::us_to_ns;
use crate::spec_keys::spec_choice;
use crate::sys::sched::SchedAttributes;

const SCHED_EXT: u32 = 7;

spec_choice! {
    /// The scheduling class of a worker.
    pub enum SchedPolicy {
        /// The kernel's default, `SCHED_OTHER`.
        Normal,
        /// `SCHED_OTHER` with a slice of its own, which EEVDF takes as a request for latency (Linux 6.12).
        NormalSlice {
            /// Length of the slice in microseconds, 100 to 100000.
            slice_us: u64,
        },
        /// `SCHED_BATCH`: a wake-up of the worker does not preempt other tasks.
        Batch,
        /// `SCHED_IDLE`: the worker runs when no other task wants the CPU.
        Idle,
        /// `SCHED_FIFO`.
        Fifo {
            /// Real-time priority, 1 to 99.
            priority: u32,
        },
        /// `SCHED_RR`.
        RoundRobin {
            /// Real-time priority, 1 to 99.
            priority: u32,
        },
        /// `SCHED_DEADLINE`, with `0 < runtime_us <= deadline_us <= period_us`.
        Deadline {
            /// CPU time of the worker per period.
            runtime_us: u64,
            /// Time from the start of a period to its deadline.
            deadline_us: u64,
            /// Length of a period.
            period_us: u64,
        },
        /// `SCHED_EXT`: the loaded BPF scheduler; the default class when none is loaded.
        Ext,
    }
}

impl SchedPolicy {
    /// Returns an error if a parameter of the policy is out of range.
    pub(crate) fn check_parameters(&self) -> Result<(), String> {
        match *self {
            Self::Fifo { priority } | Self::RoundRobin { priority }
                if !(1..=99).contains(&priority) =>
            {
                Err(format!(
                    "real-time priority {priority} is not between 1 and 99"
                ))
            }
            Self::NormalSlice { slice_us } if !(100..=100_000).contains(&slice_us) => Err(format!(
                "a slice of {slice_us} µs is not between 100 and 100000"
            )),
            Self::Deadline {
                runtime_us,
                deadline_us,
                period_us,
            } if runtime_us == 0 || runtime_us > deadline_us || deadline_us > period_us => {
                Err(format!(
                    "0 < runtime_us ({runtime_us}) <= deadline_us ({deadline_us}) <= period_us ({period_us}) does not hold"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Converts the policy to the argument of `sched_setattr`.
    pub(crate) fn to_sched_attributes(&self, nice: i32) -> SchedAttributes {
        let base = SchedAttributes {
            nice,
            ..SchedAttributes::default()
        };
        let with = |policy: i32| SchedAttributes {
            policy: policy as u32,
            ..base
        };
        match *self {
            Self::Normal => with(libc::SCHED_OTHER),
            Self::NormalSlice { slice_us } => SchedAttributes {
                runtime_ns: us_to_ns(slice_us),
                ..with(libc::SCHED_OTHER)
            },
            Self::Batch => with(libc::SCHED_BATCH),
            Self::Idle => with(libc::SCHED_IDLE),
            Self::Fifo { priority } => SchedAttributes {
                priority,
                nice: 0,
                ..with(libc::SCHED_FIFO)
            },
            Self::RoundRobin { priority } => SchedAttributes {
                priority,
                nice: 0,
                ..with(libc::SCHED_RR)
            },
            Self::Deadline {
                runtime_us,
                deadline_us,
                period_us,
            } => SchedAttributes {
                policy: libc::SCHED_DEADLINE as u32,
                runtime_ns: us_to_ns(runtime_us),
                deadline_ns: us_to_ns(deadline_us),
                period_ns: us_to_ns(period_us),
                ..SchedAttributes::default()
            },
            Self::Ext => SchedAttributes {
                policy: SCHED_EXT,
                ..base
            },
        }
    }
}

/// Gives the calling thread the highest `SCHED_FIFO` priority, so that it runs whatever a scheduler under test does.
/// Processes and threads that the calling thread starts have the default policy.
///
/// # Errors
/// The caller is not privileged.
pub fn outrank_all_threads() -> std::io::Result<()> {
    let attributes = SchedAttributes {
        policy: libc::SCHED_FIFO as u32,
        flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        priority: 99,
        ..SchedAttributes::default()
    };
    Ok(crate::sys::sched::set_sched_attributes(0, attributes)?)
}

spec_choice! {
    /// The NUMA nodes that a worker's memory comes from.
    pub enum MemoryPolicy {
        /// Memory comes from the node of the CPU that touches a page first.
        Local,
        /// Memory comes from these nodes only.
        Bind(BTreeSet<usize>),
        /// Memory comes from these nodes in turn.
        Interleave(BTreeSet<usize>),
        /// Memory comes from this node while the node has free memory.
        Preferred(usize),
    }
}

impl MemoryPolicy {
    /// Returns an error if the list of nodes is empty or names a node that this program cannot name.
    pub(crate) fn check_numa_nodes(&self) -> Result<(), String> {
        match self {
            Self::Bind(nodes) | Self::Interleave(nodes) if nodes.is_empty() => {
                Err("no NUMA node is named; name at least one".to_owned())
            }
            _ => match self.nodes().find(|node| *node > 63) {
                Some(node) => Err(format!(
                    "NUMA node {node} is beyond 63, the largest this program can name"
                )),
                None => Ok(()),
            },
        }
    }

    fn nodes(&self) -> impl Iterator<Item = usize> + '_ {
        let (set, single) = match self {
            Self::Local => (None, None),
            Self::Bind(nodes) | Self::Interleave(nodes) => (Some(nodes), None),
            Self::Preferred(node) => (None, Some(*node)),
        };
        set.into_iter().flatten().copied().chain(single)
    }

    /// Converts the policy to the arguments of `set_mempolicy`: the mode, and a word with one bit per node.
    pub(crate) fn mode_and_nodes(&self) -> (i32, u64) {
        let mode = match self {
            Self::Local => libc::MPOL_LOCAL,
            Self::Bind(_) => libc::MPOL_BIND,
            Self::Interleave(_) => libc::MPOL_INTERLEAVE,
            Self::Preferred(_) => libc::MPOL_PREFERRED,
        };
        (mode, self.nodes().fold(0, |bits, node| bits | 1 << node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_parameters_out_of_range_are_named() {
        assert!(
            SchedPolicy::Fifo { priority: 100 }
                .check_parameters()
                .unwrap_err()
                .contains("100")
        );
        let deadline = SchedPolicy::Deadline {
            runtime_us: 5,
            deadline_us: 4,
            period_us: 10,
        };
        assert!(
            deadline
                .check_parameters()
                .unwrap_err()
                .contains("deadline_us (4)")
        );
        assert!(
            MemoryPolicy::Bind(BTreeSet::new())
                .check_numa_nodes()
                .is_err()
        );
        assert!(MemoryPolicy::Preferred(64).check_numa_nodes().is_err());
        assert!(
            SchedPolicy::RoundRobin { priority: 1 }
                .check_parameters()
                .is_ok()
        );
    }

    #[test]
    fn memory_policy_nodes_become_bit_mask() {
        assert_eq!(
            MemoryPolicy::Interleave([0, 3].into()).mode_and_nodes(),
            (libc::MPOL_INTERLEAVE, 0b1001)
        );
        assert_eq!(MemoryPolicy::Local.mode_and_nodes(), (libc::MPOL_LOCAL, 0));
    }
}
