use zernel_phase::steps::{Launches, StepMark};

use super::*;
use crate::observer::monotonic_ns;
use crate::observer::process::ObservedProcess;
use crate::observer::tenants::TenantId;

const MS: u64 = 1_000_000;

fn symbol_index(name: &str) -> usize {
    let place = SYMBOLS.iter().position(|symbol| symbol.name() == name);
    place.expect("in the table")
}

fn no_launches_like(launches: Launches) -> Launches {
    match launches {
        Launches::Unknown => Launches::Unknown,
        Launches::InWindow(_) => Launches::InWindow(0),
        Launches::Counted(_) => Launches::Counted(0),
    }
}

/// A process with steps of 10 ms that launch 100 times.
struct SimulatedTrainer {
    process: ObservedProcess,
    counters: layout::Counters,
    now_ns: u64,
    launch: usize,
}

impl SimulatedTrainer {
    fn new(launch: &str) -> Self {
        let now_ns = monotonic_ns();
        let mut raw = layout::Process::new_zeroed();
        raw.first_event_ns = now_ns;
        Self {
            process: ObservedProcess::new(&raw, TenantId::default()),
            counters: layout::Counters::new_zeroed(),
            now_ns,
            launch: symbol_index(launch),
        }
    }

    fn make_steps(&mut self, steps: u64, mark: StepMark, launches: Launches) {
        for _ in 0..steps {
            self.now_ns += 10 * MS;
            if mark == StepMark::Optimizer {
                let detector = &mut self.process.steps;
                detector.record_mark(
                    StepMark::Backward,
                    self.now_ns - MS,
                    no_launches_like(launches),
                );
            }
            self.process.steps.record_mark(mark, self.now_ns, launches);
            if launches != Launches::Unknown {
                self.counters.functions[self.launch].calls += 100;
            }
        }
        self.process.call_counts.read_counters(&self.counters);
        let steps = &self.process.steps;
        self.process.call_counts.advance_to(self.now_ns, steps);
    }

    /// Three windows with five steps each, and ten steps before each of them.
    fn sample_three_windows(&mut self, mark: StepMark) {
        for _ in 0..3 {
            self.make_steps(10, mark, Launches::Unknown);
            let from_ns = self.now_ns;
            let steps = &mut self.process.steps;
            let counts = &mut self.process.call_counts;
            counts.open_window(&self.counters, from_ns, steps);
            self.make_steps(5, mark, Launches::InWindow(100));
            let window = (from_ns, self.now_ns);
            self.process.close_window(&self.counters, window, 0.0);
        }
    }

    fn begin_sampling(&mut self) {
        let counts = &mut self.process.call_counts;
        counts.begin_sampling(
            self.launch,
            &self.counters,
            self.now_ns,
            &self.process.steps,
        );
    }

    fn launch_count(&self) -> CallCount {
        self.process.count_calls(|kind| kind == CallKind::Launch)
    }

    fn counted_launches(&self) -> CountedCalls {
        self.process.counted_calls_of(CallKind::Launch)
    }
}

#[test]
fn all_launches_are_estimated_and_only_counted_ones_are_exported() {
    let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
    trainer.make_steps(20, StepMark::Backward, Launches::Counted(100));
    assert_eq!(
        (trainer.launch_count().calls, trainer.launch_count().error),
        (2000, Some(0))
    );
    let before = trainer.counted_launches();
    assert!(!before.was_sampled && (before.seconds - 0.2).abs() < 1e-9);
    trainer.begin_sampling();
    trainer.sample_three_windows(StepMark::Backward);
    // 45 steps were made while launches were sampled, 15 of them in windows.
    let all = trainer.launch_count();
    assert_eq!((all.calls, all.error), (2000 + 4500, Some(100)));
    let counted = trainer.counted_launches();
    assert_eq!(counted.calls, 2000 + 1500);
    assert!((counted.seconds - 0.35).abs() < 1e-3, "{counted:?}");
    let per_step = trainer.process.launches_per_step().expect("steps");
    assert!((per_step.mean - 100.0).abs() < 1e-9);
    let counts = &mut trainer.process.call_counts;
    counts.end_sampling(trainer.launch, trainer.now_ns, &trainer.process.steps);
    trainer.make_steps(10, StepMark::Backward, Launches::Counted(100));
    assert_eq!(trainer.launch_count().calls, 2000 + 4500 + 1000);
    assert_eq!(trainer.counted_launches().calls, 2000 + 1500 + 1000);
}

/// Sampling begins at any moment of a step. The calls of the step in which sampling begins were counted up to that moment,
/// so only the rest of the step is estimated.
#[test]
fn the_step_in_which_sampling_begins_is_not_counted_twice() {
    let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
    trainer.make_steps(20, StepMark::Backward, Launches::Counted(100));
    let step_began_ns = trainer.now_ns;
    trainer.counters.functions[trainer.launch].calls += 70;
    trainer.now_ns += 7 * MS;
    trainer.begin_sampling();
    trainer.now_ns = step_began_ns;
    trainer.sample_three_windows(StepMark::Backward);
    assert_eq!(trainer.launch_count().calls, 2000 + 4500);
}

#[test]
fn a_process_that_begins_while_launches_are_sampled_is_estimated_from_its_first_step_on() {
    let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
    trainer
        .process
        .mark_sampled_from_start(&[trainer.launch], None);
    trainer.make_steps(1, StepMark::Backward, Launches::Unknown);
    trainer.sample_three_windows(StepMark::Backward);
    assert_eq!(trainer.launch_count().calls, 4600);
    assert_eq!(trainer.counted_launches().calls, 1500);
}

#[test]
fn a_process_that_only_launches_graphs_is_counted_exactly() {
    let mut trainer = SimulatedTrainer::new("cuGraphLaunch");
    let kernel = symbol_index("cuLaunchKernel");
    trainer.process.mark_sampled_from_start(&[kernel], None);
    trainer.sample_three_windows(StepMark::Backward);
    assert!(trainer.process.call_counts.launches_only_unsampled());
    trainer.make_steps(10, StepMark::Backward, Launches::Counted(100));
    assert_eq!(trainer.launch_count().error, Some(0));
    assert_eq!(trainer.launch_count().calls, 2500);
    assert_eq!(trainer.counted_launches().calls, 2500);
}

/// The launches of its steps were counted until then, and no window may open before it exits.
#[test]
fn a_process_that_evaluates_when_sampling_begins_has_an_interval() {
    let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
    trainer.make_steps(8, StepMark::Backward, Launches::Counted(100));
    // The step that contains an evaluation is longer, and launches more.
    trainer.now_ns += 300 * MS;
    trainer.make_steps(6, StepMark::Backward, Launches::Counted(100));
    trainer.now_ns += 300 * MS;
    trainer.begin_sampling();
    trainer.make_steps(6, StepMark::Backward, Launches::Unknown);
    let launches = trainer.launch_count();
    assert_eq!(launches.calls, 1400 + 500, "{launches:?}");
    // Whether the launches of the step with the evaluation were made before is unknown, and so is it for the last step.
    assert_eq!(launches.error, Some(200));
}

/// The launches of a process that no window has shown are unknown, not 0.
#[test]
fn a_process_without_a_window_has_no_interval() {
    let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
    trainer
        .process
        .mark_sampled_from_start(&[trainer.launch], None);
    trainer.make_steps(20, StepMark::Backward, Launches::Unknown);
    let launches = trainer.launch_count();
    assert_eq!((launches.calls, launches.error), (0, None));
    let copies = trainer
        .process
        .count_calls(|kind| matches!(kind, CallKind::Copy(_)));
    assert_eq!(
        (copies.calls, copies.error),
        (0, Some(0)),
        "they are not sampled"
    );
}

/// Steps that are counted from another boundary have other launches per step, so each series of steps has its own
/// estimate.
#[test]
fn launches_of_an_earlier_boundary_are_kept() {
    let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
    trainer
        .process
        .mark_sampled_from_start(&[trainer.launch], None);
    trainer.sample_three_windows(StepMark::Backward);
    let before = trainer.launch_count().calls;
    assert_eq!(before, 4500);
    trainer.sample_three_windows(StepMark::Optimizer);
    assert_eq!(trainer.process.steps.restart_count(), 1);
    let after = trainer.launch_count();
    let error = after.error.expect("several windows");
    assert!(after.calls.abs_diff(9000) <= error, "{after:?}");
    assert!(error <= 500, "{after:?}");
}

#[test]
fn a_pause_is_no_time_in_which_anything_was_counted() {
    let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
    trainer.make_steps(10, StepMark::Backward, Launches::Counted(100));
    trainer.process.suspend_counting(&[], trainer.now_ns);
    trainer.now_ns += 1000 * MS;
    trainer.process.resume_counting(trainer.now_ns);
    trainer.make_steps(10, StepMark::Backward, Launches::Counted(100));
    let counted = trainer.counted_launches();
    assert!((counted.seconds - 0.2).abs() < 1e-9, "{counted:?}");
}

#[test]
fn windows_hold_a_few_whole_steps_of_at_most_half_a_second() {
    let window = |step_ms: u64, long_ms: u64| {
        let mut trainer = SimulatedTrainer::new("cuLaunchKernel");
        for number in 0..40 {
            let is_long = number % 5 == 0;
            trainer.now_ns += MS * if is_long { long_ms } else { step_ms };
            let launches = Launches::Counted(1);
            let detector = &mut trainer.process.steps;
            detector.record_mark(StepMark::Backward, trainer.now_ns, launches);
        }
        let length = window_length_for_steps(&trainer.process.steps)?;
        Some(length.as_millis())
    };
    assert_eq!(window(10, 10), Some(42));
    assert_eq!(window(10, 100), Some(140));
    assert_eq!(window(300, 300), Some(500));
    assert_eq!(window(400, 400), None);
    assert_eq!(window(10, 400), None, "a fifth of all steps fit no window");
}
