//! Benchmarks of the sampled rule and the tracker against naive versions that keep every sample or
//! event and search them each time.

use std::collections::HashMap;
use std::hint::black_box;

use fastrand::Rng;
use zernel_phase::{
    BlockReason, PhaseDetector, PhaseDetectorConfig, PhaseTimeAccumulator, PhaseTracker,
    ThreadEvent, TrackerConfig, WorkloadPhase, ZernelTaskState, classify,
};
use zernel_testkit::bench::TimedComparison;

fn main() {
    let mut comparison = TimedComparison::from_args();
    for (name, naive, pids) in [
        ("detect, 1 pid", "naive detect, 1 pid", 1),
        ("detect, 1,000 pids", "naive detect, 1,000 pids", 1_000),
        (
            "detect, 100,000 pids",
            "naive detect, 100,000 pids",
            100_000,
        ),
    ] {
        detect(&mut comparison, name, pids);
        naive_detect(&mut comparison, naive, pids);
    }
    measure_tracker(&mut comparison);
    naive_tracker(&mut comparison);

    println!();
    comparison.print_ratio("detect, 1 pid", "naive detect, 1 pid");
    comparison.print_ratio("detect, 1,000 pids", "naive detect, 1,000 pids");
    comparison.print_ratio("detect, 100,000 pids", "naive detect, 100,000 pids");
    comparison.print_ratio("detect, 100,000 pids", "detect, 1 pid");
    comparison.print_ratio("tracker, one event", "naive tracker, one event");
}

/// One sample of each of `count` tasks, in random pid order.
fn tasks(count: u32) -> Vec<ZernelTaskState> {
    let mut rng = Rng::with_seed(7);
    let mut pids: Vec<u32> = (1..=count).collect();
    rng.shuffle(&mut pids);
    let state = |pid| ZernelTaskState {
        is_ml_process: true,
        gpu_utilization: rng.u8(0..=100),
        io_wait_fraction: rng.f32(),
        cpu_burst_duration_ns: rng.u64(0..10_000_000),
        last_gpu_sync_ns: 1,
        ..ZernelTaskState::new(pid)
    };
    pids.into_iter().map(state).collect()
}

/// Samples all tasks in turn, at least 10,000 samples in total.
fn sample_all(tasks: &[ZernelTaskState], mut sample: impl FnMut(&ZernelTaskState)) {
    for _ in 0..rounds(tasks) {
        for task in tasks {
            sample(task);
        }
    }
}

fn rounds(tasks: &[ZernelTaskState]) -> usize {
    (10_000 / tasks.len()).max(1)
}

fn detect(comparison: &mut TimedComparison, name: &str, pids: u32) {
    let tasks = tasks(pids);
    let samples = (rounds(&tasks) * tasks.len()) as u64;
    let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
    comparison.measure_routine(name, samples, || {
        sample_all(&tasks, |task| {
            black_box(detector.detect(black_box(task)));
        });
    });
}

fn naive_detect(comparison: &mut TimedComparison, name: &str, pids: u32) {
    let tasks = tasks(pids);
    let samples = (rounds(&tasks) * tasks.len()) as u64;
    let mut detector = NaiveDetector::default();
    comparison.measure_routine(name, samples, || {
        sample_all(&tasks, |task| {
            black_box(detector.detect(black_box(task)));
        });
    });
}

/// Keeps the latest results of every pid and scans them for each sample.
#[derive(Default)]
struct NaiveDetector {
    config: PhaseDetectorConfig,
    history: HashMap<u32, Vec<WorkloadPhase>>,
}

impl NaiveDetector {
    /// Bounds the history, which would otherwise exhaust the memory.
    const MAX_HISTORY: usize = 64;

    fn detect(&mut self, state: &ZernelTaskState) -> WorkloadPhase {
        let raw = classify(&self.config, state);
        let history = self.history.entry(state.pid).or_default();
        if history.len() == Self::MAX_HISTORY {
            history.remove(0);
        }
        history.push(raw);
        let row = history
            .iter()
            .rev()
            .take_while(|phase| **phase == raw)
            .count();
        if row >= self.config.phase_stability_count as usize {
            raw
        } else {
            state.current_phase
        }
    }
}

/// The events of one training step, with the time since the event before.
fn step() -> Vec<(u64, ThreadEvent)> {
    let mut events = vec![
        (1_000, ThreadEvent::Block(BlockReason::Poll)),
        (2_000_000, ThreadEvent::Unblock),
        (300_000, ThreadEvent::CopyToDevice),
    ];
    events.extend([(20_000, ThreadEvent::Launch); 88]);
    events.extend([
        (10_000, ThreadEvent::CollectiveEnter),
        (30_000, ThreadEvent::Launch),
        (10_000, ThreadEvent::CollectiveLeave),
        (1_000, ThreadEvent::OptimizerMarker),
        (1_000, ThreadEvent::Launch),
        (5_000, ThreadEvent::GpuSyncEnter),
        (1_000, ThreadEvent::Block(BlockReason::Other)),
        (9_000_000, ThreadEvent::Unblock),
        (1_000, ThreadEvent::GpuSyncLeave),
    ]);
    events
}

fn measure_tracker(comparison: &mut TimedComparison) {
    let step = step();
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
    let mut times = PhaseTimeAccumulator::default();
    let mut now_ns = 0;
    comparison.measure_routine("tracker, one event", 100 * step.len() as u64, || {
        for _ in 0..100 {
            for (elapsed_ns, event) in &step {
                now_ns += elapsed_ns;
                tracker.observe(now_ns, black_box(*event), &mut times);
            }
        }
    });
    black_box(times);
}

/// Keeps the events of a step and replays all of them for each new event.
fn naive_tracker(comparison: &mut TimedComparison) {
    let step = step();
    comparison.measure_routine("naive tracker, one event", step.len() as u64, || {
        let mut seen: HashMap<u32, Vec<(u64, ThreadEvent)>> = HashMap::new();
        let mut now_ns = 0;
        for (elapsed_ns, event) in &step {
            now_ns += elapsed_ns;
            let events = seen.entry(1).or_default();
            events.push((now_ns, black_box(*event)));
            let mut replayed = PhaseTracker::new(TrackerConfig::default(), 0);
            let mut intervals = Vec::new();
            for (at_ns, event) in events {
                replayed.observe(*at_ns, *event, &mut intervals);
            }
            black_box((replayed.phase_at(now_ns), intervals));
        }
    });
}
