//! A task that writes to a file and waits for the disk.

use std::path::PathBuf;

use super::{Work, WorkTypeInfo, files};
use crate::spec_keys::spec_table;
use crate::sys::memory::PrivateMapping;
use crate::worker::{FailingStep, WorkFailure, Worker};
use rustix::fs::fdatasync;

/// Number of blocks after which the worker writes its file from the beginning again.
const BLOCKS_PER_FILE: u64 = 1024;

spec_table! {
    /// See [`WorkType::SyncWrite`](super::WorkType::SyncWrite).
    #[derive(Eq)]
    pub struct SyncWrite {
        /// Folder in which each worker creates its temporary file.
        pub folder: PathBuf = files::default_folder(),
        shown as "$TMPDIR, else /tmp",
        /// Size of each write, 1 KiB to 1 TiB.
        pub block_kib: usize = 4,
    }
}

impl Work for SyncWrite {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "sync_write",
            does: "writes a block and waits for the disk (fdatasync), and counts a unit for each block",
            exercises: "uninterruptible sleep, iowait, wake-ups from interrupts and kernel threads",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        super::check_kib("work.block_kib", self.block_kib)?;
        files::check_folder("work.folder", &self.folder)
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let file = files::create_unnamed_file(&self.folder)?;
        let mut block = PrivateMapping::new(self.block_kib << 10)
            .map_err(FailingStep::MapMemory.as_failure())?;
        let block = block.bytes();
        let mut number = 0;
        while worker.should_do_another_round() {
            let offset = (number % BLOCKS_PER_FILE) * block.len() as u64;
            worker.count_as_blocked(|| {
                files::write_block_at(&file, block, offset)?;
                fdatasync(&file).map_err(FailingStep::WriteFile.as_failure())
            })?;
            number += 1;
            worker.count_round(1);
        }
        Ok(())
    }
}
