//! A task that sweeps through more memory than its cache holds.

use super::{Work, WorkTypeInfo};
use crate::spec_keys::spec_table;
use crate::sys::memory::PrivateMapping;
use crate::worker::{FailingStep, WorkFailure, Worker};

const CACHE_LINE: usize = 64;
/// Cache lines that the worker touches between two checks of its stop word.
const LINES_PER_UNIT: usize = 1024;

spec_table! {
    /// See [`WorkType::CachePressure`](super::WorkType::CachePressure).
    #[derive(Eq)]
    pub struct CachePressure {
        /// Size of each worker's working set, 1 KiB to 1 TiB.
        pub size_kib: usize = 2048,
    }
}

impl Work for CachePressure {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "cache_pressure",
            does: "writes to every cache line of its working set again and again, and counts a unit for each 1024 lines",
            exercises: "the price of migrations and of sharing a cache: what cache-aware placement should avoid",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        super::check_kib("work.size_kib", self.size_kib)
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let mut memory = PrivateMapping::new(self.size_kib << 10)
            .map_err(FailingStep::MapMemory.as_failure())?;
        'sweeps: loop {
            for part in memory.bytes().chunks_mut(CACHE_LINE * LINES_PER_UNIT) {
                if !worker.should_do_another_round() {
                    break 'sweeps;
                }
                for line in part.chunks_mut(CACHE_LINE) {
                    line[0] = line[0].wrapping_add(1);
                }
                worker.count_round(1);
            }
        }
        Ok(())
    }
}
