//! Tests the probes on other kernels than that of this machine.

use std::env;
use std::time::Duration;

use zernel_ebpf::observer::{Observer, ObserverOptions};
use zernel_lab::VmSpec;
use zernel_testkit::vm;

pub(crate) fn the_probes_load_here() {
    let mut observer = Observer::start(&ObserverOptions::default()).expect("the probes load");
    observer.adopt_existing_tasks().expect("the iterator runs");
    observer.read_counts().expect("maps can be read");
    assert_eq!(observer.losses(), Default::default());
}

/// Runs the tests of waits in virtual machines.
pub(crate) fn load_in_virtual_machines(versions: &[&str]) {
    for version in versions {
        let kernel = vm::obtain_kernel_of_version(version).expect("the oldest one was there");
        let own_program = env::current_exe().expect("we run");
        let outcome = VmSpec::new(kernel)
            // An attach changes kernel code, and emulated CPUs can see each other's code changes half-way.
            .cpus(1)
            .environment(zernel_testkit::REQUIRE_VARIABLE, "root,bpf")
            .command_timeout(Duration::from_secs(300))
            .run(own_program, ["the_probes_load_here"])
            .unwrap_or_else(|error| panic!("{version}: {error}"));
        let output = [&*outcome.stdout, &*outcome.stderr].concat();
        let output = String::from_utf8_lossy(&output);
        assert!(outcome.status.success(), "{version}: {output}");
        assert!(output.contains("1 passed"), "{version}: {output}");
    }
}
