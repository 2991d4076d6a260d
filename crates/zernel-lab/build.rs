//! Compiles the library that deterministic runs preload into QEMU.

use std::env;
use std::path::PathBuf;
use std::process::Command;

const QEMU_THREADS_SOURCE: &str = "src/qemu_threads.c";

fn main() {
    println!("cargo::rerun-if-changed={QEMU_THREADS_SOURCE}");
    println!("cargo::rerun-if-env-changed=BPF_CLANG");
    // The library is compiled by the clang that also compiles the BPF programs, so every build has it.
    let clang = env::var("BPF_CLANG").unwrap_or_else(|_| "clang".into());
    let library = PathBuf::from(env::var("OUT_DIR").expect("set by cargo")).join("qemu_threads.so");
    let status = Command::new(&clang)
        .args([
            "-O2",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            QEMU_THREADS_SOURCE,
            "-o",
        ])
        .arg(&library)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{clang} does not compile {QEMU_THREADS_SOURCE}: {status}"),
        Err(error) => panic!("{clang} does not start: {error}"),
    }
}
