//! The unnamed temporary file of a worker that does I/O. The kernel removes the file when the worker ends, even if it
//! is killed.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::worker::{FailingStep, WorkFailure, Worker};

/// Size of one write while a temporary file is filled.
const FILL_BLOCK_BYTES: usize = 64 << 10;

/// Creates a file without a name in `folder`. Fork safe for short paths.
pub(super) fn create_unnamed_file(folder: &Path) -> Result<OwnedFd, WorkFailure> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    openat(CWD, folder, flags, Mode::RUSR | Mode::WUSR).map_err(FailingStep::MakeFile.as_failure())
}

/// Creates a file without a name in `folder` and writes `bytes` bytes to it, or fewer after the stop request.
pub(super) fn create_filled_file(
    folder: &Path,
    bytes: u64,
    worker: &mut Worker<'_>,
) -> Result<OwnedFd, WorkFailure> {
    let file = create_unnamed_file(folder)?;
    let block = [0x5a; FILL_BLOCK_BYTES];
    let mut written = 0;
    while written < bytes && worker.should_do_another_round() {
        written += write_block_at(&file, &block, written)?;
    }
    Ok(file)
}

/// Writes a block at an offset. A signal that interrupts the write is no failure.
pub(super) fn write_block_at(
    file: &OwnedFd,
    block: &[u8],
    offset: u64,
) -> Result<u64, WorkFailure> {
    match rustix::io::pwrite(file, block, offset) {
        Ok(written) => Ok(written as u64),
        Err(rustix::io::Errno::INTR) => Ok(0),
        Err(errno) => Err(FailingStep::WriteFile.as_failure()(errno)),
    }
}

/// Checks that `folder` is a directory. Whether files can be created in it is known only when a worker tries.
pub(super) fn check_folder(
    field: &'static str,
    folder: &Path,
) -> Result<(), (&'static str, String)> {
    if folder.is_dir() {
        return Ok(());
    }
    Err((
        field,
        format!(
            "`{}` is not a folder; name one on the disk that is to be exercised",
            folder.display()
        ),
    ))
}

/// The folder for temporary files: `$TMPDIR`, else `/tmp`.
pub(super) fn default_folder() -> PathBuf {
    std::env::temp_dir()
}
