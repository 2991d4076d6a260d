//! Compares the phase rules in the kernel with those in userspace: on the same states the results must be equal, bit for
//! bit. Mutants show that a change to the C rules is noticed.

mod mutants;
mod states;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use zernel_ebpf::capability::Capability;
use zernel_ebpf::twin::{
    BATCH_SIZE, ClassifyBatch, DetectBatch, PhaseTwin, PublishBatch, TrackBatch,
};
use zernel_lab::VmSpec;
use zernel_phase::shared::{RawPhaseConfig, RawPhaseSample, RawTaskState, raw_event};
use zernel_phase::tracker::TrackerFaults;
use zernel_phase::{
    PhaseDetector, PhaseDetectorConfig, PhaseInterval, PhaseTracker, TaskClass, TrackerConfig,
    WorkloadPhase, ZernelTaskState, classify,
};
use zernel_testkit::needs::bpf;
use zernel_testkit::{root, trial, vm};
use zerocopy::FromZeros;

use states::{
    ThreadKind, any_config, any_event, any_state, any_time, any_u64, change_class_inputs,
    change_phase_inputs, next_event_time, rng,
};

/// 256 batches of 4096: a little over a million states.
const CLASSIFY_BATCHES: usize = 256;
/// Samples of each of 4096 tasks in a row.
const DETECT_ROUNDS: usize = 64;
/// Classes of each of 4096 tasks in a row.
const PUBLISH_ROUNDS: usize = 64;
/// Events of each of 4096 threads in a row: 1.5 million.
const TRACK_ROUNDS: usize = 361;

fn main() -> ExitCode {
    let needs = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    zernel_testkit::main([
        trial("a_million_states_classify_alike", &needs, || {
            let coverage = classify_alike(&load_twin(), CLASSIFY_BATCHES).unwrap();
            let total: usize = coverage.iter().sum();
            assert!(total >= 1_000_000);
            for (phase, hits) in WorkloadPhase::ALL.into_iter().zip(coverage) {
                assert!(hits > total / 100, "{phase} came up only {hits} times");
            }
        }),
        trial("tasks_sampled_in_a_row_move_alike", &needs, || {
            let transitions = detect_alike(&load_twin(), DETECT_ROUNDS).unwrap();
            assert!(
                transitions > BATCH_SIZE as u64,
                "only {transitions} transitions"
            );
        }),
        trial("a_million_events_are_tracked_alike", &needs, || {
            let transitions = track_alike(&load_twin(), TRACK_ROUNDS).unwrap();
            assert!(
                transitions > 100 * BATCH_SIZE as u64,
                "only {transitions} transitions"
            );
        }),
        trial("classes_are_published_alike", &needs, || {
            let coverage = publish_alike(&load_twin(), PUBLISH_ROUNDS).unwrap();
            for (class, hits) in TaskClass::ALL.iter().zip(coverage) {
                assert!(hits > 1_000, "{class} came up only {hits} times");
            }
        }),
        trial(
            "the_twins_agree_on_an_old_kernel",
            &[vm::oldest_kernel_need()],
            the_twins_agree_on_an_old_kernel,
        ),
        trial(
            "every_change_to_the_c_rules_is_noticed",
            &needs,
            every_change_to_the_c_rules_is_noticed,
        ),
    ])
}

/// Runs in a virtual machine those tests of this program that compare kernel and userspace.
fn the_twins_agree_on_an_old_kernel() {
    let own_program = env::current_exe().unwrap();
    let arguments = ["alike", "--test-threads=1"];
    let outcome = VmSpec::new(vm::obtain_kernel_of_version("6.1").unwrap())
        .environment(zernel_testkit::REQUIRE_VARIABLE, "root,bpf")
        .command_timeout(Duration::from_secs(300))
        .run(own_program, arguments)
        .unwrap_or_else(|error| panic!("{error}"));
    let output = String::from_utf8_lossy(&outcome.stdout);
    assert!(outcome.status.success(), "{output}");
    assert!(output.contains("4 passed"), "{output}");
}

fn load_twin() -> PhaseTwin {
    PhaseTwin::load().unwrap()
}

/// Classifies random states on both sides. Returns how many states were classified as each phase.
fn classify_alike(twin: &PhaseTwin, batches: usize) -> Result<[usize; 5], String> {
    let mut rng = rng();
    let mut coverage = [0; 5];
    let mut batch = ClassifyBatch::new_box_zeroed().unwrap();
    for _ in 0..batches {
        let config = any_config(&mut rng);
        let states: Vec<_> = (0..BATCH_SIZE)
            .map(|_| any_state(&mut rng, &config))
            .collect();
        batch.config = RawPhaseConfig::from(&config);
        for (sample, state) in batch.samples.iter_mut().zip(&states) {
            *sample = RawPhaseSample::from(state);
        }
        twin.classify(&mut batch).map_err(|e| e.to_string())?;
        for (state, kernel) in states.iter().zip(batch.phases) {
            let ours = classify(&config, state);
            if ours as u8 != kernel {
                return Err(format!(
                    "{config:?}\n{state:?}\nkernel: {kernel}, ours: {ours}"
                ));
            }
            coverage[usize::from(kernel)] += 1;
        }
    }
    Ok(coverage)
}

/// Samples the same tasks round after round on both sides. Returns the number of phase changes that occurred.
fn detect_alike(twin: &PhaseTwin, rounds: usize) -> Result<u64, String> {
    let mut rng = rng();
    // The kernel's fractions have 16 bits; a threshold that has no more can be met exactly.
    let q16_threshold = rng.u32(1..65536);
    let config = PhaseDetectorConfig {
        io_wait_threshold: q16_threshold as f32 / 65536.0,
        nccl_detection_enabled: true,
        ..Default::default()
    };
    let mut detector = PhaseDetector::new(config.clone());
    let mut batch = DetectBatch::new_box_zeroed().unwrap();
    batch.config = RawPhaseConfig::from(&config);
    for (pid, task) in batch.tasks.iter_mut().enumerate() {
        task.pid = pid as u32;
        task.phase_ns = [rng.u64(..), 0, u64::MAX - rng.u64(0..1 << 20), 0, 1];
    }
    for round in 1..=rounds as u64 {
        let mut expected = Vec::with_capacity(BATCH_SIZE);
        for (task, now_ns) in batch.tasks.iter_mut().zip(&mut batch.now_ns) {
            *now_ns = any_time(&mut rng, round);
            if rng.u8(0..4) == 0 {
                change_phase_inputs(&mut rng, task, &config, q16_threshold);
            }
            expected.push((task.phase_word.sequence(), ZernelTaskState::from(&*task)));
        }
        twin.detect(&mut batch).map_err(|e| e.to_string())?;
        for ((task, now_ns), (sequence, mut state)) in
            batch.tasks.iter().zip(&batch.now_ns).zip(expected)
        {
            let reported = detector.detect(&state);
            let moved = reported != state.current_phase;
            if moved {
                state.transition_phase(reported, now_ns & !1023);
            }
            let kernel = ZernelTaskState::from(task);
            let sequence = (sequence + u16::from(moved)) % 4096;
            if kernel != state || task.phase_word.sequence() != sequence {
                return Err(format!(
                    "round {round}\nkernel: {kernel:?}\nours:   {state:?}"
                ));
            }
        }
    }
    Ok(detector.transition_count)
}

/// Feeds the same threads event after event on both sides. Returns the number of phase intervals that the trackers
/// closed.
fn track_alike(twin: &PhaseTwin, rounds: usize) -> Result<u64, String> {
    let mut rng = rng();
    let mut batch = TrackBatch::new_box_zeroed().unwrap();
    let config = TrackerConfig {
        sync_max_ns: 60_000,
        collective_max_ns: 50_000,
        blocked_max_ns: 70_000,
        loading_max_ns: 40_000,
        launching_max_ns: 30_000,
        optimizer_max_ns: 20_000,
        optimizer_launch_max_ns: 5_000,
        short_wait_max_ns: 3_000,
    };
    batch.config = config;
    let mut ours: Vec<(PhaseTracker, RoundedSums)> = Vec::new();
    for (index, at_ns) in batch.at_ns.iter_mut().enumerate() {
        *at_ns = 1_000_000 + index as u64;
        let tracker = PhaseTracker::new(config, *at_ns);
        ours.push((tracker, RoundedSums::default()));
    }
    twin.track(&mut batch).map_err(|e| e.to_string())?;
    for round in 1..rounds {
        for (index, (tracker, sums)) in ours.iter_mut().enumerate() {
            let event = any_event(&mut rng, ThreadKind::from_index(index));
            batch.at_ns[index] = next_event_time(&mut rng, batch.at_ns[index]);
            batch.events[index] = raw_event(event);
            tracker.observe(batch.at_ns[index], event, sums);
        }
        twin.track(&mut batch).map_err(|e| e.to_string())?;
        for (task, (tracker, sums)) in batch.tasks.iter().zip(&ours) {
            let kernel = (tracked(task), task.phase_ns);
            let expected = (tracked_by_us(tracker), sums.ns);
            if kernel != expected {
                return Err(format!(
                    "round {round}\nkernel: {kernel:?}\nours:   {expected:?}"
                ));
            }
        }
    }
    Ok(ours.iter().map(|(_, sums)| sums.intervals).sum())
}

/// Publishes the classes of the same tasks round after round on both sides. Returns how often each class occurred.
fn publish_alike(twin: &PhaseTwin, rounds: usize) -> Result<[usize; 4], String> {
    let mut rng = rng();
    let mut coverage = [0; 4];
    let mut batch = PublishBatch::new_box_zeroed().unwrap();
    for round in 1..=rounds as u64 {
        let mut expected = Vec::with_capacity(BATCH_SIZE);
        for (index, task) in batch.tasks.iter_mut().enumerate() {
            change_class_inputs(&mut rng, task);
            batch.now_ns[index] = any_time(&mut rng, round);
            let mut ours = *task;
            ours.publish_class(batch.now_ns[index]);
            // Half of the reads happen before the deadline of the class.
            let any_ns = any_u64(&mut rng, ours.class_until_ns);
            batch.read_ns[index] = if rng.bool() { 0 } else { any_ns };
            let word = ours.class_word_at(batch.read_ns[index]);
            coverage[word.class() as usize] += 1;
            expected.push((ours, word));
        }
        twin.publish(&mut batch).map_err(|e| e.to_string())?;
        let kernel = batch.tasks.iter().zip(&batch.words);
        for ((task, word), (ours, our_word)) in kernel.zip(&expected) {
            if task != ours || word != our_word {
                return Err(format!(
                    "kernel: {word:?} {task:?}\nours:   {our_word:?} {ours:?}"
                ));
            }
        }
    }
    Ok(coverage)
}

/// Sums of intervals whose ends are rounded as the kernel rounds them.
#[derive(Default)]
struct RoundedSums {
    ns: [u64; 5],
    intervals: u64,
}

impl Extend<PhaseInterval> for RoundedSums {
    fn extend<I: IntoIterator<Item = PhaseInterval>>(&mut self, intervals: I) {
        for interval in intervals {
            let rounded = (interval.end_ns & !1023) - (interval.start_ns & !1023);
            self.ns[interval.phase as usize] += rounded;
            self.intervals += 1;
        }
    }
}

/// Values that must be equal after each event: phase, deadline and faults.
fn tracked(task: &RawTaskState) -> (WorkloadPhase, u64, TrackerFaults) {
    let tracker = &task.tracker;
    let faults = TrackerFaults {
        lost_leave_events: tracker.lost_leave_events,
        lost_enter_events: tracker.lost_enter_events,
        late_events: tracker.late_events,
        expired_phases: tracker.expired_phases,
    };
    (task.phase_word.phase(), tracker.deadline_ns, faults)
}

fn tracked_by_us(tracker: &PhaseTracker) -> (WorkloadPhase, u64, TrackerFaults) {
    (tracker.phase_at(0), tracker.deadline_ns(), tracker.faults())
}

fn every_change_to_the_c_rules_is_noticed() {
    for (header, from, to) in mutants::MUTANTS {
        let object = mutants::build_mutant(header, from, to);
        let mutant = PhaseTwin::load_object(&object).unwrap();
        let survived = classify_alike(&mutant, 32).is_ok()
            && detect_alike(&mutant, 16).is_ok()
            && publish_alike(&mutant, 8).is_ok()
            && track_alike(&mutant, 1024).is_ok();
        assert!(
            !survived,
            "nobody noticed that {header} says {to:?} instead of {from:?}"
        );
    }
}
