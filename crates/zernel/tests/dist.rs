//! The archive of `make dist`.

use std::process::Command;

/// The program that tests build needs shared libraries that not every machine has.
#[test]
#[cfg_attr(feature = "static", ignore = "this program has them inside")]
fn a_program_that_would_not_start_everywhere_is_refused() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/dist");
    let mut check = Command::new(script);
    let output = check
        .args(["--check", env!("CARGO_BIN_EXE_zernel")])
        .output();
    let output = output.unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("libelf.so.1"), "{printed}");
}
