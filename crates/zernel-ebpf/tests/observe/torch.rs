//! What PyTorch announces of its compiler and its loaders reaches the phases in the kernel.

use std::fs;
use std::time::{Duration, Instant};

use libloading::Library;
use zernel_ebpf::observer::Observer;
use zernel_phase::WorkloadPhase;
use zernel_softgpu::install::{Prologue, built_libraries};
use zernel_testkit::eventually;
use zernel_testkit::target::{
    Driver, Stage, TargetRole, end_part_and_wait, stage_directory, try_call,
};

use crate::harness::{options_that_count_everything, start_attached};

pub(crate) const TORCH_ROLES: &[(&str, TargetRole)] =
    &[("compiles", compile), ("forks_loaders", fork_loaders)];

/// The libraries that announce, in the folder of a stage's libraries.
const ANNOUNCING_LIBRARIES: [&str; 2] = ["libtorch_cpu.so", "libc10.so"];
/// How long a target prepares its loaders.
const PREPARATION: Duration = Duration::from_millis(200);

fn load_library(name: &str) -> Library {
    // SAFETY: loading the stand-in runs no code of its own.
    unsafe { Library::new(stage_directory().join("lib").join(name)) }.expect(name)
}

/// Computes, then compiles with another counter inside and kernels tried out, then goes on.
fn compile(driver: &Driver, _rounds: u64) {
    let c10 = load_library("libc10.so");
    // A handle begins with the address of its counter.
    let (whole, part) = ([0x1000_u64], [0x2000_u64]);
    let (whole, part) = (whole.as_ptr(), part.as_ptr());
    let make = |handle: *const u64, name: &str| {
        let (length, text) = (name.len(), name.as_ptr());
        try_call!(
            c10,
            "_ZN3c107monitor17WaitCounterHandleC1ESt17basic_string_viewIcSt11char_traitsIcEE",
            handle,
            length,
            text
        );
    };
    let start = |handle: *const u64| {
        try_call!(c10, "_ZN3c107monitor17WaitCounterHandle5startEv", 0, handle)
    };
    let stop = |handle: *const u64| {
        try_call!(
            c10,
            "_ZN3c107monitor17WaitCounterHandle4stopERKNS_11SmallVectorIlLj6EEE",
            handle
        )
    };
    driver.open_first_device();
    launch_all_the_time(driver);
    end_part_and_wait();
    make(whole, "pytorch.wait_counter.entire_forward_compile");
    start(whole);
    make(part, "pytorch.wait_counter.dynamo_compile");
    start(part);
    stop(part);
    launch_all_the_time(driver);
    end_part_and_wait();
    stop(whole);
    launch_all_the_time(driver);
    end_part_and_wait();
    make(part, "pytorch.wait_counter.TCPStore__get");
    start(part);
    launch_all_the_time(driver);
    end_part_and_wait();
    make(whole, "pytorch.wait_counter.entire_forward_compile");
    start(whole); // as if its end were missed
    announce_batch(&load_library("libtorch_cpu.so"));
    launch_all_the_time(driver);
    end_part_and_wait();
    make(whole, "pytorch.wait_counter.entire_forward_compile");
    start(whole);
    launch_all_the_time(driver);
}

/// Launches for a second. The test reads the phase meanwhile.
fn launch_all_the_time(driver: &Driver) {
    let kernel = driver.load_empty_kernel();
    let end = Instant::now() + Duration::from_secs(1);
    while Instant::now() < end {
        driver.launch_kernel(kernel);
    }
}

/// Launches, prepares and forks a loader, and asks for a batch.
fn fork_loaders(driver: &Driver, _rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    driver.open_first_device();
    driver.launch_kernel(driver.load_empty_kernel());
    let end = Instant::now() + PREPARATION;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
    // SAFETY: this program has one thread, and the child only exits.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    announce_batch(&torch);
}

/// Announces that the thread gets its next batch.
fn announce_batch(torch: &Library) {
    let name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__";
    // A `std::string` of libstdc++.
    let string = [name.as_ptr() as u64, name.len() as u64];
    let mut result = 0_u64;
    try_call!(
        torch,
        "_ZN5torch8autograd8profiler25record_function_enter_newERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt8optionalIS7_E",
        &raw mut result,
        string.as_ptr()
    );
}

/// A stage whose libraries announce too, and an observer of all of them.
fn stage_and_observer() -> (Stage, Observer) {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let built = built_libraries().expect("they are built");
    let built = built.join("libzernel_softgpu_torch.so");
    let mut options = options_that_count_everything(&stage);
    for name in ANNOUNCING_LIBRARIES {
        fs::copy(&built, stage.library_path(name)).expect("our directory");
        options.libraries.push(stage.library_path(name));
    }
    (stage, start_attached(&options))
}

fn phase_of(observer: &Observer, pid: u32) -> Option<WorkloadPhase> {
    let state = observer.task_state(pid).expect("the map is there");
    Some(state?.phase_word.phase())
}

pub(crate) fn a_compiling_thread_has_no_phase() {
    let (stage, observer) = stage_and_observer();
    let mut target = stage.start_target("compiles", 1);
    let pid = target.pid();
    for expected in [
        WorkloadPhase::GpuCompute,
        WorkloadPhase::Unknown, // it compiles
        WorkloadPhase::GpuCompute,
        WorkloadPhase::GpuCompute, // other counters mean nothing
        WorkloadPhase::GpuCompute, // the announced batch shows that the compilation is over
        WorkloadPhase::Unknown,    // it compiles again
    ] {
        target.start_part();
        eventually(&format!("it is in {expected:?}"), || {
            phase_of(&observer, pid) == Some(expected)
        });
        target.wait_until_done();
    }
}

pub(crate) fn forking_loaders_is_data_loading() {
    let (stage, observer) = stage_and_observer();
    let mut target = stage.start_target("forks_loaders", 1);
    target.run_part();
    let state = observer.task_state(target.pid()).expect("the map is there");
    let state = state.expect("it is observed");
    assert_eq!(state.phase_word.phase(), WorkloadPhase::DataLoading);
    let asked_ns = state.tracker.now_ns;
    let loading_ns = asked_ns.saturating_sub(state.phase_word.start_ns());
    assert!(
        loading_ns >= PREPARATION.as_nanos() as u64,
        "loading for {loading_ns} ns only"
    );
}
