//! The work types. To add one: a file under `work/`, its module and its line in the list below; then the test
//! `documented` writes `docs/workload.md`.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::spec_keys::{SpecKey, SpecValue};
use crate::worker::{WorkFailure, Worker};

mod affinity_churn;
mod bursty;
mod cache_pressure;
mod cgroup_churn;
mod files;
mod fork_exit;
mod futex_fan_out;
mod futex_ping_pong;
pub(crate) mod ml_training;
mod mutex_contention;
mod nice_sweep;
mod page_fault_churn;
mod pipe_ping_pong;
mod random_read;
mod sequence;
mod spin_wait;
mod sync_write;
mod thundering_herd;
mod timer_deadline;
mod wake_chain;
mod yield_heavy;

pub use ml_training::{GpuBackend, GpuWait};
pub use sequence::Phase;

/// What a work type does and what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WorkTypeInfo {
    /// Name of the work type in a workload file.
    pub name: &'static str,
    /// What a worker of this type does, and what counts as a unit of its work.
    pub does: &'static str,
    /// The parts of the scheduler that the work type exercises.
    pub exercises: &'static str,
}

/// The behaviour and the properties of a work type.
pub(crate) trait Work {
    /// Returns the name of the work type, what it does and what it exercises.
    fn work_type_info(&self) -> WorkTypeInfo;

    /// Returns the field and the problem if a parameter of the work type is invalid.
    fn check(&self) -> Result<(), (&'static str, String)> {
        Ok(())
    }

    /// Number of workers of a group that work together as a team; 0 if `workers` are too few.
    fn team_size(&self, _workers: usize) -> usize {
        1
    }

    /// The smallest number of workers in a team.
    fn min_team_size(&self) -> usize {
        1
    }

    /// Whether no member of a team waits for another member, so that the handle can hold each of them.
    fn members_are_independent(&self, team_size: usize) -> bool {
        team_size == 1
    }

    /// Number of futex slots that a team shares.
    fn futex_slot_count(&self, _team_size: usize) -> usize {
        0
    }

    /// Number of pipes that a team shares.
    fn pipes(&self, _team_size: usize) -> usize {
        0
    }

    /// Number of ground-truth intervals that one member of a team may record.
    fn trace_capacity(&self, _team_index: usize) -> usize {
        0
    }

    /// Why workers of this type cannot run as threads of a container; `None` if they can.
    fn reason_refused_in_container(&self) -> Option<&'static str> {
        None
    }

    /// The numbers of workers that a group of this type may have, as text for users.
    fn worker_rule(&self) -> String {
        // A number of workers larger than any team of fixed size.
        const MANY_WORKERS: usize = 1 << 20;
        match (self.team_size(MANY_WORKERS), self.min_team_size()) {
            (1, _) | (MANY_WORKERS, 1) => "any number".to_owned(),
            (MANY_WORKERS, smallest) => format!("at least {smallest}"),
            (team, _) => format!("a multiple of {team}"),
        }
    }

    /// Does rounds of work until the stop request. Must be fork safe.
    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure>;
}

/// Declares all work types. `plain` types have no parameters.
macro_rules! work_types {
    (
        plain { $($(#[$plain_doc:meta])* $plain:ident: $plain_work:path,)* }
        with_parameters { $($(#[$doc:meta])* $variant:ident: $work:path,)* }
    ) => {
        $(pub use $work;)*

        /// What a worker does: a work type with its parameters.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case", deny_unknown_fields)]
        #[non_exhaustive]
        pub enum WorkType {
            $($(#[$plain_doc])* $plain,)*
            $($(#[$doc])* $variant($work),)*
            /// A function of the caller. Not available in workload files.
            #[serde(skip)]
            Custom(CustomWork),
        }

        impl WorkType {
            /// Every work type but [`Custom`](Self::Custom), with default parameters.
            #[must_use]
            pub fn all() -> Vec<Self> {
                vec![$(Self::$plain,)* $(Self::$variant(<$work>::default()),)*]
            }

            pub(crate) fn as_work(&self) -> &dyn Work {
                match self {
                    $(Self::$plain => &$plain_work,)*
                    $(Self::$variant(work) => work,)*
                    Self::Custom(work) => work,
                }
            }

            /// The keys of the work type's table in a workload file; none for a type without parameters.
            #[must_use]
            pub fn parameters(&self) -> Vec<SpecKey> {
                match self {
                    $(Self::$plain => Vec::new(),)*
                    $(Self::$variant(_) => <$work as SpecValue>::keys(),)*
                    Self::Custom(_) => Vec::new(),
                }
            }
        }

        impl SpecValue for WorkType {
            fn value_type_name() -> String {
                "work type".to_owned()
            }

            fn resolve_paths(&mut self, folder: &Path) {
                match self {
                    $(Self::$plain => {})*
                    $(Self::$variant(work) => work.resolve_paths(folder),)*
                    Self::Custom(_) => {}
                }
            }
        }
    };
}

work_types! {
    plain {
        /// The worker spins.
        SpinWait: spin_wait::SpinWait,
        /// The worker yields in a loop.
        YieldHeavy: yield_heavy::YieldHeavy,
        /// The worker forks short-lived children.
        ForkExit: fork_exit::ForkExit,
        /// The worker spins while it changes its nice value.
        NiceSweep: nice_sweep::NiceSweep,
    }
    with_parameters {
        /// The worker computes, sleeps, and computes again.
        Bursty: bursty::Bursty,
        /// The worker wakes at fixed moments, as cyclictest does.
        TimerDeadline: timer_deadline::TimerDeadline,
        /// Two workers pass messages to and fro through pipes.
        PipePingPong: pipe_ping_pong::PipePingPong,
        /// Two workers pass the turn to and fro through a futex.
        FutexPingPong: futex_ping_pong::FutexPingPong,
        /// One worker wakes many workers, which then compute.
        FutexFanOut: futex_fan_out::FutexFanOut,
        /// Each worker of a ring wakes the next.
        WakeChain: wake_chain::WakeChain,
        /// One worker wakes all workers that wait on the same futex word.
        ThunderingHerd: thundering_herd::ThunderingHerd,
        /// All workers of a group compete for one lock.
        MutexContention: mutex_contention::MutexContention,
        /// The worker moves itself from CPU to CPU.
        AffinityChurn: affinity_churn::AffinityChurn,
        /// The worker moves itself from cgroup to cgroup.
        CgroupChurn: cgroup_churn::CgroupChurn,
        /// The worker touches memory that it has just given back to the kernel.
        PageFaultChurn: page_fault_churn::PageFaultChurn,
        /// The worker sweeps through more memory than its cache holds.
        CachePressure: cache_pressure::CachePressure,
        /// The worker writes to a file and waits for the disk.
        SyncWrite: sync_write::SyncWrite,
        /// The worker reads random blocks of a file.
        RandomRead: random_read::RandomRead,
        /// The worker repeats a list of phases: compute, sleep, yield.
        Sequence: sequence::Sequence,
        /// A training job whose workers load, compute, reduce and optimize, and record their phases.
        MlTraining: ml_training::MlTraining,
        /// The worker serves inference requests with a GPU.
        Inference: ml_training::Inference,
    }
}

/// Refuses a size of 0, and a size of more than 1 TiB.
fn check_kib(field: &'static str, kib: usize) -> Result<(), (&'static str, String)> {
    match kib {
        1..=0x4000_0000 => Ok(()),
        _ => Err((field, format!("{kib} KiB is not between 1 KiB and 1 TiB"))),
    }
}

impl WorkType {
    /// Makes a work type of a function of the caller.
    ///
    /// ```
    /// use zernel_workload::WorkType;
    ///
    /// let work = WorkType::custom("count", |worker| {
    ///     while worker.should_do_another_round() {
    ///         worker.count_round(1);
    ///     }
    /// });
    /// assert_eq!(work.name(), "count");
    /// ```
    pub fn custom(
        name: impl Into<String>,
        function: impl Fn(&mut Worker<'_>) + Send + Sync + 'static,
    ) -> Self {
        Self::Custom(CustomWork {
            name: name.into().into(),
            function: Arc::new(function),
        })
    }

    /// What the work type does and what it exercises.
    #[must_use]
    pub fn describe(&self) -> WorkTypeInfo {
        self.as_work().work_type_info()
    }

    /// The numbers of workers that a group of this type may have.
    #[must_use]
    pub fn worker_rule(&self) -> String {
        let work = self.as_work();
        match work.reason_refused_in_container() {
            Some(_) => format!("{}; not with pcomm", work.worker_rule()),
            None => work.worker_rule(),
        }
    }

    /// Name of the work type in workload files and reports.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Custom(work) => &work.name,
            other => other.as_work().work_type_info().name,
        }
    }
}

/// A work function of the caller, made by [`WorkType::custom`].
#[derive(Clone)]
pub struct CustomWork {
    name: Arc<str>,
    function: Arc<dyn Fn(&mut Worker<'_>) + Send + Sync>,
}

impl Work for CustomWork {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "custom",
            does: "calls a function of the program that spawned it",
            exercises: "whatever that function does",
        }
    }

    /// Functions of the caller may wait for one another in ways that only the caller knows, so none of their workers is
    /// held.
    fn members_are_independent(&self, _team_size: usize) -> bool {
        false
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        (self.function)(worker);
        Ok(())
    }
}

impl fmt::Debug for CustomWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomWork({:?})", self.name)
    }
}

impl PartialEq for CustomWork {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.function, &other.function)
    }
}
