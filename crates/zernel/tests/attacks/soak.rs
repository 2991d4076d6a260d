//! All attacks at once for a long time, over several lives of the daemon, beside a job that is counted.
//!
//! `ZERNEL_SOAK_MINUTES` sets how long it lasts.

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

use crate::attackers::own_directory;
use crate::cpu_weights::{self, WeightGroup};
use crate::scene::{
    AnswerTimes, Clients, DETACH_LIMIT, EXIT_LIMIT, MAX_RESIDENT, NOBODY, assert_answered,
    command_of, counted_calls, describe_times, peak_resident, public_stage, request, resident,
    start_daemon, start_victim, truth_of,
};
use crate::{ATTACKS, FUSE, mount_files};

/// The variable that sets how long the soak lasts.
const MINUTES: &str = "ZERNEL_SOAK_MINUTES";
/// How long it lasts without.
const SHORT: Duration = Duration::from_secs(14);
/// Lives of the daemon.
const LIVES: u32 = 4;
/// Attacks at the same time.
const AT_ONCE: usize = 3;
/// How long one attack lasts.
const ATTACK: Duration = Duration::from_secs(5);
/// How long one attack lasts in a short soak, so that every attack has its turn.
const SHORT_ATTACK: Duration = Duration::from_secs(2);

/// Calls by name.
type Calls = BTreeMap<String, u64>;

/// Everything that was measured.
#[derive(Default)]
struct Measured {
    answers: AnswerTimes,
    exits: Vec<Duration>,
    /// The longest time from SIGTERM to the exit.
    slowest_exit: Duration,
    /// From the exit of the daemon until nothing was attached.
    slowest_detach: Duration,
    attacks: usize,
    peak: u64,
    /// Growth of the resident memory in the second half of each life, in KiB per minute.
    slopes: Vec<f64>,
    calls: u64,
}

/// Attackers of a second user that come and go.
struct Attackers {
    running: Vec<(Instant, Target)>,
    started: usize,
    /// Number of different attacks.
    attacks: usize,
    /// How long one lasts.
    length: Duration,
    /// File systems that stop answering; none on a machine without FUSE.
    files: Vec<StallingFs>,
}

impl Attackers {
    fn new(stage: &Stage, length: Duration) -> Self {
        let files = match (FUSE.check)().is_ok() {
            true => Vec::from(mount_files(stage)),
            false => Vec::new(),
        };
        Self {
            running: Vec::new(),
            started: 0,
            attacks: ATTACKS.len() + usize::from(!files.is_empty()),
            length,
            files,
        }
    }

    /// Starts the next attack. After all others comes that with the file systems.
    fn start_next(&self, stage: &Stage, own: &Path) -> Target {
        let number = self.started % self.attacks;
        let (role, rounds) = match ATTACKS.get(number) {
            Some((_, role, rounds)) => (*role, *rounds),
            None => ("maps_dead_files", 0),
        };
        let mut command = command_of(stage, NOBODY, own, role, rounds);
        command.env_remove(config::LOG);
        let mut attacker = Target::start(&mut command);
        cpu_weights::add(WeightGroup::Attacker, attacker.pid());
        // It prepares itself, then it attacks.
        match number == ATTACKS.len() {
            true => {
                self.files.iter().for_each(StallingFs::answer);
                attacker.step();
                self.files.iter().for_each(StallingFs::stall);
            }
            false => attacker.go(),
        }
        attacker.go();
        attacker
    }

    /// Kills attackers whose time is over, and starts others.
    fn turn(&mut self, stage: &Stage) {
        let now = Instant::now();
        let own = own_directory(stage.path());
        for (_, target) in self.running.extract_if(.., |(end, _)| now >= *end) {
            let files = own.join(target.pid().to_string());
            target.kill();
            // Not every attack has files.
            let _ = fs::remove_dir_all(files);
        }
        while self.running.len() < AT_ONCE {
            let attacker = self.start_next(stage, &own);
            self.running.push((now + self.length, attacker));
            self.started += 1;
        }
    }
}

pub(crate) fn soak() {
    let minutes = env::var(MINUTES).ok();
    let minutes = minutes.map(|text| text.parse::<f64>().expect("a number of minutes"));
    let time = minutes.map_or(SHORT, |minutes| Duration::from_secs_f64(60.0 * minutes));
    let stage = public_stage();
    // It lives longer than any daemon.
    let mut old = start_victim(&stage, u64::MAX);
    let length = minutes.map_or(SHORT_ATTACK, |_| ATTACK);
    let mut attackers = Attackers::new(&stage, length);
    let mut measured = Measured::default();
    for life in 0..LIVES {
        // The last life is long, to show whether the memory still grows.
        let length = match life + 1 == LIVES {
            true => time / 2,
            false => time / 2 / (LIVES - 1),
        };
        let signal = match life % 2 {
            0 => Signal::KILL,
            _ => Signal::TERM,
        };
        live(
            &stage,
            &mut old,
            &mut attackers,
            length,
            signal,
            &mut measured,
        );
    }
    measured.attacks = attackers.started;
    assert!(measured.attacks >= attackers.attacks, "each has its turn");
    drop(attackers);
    // It was not harmed: it ends at the first call that fails.
    old.step();
    old.kill();
    if minutes.is_some() {
        report(time, &measured);
        // Limits of time are for a release build that runs long enough.
        assert_answered(&measured.answers);
        let (exit, detached) = (measured.slowest_exit, measured.slowest_detach);
        assert!(exit < EXIT_LIMIT, "exit after {exit:?}");
        assert!(detached < DETACH_LIMIT, "detached {detached:?} later");
    }
}

/// One life of the daemon, which ends by a signal.
fn live(
    stage: &Stage,
    old: &mut Target,
    attackers: &mut Attackers,
    time: Duration,
    signal: Signal,
    measured: &mut Measured,
) {
    let daemon = start_daemon(stage);
    let end = Instant::now() + time;
    let clients = Clients::start(&daemon);
    // Found running: what it called before is unknown, and the daemon says so.
    old.step();
    let start = eventually_ok("it is found", || settled(&daemon, stage, old.pid()));
    assert_eq!(is_complete(&daemon, old.pid()), Some(false));
    let mut new = start_victim(stage, u64::MAX);
    let mut sizes = Vec::new();
    // At least once: on a busy machine a short life may be over before the jobs are found.
    loop {
        attackers.turn(stage);
        old.step();
        new.step();
        let left = end.saturating_duration_since(Instant::now());
        sizes.push((left, resident(daemon.pid())));
        thread::sleep(Duration::from_millis(50));
        if left.is_zero() {
            break;
        }
    }
    assert_counted_since(&daemon, stage, old.pid(), &start);
    assert_counted_since(&daemon, stage, new.pid(), &(Calls::new(), Calls::new()));
    assert_eq!(is_complete(&daemon, new.pid()), Some(true));
    measured.calls += truth_of(stage, new.pid()).values().sum::<u64>();
    for (endpoint, times) in clients.stop() {
        measured.answers.entry(endpoint).or_default().extend(times);
    }
    let peak = peak_resident(daemon.pid());
    assert!(peak < MAX_RESIDENT, "{} MiB", peak >> 20);
    measured.peak = measured.peak.max(peak);
    measured.slopes.push(slope(&sizes, time / 2));
    let objects = daemon.kernel_objects();
    let begin = Instant::now();
    let (status, said) = daemon.end(signal);
    let exit = begin.elapsed();
    measured.exits.push(exit);
    if exit > EXIT_LIMIT {
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
fn settled(daemon: &Daemon, stage: &Stage, pid: u32) -> Result<(Calls, Calls), String> {
    let first = counted_calls(daemon, pid)?;
    thread::sleep(Duration::from_millis(1200));
    let second = counted_calls(daemon, pid)?;
    match first == second {
        true => Ok((truth_of(stage, pid), second)),
        false => Err("its counts still change".to_owned()),
    }
}

/// Calls since a start.
fn since(calls: &Calls, start: &Calls) -> Calls {
    let calls = calls.iter().map(|(name, count)| {
        let before = start.get(name).copied().unwrap_or(0);
        (name.clone(), count - before)
    });
    calls.filter(|(_, count)| *count > 0).collect()
}

/// Waits until the daemon shows exactly the calls that a process made since a start.
fn assert_counted_since(daemon: &Daemon, stage: &Stage, pid: u32, start: &(Calls, Calls)) {
    let truth = since(&truth_of(stage, pid), &start.0);
    assert!(truth["cuLaunchKernel"] > 0);
    eventually_ok("it is counted exactly", || {
        let counted = since(&counted_calls(daemon, pid)?, &start.1);
        match counted == truth {
            true => Ok(()),
            false => Err(format!("{counted:?} instead of {truth:?}")),
        }
    });
}

/// Whether the daemon says that it observed all calls of a process.
fn is_complete(daemon: &Daemon, pid: u32) -> Option<bool> {
    let body = request(daemon.http, "/api/v1/snapshot").expect("it answers");
    let snapshot: Value = serde_json::from_str(&body).expect("JSON");
    let mut observed = snapshot["observed"].as_array()?.iter();
    observed.find(|process| process["pid"] == pid)?["complete"].as_bool()
}

/// Growth of the resident memory in the last part of a life, in KiB per minute: the slope of the line through the sizes with
/// the least squares.
fn slope(sizes: &[(Duration, u64)], last: Duration) -> f64 {
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
fn report(time: Duration, measured: &Measured) {
    let minutes = time.as_secs_f64() / 60.0;
    let Measured {
        attacks,
        calls,
        slopes,
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
    println!("| soak of {minutes:.1} minutes | {attacks} attacks, {LIVES} lives |");
    println!("| calls of jobs that started in a life of the daemon | {calls}, counted exactly |");
    println!("| jobs harmed | 0 |");
    let peak = measured.peak >> 20;
    println!("| resident memory | at most {peak} MiB; grows by {slopes:.0?} KiB per minute |");
    println!("| exit after SIGTERM | {} |", times(&by_term));
    println!("| exit after SIGKILL | {} |", times(&by_kill));
    println!("| nothing attached after the exit | {slowest_detach:.2?} |");
    for (endpoint, times) in &measured.answers {
        println!("| {endpoint} | {} |", describe_times(times));
    }
}
