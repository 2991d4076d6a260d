//! A second user attacks while the daemon counts a well-behaved job: the job's numbers stay exact, every endpoint answers, and
//! the daemon ends on SIGTERM with nothing attached.
//!
//! `ZERNEL_ATTACK_SECONDS` sets how long each attack lasts, and prints how long answers and exits took. `ZERNEL_SOAK_MINUTES`
//! sets how long the soak lasts, `ZERNEL_ATTACK_CROWD` how many processes a crowd has. `ZERNEL_PROGRAM` names another `zernel`
//! than the one that cargo has built for the test. In a release build, the longest times for answers and exits are those that
//! docs/security.md states.

mod attackers;
mod cpu_weights;
mod restart;
mod scene;
mod soak;

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::Signal;
use zernel_ebpf::capability::Capability;
use zernel_testkit::needs::bpf;
use zernel_testkit::target::{self, Stage, Target, TargetRole};
use zernel_testkit::{Need, StallingFs, root, trial};

use attackers::STALLING_FILE_NAMES;
use scene::{AttackScene, start_attack};

/// The variable that sets how long an attack lasts.
const ATTACK_SECONDS_VARIABLE: &str = "ZERNEL_ATTACK_SECONDS";

/// The attacks: name of the trial, role, rounds.
const ATTACKS: &[(&str, &str, u64)] = &[
    ("growing_loaders", "grows_loaders", 0),
    ("huge_libraries", "maps_huge_libraries", 0),
    ("many_copies_of_a_library", "maps_copies", 600),
    ("a_loop_of_cu_init", "loops_cu_init", 0),
    ("churn_of_short_processes", "forks_and_exits", 5000),
    ("destroyed_contexts", "destroys_contexts", 5000),
    ("refused_files", "maps_refused_files", 0),
    ("replaced_libraries", "replaces_libraries", 64),
    ("held_connections", "holds_connections", 0),
    ("slow_readers", "reads_slowly", 31),
    ("programs_with_their_own_library", "executes_programs", 0),
    ("a_flood_of_requests", "floods_requests", 32),
];

/// Whether a FUSE file system can be mounted.
const FUSE_NEED: Need = Need {
    name: "fuse",
    check: || match fs::metadata("/dev/fuse") {
        Ok(device) if device.rdev() != 0 => Ok(()),
        _ => Err("there is no /dev/fuse".into()),
    },
};

fn main() -> ExitCode {
    let roles: &[(&str, TargetRole)] = &[("trains", scene::train_one_step_per_request)];
    let roles = [roles, attackers::ATTACKER_ROLES, restart::RESTART_ROLES].concat();
    if let Some(code) = target::run_role(&roles) {
        return code;
    }
    cpu_weights::create_test_cgroups();
    let needs = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    let attacks = ATTACKS.iter().map(|(name, role, rounds)| {
        let attack = || {
            let mut scene = AttackScene::start();
            let attacker = start_attack(&scene.stage, role, *rounds);
            scene.assert_daemon_endures_attack(name, attack_duration());
            let used = scene.stop_by_sigterm(name, &[&attacker]);
            attacker.kill();
            drop(used);
        };
        trial(name, &needs, attack)
    });
    let dead = trial(
        "a_dead_file_system",
        &[needs[0], needs[1], FUSE_NEED],
        endure_a_dead_file_system,
    );
    let together = trial(
        "attacks_together",
        &[needs[0], needs[1], FUSE_NEED],
        endure_attacks_together,
    );
    let quarantined = trial(
        "a_file_that_a_killed_daemon_read_is_refused",
        &[needs[0], needs[1], FUSE_NEED],
        restart::a_file_that_a_killed_daemon_read_is_refused,
    );
    let busy = trial(
        "a_job_started_with_the_daemon_gets_its_rank",
        &needs,
        restart::a_job_started_with_the_daemon_gets_its_rank,
    );
    let crowd = trial(
        "a_crowd_beside_sampling_windows",
        &needs,
        restart::endure_a_crowd_beside_sampling_windows,
    );
    let soak = trial("soak", &needs, soak::soak_under_rotating_attacks);
    let code =
        zernel_testkit::main(attacks.chain([dead, together, quarantined, busy, crowd, soak]));
    cpu_weights::remove_test_cgroups();
    code
}

/// How long an attack lasts.
fn attack_duration() -> Duration {
    let seconds = env::var(ATTACK_SECONDS_VARIABLE).ok();
    let seconds = seconds.map(|text| text.parse().expect("a number of seconds"));
    Duration::from_secs(seconds.unwrap_or(2))
}

/// Prints a measurement if `ZERNEL_ATTACK_SECONDS` is set.
fn print_measurement(text: &str) {
    if env::var_os(ATTACK_SECONDS_VARIABLE).is_some() {
        println!("{text}");
    }
}

/// Mounts the file systems with the files that [`attackers`] maps and that can stop answering.
fn mount_stalling_files(stage: &Stage) -> [StallingFs; 2] {
    let content = fs::read(stage.library_path("libcuda.so.1")).expect("it is installed");
    STALLING_FILE_NAMES.map(|name| {
        let directory = stage.path().join("dead").join(name);
        fs::create_dir_all(&directory).expect("ours");
        StallingFs::mount(&directory, name, content.clone()).expect("FUSE is there")
    })
}

/// A library and a loader are on a file system that does not answer any more.
fn endure_a_dead_file_system() {
    let name = "a_dead_file_system";
    let mut scene = AttackScene::start();
    scene.files = mount_stalling_files(&scene.stage).into();
    let attacker = start_attack(&scene.stage, "maps_dead_files", 0);
    scene.files.iter().for_each(StallingFs::stop_answering);
    scene.assert_daemon_endures_attack(name, attack_duration());
    let used = scene.stop_by_sigterm(name, &[&attacker]);
    attacker.kill();
    drop(used);
}

/// The attacks that hold up the end of a daemon most, together: a file system that stops answering again and again, hundreds of
/// files with thousands of links, and a flood of requests.
fn endure_attacks_together() {
    for signal in [Signal::TERM, Signal::KILL] {
        let mut scene = AttackScene::start();
        scene.files = mount_stalling_files(&scene.stage).into();
        let mut attackers = vec![
            start_attack(&scene.stage, "maps_full_copies", 400),
            start_attack(&scene.stage, "floods_requests", 32),
        ];
        for _ in 0..2 {
            scene.files.iter().for_each(StallingFs::answer_again);
            attackers.push(start_attack(&scene.stage, "maps_dead_files", 0));
            scene.files.iter().for_each(StallingFs::stop_answering);
            scene.assert_daemon_endures_attack("attacks_together", attack_duration());
        }
        let others: Vec<&Target> = attackers.iter().collect();
        let used = scene.stop_by_signal("attacks_together", signal, &others);
        attackers.into_iter().for_each(Target::kill);
        drop(used);
    }
}
