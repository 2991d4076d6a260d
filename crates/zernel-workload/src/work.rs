//! The work types. Adding one takes a file under `work/`, its module and its line in the list below,
//! and `docs/workload.md`, which the test `documented` writes.

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
    /// Name of the work type in a spec file.
    pub name: &'static str,
    /// What a worker does, and what counts as a unit of work.
    pub does: &'static str,
    /// The path through the scheduler that it exercises.
    pub exercises: &'static str,
}

/// A work type, as the rest of the crate uses it.
pub(crate) trait Work {
    /// Name of the work type, what it does and what it exercises.
    fn about(&self) -> WorkTypeInfo;

    /// Returns the field and the problem if its parameters are invalid.
    fn check(&self) -> Result<(), (&'static str, String)> {
        Ok(())
    }

    /// How many of a group's workers work together; 0 when `workers` are too few.
    fn team_size(&self, _workers: usize) -> usize {
        1
    }

    /// The smallest team there can be.
    fn smallest_team(&self) -> usize {
        1
    }

    /// Whether no member of such a team waits for another, so that each can be held.
    fn can_be_spared(&self, team_size: usize) -> bool {
        team_size == 1
    }

    /// Futex slots that a team shares.
    fn slot_count(&self, _team_size: usize) -> usize {
        0
    }

    /// Pipes that a team shares.
    fn pipes(&self, _team_size: usize) -> usize {
        0
    }

    /// Ground-truth intervals that one member of a team may write.
    fn trace_capacity(&self, _team_index: usize) -> usize {
        0
    }

    /// The reason if it cannot run as a thread of a container.
    fn refused_in_container(&self) -> Option<&'static str> {
        None
    }

    /// The numbers of workers that a group may have.
    fn worker_rule(&self) -> String {
        // Larger than any fixed team.
        const MANY_WORKERS: usize = 1 << 20;
        match (self.team_size(MANY_WORKERS), self.smallest_team()) {
            (1, _) | (MANY_WORKERS, 1) => "any number".to_owned(),
            (MANY_WORKERS, smallest) => format!("at least {smallest}"),
            (team, _) => format!("a multiple of {team}"),
        }
    }

    /// Works until the stop request. Must be fork safe.
    fn run(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure>;
}

/// The list of work types. `plain` types have no parameters.
macro_rules! work_types {
    (
        plain { $($(#[$plain_doc:meta])* $plain:ident: $plain_work:path,)* }
        with_parameters { $($(#[$doc:meta])* $variant:ident: $work:path,)* }
    ) => {
        $(pub use $work;)*

        /// What a worker does.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case", deny_unknown_fields)]
        #[non_exhaustive]
        pub enum WorkType {
            $($(#[$plain_doc])* $plain,)*
            $($(#[$doc])* $variant($work),)*
            /// A function of the caller. Not available in spec files.
            #[serde(skip)]
            Custom(CustomWork),
        }

        impl WorkType {
            /// Every type but [`Custom`](Self::Custom), with default parameters.
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

            /// The keys of its table in a spec file; none for a type without parameters.
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
            fn kind() -> String {
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
        /// Spins.
        SpinWait: spin_wait::SpinWait,
        /// Yields all the time.
        YieldHeavy: yield_heavy::YieldHeavy,
        /// Makes short-lived children.
        ForkExit: fork_exit::ForkExit,
        /// Spins while it changes its nice value.
        NiceSweep: nice_sweep::NiceSweep,
    }
    with_parameters {
        /// Computes, sleeps, computes.
        Bursty: bursty::Bursty,
        /// Wakes at fixed moments, as cyclictest does.
        TimerDeadline: timer_deadline::TimerDeadline,
        /// Passes messages to and fro through pipes.
        PipePingPong: pipe_ping_pong::PipePingPong,
        /// Passes the turn to and fro through a futex.
        FutexPingPong: futex_ping_pong::FutexPingPong,
        /// One wakes many, which compute.
        FutexFanOut: futex_fan_out::FutexFanOut,
        /// Each wakes the next in a ring.
        WakeChain: wake_chain::WakeChain,
        /// One wakes all that wait on the same word.
        ThunderingHerd: thundering_herd::ThunderingHerd,
        /// All fight for one lock.
        MutexContention: mutex_contention::MutexContention,
        /// Moves itself from CPU to CPU.
        AffinityChurn: affinity_churn::AffinityChurn,
        /// Moves itself from cgroup to cgroup.
        CgroupChurn: cgroup_churn::CgroupChurn,
        /// Touches memory it has just given back.
        PageFaultChurn: page_fault_churn::PageFaultChurn,
        /// Sweeps through more memory than its cache holds.
        CachePressure: cache_pressure::CachePressure,
        /// Writes and waits for the disk.
        SyncWrite: sync_write::SyncWrite,
        /// Reads here and there.
        RandomRead: random_read::RandomRead,
        /// Goes through phases.
        Sequence: sequence::Sequence,
        /// Loads, computes, reduces, optimizes: a training job that knows its phases.
        MlTraining: ml_training::MlTraining,
        /// Serves requests with a GPU.
        Inference: ml_training::Inference,
    }
}

/// Refuses a size of 0 or of more than 1 TiB.
fn check_kib(field: &'static str, kib: usize) -> Result<(), (&'static str, String)> {
    match kib {
        1..=0x4000_0000 => Ok(()),
        _ => Err((field, format!("{kib} KiB is not between 1 KiB and 1 TiB"))),
    }
}

impl WorkType {
    /// A work function of the caller.
    ///
    /// ```
    /// use zernel_workload::WorkType;
    ///
    /// let work = WorkType::custom("count", |worker| {
    ///     while worker.proceed() {
    ///         worker.done(1);
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
        self.as_work().about()
    }

    /// The numbers of workers that a group of this type may have.
    #[must_use]
    pub fn worker_rule(&self) -> String {
        let work = self.as_work();
        match work.refused_in_container() {
            Some(_) => format!("{}; not with pcomm", work.worker_rule()),
            None => work.worker_rule(),
        }
    }

    /// Name of the work type in spec files and reports.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Custom(work) => &work.name,
            other => other.as_work().about().name,
        }
    }
}

/// A work function of the caller; made by [`WorkType::custom`].
#[derive(Clone)]
pub struct CustomWork {
    name: Arc<str>,
    function: Arc<dyn Fn(&mut Worker<'_>) + Send + Sync>,
}

impl Work for CustomWork {
    fn about(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "custom",
            does: "calls a function of the program that spawned it",
            exercises: "whatever that function does",
        }
    }

    /// The caller's functions may wait for one another in ways that only the caller knows.
    fn can_be_spared(&self, _team_size: usize) -> bool {
        false
    }

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
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
