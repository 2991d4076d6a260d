//! A spinning task that moves itself from CPU to CPU.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{Work, WorkTypeInfo};
use crate::clock::us_to_ns;
use crate::spec_keys::spec_table;
use crate::worker::{FailingStep, WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::AffinityChurn`](super::WorkType::AffinityChurn).
    #[derive(Eq)]
    pub struct AffinityChurn {
        /// CPU time that the worker uses on each CPU.
        pub spin_us: u64 = 200,
    }
}

impl Work for AffinityChurn {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "affinity_churn",
            does: "pins itself to each CPU that it may use in turn, computes there, and counts a unit for each CPU",
            exercises: "sched_setaffinity, the migration of a running task, stopper threads",
        }
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let allowed = sched_getaffinity(None).map_err(FailingStep::SetAffinity.as_failure())?;
        let mut cpu = worker.index();
        while worker.should_do_another_round() {
            cpu = next_allowed_cpu(&allowed, cpu);
            let mut only = CpuSet::new();
            only.set(cpu);
            // The CPU may be offline by now. Then the worker stays on its CPU and tries the next one.
            let _ = sched_setaffinity(None, &only);
            worker.burn_cpu_ns(us_to_ns(self.spin_us));
            worker.count_round(1);
        }
        sched_setaffinity(None, &allowed).map_err(FailingStep::SetAffinity.as_failure())
    }
}

fn next_allowed_cpu(allowed: &CpuSet, after: usize) -> usize {
    let candidates = (after + 1..CpuSet::MAX_CPU).chain(0..=after);
    candidates
        .into_iter()
        .find(|cpu| allowed.is_set(*cpu))
        .unwrap_or(after)
}
