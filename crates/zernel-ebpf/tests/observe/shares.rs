//! One tenant tries to fill a table in the kernel. Processes of other tenants are still observed.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::time::Instant;

use zernel_ebpf::metrics::{self, TextFormat};
use zernel_ebpf::observer::Observer;
use zernel_ebpf::probes::DurationKind;
use zernel_model::snapshot::Scope;
use zernel_softgpu::config;
use zernel_softgpu::install::Prologue;
use zernel_testkit::eventually;
use zernel_testkit::target::{
    Driver, Stage, Target, TargetRole, call, end_part_and_wait, out_pointer,
};

use crate::counts::target_launch_only;
use crate::harness::{find_process, logged_calls, observe_stage, observed_calls};
use crate::processes::fork_waiting_child;

pub(crate) const SHARE_ROLES: &[(&str, TargetRole)] = &[
    ("keeps_children", target_fork_waiting_children),
    ("fills_memory", target_fills_memory),
];

pub(crate) const NOBODY_UID: u32 = 65534;
/// Number of children: more than the tables of processes and of allocations have places for.
pub(crate) const TOO_MANY_CHILDREN: u64 = 2100;
const TOO_MANY_ALLOCATIONS: u64 = 140_000;
/// The largest share of one tenant: the table without its reserve.
pub(crate) const PROCESS_SHARE: u64 = 2047 - 512;
const ALLOCATION_SHARE: u64 = (1 << 17) - (1 << 15);
/// Entries that processes of other tests and of this machine may have meanwhile.
pub(crate) const MAX_ENTRIES_OF_OTHERS: u64 = 20;

/// Forks `children` children that do nothing until it exits.
fn target_fork_waiting_children(driver: &Driver, children: u64) {
    target_launch_only(driver, 1);
    for _ in 0..children {
        fork_waiting_child();
    }
}

/// Allocates and frees `allocations` times, allocates in a context that it destroys, and then allocates `allocations`
/// times without a free.
fn target_fills_memory(driver: &Driver, allocations: u64) {
    driver.open_first_device();
    for _ in 0..allocations {
        driver.free_memory(driver.allocate_memory(64));
    }
    let mut context = 0_u64;
    call!(
        driver.cuda(),
        "cuCtxCreate_v2",
        out_pointer(&mut context),
        0,
        0
    );
    for _ in 0..ALLOCATION_SHARE / 2 {
        driver.allocate_memory(64);
    }
    call!(driver.cuda(), "cuCtxDestroy_v2", context);
    end_part_and_wait();
    driver.open_first_device();
    for _ in 0..allocations {
        driver.allocate_memory(64);
    }
}

/// A stage whose log any user may write.
pub(crate) fn stage_open_to_all() -> Stage {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let log = stage.path().join("log");
    fs::create_dir(&log).expect("ours");
    for (path, mode) in [(stage.path(), 0o755), (&log, 0o777)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
    }
    stage
}

/// Starts a target of a user without privileges, with GPUs of its own.
pub(crate) fn start_target_of(stage: &Stage, user: u32, role: &str, rounds: u64) -> Target {
    let node = stage.path().join(format!("node-of-{user}"));
    if !node.exists() {
        fs::create_dir(&node).expect("ours");
        std::os::unix::fs::chown(&node, Some(user), None).expect("we are root");
    }
    let mut command = stage.target_command(role, rounds);
    Target::start(command.env(config::DIRECTORY_VARIABLE, node).uid(user))
}

/// Number of running children of a target that are observed.
pub(crate) fn observed_children(observer: &mut Observer, parent: u32) -> u64 {
    observer.read_counts().expect("maps can be read");
    let children = observer
        .processes()
        .filter(|process| process.loads_for == Some(parent) && process.ended_ns.is_none());
    children.count() as u64
}

/// Checks that a refusal is exported, and reported as a problem of the tenant. No other tenant has such a problem.
pub(crate) fn assert_reported(observer: &Observer, cause: &str, refused: u64, tenant: &str) {
    let text = metrics::metrics_text(&observer.snapshot(), Scope::All, TextFormat::Prometheus);
    let series = format!("zernel_observe_lost_total{{cause=\"{cause}\"}} {refused}\n");
    assert!(text.contains(&series), "{series}");
    let problems = observer.problems();
    let lost = format!("{refused} ");
    assert!(
        problems.iter().any(|it| it.starts_with(&lost)),
        "{problems:?}"
    );
    let of_tenant = format!(" lost: {tenant} used");
    assert!(
        problems.iter().all(|it| it.contains(&of_tenant)),
        "{problems:?}"
    );
}

/// Checks that a new process of root is counted exactly, and its memory and its durations too.
pub(crate) fn assert_others_are_observed(observer: &mut Observer, stage: &Stage) {
    let mut modest = stage.start_target("everything", 10);
    modest.run_part();
    observer.read_counts().expect("maps can be read");
    let process = find_process(observer, modest.pid());
    assert_eq!(observed_calls(process), logged_calls(stage, modest.pid()));
    let memory = &process.probes.gpu_mem.by_device[&0].total;
    assert_eq!(memory.current_bytes, 4096);
    assert!(process.duration_histogram(DurationKind::Launch).is_some());
}

/// Checks that a process of the tenant that has used up its share does not ask for a record at every call.
fn assert_refused_about_once_a_second(observer: &Observer, stage: &Stage) {
    let mut late = start_target_of(stage, NOBODY_UID, "launches", 10_000);
    let before = observer.losses().refused_processes;
    let begin = Instant::now();
    late.run_part();
    let refused = observer.losses().refused_processes - before;
    let most = 1 + begin.elapsed().as_secs();
    assert!((1..=most).contains(&refused), "{refused} of {most}");
}

pub(crate) fn one_tenant_has_a_share_of_the_processes() {
    let stage = stage_open_to_all();
    let mut observer = observe_stage(&stage);
    let mut refused = 0;
    // The test runs twice: the second time shows that exits release all entries.
    for _ in 0..2 {
        let mut greedy = start_target_of(&stage, NOBODY_UID, "keeps_children", TOO_MANY_CHILDREN);
        let parent = greedy.pid();
        greedy.run_part();
        let children = observed_children(&mut observer, parent);
        let share = PROCESS_SHARE - MAX_ENTRIES_OF_OTHERS..PROCESS_SHARE;
        assert!(share.contains(&children), "{children}");
        let losses = observer.losses();
        assert_eq!(losses.processes, 0);
        assert!(losses.refused_processes - refused >= TOO_MANY_CHILDREN - children);
        refused = losses.refused_processes;
        assert_reported(&observer, "refused_processes", refused, "user 65534");
        assert_others_are_observed(&mut observer, &stage);
        assert_refused_about_once_a_second(&observer, &stage);
        greedy.kill();
        eventually("the children have exited", || {
            observed_children(&mut observer, parent) == 0
        });
        refused = observer.losses().refused_processes;
    }
}

pub(crate) fn one_tenant_has_a_share_of_the_allocations() {
    let stage = stage_open_to_all();
    let mut observer = observe_stage(&stage);
    let mut refused = 0;
    for _ in 0..2 {
        let mut greedy = start_target_of(&stage, NOBODY_UID, "fills_memory", TOO_MANY_ALLOCATIONS);
        greedy.run_part();
        observer.read_counts().expect("maps can be read");
        assert_eq!(observer.losses().refused_allocations, refused);
        greedy.run_part();
        observer.read_counts().expect("maps can be read");
        let memory = &find_process(&observer, greedy.pid())
            .probes
            .gpu_mem
            .by_device[&0];
        let held = memory.total.current_bytes / 64;
        let share = ALLOCATION_SHARE - MAX_ENTRIES_OF_OTHERS..=ALLOCATION_SHARE;
        assert!(share.contains(&held), "{held}");
        refused += TOO_MANY_ALLOCATIONS - held;
        let losses = observer.losses();
        assert_eq!(
            (losses.allocations, losses.refused_allocations),
            (0, refused)
        );
        assert_reported(&observer, "refused_allocations", refused, "user 65534");
        assert_others_are_observed(&mut observer, &stage);
        greedy.kill();
        observer.read_counts().expect("maps can be read");
    }
}
