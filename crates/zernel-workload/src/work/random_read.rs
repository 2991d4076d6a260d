//! A task that reads random blocks of a file that the page cache does not hold.

use std::path::PathBuf;

use rustix::fs::{Advice, fadvise, fdatasync};

use super::{Work, WorkTypeInfo, files};
use crate::affinity::SplitMix64;
use crate::spec_keys::spec_table;
use crate::worker::{FailingStep, WorkFailure, Worker};

const BLOCK_BYTES: usize = 4096;

spec_table! {
    /// See [`WorkType::RandomRead`](super::WorkType::RandomRead).
    #[derive(Eq)]
    pub struct RandomRead {
        /// Folder in which each worker creates its temporary file.
        pub folder: PathBuf = files::default_folder(),
        shown as "$TMPDIR, else /tmp",
        /// Size of each worker's file, 1 KiB to 1 TiB.
        pub file_kib: usize = 4096,
        /// Seed of the order in which blocks are read.
        pub seed: u64 = 1,
    }
}

impl Work for RandomRead {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "random_read",
            does: "reads random 4 KiB blocks of its file, which it drops from the page cache, and counts a unit for each block",
            exercises: "short sleeps in the block layer, iowait, wake-ups from disk interrupts",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        super::check_kib("work.file_kib", self.file_kib)?;
        files::check_folder("work.folder", &self.folder)
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let bytes = (self.file_kib as u64) << 10;
        let file = files::create_filled_file(&self.folder, bytes, worker)?;
        worker
            .count_as_blocked(|| fdatasync(&file))
            .map_err(FailingStep::WriteFile.as_failure())?;
        let mut random = SplitMix64(self.seed.wrapping_add(worker.index() as u64));
        let mut block = [0; BLOCK_BYTES];
        while worker.should_do_another_round() {
            let offset = random.random_below((bytes as usize / BLOCK_BYTES).max(1)) as u64
                * BLOCK_BYTES as u64;
            // Drops the block from the page cache, so that the next read of this block waits for the disk. Not all file
            // systems can do this.
            let _ = fadvise(
                &file,
                offset,
                std::num::NonZeroU64::new(BLOCK_BYTES as u64),
                Advice::DontNeed,
            );
            match worker.count_as_blocked(|| rustix::io::pread(&file, &mut block, offset)) {
                Ok(_) => worker.count_round(1),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(FailingStep::ReadFile.as_failure()(errno)),
            }
        }
        Ok(())
    }
}
