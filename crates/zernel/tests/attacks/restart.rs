//! What a daemon finds when it starts: files that its predecessor died with, and a busy machine.

use std::env;
use std::fs;
use std::process::Command;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;
use zernel_testkit::daemon::Daemon;
use zernel_testkit::target::{Driver, Stage, Target, TargetRole, end_part_and_wait};
use zernel_testkit::{StallingFs, eventually, eventually_ok};

use crate::attackers::STALLING_FILE_NAMES;
use crate::scene::{
    AttackScene, VICTIM_UID, command_for_role, stage_for_all_users, start_attack, start_daemon,
    start_victim, zernel_path,
};
use crate::{mount_stalling_files, scene};

pub(crate) const RESTART_ROLES: &[(&str, TargetRole)] = &[
    ("forks_idle_children", target_forks_idle_children),
    ("launches_all_the_time", target_launches_all_the_time),
];

/// Forks this number of children, which map the same libraries and do nothing.
fn target_forks_idle_children(driver: &Driver, children: u64) {
    driver.open_first_device();
    for _ in 0..children {
        // SAFETY: this process has one thread. The child does nothing, and dies with its parent.
        if unsafe { libc::fork() } == 0 {
            let signal = Some(rustix::process::Signal::KILL);
            let _ = rustix::process::set_parent_process_death_signal(signal);
            loop {
                std::thread::park();
            }
        }
    }
    end_part_and_wait();
}

/// The variable that sets the number of processes of a crowd.
const CROWD_SIZE_VARIABLE: &str = "ZERNEL_ATTACK_CROWD";

/// A target that launches all the time, so that launches are sampled.
fn target_launches_all_the_time(driver: &Driver, _rounds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    end_part_and_wait();
    loop {
        driver.launch_kernel(function);
    }
}

/// Many processes map libraries while sampling windows open and close, which changes the code of all of them.
pub(crate) fn endure_a_crowd_beside_sampling_windows() {
    let name = "a_crowd_beside_sampling_windows";
    let crowd = env::var(CROWD_SIZE_VARIABLE).map_or(400, |text| text.parse().expect("a number"));
    let mut scene = AttackScene::start();
    let busy = start_attack(&scene.stage, "launches_all_the_time", 0);
    let begin = Instant::now();
    let children = start_attack(&scene.stage, "forks_idle_children", crowd);
    crate::print_measurement(&format!("{name}: {crowd} forks in {:.2?}", begin.elapsed()));
    scene.assert_daemon_endures_attack_sampled(name, crate::attack_duration());
    let used = scene.stop_by_sigterm(name, &[&busy, &children]);
    busy.kill();
    children.kill();
    drop(used);
}

/// Why a file is refused, by the ledger of a daemon.
fn refusal_in_ledger(daemon: &Daemon, path: &str) -> Option<String> {
    let ledger = daemon.get("/api/v1/ledger").body_as_json();
    let mut refused = ledger["refused"].as_array()?.iter();
    let entry = refused.find(|entry| entry["path"] == path)?;
    entry["reason"].as_str().map(str::to_owned)
}

/// A daemon is killed while it reads a file. The next daemon refuses that file, and counts calls of other files.
pub(crate) fn a_file_that_a_killed_daemon_read_is_refused() {
    let stage = stage_for_all_users();
    let files = mount_stalling_files(&stage);
    let state = stage.path().join("state/files-in-hand");
    let in_hand = || fs::read_to_string(&state).unwrap_or_default();
    let first = start_daemon(&stage);
    assert_eq!(in_hand(), "");
    let _holder = start_attack(&stage, "maps_dead_files", 0);
    files.iter().for_each(StallingFs::stop_answering);
    eventually("a library and a loader are in hand", || {
        in_hand().lines().count() == STALLING_FILE_NAMES.len()
    });
    first.end_by_signal(Signal::KILL);
    files.iter().for_each(StallingFs::answer_again);

    let second = start_daemon(&stage);
    let path = stage
        .path()
        .join("dead")
        .join(STALLING_FILE_NAMES[0])
        .join(STALLING_FILE_NAMES[0]);
    let path = path.to_str().expect("text");
    let reason = eventually_ok("the file is refused", || {
        refusal_in_ledger(&second, path).ok_or("it is not refused")
    });
    assert!(reason.contains("the daemon died"), "{reason}");
    assert_eq!(
        in_hand().lines().count(),
        STALLING_FILE_NAMES.len(),
        "for the next start"
    );
    let victim = start_victim(&stage, 1);
    scene::assert_calls_are_exact(&second, &stage, &victim);
    // A daemon that ends on SIGTERM adds no file to the list of files in hand.
    let (status, said) = second.end_by_signal(Signal::TERM);
    assert!(status.success(), "{said}");
    assert_eq!(in_hand().lines().count(), STALLING_FILE_NAMES.len());
}

/// The job with this pid, as `zernel ps` lists it.
fn process_listed_by_ps(daemon: &Daemon, pid: u32) -> Option<Value> {
    let mut command = Command::new(zernel_path());
    command
        .args(["ps", "--json", "--socket"])
        .arg(&daemon.socket);
    let output = command.output().expect("zernel runs");
    let trainers: Vec<Value> = serde_json::from_slice(&output.stdout).ok()?;
    trainers.into_iter().find(|trainer| trainer["pid"] == pid)
}

/// A job that starts together with the daemon, on a machine with many processes, has its rank and its job. The GPU of a job
/// is unknown if the job opened the device before probes were attached.
pub(crate) fn a_job_started_with_the_daemon_gets_its_rank() {
    let stage = stage_for_all_users();
    let own = stage.path().join("victim");
    let with_rank = |stage: &Stage, role, rounds, rank: &str| {
        let mut command = command_for_role(stage, VICTIM_UID, &own, role, rounds);
        command.envs([("RANK", rank), ("WORLD_SIZE", "8"), ("SLURM_JOB_ID", "77")]);
        Target::start(&mut command)
    };
    let mut crowd = with_rank(&stage, "forks_idle_children", 400, "1");
    crowd.run_part();
    let mut job = with_rank(&stage, "trains", u64::MAX, "5");
    let daemon = std::thread::scope(|scope| {
        let daemon = scope.spawn(|| start_daemon(&stage));
        job.run_part();
        daemon.join().expect("it starts")
    });
    job.run_part();
    eventually_ok("the job is known", || {
        let job = process_listed_by_ps(&daemon, job.pid()).ok_or("it is not listed")?;
        match job["rank"] == 5 && job["job"] == "77" {
            true => Ok(()),
            false => Err(job.to_string()),
        }
    });
}
