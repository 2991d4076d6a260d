//! One tenant fills the tables of histograms, communicators and memory accounts: other tenants are still counted exactly. A
//! further test has three tenants share the table of processes.

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use zernel_ebpf::metrics::{self, TextFormat};
use zernel_ebpf::observer::{Losses, Observer};
use zernel_model::snapshot::Scope;
use zernel_testkit::target::{Driver, Stage, TargetRole, call, out_pointer, try_call};

use crate::harness::{find_process, observe_stage};
use crate::processes::fork_child;
use crate::shares::{
    MAX_ENTRIES_OF_OTHERS, NOBODY_UID, PROCESS_SHARE, TOO_MANY_CHILDREN,
    assert_others_are_observed, observed_children, stage_open_to_all, start_target_of,
};

pub(crate) const TABLE_FILLING_ROLES: &[(&str, TargetRole)] = &[
    ("fills_histograms", target_fills_histograms),
    ("fills_memory_accounts", target_fills_memory_accounts),
    ("floods_step_marks", target_floods_step_marks),
];

/// Number of children whose histograms fill the table: each child has one histogram per timed kind of call.
const CHILDREN_WITH_HISTOGRAMS: u64 = 900;
/// Number of communicators: more than the table has room for.
const TOO_MANY_COMMUNICATORS: u64 = 13_000;
const TOO_MANY_CONTEXTS: u64 = 13_000;
/// The second uid, without a user on this machine.
const SECOND_UID: u32 = 54_322;

/// Forks children that call one function of each timed kind, and wait. These calls fail, but are timed all the same.
fn target_fills_histograms(driver: &Driver, children: u64) {
    driver.open_first_device();
    let (mut done, report) = std::io::pipe().expect("a pipe");
    for _ in 0..children {
        let mut report = report.try_clone().expect("a pipe");
        fork_child(|| {
            let cuda = driver.cuda();
            try_call!(cuda, "cuLaunchKernel", 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
            try_call!(cuda, "cuStreamSynchronize", 0);
            try_call!(cuda, "cuEventSynchronize", 0);
            try_call!(cuda, "cuCtxSynchronize");
            try_call!(cuda, "cuMemcpyHtoD_v2", 0, 0, 0);
            report.write_all(&[1]).expect("the parent reads");
            loop {
                thread::park();
            }
        });
    }
    drop(report);
    let mut all = vec![0; children as usize];
    done.read_exact(&mut all).expect("every child calls");
}

/// Creates contexts with one allocation each.
fn target_fills_memory_accounts(driver: &Driver, contexts: u64) {
    driver.open_first_device();
    for _ in 0..contexts {
        let mut context = 0_u64;
        call!(
            driver.cuda(),
            "cuCtxCreate_v2",
            out_pointer(&mut context),
            0,
            0
        );
        driver.allocate_memory(64);
    }
}

/// Forks children that wait for the device all the time. These calls fail, but are step marks all the same.
fn target_floods_step_marks(driver: &Driver, children: u64) {
    driver.open_first_device();
    for _ in 0..children {
        fork_child(|| {
            loop {
                try_call!(driver.cuda(), "cuStreamSynchronize", 0);
            }
        });
    }
}

/// Fills a table as a user, and checks that the refusals are reported and that root's processes are counted
/// exactly.
fn fill_table(role: &str, rounds: u64, cause: &str, refused: fn(&Losses) -> u64) {
    let stage = stage_open_to_all();
    let mut observer = observe_stage(&stage);
    let mut greedy = start_target_of(&stage, NOBODY_UID, role, rounds);
    greedy.run_part();
    observer.read_counts().expect("maps can be read");
    let losses = observer.losses();
    let count = refused(&losses);
    assert!(count > 0, "{losses:?}");
    let full = losses.histograms + losses.communicators + losses.memory_accounts;
    assert_eq!(full, 0, "{losses:?}");
    let text = metrics::metrics_text(&observer.snapshot(), Scope::All, TextFormat::Prometheus);
    let series = format!("zernel_observe_lost_total{{cause=\"{cause}\"}} {count}\n");
    assert!(text.contains(&series), "{series}");
    let problems = observer.problems();
    let names = |it: &String| it.starts_with(&format!("{count} ")) && it.contains("user 65534");
    assert!(problems.iter().any(names), "{problems:?}");
    assert_others_are_observed(&mut observer, &stage);
    assert_communicator_is_observed(&mut observer, &stage);
    assert_eq!(refused(&observer.losses()), count);
    greedy.kill();
}

/// Checks that a new communicator of root is known.
fn assert_communicator_is_observed(observer: &mut Observer, stage: &Stage) {
    let mut modest = stage.start_target("communicators", 1);
    modest.run_part();
    observer.read_counts().expect("maps can be read");
    let communicators = &find_process(observer, modest.pid())
        .probes
        .nccl
        .communicators;
    let [only] = &communicators[..] else {
        panic!("{communicators:?}");
    };
    assert_eq!((only.rank, only.ranks), (Some(0), Some(1)));
}

pub(crate) fn one_tenant_has_a_share_of_the_histograms() {
    let refused = |losses: &Losses| losses.refused_histograms;
    let children = CHILDREN_WITH_HISTOGRAMS;
    fill_table("fills_histograms", children, "refused_histograms", refused);
}

pub(crate) fn one_tenant_has_a_share_of_the_communicators() {
    let refused = |losses: &Losses| losses.refused_communicators;
    fill_table(
        "communicators",
        TOO_MANY_COMMUNICATORS,
        "refused_communicators",
        refused,
    );
}

pub(crate) fn one_tenant_has_a_share_of_the_memory_accounts() {
    let refused = |losses: &Losses| losses.refused_memory_accounts;
    fill_table(
        "fills_memory_accounts",
        TOO_MANY_CONTEXTS,
        "refused_memory_accounts",
        refused,
    );
}

/// The largest tenant fills the table of processes. A smaller tenant grows beyond its minimum, and a third tenant gets its
/// minimum.
pub(crate) fn a_full_table_refuses_the_largest_tenant_first() {
    const HALF_OF_RESERVE: u64 = 256;
    let stage = stage_open_to_all();
    let mut observer = observe_stage(&stage);
    let mut largest = start_target_of(&stage, NOBODY_UID, "keeps_children", TOO_MANY_CHILDREN);
    largest.run_part();
    let had = observed_children(&mut observer, largest.pid());
    assert!(
        (PROCESS_SHARE - MAX_ENTRIES_OF_OTHERS..PROCESS_SHARE).contains(&had),
        "{had}"
    );

    let mut second = start_target_of(&stage, SECOND_UID, "keeps_children", 2 * HALF_OF_RESERVE);
    second.run_part();
    let got = observed_children(&mut observer, second.pid());
    let share = HALF_OF_RESERVE - MAX_ENTRIES_OF_OTHERS..=HALF_OF_RESERVE;
    assert!(share.contains(&got), "{got}");

    let mut again = start_target_of(&stage, NOBODY_UID, "keeps_children", 10);
    again.run_part();
    assert_eq!(observed_children(&mut observer, again.pid()), 0);

    let mut third = stage.start_target("keeps_children", 30);
    third.run_part();
    assert_eq!(observed_children(&mut observer, third.pid()), 30);
    assert_eq!(observer.losses().processes, 0);
}

/// Many processes of one tenant make more step marks than the buffer of marks holds between two reads. No step of another
/// tenant is missing.
pub(crate) fn one_tenant_has_a_share_of_the_step_marks() {
    let stage = stage_open_to_all();
    let mut observer = observe_stage(&stage);
    let mut flood = start_target_of(&stage, NOBODY_UID, "floods_step_marks", 24);
    flood.run_part();
    let mut modest = stage.start_target("steps_in_parts", 20);
    for _ in 0..3 {
        // As long as a round of the daemon.
        thread::sleep(Duration::from_millis(500));
        modest.run_part();
        observer.read_counts().expect("maps can be read");
    }
    let steps = &find_process(&observer, modest.pid()).steps;
    assert_eq!((steps.step_count(), steps.gap_count()), (60, 0));
}
