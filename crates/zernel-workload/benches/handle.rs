//! What spawning, stopping and dropping workers costs, beside the bars of this crate.
//!
//! `cargo bench -p zernel-workload --bench handle`

use std::time::{Duration, Instant};

use zernel_workload::{CloneMode, WorkloadConfig, WorkloadHandle};

const WORKERS: usize = 128;
const ROUNDS: usize = 9;

/// What the tool with the same interface (ktstr 0.50.0) took on a machine like this one, in ms, and
/// the most that this crate may take.
struct Bar {
    name: &'static str,
    other_ms: (f64, f64),
    limit_ms: f64,
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    println!("{WORKERS} spinners, median of {ROUNDS} rounds\n");
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
        let rounds: Vec<[Duration; 3]> = (0..ROUNDS).map(|_| round(mode)).collect();
        for (index, (name, other_ms, limit_ms)) in bars.into_iter().enumerate() {
            let bar = Bar {
                name,
                other_ms,
                limit_ms,
            };
            bar.print(median(rounds.iter().map(|round| round[index])));
        }
    }
    snapshot();
    scaling();
}

impl Bar {
    fn print(&self, ours: Duration) {
        let ours_ms = ours.as_secs_f64() * 1e3;
        let (least, most) = self.other_ms;
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

fn spawn(mode: CloneMode, workers: usize) -> WorkloadHandle {
    let config = WorkloadConfig::default().workers(workers).clone_mode(mode);
    WorkloadHandle::spawn(&config).expect("workers can be made")
}

/// Spawn, stop after a while, and drop after a while.
fn round(mode: CloneMode) -> [Duration; 3] {
    let (mut handle, spawn_time) = timed(|| spawn(mode, WORKERS));
    handle.start();
    std::thread::sleep(Duration::from_millis(1000));
    let (reports, stop_time) = timed(|| handle.stop_and_collect());
    assert!(
        reports.iter().all(|report| report.completed),
        "a worker did not complete"
    );

    let mut handle = spawn(mode, WORKERS);
    handle.start();
    std::thread::sleep(Duration::from_millis(200));
    let ((), drop_time) = timed(|| drop(handle));
    [spawn_time, stop_time, drop_time]
}

fn snapshot() {
    let mut handle = spawn(CloneMode::Fork, WORKERS);
    handle.start();
    std::thread::sleep(Duration::from_millis(500));
    let calls = 20_000;
    let samples = (0..21).map(|_| {
        let ((), time) = timed(|| {
            for _ in 0..calls {
                std::hint::black_box(handle.snapshot_iterations());
            }
        });
        time / calls
    });
    println!(
        "\nsnapshot_iterations: {} ns (other tool: 70 ns)",
        median(samples).as_nanos()
    );
}

fn scaling() {
    let small = whole_life(512);
    let large = whole_life(4096);
    println!(
        "\nspawn+start+stop+collect: 512 workers {:.0} ms, 4096 workers {:.0} ms, ratio {:.1} (bar 10)",
        small.as_secs_f64() * 1e3,
        large.as_secs_f64() * 1e3,
        large.as_secs_f64() / small.as_secs_f64()
    );
}

fn whole_life(workers: usize) -> Duration {
    median((0..3).map(|_| {
        let (_, time) = timed(|| {
            let (mut handle, spawn_time) = timed(|| spawn(CloneMode::Fork, workers));
            handle.start();
            let (reports, stop_time) = timed(|| handle.stop_and_collect());
            assert!(
                reports.iter().all(|report| report.completed),
                "a worker did not complete"
            );
            eprintln!("{workers} workers: spawn {spawn_time:.0?}, stop {stop_time:.0?}");
        });
        time
    }))
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let result = work();
    (result, begin.elapsed())
}

fn median(samples: impl Iterator<Item = Duration>) -> Duration {
    let mut samples: Vec<Duration> = samples.collect();
    samples.sort_unstable();
    samples[samples.len() / 2]
}
