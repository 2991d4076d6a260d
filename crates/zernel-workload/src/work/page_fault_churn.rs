//! A task that touches memory that it has just given back to the kernel.

use super::{Work, WorkTypeInfo};
use crate::spec_keys::spec_table;
use crate::sys::memory::PrivateMapping;
use crate::worker::{FailingStep, WorkFailure, Worker};

const PAGE_BYTES: usize = 4096;

spec_table! {
    /// See [`WorkType::PageFaultChurn`](super::WorkType::PageFaultChurn).
    #[derive(Eq)]
    pub struct PageFaultChurn {
        /// Size of the memory region that the worker touches and gives back, 1 KiB to 1 TiB.
        pub region_kib: usize = 4096,
    }
}

impl Work for PageFaultChurn {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "page_fault_churn",
            does: "touches every page of a region, gives the region back, and counts a unit for each page",
            exercises: "page faults, mmap lock and allocator contention, system time that preempts badly",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        super::check_kib("work.region_kib", self.region_kib)
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let mut region = PrivateMapping::new(self.region_kib << 10)
            .map_err(FailingStep::MapMemory.as_failure())?;
        'rounds: loop {
            for page in region.bytes().chunks_mut(PAGE_BYTES) {
                if !worker.should_do_another_round() {
                    break 'rounds;
                }
                page[0] = 1;
                worker.count_round(1);
            }
            region
                .discard_pages()
                .map_err(FailingStep::MapMemory.as_failure())?;
        }
        Ok(())
    }
}
