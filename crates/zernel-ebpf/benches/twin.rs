//! The phase rule in the kernel beside the same rule in userspace, on the same samples.

use std::hint::black_box;

use fastrand::Rng;
use zernel_ebpf::twin::{BATCH_SIZE, ClassifyBatch, PhaseTwin};
use zernel_phase::shared::{RawPhaseConfig, RawPhaseSample};
use zernel_phase::{PhaseDetectorConfig, ZernelTaskState, classify};
use zernel_testkit::bench::TimedComparison;
use zerocopy::FromZeros;

fn main() {
    let twin = match PhaseTwin::load() {
        Ok(twin) => twin,
        Err(error) => {
            println!("skipped: the kernel does not load the twin: {error}");
            return;
        }
    };
    let config = PhaseDetectorConfig::default();
    let states = random_states();
    let mut batch = ClassifyBatch::new_box_zeroed().expect("memory for one batch");
    batch.config = RawPhaseConfig::from(&config);
    for (sample, state) in batch.samples.iter_mut().zip(&states) {
        *sample = RawPhaseSample::from(state);
    }
    twin.classify(&mut batch).expect("the twin runs");

    let mut comparison = TimedComparison::from_args();
    comparison.measure_routine("rule in the kernel", BATCH_SIZE as u64, || {
        twin.run_in_place("classify").expect("the twin runs");
    });
    comparison.measure_routine("rule in userspace", BATCH_SIZE as u64, || {
        for state in &states {
            black_box(classify(&config, black_box(state)));
        }
    });
    println!();
    comparison.print_ratio("rule in the kernel", "rule in userspace");
}

fn random_states() -> Vec<ZernelTaskState> {
    let mut rng = Rng::with_seed(7);
    let state = |pid| ZernelTaskState {
        is_ml_process: true,
        gpu_utilization: rng.u8(0..=100),
        io_wait_fraction: rng.f32(),
        cpu_burst_duration_ns: rng.u64(0..10_000_000),
        last_gpu_sync_ns: 1,
        ..ZernelTaskState::new(pid)
    };
    (0..BATCH_SIZE as u32).map(state).collect()
}
