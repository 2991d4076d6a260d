//! Processes that start, exec and exit, and pids that are reused.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zernel_ebpf::metrics::{self, TextFormat};
use zernel_ebpf::observer::{ObservedProcess, Observer, ObserverOptions, ProcessCoverage};
use zernel_model::snapshot::Scope;
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::{
    Driver, ROLE_VARIABLE, ROUNDS_VARIABLE, Stage, Target, TargetRole, call, end_part_and_wait,
    stage_directory, try_call,
};
use zernel_testkit::{Need, eventually};

use crate::counts::target_launch_only;
use crate::harness::{
    ObserverOnThread, attach_rest, find_process, observe_stage, observed_calls,
    options_that_count_everything, start_observer,
};

pub(crate) const PROCESS_ROLES: &[(&str, TargetRole)] = &[
    ("executes", target_launches_then_execs),
    ("forks", target_forks_idle_child),
    ("many_children", target_forks_many_children),
    ("steps_in_parts", target_steps_in_parts),
    ("initialises_again", target_initialises_again),
];

/// Makes `steps` steps three times, with a pause before the second and the third time.
fn target_steps_in_parts(driver: &Driver, steps: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    let device = driver.allocate_memory(64);
    let mut batch = [0; 64];
    for part in 0..3 {
        if part > 0 {
            end_part_and_wait();
        }
        for _ in 0..steps {
            call!(
                driver.cuda(),
                "cuMemcpyHtoDAsync_v2",
                device,
                batch.as_mut_ptr(),
                64,
                0
            );
            driver.launch_kernel(function);
            driver.synchronize();
        }
    }
}

/// Initialises the driver twice, as a program does when it loads another library that uses the driver.
fn target_initialises_again(driver: &Driver, rounds: u64) {
    target_launch_only(driver, rounds);
    end_part_and_wait();
    target_launch_only(driver, rounds);
}

/// Launches, then execs a program that launches once more.
fn target_launches_then_execs(driver: &Driver, rounds: u64) {
    target_launch_only(driver, rounds);
    end_part_and_wait();
    let program = std::env::current_exe().expect("we run");
    let mut command = Command::new(program);
    let command = command.env(ROLE_VARIABLE, "launches");
    let error = command
        .env(ROUNDS_VARIABLE, (rounds + 1).to_string())
        .exec();
    panic!("{error}");
}

/// A child that does nothing until its parent ends.
pub(crate) fn fork_waiting_child() -> i32 {
    fork_child(|| {
        loop {
            std::thread::park();
        }
    })
}

/// Forks a child that does nothing.
fn target_forks_idle_child(driver: &Driver, rounds: u64) {
    target_launch_only(driver, rounds);
    let child = fork_waiting_child();
    end_part_and_wait();
    // SAFETY: our own child.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

/// Forks `children` children, some at a time. Each child makes a few calls and exits. The calls fail, because no child
/// opens the device: that would take longer than all the rest.
fn target_forks_many_children(driver: &Driver, children: u64) {
    const CHILDREN_AT_ONCE: usize = 100;
    let (mut running, mut all) = (Vec::new(), String::new());
    for number in 0..children {
        if number > 0 && number % CHILDREN_PER_PART == 0 {
            running.drain(..).for_each(expect_child_success);
            end_part_and_wait();
        }
        let child = fork_child(|| {
            for _ in 0..FEW_LAUNCHES {
                assert_ne!(try_call!(driver.cuda(), "cuCtxSynchronize"), 0);
            }
            std::process::exit(0);
        });
        running.push(child);
        all += &format!("{child}\n");
        if running.len() == CHILDREN_AT_ONCE {
            running.drain(..).for_each(expect_child_success);
        }
    }
    running.into_iter().for_each(expect_child_success);
    fs::write(stage_directory().join(CHILDREN_FILE), all).expect("our directory");
}

/// Children between two pauses. The kernel's table has places for at most this many exited processes between two
/// reads.
const CHILDREN_PER_PART: u64 = 700;

/// The file with the pids of all children.
const CHILDREN_FILE: &str = "children";

const FEW_LAUNCHES: u64 = 3;

pub(crate) fn fork_child(child: impl FnOnce()) -> i32 {
    // SAFETY: a target has one thread.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: a system call that takes plain numbers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            child();
            std::process::exit(1);
        }
        pid => {
            assert!(pid > 0, "fork");
            pid
        }
    }
}

pub(crate) fn expect_child_success(child: i32) {
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
}

/// All observed processes with a pid, the running one first.
fn processes_with_pid(observer: &Observer, pid: u32) -> Vec<&ObservedProcess> {
    let processes = observer.processes();
    processes.filter(|process| process.pid == pid).collect()
}

fn launches_of(process: &ObservedProcess) -> u64 {
    observed_calls(process)["cuLaunchKernel"].calls
}

/// Checks that no series is exported twice: Prometheus refuses a scrape with duplicates.
pub(crate) fn assert_exported_once(observer: &Observer) {
    let text = metrics::metrics_text(&observer.snapshot(), Scope::All, TextFormat::Prometheus);
    let mut exported = BTreeSet::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').expect("a sample");
        assert!(exported.insert(series), "{series} twice");
    }
}

pub(crate) fn exec_starts_a_new_process() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("executes", 10);
    target.run_part();
    target.start_part();
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let processes = processes_with_pid(&observer, target.pid());
    let found: Vec<_> = processes
        .iter()
        .map(|process| {
            (
                launches_of(process),
                process.ended_ns.is_some(),
                process.coverage,
            )
        })
        .collect();
    let expected = [
        (11, false, ProcessCoverage::Complete),
        (10, true, ProcessCoverage::Complete),
    ];
    assert_eq!(found, expected);
    assert_exported_once(&observer);
}

pub(crate) fn a_child_without_cuda_is_no_trainer() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("forks", 10);
    target.run_part();
    observer.discover().expect("processes can be discovered");
    observer.read_counts().expect("maps can be read");
    let pid = target.pid();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let child: u32 = children
        .expect("it lives")
        .trim()
        .parse()
        .expect("one child");
    assert_eq!(launches_of(find_process(&observer, pid)), 10);
    let trainers = observer.processes().filter(|process| !process.is_loader);
    assert!(!trainers.map(|process| process.pid).any(|pid| pid == child));
    target.run_part();
}

/// A process killed by SIGKILL is exported until its grace period is over.
pub(crate) fn a_killed_process_is_exported_for_a_while() {
    let stage = Stage::new(Prologue::Push);
    let mut patient = observe_stage(&stage);
    let mut hasty = start_observer(&ObserverOptions {
        grace_period: Duration::ZERO,
        ..options_that_count_everything(&stage)
    });
    let mut target = stage.start_target("everything", 10);
    let pid = target.pid();
    target.run_part();
    for observer in [&mut patient, &mut hasty] {
        observer.read_counts().expect("maps can be read");
        assert_eq!(find_process(observer, pid).ended_ns, None);
        assert_eq!(
            find_process(observer, pid).probes.gpu_mem.by_device[&0]
                .total
                .current_bytes,
            4096
        );
    }
    target.kill();
    patient.read_counts().expect("maps can be read");
    let process = find_process(&patient, pid);
    assert!(process.ended_ns.is_some());
    assert_eq!(launches_of(process), 20);
    assert_eq!(process.probes.gpu_mem.by_device[&0].total.current_bytes, 0);
    hasty.read_counts().expect("maps can be read");
    assert_eq!(processes_with_pid(&hasty, pid).len(), 0);
}

/// The need for a kernel on which the next pid can be set.
pub(crate) fn next_pid_need() -> Need {
    Need {
        name: "next-pid",
        check: || match fs::exists(NEXT_PID_PATH) {
            Ok(true) => Ok(()),
            _ => Err(format!("no {NEXT_PID_PATH}")),
        },
    }
}

const NEXT_PID_PATH: &str = "/proc/sys/kernel/ns_last_pid";

/// Held by tests that set the next pid, and by tests that need unique pids.
static PIDS_LOCK: Mutex<()> = Mutex::new(());

fn alone_with_pids() -> MutexGuard<'static, ()> {
    PIDS_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a target with a reused pid. Tries again if the pid is taken, because other programs start processes too.
fn start_with_pid(stage: &Stage, pid: u32, rounds: u64) -> Target {
    let mut found = None;
    eventually("the same pid again", || {
        fs::write(NEXT_PID_PATH, (pid - 1).to_string()).expect("we are root");
        let target = stage.start_target("launches", rounds);
        found = Some(target).filter(|target| target.pid() == pid);
        found.is_some()
    });
    found.expect("it was found")
}

pub(crate) fn a_reused_pid_is_a_new_process() {
    let _alone = alone_with_pids();
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut first = stage.start_target("launches", 10);
    let pid = first.pid();
    first.run_part();
    // The maps are not read between the two processes, so the kernel side must distinguish them.
    first.let_exit();
    let mut second = start_with_pid(&stage, pid, 7);
    second.run_part();
    observer.read_counts().expect("maps can be read");
    let launches: Vec<_> = processes_with_pid(&observer, pid)
        .into_iter()
        .map(launches_of)
        .collect();
    assert_eq!(launches, [7, 10]);
    assert_exported_once(&observer);
}

/// More processes than the kernel has indices for: indices are reused. The probes are attached while these processes
/// run, and many exit meanwhile.
pub(crate) fn thousands_of_short_processes_are_counted() {
    let _alone = alone_with_pids();
    const CHILD_COUNT: u64 = 2100;
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&ObserverOptions {
        libraries: Vec::new(),
        max_exited: usize::MAX,
        ..options_that_count_everything(&stage)
    });
    let mut warm = stage.start_target("launches", 1);
    warm.run_part();
    watcher.wait_until("the libraries are attached to", |observer| {
        observer.snapshot().ledger_json(Scope::All)["files"]
            .as_array()
            .is_some_and(|files| files.len() >= 2)
    });
    let mut target = stage.start_target("many_children", CHILD_COUNT);
    for _ in 0..CHILD_COUNT / CHILDREN_PER_PART {
        target.run_part();
        watcher.with_observer(|observer| observer.read_counts().expect("maps can be read"));
    }
    let mut observer = watcher.stop();
    observer.read_counts().expect("maps can be read");
    let children = fs::read_to_string(stage.path().join(CHILDREN_FILE)).expect("it is written");
    let children: BTreeSet<u32> = children
        .lines()
        .map(|pid| pid.parse().expect("a pid"))
        .collect();
    let short = observer
        .processes()
        .filter(|process| children.contains(&process.pid));
    let waits = short.map(|process| observed_calls(process)["cuCtxSynchronize"]);
    let counted: Vec<_> = waits
        .map(|waits| (waits.calls, waits.failed_calls))
        .collect();
    assert_eq!(counted.len() as u64, CHILD_COUNT);
    assert!(
        counted
            .iter()
            .all(|counted| *counted == (FEW_LAUNCHES, FEW_LAUNCHES)),
        "{counted:?}"
    );
    assert_eq!(observer.losses(), Default::default());
}

/// Processes that exit while probes are attached to their libraries.
pub(crate) fn an_exit_during_attaching_is_no_error() {
    let watcher = ObserverOnThread::start(&ObserverOptions::default());
    for _ in 0..10 {
        // Each stage has library files of its own.
        let stage = Stage::new(Prologue::Push);
        let targets: Vec<_> = (0..4).map(|_| stage.start_target("launches", 1)).collect();
        for mut target in targets {
            target.start_part();
            target.kill();
        }
    }
    let observer = watcher.stop();
    let refused = observer.snapshot().ledger_json(Scope::All)["refused"].clone();
    assert_eq!(refused, serde_json::json!([]));
}

/// A process is complete only if its initialisation of the driver was observed before any other call.
pub(crate) fn a_process_found_running_is_not_complete() {
    let stage = Stage::new(Prologue::Push);
    let mut target = stage.start_target("initialises_again", 10);
    target.run_part();
    let mut observer = observe_stage(&stage);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let process = find_process(&observer, target.pid());
    assert_eq!(launches_of(process), 10);
    assert!(
        matches!(process.coverage, ProcessCoverage::Since(_)),
        "{:?}",
        process.coverage
    );
}

/// Work during a pause of observation is not counted, and does not make a step longer.
pub(crate) fn no_step_spans_a_pause_of_observing() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("steps_in_parts", 20);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    observer.pause();
    target.run_part();
    observer.resume();
    attach_rest(&mut observer);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let steps = &find_process(&observer, target.pid()).steps;
    assert_eq!((steps.step_count(), steps.gap_count()), (40, 1));
    assert_eq!(steps.recent_steps().len(), 38);
}
