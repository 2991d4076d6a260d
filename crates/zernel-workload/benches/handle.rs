//! The cost of spawning, stopping and dropping workers, compared with the limits of this crate.
//!
//! `cargo bench -p zernel-workload --bench handle`

use std::process::Command;
use std::time::{Duration, Instant};

use zernel_workload::{Affinity, CloneMode, WorkloadConfig, WorkloadHandle};

const WORKER_COUNT: usize = 128;
const ROUND_COUNT: usize = 9;
const SPAWN_START_STOP_ARGUMENT: &str = "--whole-life";

/// The time that ktstr 0.50.0, a tool with the same interface, takes on a machine like this one, in ms, and the limit
/// for this crate.
struct TimeLimit {
    name: &'static str,
    ktstr_ms: (f64, f64),
    limit_ms: f64,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [SPAWN_START_STOP_ARGUMENT, workers] => {
            let workers = workers.parse().expect("a number of workers");
            println!("{}", time_spawn_start_and_stop(workers).as_nanos());
        }
        // `cargo test` runs this benchmark with other arguments, and then it measures nothing.
        ["--test", ..] => {}
        _ => measure_handles(),
    }
}

fn measure_handles() {
    println!("{WORKER_COUNT} spinners, median of {ROUND_COUNT} rounds\n");
    println!(
        "{:<26} {:>10} {:>18} {:>7} {:>10}",
        "what", "ours ms", "other tool ms", "ratio", "bar ms"
    );
    for (mode, bars) in [
        (
            CloneMode::Fork,
            [
                ("spawn fork", (35.0, 55.0), 17.5),
                ("stop fork", (51.0, 88.0), 25.5),
                ("drop fork", (5000.0, 5400.0), 100.0),
            ],
        ),
        (
            CloneMode::Thread,
            [
                ("spawn thread", (20.0, 31.0), 10.0),
                ("stop thread", (204.0, 237.0), 102.0),
                ("drop thread", (31_000.0, 36_000.0), 100.0),
            ],
        ),
    ] {
        let rounds: Vec<[Duration; 3]> = (0..ROUND_COUNT).map(|_| measure_round(mode)).collect();
        for (index, (name, ktstr_ms, limit_ms)) in bars.into_iter().enumerate() {
            let bar = TimeLimit {
                name,
                ktstr_ms,
                limit_ms,
            };
            bar.print(median_duration(rounds.iter().map(|round| round[index])));
        }
    }
    measure_snapshot();
    measure_stop_of_starved_workers();
    measure_scaling();
}

impl TimeLimit {
    fn print(&self, ours: Duration) {
        let ours_ms = ours.as_secs_f64() * 1e3;
        let (least, most) = self.ktstr_ms;
        println!(
            "{:<26} {:>10.2} {:>18} {:>7.3} {:>10} {}",
            self.name,
            ours_ms,
            format!("{least}-{most}"),
            ours_ms / least,
            self.limit_ms,
            if ours_ms <= self.limit_ms {
                "met"
            } else {
                "MISSED"
            }
        );
    }
}

fn spawn_workers(mode: CloneMode, workers: usize) -> WorkloadHandle {
    let config = WorkloadConfig::default().workers(workers).clone_mode(mode);
    WorkloadHandle::spawn(&config).expect("workers can be made")
}

/// Times three operations on workers: to spawn them, to stop them after a while, and to drop them after a while.
fn measure_round(mode: CloneMode) -> [Duration; 3] {
    let (mut handle, spawn_time) = time_of(|| spawn_workers(mode, WORKER_COUNT));
    handle.start();
    std::thread::sleep(Duration::from_millis(1000));
    let (reports, stop_time) = time_of(|| handle.stop_and_collect());
    assert!(
        reports.iter().all(|report| report.completed),
        "a worker did not complete"
    );

    let mut handle = spawn_workers(mode, WORKER_COUNT);
    handle.start();
    std::thread::sleep(Duration::from_millis(200));
    let ((), drop_time) = time_of(|| drop(handle));
    [spawn_time, stop_time, drop_time]
}

fn measure_snapshot() {
    let mut handle = spawn_workers(CloneMode::Fork, WORKER_COUNT);
    handle.start();
    std::thread::sleep(Duration::from_millis(500));
    let calls = 20_000;
    let samples = (0..21).map(|_| {
        let ((), time) = time_of(|| {
            for _ in 0..calls {
                std::hint::black_box(handle.snapshot_iterations());
            }
        });
        time / calls
    });
    println!(
        "\nsnapshot_iterations: {} ns (other tool: 70 ns)",
        median_duration(samples).as_nanos()
    );
}

/// Measures how long a stop takes for workers that get almost no CPU time.
fn measure_stop_of_starved_workers() {
    let cpu = Affinity::Exact([0].into());
    let hog = WorkloadConfig::default().affinity(cpu.clone()).nice(-20);
    let starved = WorkloadConfig::default().workers(8).affinity(cpu).nice(19);
    let mut times = Vec::new();
    for _ in 0..3 {
        let mut starved = WorkloadHandle::spawn(&starved).expect("workers can be made");
        starved.start();
        std::thread::sleep(Duration::from_millis(200));
        let mut hog = WorkloadHandle::spawn(&hog).expect("workers can be made");
        hog.start();
        std::thread::sleep(Duration::from_millis(500));
        let (reports, time) = time_of(|| starved.stop_and_collect());
        assert!(
            reports.iter().all(|report| report.completed),
            "a worker did not complete"
        );
        if !hog.stop_and_collect()[0].setting_errors.is_empty() {
            println!("\nstop of starved workers: not measured, a nice value of -20 needs root");
            return;
        }
        times.push(time);
    }
    let ms = median_duration(times.into_iter()).as_secs_f64() * 1e3;
    println!(
        "\nstop of 8 workers at nice 19 beside a hog at nice -20 on one CPU: {ms:.0} ms (bar about 100)"
    );
}

/// A fork copies the mappings of the process, so each measurement runs in a fresh process.
fn measure_scaling() {
    let (mut small, mut large) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        small.push(time_spawn_start_and_stop_in_new_process(512));
        large.push(time_spawn_start_and_stop_in_new_process(4096));
    }
    let (small, large) = (
        median_duration(small.into_iter()),
        median_duration(large.into_iter()),
    );
    println!(
        "\nspawn+start+stop+collect: 512 workers {:.0} ms, 4096 workers {:.0} ms, ratio {:.1} (bar 10)",
        small.as_secs_f64() * 1e3,
        large.as_secs_f64() * 1e3,
        large.as_secs_f64() / small.as_secs_f64()
    );
}

fn time_spawn_start_and_stop_in_new_process(workers: usize) -> Duration {
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(program)
        .args([SPAWN_START_STOP_ARGUMENT, &workers.to_string()])
        .output();
    let output = output.expect("this program can be started again");
    let text = String::from_utf8_lossy(&output.stdout);
    Duration::from_nanos(text.trim().parse().expect("the life took some nanoseconds"))
}

fn time_spawn_start_and_stop(workers: usize) -> Duration {
    let (reports, time) = time_of(|| {
        let mut handle = spawn_workers(CloneMode::Fork, workers);
        handle.start();
        handle.stop_and_collect()
    });
    assert!(
        reports.iter().all(|report| report.completed),
        "a worker did not complete"
    );
    time
}

fn time_of<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let result = work();
    (result, begin.elapsed())
}

fn median_duration(samples: impl Iterator<Item = Duration>) -> Duration {
    let mut samples: Vec<Duration> = samples.collect();
    samples.sort_unstable();
    samples[samples.len() / 2]
}
