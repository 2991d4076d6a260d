//! Which processes count for one tenant where tenants share the tables in the kernel.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;

use zernel_ebpf::observer::Observer;
use zernel_identity::Tenant;
use zernel_testkit::target::{Driver, Stage, Target, TargetRole, end_part_and_wait, try_call};
use zernel_testkit::{PodCgroup, eventually};

use crate::harness::observe_stage;
use crate::processes::fork_child;
use crate::shares::{
    NOBODY_UID, PROCESS_SHARE, TOO_MANY_CHILDREN, assert_others_are_observed, assert_reported,
    observed_children, stage_open_to_all,
};

pub(crate) const TENANT_ROLES: &[(&str, TargetRole)] = &[
    (
        "has_children_of_many_users",
        target_has_children_of_many_users,
    ),
    ("enters_a_namespace", target_enters_a_namespace),
];

/// The variable with the uid of the first child.
const FIRST_UID_VARIABLE: &str = "ZERNEL_TEST_FIRST_UID";
/// Number of users: more than the kernel has indices for tenants.
const USER_COUNT: u64 = 300;
/// Subordinate uids.
const FIRST_SUBORDINATE_UID: u32 = 700_000;

/// Forks `children` children, each with its own uid. The children make one call each and wait. The process itself
/// makes no call.
fn target_has_children_of_many_users(driver: &Driver, children: u64) {
    let first: u32 = env::var(FIRST_UID_VARIABLE)
        .expect("set")
        .parse()
        .expect("a uid");
    let (mut done, report) = std::io::pipe().expect("a pipe");
    for number in 0..children as u32 {
        let mut report = report.try_clone().expect("a pipe");
        fork_child(|| {
            // SAFETY: system calls that take plain numbers. A change of the uid clears the signal.
            let result = unsafe {
                let result = libc::setuid(first + number);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                result
            };
            assert_eq!(result, 0, "setuid({})", first + number);
            assert_ne!(try_call!(driver.cuda(), "cuCtxSynchronize"), 0);
            report.write_all(&[1]).expect("the parent reads");
            loop {
                std::thread::park();
            }
        });
    }
    drop(report);
    let mut all = vec![0; children as usize];
    done.read_exact(&mut all).expect("every child calls");
}

/// Forks the children in its own user namespace, after the test has mapped uids.
fn target_enters_a_namespace(driver: &Driver, children: u64) {
    // SAFETY: a system call that takes a plain number.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWUSER) }, 0);
    end_part_and_wait();
    target_has_children_of_many_users(driver, children);
}

/// Number of tenants after the maps were read.
fn tenant_count(observer: &mut Observer) -> usize {
    observer.read_counts().expect("maps can be read");
    observer.tenant_count().expect("maps can be read")
}

/// The pids of running processes with a parent.
fn children_of(observer: &Observer, parent: u32) -> Vec<u32> {
    let running = observer.processes().filter(|it| it.ended_ns.is_none());
    let identities = running.filter_map(|it| it.identity.as_ref());
    let children = identities.filter(|it| it.parent == parent);
    children.map(|it| it.pid).collect()
}

/// A user namespace of a user counts for the user, and one that root creates for the range of uids that it maps.
pub(crate) fn many_uids_in_a_namespace_are_one_tenant() {
    let stage = stage_open_to_all();
    let mut observer = observe_stage(&stage);
    for (owner, map, tenant) in [
        (
            NOBODY_UID,
            format!("0 {NOBODY_UID} 1\n1 {FIRST_SUBORDINATE_UID} 65536\n"),
            NOBODY_UID,
        ),
        (
            0,
            format!("0 {FIRST_SUBORDINATE_UID} 65536\n"),
            FIRST_SUBORDINATE_UID,
        ),
    ] {
        let before = tenant_count(&mut observer);
        let mut command = stage.target_command("enters_a_namespace", USER_COUNT);
        let mut target = Target::start(command.env(FIRST_UID_VARIABLE, "1").uid(owner));
        target.run_part();
        fs::write(format!("/proc/{}/uid_map", target.pid()), map).expect("we are root");
        target.run_part();
        let after = tenant_count(&mut observer);
        let children = children_of(&observer, target.pid());
        assert_eq!(children.len() as u64, USER_COUNT, "user {owner}");
        assert_eq!(after, before + 1, "user {owner}");
        // Userspace applies the same rule as the kernel.
        for child in children {
            assert_eq!(
                Tenant::of_pid(child).expect("it runs"),
                Tenant::User(tenant)
            );
        }
        target.kill();
        eventually("the children have exited", || {
            observer.read_counts().expect("maps can be read");
            observer
                .processes()
                .all(|process| process.ended_ns.is_some())
        });
    }
}

/// More users than there are indices, one after the other.
pub(crate) fn indices_of_tenants_are_reused() {
    const USERS_AT_ONCE: u64 = 200;
    let stage = stage_open_to_all();
    let mut observer = observe_stage(&stage);
    for round in 0..3 {
        let first = u64::from(FIRST_SUBORDINATE_UID) + round * USERS_AT_ONCE;
        let mut command = stage.target_command("has_children_of_many_users", USERS_AT_ONCE);
        let mut target = Target::start(command.env(FIRST_UID_VARIABLE, first.to_string()));
        target.run_part();
        let count = tenant_count(&mut observer) as u64;
        assert!(
            (USERS_AT_ONCE..USERS_AT_ONCE + 20).contains(&count),
            "{count}"
        );
        let children = children_of(&observer, target.pid());
        assert_eq!(children.len() as u64, USERS_AT_ONCE);
        target.kill();
        eventually("their tenants are forgotten", || {
            tenant_count(&mut observer) < 20
        });
        // The index of a tenant becomes free one round after the tenant was forgotten.
        tenant_count(&mut observer);
    }
    assert_eq!(observer.losses().refused_processes, 0);
    // Nothing of the earlier tenants is left in the counts.
    assert_others_are_observed(&mut observer, &stage);
    assert_eq!(observer.problems(), Vec::<String>::new());
}

/// A pod of root tries to fill the table of processes. Processes of root outside of the pod count for another tenant.
pub(crate) fn one_tenant_is_a_pod() {
    for pod in PodCgroup::in_each_hierarchy() {
        let stage = stage_open_to_all();
        let mut observer = observe_stage(&stage);
        fill_from_pod(&stage, &mut observer, &pod);
    }
}

fn fill_from_pod(stage: &Stage, observer: &mut Observer, pod: &PodCgroup) {
    let mut greedy = stage.start_target("keeps_children", TOO_MANY_CHILDREN);
    pod.move_into_container(greedy.pid());
    greedy.run_part();
    let tenant = Tenant::of_pid(greedy.pid()).expect("it runs");
    assert_eq!(tenant, Tenant::Pod(PodCgroup::POD_UID.to_owned()));
    let children = observed_children(observer, greedy.pid());
    assert!(children < PROCESS_SHARE, "{children}");
    let refused = observer.losses().refused_processes;
    assert!(refused >= TOO_MANY_CHILDREN - children, "{refused}");
    assert_reported(
        observer,
        "refused_processes",
        refused,
        &format!("pod {}", PodCgroup::POD_UID),
    );
    assert_others_are_observed(observer, stage);
    greedy.kill();
}
