//! Copies programs that tests run.

use std::path::Path;
use std::process::Command;

/// Copies a program, with its permissions. `cp` writes the copy instead of this process: a program that a process has
/// open for writing cannot run, and a child that another thread forks at that moment would inherit the descriptor.
pub fn copy_program(program: impl AsRef<Path>, copy: impl AsRef<Path>) {
    let mut command = Command::new("cp");
    command.arg(program.as_ref()).arg(copy.as_ref());
    let status = command.status().expect("cp is there");
    assert!(status.success(), "{command:?}");
}
