//! Runs the trials of discovery in virtual machines with other kernels.

use std::env;
use std::time::Duration;

use zernel_lab::{Initramfs, VmSpec};
use zernel_softgpu::install::{CARGO_AND_REAL_LIBRARY_NAMES, built_libraries};
use zernel_testkit::vm;

/// Programs that the trials run.
const PROGRAMS: [&str; 7] = [
    "/bin/cp",
    "/bin/mkdir",
    "/bin/mount",
    "/bin/sh",
    "/bin/sleep",
    "/bin/true",
    "/usr/bin/unshare",
];
/// Loaded by a trial, not linked to anything.
const LOADED_LIBRARY: &str = "libutil.so.1";

/// Runs the trials on the kernel `version`, without those that need thousands of processes.
pub(crate) fn run(version: &str) {
    let own_program = env::current_exe().unwrap();
    let arguments = [
        "--test-threads=1",
        "--skip=full_event_buffer",
        "--skip=thousand",
        "--skip=kernel",
    ];
    let outcome = VmSpec::new(vm::obtain_kernel_of_version(version).unwrap())
        .files(guest_files())
        .environment(zernel_testkit::REQUIRE_VARIABLE, "root,bpf")
        .command_timeout(Duration::from_secs(300))
        .run(own_program, arguments)
        .unwrap_or_else(|error| panic!("{error}"));
    let output = String::from_utf8_lossy(&outcome.stdout);
    assert!(outcome.status.success(), "{output}");
    assert!(output.contains("13 passed"), "{output}");
}

fn guest_files() -> Initramfs {
    let mut files = Initramfs::new();
    for program in PROGRAMS {
        files.add_program(program).unwrap();
    }
    let built = built_libraries().unwrap();
    for (library, _) in CARGO_AND_REAL_LIBRARY_NAMES {
        let path = built.join(library);
        files.add_host_file(&path, &path).unwrap();
    }
    let system = super::interpreter().with_file_name(LOADED_LIBRARY);
    files.add_host_file(&system, &system).unwrap();
    files
}
