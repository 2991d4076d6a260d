//! Which thread ended a wait shows what the wait was for.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use libloading::Library;
use zernel_ebpf::observer::Observer;
use zernel_ebpf::probes::DurationKind;
use zernel_phase::WorkloadPhase;
use zernel_phase::class::TaskRole;
use zernel_testkit::eventually;
use zernel_testkit::target::{
    Driver, ROLE_VARIABLE, Stage, Target, TargetRole, end_part_and_wait, stage_directory, try_call,
};

use crate::harness::{find_process, observed_calls};
use crate::torch::{announce_batch, announce_update, load_library, stage_and_observer};

pub(crate) const HAND_OVER_ROLES: &[(&str, TargetRole)] = &[
    ("awaits_collectives", target_await_collectives),
    ("awaits_another_thread", target_await_another_thread),
    ("awaits_batches_of_layers", target_await_batches_of_layers),
    (
        "trains_with_spawned_loader",
        target_train_with_spawned_loader,
    ),
    ("serves_batches", target_serve_batches),
];

/// How long a thread of a target waits for its peers in one collective.
const COLLECTIVE_TIME: Duration = Duration::from_millis(50);
/// How long a thread of a target works outside of collectives.
const OTHER_WORK_TIME: Duration = Duration::from_millis(400);

/// Launches, and waits for another thread, which is in collectives for a part of the wait.
fn target_await_collectives(driver: &Driver, _rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    driver.open_first_device();
    announce_batch(&torch);
    let kernel = driver.load_empty_kernel();
    driver.launch_kernel(kernel);
    end_part_and_wait();
    for collectives in [1, 4] {
        driver.launch_kernel(kernel);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(OTHER_WORK_TIME);
                (0..collectives).for_each(|_| wait_for_peers(&torch));
            });
        });
        driver.launch_kernel(kernel);
        end_part_and_wait();
    }
}

/// Calls a collective and blocks as it does.
fn wait_for_peers(torch: &Library) {
    try_call!(
        torch,
        "_ZN4c10d4Work4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE",
        0,
        0
    );
    thread::park_timeout(COLLECTIVE_TIME);
}

/// Of a wait for another thread, only the time that this thread is in collectives is communication.
pub(crate) fn a_wait_is_for_peers_as_long_as_collectives_last() {
    let (stage, observer) = stage_and_observer();
    let mut target = stage.start_target("awaits_collectives", 1);
    let pid = target.pid();
    let peers_ns = || {
        let state = observer.task_state(pid).expect("the map is there");
        let phase_ns = state.expect("it is observed").phase_ns;
        Duration::from_nanos(phase_ns[WorkloadPhase::NcclCollective as usize])
    };
    target.run_part();
    for collectives in [1, 4] {
        let before = peers_ns();
        target.run_part();
        let waited = peers_ns() - before;
        let in_collectives = COLLECTIVE_TIME * collectives;
        assert!(
            waited > in_collectives.mul_f64(0.9) && waited < in_collectives + OTHER_WORK_TIME / 2,
            "{waited:?} for {collectives} collectives"
        );
    }
}

/// How long a thread that loads takes for a batch.
const LOADING_TIME: Duration = Duration::from_millis(20);
/// How long a thread that hands over at once is busy before, so that the other one blocks meanwhile.
const HAND_OVER_TIME: Duration = Duration::from_micros(200);
/// For how long a thread counts as loading after it handed over data; the kernel counts about a minute.
const LOADER_TIME: Duration = Duration::from_secs(65);

const HELPER_TID_FILE: &str = "helper";
const LONGEST_WAIT_FILE: &str = "longest";

/// A thread of a target that does what it is asked for and then ends the wait of the thread that asked.
struct Helper {
    orders: Sender<Duration>,
    results: Receiver<()>,
}

impl Helper {
    /// Starts a helper that does this work for as long as it is asked to.
    fn start(work: impl Fn(Duration) + Send + 'static) -> Self {
        let (orders, ordered) = channel::<Duration>();
        let (done, results) = channel();
        thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero();
            let path = stage_directory().join(HELPER_TID_FILE);
            fs::write(path, tid.to_string()).expect("our directory");
            for busy in ordered {
                work(busy);
                done.send(()).expect("it waits");
            }
        });
        Self { orders, results }
    }

    /// Waits for the helper, which is busy for this time, and returns how long that took.
    fn await_hand_over(&self, busy: Duration) -> Duration {
        let begin = Instant::now();
        self.orders.send(busy).expect("it waits");
        self.results.recv().expect("it is there");
        begin.elapsed()
    }
}

fn spin_for(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Gets batches, while another thread ends short waits, as one does that takes Python's lock. Then this thread loads, then
/// it does nothing for longer than it counts as loading.
fn target_await_another_thread(driver: &Driver, _rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    driver.open_first_device();
    let helper = Helper::start(spin_for);
    helper.await_hand_over(HAND_OVER_TIME);
    announce_batch(&torch);
    let waits = (0..10).map(|_| helper.await_hand_over(HAND_OVER_TIME));
    let longest = waits.max().expect("there are waits");
    let path = stage_directory().join(LONGEST_WAIT_FILE);
    fs::write(path, longest.as_micros().to_string()).expect("our directory");
    end_part_and_wait();
    helper.await_hand_over(LOADING_TIME);
    helper.await_hand_over(HAND_OVER_TIME);
    end_part_and_wait();
    thread::sleep(LOADER_TIME);
    helper.await_hand_over(HAND_OVER_TIME);
    end_part_and_wait();
}

fn number_of_target(stage: &Stage, file: &str) -> u32 {
    let text = fs::read_to_string(stage.path().join(file)).expect("it was written");
    text.parse().expect("a number")
}

fn role_of_helper(stage: &Stage, observer: &Observer) -> TaskRole {
    let state = observer.task_state(number_of_target(stage, HELPER_TID_FILE));
    let state = state.expect("the map is there");
    state.expect("it is observed").role()
}

/// A thread that ends waits loads data only if these waits are long enough to load in, and only for a while.
pub(crate) fn a_thread_that_ends_short_waits_is_no_loader() {
    let (stage, observer) = stage_and_observer();
    let mut target = (0..50)
        .map(|_| {
            let mut target = stage.start_target("awaits_another_thread", 1);
            target.run_part();
            target
        })
        // On a busy machine the helper may not get a CPU for longer.
        .find(|_| number_of_target(&stage, LONGEST_WAIT_FILE) < 900)
        .expect("a run with short waits");
    assert_eq!(role_of_helper(&stage, &observer), TaskRole::Helper);
    target.run_part();
    assert_eq!(role_of_helper(&stage, &observer), TaskRole::Loader);
    target.run_part();
    assert_eq!(role_of_helper(&stage, &observer), TaskRole::Helper);
}

/// Waits after each optimizer step for a thread that makes a batch with layers, and launches without a copy.
fn target_await_batches_of_layers(driver: &Driver, rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    let layers = load_library("libtorch_cpu.so");
    driver.open_first_device();
    let kernel = driver.load_empty_kernel();
    let helper = Helper::start(move |busy| {
        try_call!(
            layers,
            "_ZN2at4_ops6linear4callERKNS_6TensorES4_RKSt8optionalIS2_E",
            0
        );
        spin_for(busy);
    });
    for _ in 0..rounds {
        announce_update(&torch);
        helper.await_hand_over(LOADING_TIME);
        driver.launch_kernel(kernel);
    }
    end_part_and_wait();
}

/// Steps of a target that waits for batches of another thread.
const STEP_COUNT: u32 = 10;

/// Runs a target whose helper makes batches with layers, and returns what was observed.
fn observe_batches_of_layers() -> (Stage, Target, Observer) {
    let (stage, mut observer) = stage_and_observer();
    let mut target = stage.start_target("awaits_batches_of_layers", STEP_COUNT.into());
    target.run_part();
    observer.read_counts().expect("maps can be read");
    (stage, target, observer)
}

/// Layers are no evidence that a thread runs a training loop: a thread that loads may augment its batches with them.
pub(crate) fn a_loading_thread_may_call_layers() {
    let (stage, target, observer) = observe_batches_of_layers();
    assert_eq!(role_of_helper(&stage, &observer), TaskRole::Loader);
    let process = find_process(&observer, target.pid());
    let layers = observed_calls(process)["at::_ops::linear::call"].calls;
    assert_eq!(layers, u64::from(STEP_COUNT));
    let times = process.probes.sched;
    let calling = Duration::from_nanos(times.calling_on_cpu_ns);
    assert!(calling < LOADING_TIME * STEP_COUNT / 2, "{times:?}");
}

/// A wait for a thread that loads is a wait for data, also if no copy follows.
pub(crate) fn a_wait_for_a_thread_that_loads_is_one_for_data() {
    let (_stage, target, observer) = observe_batches_of_layers();
    let process = find_process(&observer, target.pid());
    let waits = process.duration_histogram(DurationKind::Dataload);
    let waits = waits.expect("it waited for data");
    assert_eq!(waits.count, u64::from(STEP_COUNT));
    let waited = Duration::from_nanos(waits.sum_ns);
    assert!(waited >= LOADING_TIME * STEP_COUNT, "{waited:?}");
}

/// Starts this program again as a loader, as a loader that is spawned and not forked. Then gets batches from it.
fn target_train_with_spawned_loader(driver: &Driver, rounds: u64) {
    let torch = load_library("libtorch_cpu.so");
    driver.open_first_device();
    let (kernel, device) = (driver.load_empty_kernel(), driver.allocate_memory(4096));
    driver.launch_kernel(kernel);
    let mut loader = Command::new(env::current_exe().expect("it runs"))
        .env(ROLE_VARIABLE, "serves_batches")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program runs");
    let path = stage_directory().join(HELPER_TID_FILE);
    fs::write(path, loader.id().to_string()).expect("our directory");
    let requests = loader.stdin.as_mut().expect("piped");
    let batches = loader.stdout.as_mut().expect("piped");
    end_part_and_wait();
    for _ in 0..rounds {
        announce_batch(&torch);
        requests.write_all(b"\n").expect("it listens");
        batches.read_exact(&mut [0]).expect("it loads");
        driver.copy_to_device(device, &mut [0; 4096]);
        driver.launch_kernel(kernel);
        driver.synchronize();
    }
    end_part_and_wait();
    drop(loader.stdin.take());
    loader.wait().expect("it exits");
}

/// Loads a batch for every byte on stdin, until its trainer exits.
fn target_serve_batches(_driver: &Driver, _rounds: u64) {
    loop {
        spin_for(LOADING_TIME);
        let written = std::io::stdout()
            .write_all(b".")
            .and_then(|()| std::io::stdout().flush());
        if written.is_err() || !matches!(std::io::stdin().read(&mut [0]), Ok(1)) {
            std::process::exit(0);
        }
    }
}

/// A child that execs the program of its trainer loads data for it once it hands over a batch.
pub(crate) fn a_spawned_loader_counts_once_it_hands_over_data() {
    let (stage, mut observer) = stage_and_observer();
    let mut target = stage.start_target("trains_with_spawned_loader", STEP_COUNT.into());
    target.run_part();
    let loader = number_of_target(&stage, HELPER_TID_FILE);
    observer.read_counts().expect("maps can be read");
    observer.adopt_existing_tasks().expect("the iterator runs");
    assert_eq!(observer.task_state(loader).expect("readable"), None);
    target.run_part();
    eventually("it is adopted", || {
        observer.read_counts().expect("maps can be read");
        observer.processes().any(|process| process.pid == loader)
    });
    assert_eq!(role_of_helper(&stage, &observer), TaskRole::Loader);
    assert_eq!(
        find_process(&observer, loader).loads_for,
        Some(target.pid())
    );
}
