//! A task that writes and waits until the disk has it.

use std::path::PathBuf;

use rustix::fs::fdatasync;
use serde::{Deserialize, Serialize};

use super::{About, Work, files};
use crate::sys::memory::PrivateMapping;
use crate::worker::{Failure, Step, Worker};

/// Blocks after which the file is written from its beginning again.
const BLOCKS: u64 = 1024;

/// See [`WorkType::SyncWrite`](super::WorkType::SyncWrite).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SyncWrite {
    /// Where the temporary file is made.
    pub folder: PathBuf,
    /// Size of a write.
    pub block_kib: usize,
}

impl Default for SyncWrite {
    fn default() -> Self {
        Self {
            folder: files::default_folder(),
            block_kib: 4,
        }
    }
}

impl Work for SyncWrite {
    fn about(&self) -> About {
        About {
            name: "sync_write",
            does: "writes a block and waits for the disk (fdatasync), a unit for each",
            exercises: "uninterruptible sleep, iowait, wake-ups from interrupts and kernel threads",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        super::check_kib("work.block_kib", self.block_kib)?;
        files::check_folder("work.folder", &self.folder)
    }

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), Failure> {
        let file = files::temporary(&self.folder)?;
        let mut block =
            PrivateMapping::new(self.block_kib << 10).map_err(Step::MapMemory.failed())?;
        let block = block.bytes();
        let mut number = 0;
        while worker.proceed() {
            let offset = (number % BLOCKS) * block.len() as u64;
            worker.blocking(|| {
                files::write_at(&file, block, offset)?;
                fdatasync(&file).map_err(Step::WriteFile.failed())
            })?;
            number += 1;
            worker.done(1);
        }
        Ok(())
    }
}
