//! What PyTorch announces of its compiler and its loaders reaches the phases in the kernel.

use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use libloading::Library;
use zernel_ebpf::observer::{Observer, ObserverOptions};
use zernel_model::snapshot::TorchSnapshot;
use zernel_phase::WorkloadPhase;
use zernel_softgpu::install::{Prologue, built_libraries};
use zernel_testkit::eventually;
use zernel_testkit::target::{
    Driver, Stage, TargetRole, end_part_and_wait, stage_directory, try_call,
};

use crate::harness::{find_process, observed_calls, options_that_count_everything, start_attached};

pub(crate) const TORCH_ROLES: &[(&str, TargetRole)] = &[
    ("compiles", target_compile),
    ("awaits_compilation", target_await_compilation),
    ("begins_to_compile", target_begin_to_compile),
    ("forks_loaders", target_fork_loaders),
    ("serves_a_child", target_serve_a_child),
    ("serves_a_client", target_serve_a_client),
];

/// The libraries that announce, in the folder of a stage's libraries.
const ANNOUNCING_LIBRARIES: [&str; 2] = ["libtorch_cpu.so", "libc10.so"];
/// How long a target prepares its loaders.
const PREPARATION_TIME: Duration = Duration::from_millis(200);
/// How long a target polls for the next request.
const REQUEST_PAUSE: Duration = Duration::from_millis(200);
/// How long a thread of a target compiles for another one.
const COMPILATION_TIME: Duration = Duration::from_millis(200);

pub(crate) fn load_library(name: &str) -> Library {
    // SAFETY: loading the stand-in runs no code of its own.
    unsafe { Library::new(stage_directory().join("lib").join(name)) }.expect(name)
}

/// The counters of `PyTorch`'s compiler, as a thread uses them.
struct CompileCounters {
    c10: Library,
}

impl CompileCounters {
    fn load() -> Self {
        let c10 = load_library("libc10.so");
        Self { c10 }
    }

    /// Makes a handle, which begins with the address of its counter, and starts the counter.
    fn start(&self, handle: &[u64; 1], name: &str) {
        let (handle, length, text) = (handle.as_ptr(), name.len(), name.as_ptr());
        try_call!(
            self.c10,
            "_ZN3c107monitor17WaitCounterHandleC1ESt17basic_string_viewIcSt11char_traitsIcEE",
            handle,
            length,
            text
        );
        try_call!(
            self.c10,
            "_ZN3c107monitor17WaitCounterHandle5startEv",
            0,
            handle
        );
    }

    fn stop(&self, handle: &[u64; 1]) {
        try_call!(
            self.c10,
            "_ZN3c107monitor17WaitCounterHandle4stopERKNS_11SmallVectorIlLj6EEE",
            handle.as_ptr()
        );
    }
}

/// The name of the counter that times all of a compilation.
const WHOLE_COMPILATION: &str = "pytorch.wait_counter.entire_forward_compile";

/// Computes, then compiles with another counter inside and kernels tried out, then goes on.
fn target_compile(driver: &Driver, _rounds: u64) {
    let counters = CompileCounters::load();
    let (whole, part) = ([0x1000], [0x2000]);
    driver.open_first_device();
    launch_all_the_time(driver);
    end_part_and_wait();
    counters.start(&whole, WHOLE_COMPILATION);
    counters.start(&part, "pytorch.wait_counter.dynamo_compile");
    counters.stop(&part);
    launch_all_the_time(driver);
    end_part_and_wait();
    counters.stop(&whole);
    launch_all_the_time(driver);
    end_part_and_wait();
    counters.start(&part, "pytorch.wait_counter.TCPStore__get");
    launch_all_the_time(driver);
    end_part_and_wait();
    counters.start(&whole, WHOLE_COMPILATION); // as if its end were missed
    announce_batch(&load_library("libtorch_cpu.so"));
    launch_all_the_time(driver);
    end_part_and_wait();
    counters.start(&whole, WHOLE_COMPILATION);
    launch_all_the_time(driver);
}

/// Computes and waits for another thread, which compiles, as for a backward pass.
fn target_await_compilation(driver: &Driver, _rounds: u64) {
    let counters = CompileCounters::load();
    driver.open_first_device();
    announce_batch(&load_library("libtorch_cpu.so"));
    let kernel = driver.load_empty_kernel();
    driver.launch_kernel(kernel);
    end_part_and_wait();
    driver.launch_kernel(kernel);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            counters.start(&[0x1000], WHOLE_COMPILATION);
            std::thread::sleep(COMPILATION_TIME);
            counters.stop(&[0x1000]);
        });
    });
    driver.launch_kernel(kernel);
}

/// Begins compilations whose ends are not seen: a thread exits, a batch follows, and the test detaches the probes.
fn target_begin_to_compile(driver: &Driver, _rounds: u64) {
    let counters = CompileCounters::load();
    driver.open_first_device();
    std::thread::scope(|scope| {
        scope.spawn(|| counters.start(&[0x1000], WHOLE_COMPILATION));
    });
    end_part_and_wait();
    counters.start(&[0x1000], WHOLE_COMPILATION);
    announce_batch(&load_library("libtorch_cpu.so"));
    end_part_and_wait();
    counters.start(&[0x1000], WHOLE_COMPILATION);
    end_part_and_wait();
    end_part_and_wait();
}

/// Launches for a second. The test reads the phase of the thread meanwhile.
fn launch_all_the_time(driver: &Driver) {
    let kernel = driver.load_empty_kernel();
    let end = Instant::now() + Duration::from_secs(1);
    while Instant::now() < end {
        driver.launch_kernel(kernel);
    }
}

/// Launches, prepares and forks a loader, and asks for a batch.
fn target_fork_loaders(driver: &Driver, _rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    driver.open_first_device();
    driver.launch_kernel(driver.load_empty_kernel());
    let end = Instant::now() + PREPARATION_TIME;
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

/// Runs a model and polls while it has a child, which could load data or send requests. Then does the same after an
/// optimizer step.
fn target_serve_a_child(driver: &Driver, _rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    driver.open_first_device();
    let kernel = driver.load_empty_kernel();
    driver.launch_kernel(kernel);
    let (unread, kept_open) = std::io::pipe().expect("a pipe");
    // SAFETY: this program has one thread, and the child only waits until it is killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; the child ends with its parent at the latest.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::pause();
            libc::_exit(0);
        }
    }
    for announcement in [None, Some("Optimizer.step#SGD.step")] {
        try_call!(
            torch,
            "_ZN2at4_ops6linear4callERKNS_6TensorES4_RKSt8optionalIS2_E",
            0
        );
        if let Some(name) = announcement {
            begin_record(&torch, name);
            driver.launch_kernel(kernel);
            end_part_and_wait();
        }
        driver.launch_kernel(kernel);
        poll(&unread, REQUEST_PAUSE);
        driver.launch_kernel(kernel);
        end_part_and_wait();
    }
    drop(kept_open);
    // SAFETY: ends a child of this program, and takes its exit status.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

/// Runs a model and receives from a socket, from which requests or data may come. Then does the same after an optimizer
/// step.
fn target_serve_a_client(driver: &Driver, _rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let mut socket = TcpStream::connect(server.local_addr().expect("bound")).expect("it listens");
    let timeout = Some(REQUEST_PAUSE);
    socket.set_read_timeout(timeout).expect("a socket of ours");
    driver.open_first_device();
    let kernel = driver.load_empty_kernel();
    for announcement in [None, Some("Optimizer.step#SGD.step")] {
        try_call!(
            torch,
            "_ZN2at4_ops6linear4callERKNS_6TensorES4_RKSt8optionalIS2_E",
            0
        );
        if let Some(name) = announcement {
            begin_record(&torch, name);
        }
        driver.launch_kernel(kernel);
        driver.synchronize();
        assert!(socket.read(&mut [0]).is_err(), "nobody sends");
        driver.launch_kernel(kernel);
        end_part_and_wait();
    }
}

/// Polls a file that never becomes readable.
fn poll(file: &impl AsRawFd, how_long: Duration) {
    let mut polled = libc::pollfd {
        fd: file.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the one entry lives until the call returns.
    let ready = unsafe { libc::poll(&raw mut polled, 1, how_long.as_millis() as i32) };
    assert_eq!(ready, 0, "nobody writes");
}

/// Announces that the thread gets its next batch.
pub(crate) fn announce_batch(torch: &Library) {
    begin_record(
        torch,
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
    );
}

/// Announces an optimizer step and its end.
pub(crate) fn announce_update(torch: &Library) {
    begin_record(torch, "Optimizer.step#SGD.step");
    try_call!(
        torch,
        "_ZNO3c106IValue13toCustomClassIN5torch8autograd8profiler20PythonRecordFunctionEE",
        0
    );
}

/// Calls the function of `PyTorch` that announces what follows by its name.
fn begin_record(torch: &Library, name: &str) {
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

/// Begins a backward pass, as the thread that asks for gradients does.
pub(crate) fn begin_backward_pass(torch: &Library) {
    try_call!(
        torch,
        "_ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorESaIS9_EEbbbS7_",
        0
    );
    let graph = [1_u64];
    try_call!(
        torch,
        "_ZN5torch8autograd6Engine11thread_mainERKSt10shared_ptrINS0_9GraphTaskEE",
        0,
        graph.as_ptr()
    );
}

/// A stage with a stand-in for torch, whose calls announce batches and steps, and an observer of all its libraries.
pub(crate) fn stage_and_observer() -> (Stage, Observer) {
    let (stage, options) = stage_and_options();
    (stage, start_attached(&options))
}

/// A stage with a stand-in for torch, and options that count all calls of all its libraries.
pub(crate) fn stage_and_options() -> (Stage, ObserverOptions) {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let built = built_libraries().expect("they are built");
    let built = built.join("libzernel_softgpu_torch.so");
    let mut options = options_that_count_everything(&stage);
    for name in ANNOUNCING_LIBRARIES {
        fs::copy(&built, stage.library_path(name)).expect("our directory");
        options.libraries.push(stage.library_path(name));
    }
    (stage, options)
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

pub(crate) fn waiting_for_a_compilation_has_no_phase() {
    let (stage, mut observer) = stage_and_observer();
    let mut target = stage.start_target("awaits_compilation", 1);
    let pid = target.pid();
    let unknown_ns = |observer: &Observer| {
        let state = observer.task_state(pid).expect("the map is there");
        state.expect("it is observed").phase_ns[WorkloadPhase::Unknown as usize]
    };
    target.run_part();
    let before_ns = unknown_ns(&observer);
    target.run_part();
    let waited_ns = unknown_ns(&observer) - before_ns;
    assert!(
        waited_ns >= COMPILATION_TIME.as_nanos() as u64,
        "{waited_ns} ns without a phase"
    );
    let compile_seconds = torch_snapshot(&mut observer, pid).compile_seconds;
    assert!(
        compile_seconds >= COMPILATION_TIME.as_secs_f64(),
        "{compile_seconds}"
    );
}

/// A compilation that began is over when its thread exits or gets a batch, or when its process is no longer observed.
pub(crate) fn a_compilation_without_an_end_is_dropped() {
    let (stage, mut observer) = stage_and_observer();
    let mut target = stage.start_target("begins_to_compile", 1);
    let pid = target.pid();
    target.run_part();
    eventually("the thread has exited", || {
        torch_snapshot(&mut observer, pid).compile_seconds == 0.0
    });
    target.run_part();
    assert_eq!(torch_snapshot(&mut observer, pid).compile_seconds, 0.0);
    target.run_part();
    assert!(torch_snapshot(&mut observer, pid).compile_seconds > 0.0);
    observer.pause();
    target.run_part();
    assert_eq!(torch_snapshot(&mut observer, pid).compile_seconds, 0.0);
}

/// What was observed of a process's calls of `PyTorch`.
fn torch_snapshot(observer: &mut Observer, pid: u32) -> TorchSnapshot {
    observer.read_counts().expect("maps can be read");
    let snapshot = observer.snapshot();
    let mut processes = snapshot.observed.iter();
    let process = processes.find(|process| process.pid == pid);
    process.expect("it is observed").probes.torch.clone()
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
        loading_ns >= PREPARATION_TIME.as_nanos() as u64,
        "loading for {loading_ns} ns only"
    );
}

/// Runs a target that serves requests. Until it trains, its waits for requests are no waits for data.
fn assert_server_waits_for_no_data(target: &str, parts_of_training: u32) {
    let (stage, observer) = stage_and_observer();
    let mut target = stage.start_target(target, 1);
    let pid = target.pid();
    let pause_ns = REQUEST_PAUSE.as_nanos() as u64;
    let times = |phase: WorkloadPhase| {
        let state = observer.task_state(pid).expect("the map is there");
        state.expect("it is observed").phase_ns[phase as usize]
    };
    target.run_part();
    assert_eq!(times(WorkloadPhase::DataLoading), 0, "it only runs a model");
    let unknown_ns = times(WorkloadPhase::Unknown);
    assert!(unknown_ns >= pause_ns * 9 / 10, "{unknown_ns} ns unknown");
    // The first of them is an optimizer step.
    (0..parts_of_training).for_each(|_| target.run_part());
    let loading_ns = times(WorkloadPhase::DataLoading);
    assert!(loading_ns >= pause_ns, "{loading_ns} ns of loading");
}

pub(crate) fn a_server_waits_for_requests_of_its_children() {
    assert_server_waits_for_no_data("serves_a_child", 2);
}

pub(crate) fn a_server_receives_requests_and_no_data() {
    assert_server_waits_for_no_data("serves_a_client", 1);
}

pub(crate) fn only_torch_calls_are_announcements_and_layers() {
    let (stage, mut observer) = stage_and_observer();
    let mut target = stage.start_target("serves_a_child", 1);
    let pid = target.pid();
    (0..3).for_each(|_| target.run_part());
    observer.read_counts().expect("maps can be read");
    let driver_calls = observed_calls(find_process(&observer, pid));
    assert!(driver_calls["cuCtxSetCurrent"].calls > 0);
    let torch = torch_snapshot(&mut observer, pid);
    assert_eq!((torch.announcements, torch.layer_calls), (1, 2));
}
