//! Many processes start and exit, and allocate and free much memory. No process gets figures of another, and
//! cleanup stays cheap.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use zernel_ebpf::metrics::{self, TextFormat};
use zernel_ebpf::observer::{ObservedProcess, Observer};
use zernel_ebpf::probes::SchedBlockReason;
use zernel_model::snapshot::Scope;
use zernel_softgpu::install::Prologue;
use zernel_testkit::eventually;
use zernel_testkit::target::{
    Driver, Stage, Target, TargetRole, call, end_part_and_wait, out_pointer, stage_directory,
};

use crate::counts::target_launch_only;
use crate::harness::{find_process, observe_stage};
use crate::processes::{expect_child_success, fork_child, fork_waiting_child};

pub(crate) const CHURN_ROLES: &[(&str, TargetRole)] = &[
    ("exits_slowly", target_exits_slowly),
    ("fills_the_indices", target_fills_the_indices),
    ("short_children", target_forks_short_children),
    ("holds_memory", target_holds_memory),
    ("destroys_contexts", target_destroys_contexts),
    ("empties_early_contexts", target_empties_early_contexts),
    ("changes_its_user", target_changes_its_user),
];

/// The file with what a target reports to its test.
const REPORT_FILE: &str = "report";

fn write_report(text: &str) {
    fs::write(stage_directory().join(REPORT_FILE), text).expect("our directory");
}

fn numbers_in_report(stage: &Path) -> Vec<u64> {
    let text = fs::read_to_string(stage.join(REPORT_FILE)).expect("it is written");
    let numbers = text.lines().map(|line| line.parse().expect("a number"));
    numbers.collect()
}

/// Exits with `sockets` open packet sockets. At exit the kernel closes the sockets one by one, and waits for each.
fn target_exits_slowly(driver: &Driver, sockets: u64) {
    target_launch_only(driver, 1);
    for _ in 0..sockets {
        // SAFETY: a system call that takes plain numbers. The socket stays open.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
        assert!(socket >= 0, "{}", std::io::Error::last_os_error());
    }
}

/// Number of process indices in the kernel's table.
const PROCESS_INDICES: usize = 2047;
/// Children that exit at once.
const SHORT_CHILDREN: usize = 1900;
/// Children that exit between two reads.
const CHILDREN_PER_PART: usize = 380;
/// Children that stay until the test ends. Together with the short-lived children they need every index of a process.
const PATIENT_CHILDREN: usize = 300;

/// Has [`SHORT_CHILDREN`] children that exit at once, then [`PATIENT_CHILDREN`] that stay.
fn target_fills_the_indices(driver: &Driver, _rounds: u64) {
    target_launch_only(driver, 1);
    for _ in 0..SHORT_CHILDREN / CHILDREN_PER_PART {
        fork_children_that_exit(CHILDREN_PER_PART);
        end_part_and_wait();
    }
    let children: Vec<_> = (0..PATIENT_CHILDREN)
        .map(|_| fork_waiting_child().to_string())
        .collect();
    write_report(&children.join("\n"));
}

/// Forks `children` children that exit at once.
fn target_forks_short_children(driver: &Driver, children: u64) {
    target_launch_only(driver, 1);
    fork_children_that_exit(children as usize);
}

fn fork_children_that_exit(children: usize) {
    let exit = || fork_child(|| std::process::exit(0));
    let children: Vec<i32> = (0..children).map(|_| exit()).collect();
    children.into_iter().for_each(expect_child_success);
}

fn blocked_ns(process: &ObservedProcess) -> u64 {
    let reasons = SchedBlockReason::ALL.into_iter();
    reasons.map(|by| process.probes.sched.blocked_ns(by)).sum()
}

/// The index of a process whose exit takes seconds is used by another process meanwhile.
pub(crate) fn a_slow_exit_adds_no_time_to_another_process() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut slow = stage.start_target("exits_slowly", 600);
    slow.run_part();
    slow.start_part();
    let pid = slow.pid();
    eventually("its exit is observed", || {
        observer.read_counts().expect("maps can be read");
        find_process(&observer, pid).ended_ns.is_some()
    });
    let mut others = stage.start_target("fills_the_indices", 0);
    for _ in 0..SHORT_CHILDREN / CHILDREN_PER_PART {
        others.run_part();
        observer.read_counts().expect("maps can be read");
    }
    others.run_part();
    const { assert!(SHORT_CHILDREN + PATIENT_CHILDREN > PROCESS_INDICES) };
    assert!(is_exiting(pid), "its exit was too short for this test");
    eventually("its exit is over", || !is_exiting(pid));
    observer.read_counts().expect("maps can be read");
    let patient: BTreeSet<u64> = numbers_in_report(stage.path()).into_iter().collect();
    let patient: Vec<_> = observer
        .processes()
        .filter(|process| patient.contains(&process.pid.into()))
        .collect();
    assert_eq!(patient.len(), PATIENT_CHILDREN);
    // These children block until they are killed, so none of their blocks has ended.
    let most = patient.iter().map(|process| blocked_ns(process)).max();
    assert!(most < Some(1_000_000), "{most:?} ns of another process");
    assert_eq!(observer.losses(), Default::default());
}

fn is_exiting(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is not reaped");
    let (_, state) = stat.rsplit_once(") ").expect("the format of stat");
    !state.starts_with('Z')
}

/// Allocates `allocations` times.
fn target_holds_memory(driver: &Driver, allocations: u64) {
    driver.open_first_device();
    for _ in 0..allocations {
        driver.allocate_memory(64);
    }
}

/// Cleaning up after many processes visits every entry of a map once.
pub(crate) fn many_exits_are_cleaned_up_in_one_pass() {
    const ALLOCATIONS_PER_PROCESS: u64 = 3000;
    const CHILD_COUNT: u64 = 60;
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut holder = stage.start_target("holds_memory", ALLOCATIONS_PER_PROCESS);
    holder.run_part();
    let mut parent = stage.start_target("short_children", CHILD_COUNT);
    parent.run_part();
    let before = observer.visited_entries();
    observer.read_counts().expect("maps can be read");
    let children = observer
        .processes()
        .filter(|process| process.loads_for == Some(parent.pid()));
    assert_eq!(children.count() as u64, CHILD_COUNT);
    let visited = observer.visited_entries() - before;
    assert!(
        (ALLOCATIONS_PER_PROCESS..2 * ALLOCATIONS_PER_PROCESS).contains(&visited),
        "{visited} entries"
    );
}

/// Creates and destroys contexts without memory, and reports the median time of a destruction in nanoseconds.
fn target_destroys_contexts(driver: &Driver, rounds: u64) {
    let cuda = driver.cuda();
    driver.open_first_device();
    let destroy = |_| {
        let mut context = 0_u64;
        call!(cuda, "cuCtxCreate_v2", out_pointer(&mut context), 0, 0);
        let begin = Instant::now();
        call!(cuda, "cuCtxDestroy_v2", context);
        begin.elapsed().as_nanos()
    };
    let mut times: Vec<u128> = (0..rounds).map(destroy).collect();
    times.sort_unstable();
    write_report(&times[times.len() / 2].to_string());
}

/// Destroying a context takes microseconds, for any number of allocations in the tables. A walk over the
/// table of allocations would take milliseconds.
pub(crate) fn destroying_a_context_is_quick_among_many_allocations() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let _observer = observe_stage(&stage);
    let mut holder = stage.start_target("holds_memory", 60_000);
    holder.run_part();
    stage.start_target("destroys_contexts", 200).run_part();
    let median = Duration::from_nanos(numbers_in_report(stage.path())[0]);
    assert!(median < Duration::from_micros(200), "{median:?}");
}

/// Opens the device and another context before the process is observed, and allocates in both and destroys one
/// afterwards.
fn target_empties_early_contexts(driver: &Driver, _rounds: u64) {
    let cuda = driver.cuda();
    driver.open_first_device();
    let (mut primary, mut other) = (0_u64, 0_u64);
    call!(cuda, "cuCtxGetCurrent", out_pointer(&mut primary));
    call!(cuda, "cuCtxCreate_v2", out_pointer(&mut other), 0, 0);
    end_part_and_wait();
    call!(cuda, "cuCtxSetCurrent", primary);
    driver.allocate_memory(1000);
    call!(cuda, "cuCtxSetCurrent", other);
    driver.allocate_memory(300);
    end_part_and_wait();
    call!(cuda, "cuCtxDestroy_v2", other);
    end_part_and_wait();
    call!(cuda, "cuCtxSetCurrent", primary);
    driver.allocate_memory(20);
}

/// A context that was created before its process was observed frees its memory with it.
pub(crate) fn memory_is_freed_with_a_context_from_before_observing() {
    let stage = Stage::new(Prologue::Push);
    let mut target = stage.start_target("empties_early_contexts", 0);
    target.run_part();
    let mut observer = observe_stage(&stage);
    for (bytes, frees) in [(1300, 0), (1000, 1), (1020, 1)] {
        target.run_part();
        assert_eq!(bytes_and_frees(&mut observer, &target), (bytes, frees));
        assert_eq!(bytes_of_callers(&observer, target.pid()), bytes);
    }
}

/// Bytes and frees on all devices.
fn bytes_and_frees(observer: &mut Observer, target: &Target) -> (u64, u64) {
    observer.read_counts().expect("maps can be read");
    let memory = find_process(observer, target.pid())
        .probes
        .gpu_mem
        .by_device
        .values();
    let totals = memory.map(|memory| (memory.total.current_bytes, memory.total.free_count));
    totals.fold((0, 0), |sum, (bytes, frees)| (sum.0 + bytes, sum.1 + frees))
}

fn bytes_of_callers(observer: &Observer, pid: u32) -> u64 {
    let memory = find_process(observer, pid)
        .probes
        .gpu_mem
        .by_device
        .values();
    memory.flat_map(|memory| memory.by_caller.values()).sum()
}

/// A uid without a user on this machine.
const UNKNOWN_UID: u32 = 54_321;

/// Has a child that changes its user and has a child of its own, which exits at once.
fn target_changes_its_user(driver: &Driver, _rounds: u64) {
    target_launch_only(driver, 1);
    let child = fork_child(|| {
        // SAFETY: a system call that takes a plain number.
        assert_eq!(unsafe { libc::setuid(UNKNOWN_UID) }, 0);
        fork_children_that_exit(1);
        std::process::exit(0);
    });
    expect_child_success(child);
}

/// A process that exits before userspace can identify it is still exported with its name and owner.
pub(crate) fn a_short_process_has_a_name_and_an_owner() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("changes_its_user", 0);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let pid = target.pid();
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).expect("it lives");
    let children = observer
        .processes()
        .filter(|process| process.loads_for == Some(pid));
    let identities: Vec<_> = children
        .map(|process| process.identity.as_ref().expect("an identity"))
        .collect();
    assert_eq!(identities.len(), 2);
    assert!(identities.iter().all(|it| it.comm == comm.trim_end()));
    let child = identities.iter().find(|it| it.parent == pid);
    let child = child.expect("the child of the target");
    assert_eq!(child.uid, 0);
    let grandchild = identities.iter().find(|it| it.parent == child.pid);
    assert_eq!(grandchild.map(|it| it.uid), Some(UNKNOWN_UID));
    let text = metrics::metrics_text(&observer.snapshot(), Scope::All, TextFormat::Prometheus);
    let has_no_name =
        |line: &&str| line.starts_with("zernel_process_info") && line.contains("comm=\"\"");
    assert_eq!(text.lines().find(has_no_name), None);
}
