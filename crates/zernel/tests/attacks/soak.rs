//! All attacks at once for a long time, over several lives of the daemon, beside a job that is counted.
//!
//! `ZERNEL_SOAK_MINUTES` sets how long the soak lasts.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use zernel_softgpu::config;
use zernel_testkit::daemon::Daemon;
use zernel_testkit::target::{Stage, Target};
use zernel_testkit::{StallingFs, eventually_ok};

use crate::attackers::attacker_directory;
use crate::cpu_weights::{self, ProcessCgroup};
use crate::scene::{
    ATTACKER_UID, AnswerTimes, EndpointPoller, MAX_DAEMON_RESIDENT_BYTES, MAX_DETACH_TIME,
    MAX_EXIT_TIME, assert_answered_in_time, command_for_role, counted_calls, describe_quantiles,
    logged_calls, peak_resident_bytes, request_over_http, resident_bytes, stage_for_all_users,
    start_daemon, start_victim,
};
use crate::{ATTACKS, FUSE_NEED, mount_stalling_files};

/// The variable that sets how long the soak lasts.
const SOAK_MINUTES_VARIABLE: &str = "ZERNEL_SOAK_MINUTES";
/// How long the soak lasts if `ZERNEL_SOAK_MINUTES` is not set.
const DEFAULT_SOAK_TIME: Duration = Duration::from_secs(14);
/// Lives of the daemon.
const DAEMON_RUN_COUNT: u32 = 4;
/// Attacks at the same time.
const CONCURRENT_ATTACK_COUNT: usize = 3;
/// How long one attack lasts.
const ATTACK_TIME: Duration = Duration::from_secs(5);
/// How long one attack lasts in a short soak, so that every attack has its turn.
const DEFAULT_ATTACK_TIME: Duration = Duration::from_secs(2);

/// Calls by name.
type CallsByName = BTreeMap<String, u64>;

/// Everything that was measured.
#[derive(Default)]
struct SoakMeasurements {
    answers: AnswerTimes,
    exits: Vec<Duration>,
    /// The longest time from SIGTERM to the exit.
    slowest_exit: Duration,
    /// From the exit of the daemon until nothing was attached.
    slowest_detach: Duration,
    attacks: usize,
    peak_resident: u64,
    /// Growth of the resident memory in the second half of each life, in KiB per minute.
    resident_slopes: Vec<f64>,
    calls: u64,
}

/// Attackers of a second user that come and go.
struct RotatingAttackers {
    running: Vec<(Instant, Target)>,
    started_count: usize,
    /// Number of different attacks.
    attack_count: usize,
    /// How long one lasts.
    length: Duration,
    /// File systems that stop answering; none on a machine without FUSE.
    files: Vec<StallingFs>,
}

impl RotatingAttackers {
    fn new(stage: &Stage, length: Duration) -> Self {
        let files = match (FUSE_NEED.check)().is_ok() {
            true => Vec::from(mount_stalling_files(stage)),
            false => Vec::new(),
        };
        Self {
            running: Vec::new(),
            started_count: 0,
            attack_count: ATTACKS.len() + usize::from(!files.is_empty()),
            length,
            files,
        }
    }

    /// Starts the next attack. After all other attacks comes the one with file systems that stop answering.
    fn start_next_attack(&self, stage: &Stage, own: &Path) -> Target {
        let number = self.started_count % self.attack_count;
        let (role, rounds) = match ATTACKS.get(number) {
            Some((_, role, rounds)) => (*role, *rounds),
            None => ("maps_dead_files", 0),
        };
        let mut command = command_for_role(stage, ATTACKER_UID, own, role, rounds);
        command.env_remove(config::LOG_VARIABLE);
        let mut attacker = Target::start(&mut command);
        cpu_weights::move_process_to_cgroup(ProcessCgroup::Attacker, attacker.pid());
        // The attacker prepares itself in the first part, and attacks in the second.
        match number == ATTACKS.len() {
            true => {
                self.files.iter().for_each(StallingFs::answer_again);
                attacker.run_part();
                self.files.iter().for_each(StallingFs::stop_answering);
            }
            false => attacker.start_part(),
        }
        attacker.start_part();
        attacker
    }

    /// Kills attackers whose time is over, and starts others.
    fn replace_expired_attackers(&mut self, stage: &Stage) {
        let now = Instant::now();
        let own = attacker_directory(stage.path());
        for (_, target) in self.running.extract_if(.., |(end, _)| now >= *end) {
            let files = own.join(target.pid().to_string());
            target.kill();
            // Not every attack has files.
            let _ = fs::remove_dir_all(files);
        }
        while self.running.len() < CONCURRENT_ATTACK_COUNT {
            let attacker = self.start_next_attack(stage, &own);
            self.running.push((now + self.length, attacker));
            self.started_count += 1;
        }
    }
}

pub(crate) fn soak_under_rotating_attacks() {
    let minutes = env::var(SOAK_MINUTES_VARIABLE).ok();
    let minutes = minutes.map(|text| text.parse::<f64>().expect("a number of minutes"));
    let time = minutes.map_or(DEFAULT_SOAK_TIME, |minutes| {
        Duration::from_secs_f64(60.0 * minutes)
    });
    let stage = stage_for_all_users();
    // This job lives longer than any daemon.
    let mut old = start_victim(&stage, u64::MAX);
    let length = minutes.map_or(DEFAULT_ATTACK_TIME, |_| ATTACK_TIME);
    let mut attackers = RotatingAttackers::new(&stage, length);
    let mut measured = SoakMeasurements::default();
    for life in 0..DAEMON_RUN_COUNT {
        // The last life is long, to show whether the memory still grows.
        let length = match life + 1 == DAEMON_RUN_COUNT {
            true => time / 2,
            false => time / 2 / (DAEMON_RUN_COUNT - 1),
        };
        let signal = match life % 2 {
            0 => Signal::KILL,
            _ => Signal::TERM,
        };
        run_daemon_until_signal(
            &stage,
            &mut old,
            &mut attackers,
            length,
            signal,
            &mut measured,
        );
    }
    measured.attacks = attackers.started_count;
    assert!(
        measured.attacks >= attackers.attack_count,
        "each has its turn"
    );
    drop(attackers);
    // The job was not harmed, because it ends at the first call that fails.
    old.run_part();
    old.kill();
    if minutes.is_some() {
        print_measurements(time, &measured);
        // Limits of time are for a release build that runs long enough.
        assert_answered_in_time(&measured.answers);
        let (exit, detached) = (measured.slowest_exit, measured.slowest_detach);
        assert!(exit < MAX_EXIT_TIME, "exit after {exit:?}");
        assert!(detached < MAX_DETACH_TIME, "detached {detached:?} later");
    }
}

/// One life of the daemon, which ends by a signal.
fn run_daemon_until_signal(
    stage: &Stage,
    old: &mut Target,
    attackers: &mut RotatingAttackers,
    time: Duration,
    signal: Signal,
    measured: &mut SoakMeasurements,
) {
    let daemon = start_daemon(stage);
    let end = Instant::now() + time;
    let clients = EndpointPoller::start(&daemon);
    // The daemon found this job running: its earlier calls are unknown, and the daemon states that.
    old.run_part();
    let start = eventually_ok("it is found", || {
        stable_call_counts(&daemon, stage, old.pid())
    });
    assert_eq!(is_observed_completely(&daemon, old.pid()), Some(false));
    let mut new = start_victim(stage, u64::MAX);
    let mut sizes = Vec::new();
    // At least once: on a busy machine a short life may be over before the jobs are found.
    loop {
        attackers.replace_expired_attackers(stage);
        old.run_part();
        new.run_part();
        let left = end.saturating_duration_since(Instant::now());
        sizes.push((left, resident_bytes(daemon.pid())));
        thread::sleep(Duration::from_millis(50));
        if left.is_zero() {
            break;
        }
    }
    assert_calls_counted_since(&daemon, stage, old.pid(), &start);
    assert_calls_counted_since(
        &daemon,
        stage,
        new.pid(),
        &(CallsByName::new(), CallsByName::new()),
    );
    assert_eq!(is_observed_completely(&daemon, new.pid()), Some(true));
    measured.calls += logged_calls(stage, new.pid()).values().sum::<u64>();
    for (endpoint, times) in clients.stop() {
        measured.answers.entry(endpoint).or_default().extend(times);
    }
    let peak = peak_resident_bytes(daemon.pid());
    assert!(peak < MAX_DAEMON_RESIDENT_BYTES, "{} MiB", peak >> 20);
    measured.peak_resident = measured.peak_resident.max(peak);
    measured
        .resident_slopes
        .push(resident_growth_per_minute(&sizes, time / 2));
    let objects = daemon.kernel_objects();
    let begin = Instant::now();
    let (status, said) = daemon.end_by_signal(signal);
    let exit = begin.elapsed();
    measured.exits.push(exit);
    if exit > MAX_EXIT_TIME {
        println!("exit after {exit:.2?}: {said}");
    }
    if signal == Signal::TERM {
        measured.slowest_exit = measured.slowest_exit.max(exit);
    }
    assert!(signal == Signal::KILL || status.success(), "{said}");
    // A child process that cannot die keeps the programs.
    objects.wait_until_detached();
    measured.slowest_detach = measured.slowest_detach.max(begin.elapsed() - exit);
    new.kill();
}

/// True and counted calls of a process, when two readings in a row count the same.
fn stable_call_counts(
    daemon: &Daemon,
    stage: &Stage,
    pid: u32,
) -> Result<(CallsByName, CallsByName), String> {
    let first = counted_calls(daemon, pid)?;
    thread::sleep(Duration::from_millis(1200));
    let second = counted_calls(daemon, pid)?;
    match first == second {
        true => Ok((logged_calls(stage, pid), second)),
        false => Err("its counts still change".to_owned()),
    }
}

/// Calls since a start.
fn calls_made_since(calls: &CallsByName, start: &CallsByName) -> CallsByName {
    let calls = calls.iter().map(|(name, count)| {
        let before = start.get(name).copied().unwrap_or(0);
        (name.clone(), count - before)
    });
    calls.filter(|(_, count)| *count > 0).collect()
}

/// Waits until the daemon shows exactly the calls that a process made since a start.
fn assert_calls_counted_since(
    daemon: &Daemon,
    stage: &Stage,
    pid: u32,
    start: &(CallsByName, CallsByName),
) {
    let truth = calls_made_since(&logged_calls(stage, pid), &start.0);
    assert!(truth["cuLaunchKernel"] > 0);
    eventually_ok("it is counted exactly", || {
        let counted = calls_made_since(&counted_calls(daemon, pid)?, &start.1);
        match counted == truth {
            true => Ok(()),
            false => Err(format!("{counted:?} instead of {truth:?}")),
        }
    });
}

/// Whether the daemon says that it observed all calls of a process.
fn is_observed_completely(daemon: &Daemon, pid: u32) -> Option<bool> {
    let body = request_over_http(daemon.http, "/api/v1/snapshot").expect("it answers");
    let snapshot: Value = serde_json::from_str(&body).expect("JSON");
    let mut observed = snapshot["observed"].as_array()?.iter();
    observed.find(|process| process["pid"] == pid)?["complete"].as_bool()
}

/// Growth of the resident memory in the last part of a life, in KiB per minute: the slope of the line through the sizes with
/// the least squares.
fn resident_growth_per_minute(sizes: &[(Duration, u64)], last: Duration) -> f64 {
    let sizes = sizes.iter().filter(|(left, _)| *left <= last);
    let points: Vec<(f64, f64)> = sizes
        .map(|(left, bytes)| (-left.as_secs_f64() / 60.0, *bytes as f64 / 1024.0))
        .collect();
    let count = points.len() as f64;
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / count;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / count;
    let products = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y));
    let squares = points.iter().map(|(x, _)| (x - mean_x).powi(2));
    products.sum::<f64>() / squares.sum::<f64>()
}

/// Prints what was measured as a table for docs/measurements.md.
fn print_measurements(time: Duration, measured: &SoakMeasurements) {
    let minutes = time.as_secs_f64() / 60.0;
    let SoakMeasurements {
        attacks,
        calls,
        resident_slopes: slopes,
        exits,
        slowest_detach,
        ..
    } = measured;
    let (by_kill, by_term): (Vec<_>, Vec<_>) = exits
        .iter()
        .enumerate()
        .partition(|(life, _)| life % 2 == 0);
    let times = |exits: &[(usize, &Duration)]| {
        let times = exits.iter().map(|(_, time)| format!("{time:.2?}"));
        times.collect::<Vec<String>>().join(" and ")
    };
    println!("| what | result |\n|---|---|");
    println!("| soak of {minutes:.1} minutes | {attacks} attacks, {DAEMON_RUN_COUNT} lives |");
    println!("| calls of jobs that started in a life of the daemon | {calls}, counted exactly |");
    println!("| jobs harmed | 0 |");
    let peak = measured.peak_resident >> 20;
    println!("| resident memory | at most {peak} MiB; grows by {slopes:.0?} KiB per minute |");
    println!("| exit after SIGTERM | {} |", times(&by_term));
    println!("| exit after SIGKILL | {} |", times(&by_kill));
    println!("| nothing attached after the exit | {slowest_detach:.2?} |");
    for (endpoint, times) in &measured.answers {
        println!("| {endpoint} | {} |", describe_quantiles(times));
    }
}
