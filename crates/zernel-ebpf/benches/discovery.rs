//! The cost of discovery: for processes that call exec and `dlopen`, and for the thread that scans.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use zernel_ebpf::discovery::Discovery;
use zernel_testkit::bench::TimedComparison;

fn main() {
    if let Err(error) = Discovery::start() {
        println!("skipped: {error}");
        return;
    }
    let mut comparison = TimedComparison::from_args();
    comparison.measure_routine("exec", 1, run_true);
    comparison.measure_routine("dlopen and dlclose", 1, load_and_unload);
    do_while_discovering(|| {
        comparison.measure_routine("exec, discovered", 1, run_true);
        comparison.measure_routine("dlopen and dlclose, discovered", 1, load_and_unload);
    });
    let mut iterator = Discovery::start().expect("it did before");
    comparison.measure_routine("scan by the iterator", 1, || {
        scan_all_processes(&mut iterator);
    });
    let mut procfs = Discovery::start_without_iterator().expect("it did before");
    comparison.measure_routine("scan by procfs", 1, || scan_all_processes(&mut procfs));
    println!();
    comparison.print_ratio("exec, discovered", "exec");
    comparison.print_ratio("dlopen and dlclose, discovered", "dlopen and dlclose");
    comparison.print_ratio("scan by the iterator", "scan by procfs");
}

/// Does something while another thread discovers processes.
fn do_while_discovering(action: impl FnOnce()) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut discovery = Discovery::start().expect("it did before");
        let done = &done;
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                discovery
                    .poll(Duration::from_millis(10))
                    .expect("events can be read");
            }
        });
        action();
        done.store(true, Ordering::Relaxed);
    });
}

fn run_true() {
    let status = Command::new("true").status().expect("true runs");
    assert!(status.success());
}

fn load_and_unload() {
    // SAFETY: glibc's empty library does nothing when it is loaded.
    let library = unsafe { libloading::Library::new("libutil.so.1") };
    drop(library.expect("glibc has it"));
}

fn scan_all_processes(discovery: &mut Discovery) {
    discovery.scan().expect("processes can be scanned");
}
