mod elf_builder;
mod malformed_files;
mod real_libraries;

use std::path::PathBuf;

use tempfile::TempDir;
use zernel_softgpu::install::{Prologue, install};

/// Installs the software GPU's libraries with this prologue.
fn softgpu(prologue: Prologue) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    install(directory.path(), prologue).unwrap();
    directory
}

fn cuda(directory: &TempDir) -> PathBuf {
    directory.path().join("libcuda.so.1")
}
