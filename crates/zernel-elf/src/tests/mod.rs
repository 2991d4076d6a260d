mod hostile_tables;
mod malformed_files;
mod real_libraries;

use std::cell::Cell;
use std::path::PathBuf;

use tempfile::{NamedTempFile, TempDir};
use zernel_softgpu::install::{Prologue, install_libraries};

use crate::{FunctionName, Library, LibraryError, ProbeSite, SiteError};

thread_local! {
    static BYTES_READ: Cell<u64> = const { Cell::new(0) };
}

/// Adds to the number of bytes that this thread has read from files.
pub(crate) fn count_bytes_read(bytes: usize) {
    BYTES_READ.set(BYTES_READ.get() + bytes as u64);
}

/// Runs `work` and returns its result with the number of bytes that it read from files.
fn bytes_read_by<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = BYTES_READ.get();
    let result = work();
    (result, BYTES_READ.get() - before)
}

impl Library {
    /// Looks up one function.
    fn find_site(&self, name: &str) -> Result<ProbeSite, SiteError> {
        self.find_exact_sites(&[name]).remove(0)
    }

    /// Looks up functions by their exact names.
    fn find_exact_sites(&self, names: &[&str]) -> Vec<Result<ProbeSite, SiteError>> {
        let names: Vec<_> = names.iter().copied().map(FunctionName::Exact).collect();
        let sites = self.find_functions(&names).unwrap();
        sites.into_iter().flatten().collect()
    }
}

/// Installs the software GPU's libraries in a folder, with this prologue in each probed function.
fn install_softgpu(prologue: Prologue) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    install_libraries(directory.path(), prologue).unwrap();
    directory
}

fn cuda_path(directory: &TempDir) -> PathBuf {
    directory.path().join("libcuda.so.1")
}

/// Writes `content` to a file.
pub(crate) fn write_to_file(content: &[u8]) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    file
}

/// Writes `content` to a file and opens it as a library.
fn open_content(content: &[u8]) -> Result<Library, LibraryError> {
    Library::open(write_to_file(content).path())
}
