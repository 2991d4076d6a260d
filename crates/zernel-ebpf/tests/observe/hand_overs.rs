//! Which thread ended a wait shows what the wait was for.

use std::thread;
use std::time::Duration;

use libloading::Library;
use zernel_phase::WorkloadPhase;
use zernel_testkit::target::{Driver, TargetRole, end_part_and_wait, try_call};

use crate::torch::{announce_batch, load_library, stage_and_observer};

pub(crate) const HAND_OVER_ROLES: &[(&str, TargetRole)] =
    &[("awaits_collectives", await_collectives)];

/// How long a thread of a target waits for its peers in one collective.
const COLLECTIVE: Duration = Duration::from_millis(50);
/// How long a thread of a target works outside of collectives.
const OTHER_WORK: Duration = Duration::from_millis(400);

/// Launches, and waits for another thread, which is in collectives for a part of the wait.
fn await_collectives(driver: &Driver, _rounds: u64) {
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
                thread::sleep(OTHER_WORK);
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
    thread::park_timeout(COLLECTIVE);
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
        let in_collectives = COLLECTIVE * collectives;
        assert!(
            waited > in_collectives.mul_f64(0.9) && waited < in_collectives + OTHER_WORK / 2,
            "{waited:?} for {collectives} collectives"
        );
    }
}
