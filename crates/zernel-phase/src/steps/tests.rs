use super::*;

const MS: u64 = 1_000_000;

/// A simulated training process that makes marks.
struct TrainingLoop {
    detector: StepDetector,
    now_ns: u64,
    collected: Vec<Step>,
    restarts: u32,
    seen: u64,
}

impl TrainingLoop {
    fn new() -> Self {
        Self {
            detector: StepDetector::default(),
            now_ns: 5_000 * MS,
            collected: Vec::new(),
            restarts: 0,
            seen: 0,
        }
    }

    fn mark(&mut self, mark: StepMark, launches: u32, after_ns: u64) {
        self.now_ns += after_ns;
        self.detector
            .record_mark(mark, self.now_ns, Launches::Counted(launches));
    }

    /// Collects the steps since the last call, as a reader of the detector does.
    fn collect_new_steps(&mut self) {
        if self.restarts != self.detector.restart_count() {
            self.restarts = self.detector.restart_count();
            self.collected.clear();
            self.seen = 0;
        }
        let new = (self.detector.step_count() - self.seen) as usize;
        let recent = self.detector.recent_steps();
        let from = recent.len().saturating_sub(new);
        self.collected.extend(recent.range(from..));
        self.seen = self.detector.step_count();
    }

    fn summary(&mut self) -> StepSummary {
        self.collect_new_steps();
        let boundary = self.detector.boundary_mark().expect("a boundary");
        StepSummary::from_whole_run(&self.collected, boundary).expect("steps")
    }

    /// Moves a model to the device as PyTorch does: copy, wait, copy, wait.
    fn load_model(&mut self) {
        for _ in 0..300 {
            self.mark(StepMark::CopyIn, 0, MS / 20);
            self.mark(StepMark::Wait, 0, MS / 20);
        }
    }

    /// Makes the marks of a PyTorch step: a batch of two pageable tensors, forward, backward,
    /// optimizer, loss.
    fn torch_step(&mut self, accumulated: usize, scale: u64) {
        self.make_gradients(accumulated, scale);
        self.update(scale);
    }

    fn make_gradients(&mut self, accumulated: usize, scale: u64) {
        for _ in 0..accumulated {
            for _ in 0..2 {
                self.mark(StepMark::CopyIn, 0, MS / 10 * scale);
                self.mark(StepMark::Wait, 0, MS / 10 * scale);
            }
            self.mark(StepMark::Backward, 100, 3 * MS * scale);
        }
        for _ in 0..6 {
            self.mark(StepMark::Reduce, 20, MS / 2 * scale);
        }
    }

    fn update(&mut self, scale: u64) {
        self.mark(StepMark::Optimizer, 100, MS * scale);
        // A gradient scaler checks in between whether the gradients are finite.
        self.mark(StepMark::Wait, 5, MS / 10 * scale);
        self.mark(StepMark::Optimizer, 5, MS / 10 * scale);
        self.mark(StepMark::CopyOut, 50, MS / 10 * scale);
        self.mark(StepMark::Wait, 0, 2 * MS * scale);
    }

    fn evaluate(&mut self, batches: usize) {
        for _ in 0..batches {
            self.mark(StepMark::CopyIn, 0, MS / 10);
            self.mark(StepMark::Wait, 0, MS / 10);
            self.mark(StepMark::CopyOut, 100, 2 * MS);
            self.mark(StepMark::Wait, 0, MS / 10);
        }
    }
}

#[test]
fn optimizer_marks_separate_steps() {
    for accumulated in [1, 4] {
        let mut run = TrainingLoop::new();
        run.load_model();
        let mut stamps = Vec::new();
        for _ in 0..100 {
            run.torch_step(accumulated, 1);
            stamps.push(run.now_ns);
            run.collect_new_steps();
        }
        let summary = run.summary();
        assert_eq!(run.detector.boundary_mark(), Some(StepMark::Optimizer));
        assert_eq!(run.detector.step_count(), 100);
        assert_eq!(summary.steps, 99, "the start of the first step is unknown");
        assert_eq!(summary.median_ns, stamps[1] - stamps[0]);
        assert_eq!(summary.p99_ns, stamps[1] - stamps[0]);
        assert_eq!((summary.warm_up, summary.pauses.len()), (0, 0));
    }
}

#[test]
fn warm_up_evaluation_and_checkpoints_are_not_ordinary_steps() {
    let mut run = TrainingLoop::new();
    run.load_model();
    let mut usual_ns = 0;
    for step in 0..200 {
        let began_ns = run.now_ns;
        let is_warm_up = step < 3;
        run.torch_step(1, if is_warm_up { 20 } else { 1 });
        usual_ns = run.now_ns - began_ns;
        match step {
            60 | 120 => run.evaluate(50),
            150 => {
                (0..30).for_each(|_| run.mark(StepMark::CopyOut, 0, MS));
                run.mark(StepMark::Wait, 0, 800 * MS);
            }
            180 => run.now_ns += 100 * MS,
            _ => {}
        }
        run.collect_new_steps();
    }
    let summary = run.summary();
    assert_eq!(run.detector.step_count(), 200);
    assert_eq!((summary.median_ns, summary.p99_ns), (usual_ns, usual_ns));
    // The start of the first step is unknown, and the end of the third falls into the interval of
    // the fourth.
    assert_eq!(summary.warm_up, 3);
    assert_eq!(summary.pauses.len(), 3, "{summary:?}");
    assert_eq!(summary.pauses[0].duration_ns, 50 * 23 * MS / 10);
    assert_eq!(summary.pauses[2].duration_ns, 830 * MS);
    // The marks are the usual ones and only late, so this is a stall and an ordinary step.
    assert_eq!(summary.stalls.len(), 1);
    assert_eq!(summary.longest_ns, usual_ns + 100 * MS);
}

#[test]
fn gradient_reductions_separate_steps_without_optimizer_marks() {
    let mut run = TrainingLoop::new();
    run.load_model();
    for _ in 0..50 {
        for _ in 0..4 {
            run.mark(StepMark::CopyIn, 0, MS);
            run.mark(StepMark::Wait, 40, 5 * MS);
        }
        (0..8).for_each(|_| run.mark(StepMark::Reduce, 3, MS / 4));
        run.mark(StepMark::Wait, 10, MS);
    }
    assert_eq!(run.detector.boundary_mark(), Some(StepMark::Reduce));
    assert_eq!(run.detector.step_count(), 50);
    assert_eq!(run.summary().median_ns, 27 * MS);
}

#[test]
fn collectives_of_a_sharded_model_do_not_separate_steps() {
    let mut run = TrainingLoop::new();
    for _ in 0..50 {
        run.mark(StepMark::CopyIn, 0, MS);
        run.mark(StepMark::Backward, 100, 3 * MS);
        for _ in 0..10 {
            run.mark(StepMark::Reduce, 10, MS / 2);
            run.mark(StepMark::Wait, 10, MS / 2);
        }
    }
    assert_eq!(run.detector.boundary_mark(), Some(StepMark::Backward));
    run.collect_new_steps();
    assert_eq!(run.summary().median_ns, 14 * MS);
}

#[test]
fn batch_copies_separate_steps_and_few_launches_reveal_evaluation() {
    let mut run = TrainingLoop::new();
    run.load_model();
    for step in 0..100 {
        // Two tensors without a launch between them.
        run.mark(StepMark::CopyIn, 0, MS);
        run.mark(StepMark::Wait, 0, MS);
        run.mark(StepMark::CopyIn, 0, MS);
        run.mark(StepMark::Wait, 90, 7 * MS);
        if step % 25 == 24 {
            for _ in 0..10 {
                run.mark(StepMark::CopyIn, 0, MS);
                run.mark(StepMark::Wait, 30, 3 * MS);
            }
        }
        run.collect_new_steps();
    }
    assert_eq!(run.detector.boundary_mark(), Some(StepMark::CopyIn));
    let summary = run.summary();
    assert_eq!(summary.median_ns, 10 * MS);
    // The copy of an evaluation batch ends the step before it.
    assert_eq!(summary.steps, 100);
    assert_eq!(summary.pauses.len(), 4);
    assert_eq!(summary.pauses[0].duration_ns, 40 * MS);
}

#[test]
fn the_only_kind_of_mark_separates_steps() {
    for only in [StepMark::Backward, StepMark::Graph, StepMark::Wait] {
        let mut run = TrainingLoop::new();
        for _ in 0..200 {
            run.mark(only, 10, 5 * MS);
            run.collect_new_steps();
        }
        assert_eq!(run.detector.boundary_mark(), Some(only));
        assert_eq!(run.summary().median_ns, 5 * MS);
    }
}

#[test]
fn an_equally_frequent_mark_replaces_a_lost_boundary() {
    for (accumulated, substitute) in [(1, StepMark::Backward), (4, StepMark::Reduce)] {
        // The boundary is lost between two steps, or in the middle of one.
        for is_amid in [false, true] {
            let mut run = TrainingLoop::new();
            run.load_model();
            for _ in 0..50 {
                run.torch_step(accumulated, 1);
                run.collect_new_steps();
            }
            let restarts = run.detector.restart_count();
            if is_amid {
                // Neither kind of mark ends this step.
                run.make_gradients(accumulated, 1);
                run.detector.ignore_marks(&[StepMark::Optimizer]);
                run.update(1);
            }
            run.detector.ignore_marks(&[StepMark::Optimizer]);
            for _ in 0..50 {
                run.torch_step(accumulated, 1);
                run.collect_new_steps();
            }
            assert_eq!(run.detector.boundary_mark(), Some(substitute));
            assert_eq!(run.detector.restart_count(), restarts);
            assert_eq!(run.detector.step_count(), 100);
            let summary = run.summary();
            let shortest = run.collected.iter().map(Step::duration_ns).min();
            assert_eq!(
                shortest,
                Some(summary.median_ns),
                "no part of a step counts as a step"
            );
        }
    }
}

#[test]
fn an_empty_list_has_no_summary() {
    assert_eq!(StepSummary::from_whole_run(&[], StepMark::Wait), None);
    let mut detector = StepDetector::default();
    detector.record_mark(StepMark::Optimizer, 5, Launches::Unknown);
    assert_eq!((detector.boundary_mark(), detector.step_count()), (None, 0));
}

#[test]
fn late_marks_never_give_negative_durations() {
    let mut detector = StepDetector::default();
    for at_ns in [50, 40, 60, 10, u64::MAX, 0] {
        detector.record_mark(StepMark::Backward, at_ns, Launches::Counted(u32::MAX));
    }
    let durations = detector.recent_steps().iter().map(Step::duration_ns);
    assert!(durations.eq([0, 20, 0, u64::MAX - 10, 0]));
}

#[test]
fn the_list_of_recent_steps_is_bounded() {
    let mut run = TrainingLoop::new();
    (0..10_000).for_each(|_| run.torch_step(1, 1));
    assert_eq!(run.detector.recent_steps().len(), MAX_RECENT_STEPS);
    assert_eq!(run.detector.step_count(), 10_000);
}

#[test]
fn a_gap_does_not_become_a_long_step() {
    let mut run = TrainingLoop::new();
    (0..20).for_each(|_| run.torch_step(1, 1));
    run.detector.record_gap(&[StepMarkClass::GpuUse]);
    run.torch_step(1, 1);
    assert_eq!(run.detector.gap_count(), 0, "optimizer marks have no gap");
    run.detector.record_gap(&[StepMarkClass::Training]);
    run.now_ns += 5_000 * MS;
    (0..20).for_each(|_| run.torch_step(1, 1));
    let summary = run.summary();
    assert_eq!(
        (run.detector.step_count(), run.detector.gap_count()),
        (41, 1)
    );
    assert_eq!(summary.steps, 39);
    assert_eq!(summary.longest_ns, summary.median_ns);
}

#[test]
fn missing_gpu_use_marks_do_not_hide_steps() {
    let mut run = TrainingLoop::new();
    for _ in 0..20 {
        run.detector.record_gap(&[StepMarkClass::GpuUse]);
        (0..4).for_each(|_| run.mark(StepMark::Reduce, 10, MS));
        run.now_ns += 6 * MS;
    }
    assert_eq!(run.detector.step_count(), 20);
    assert_eq!(run.summary().median_ns, 10 * MS);
}

#[test]
fn graph_replays_become_the_boundary_when_training_marks_stop() {
    let mut run = TrainingLoop::new();
    (0..11).for_each(|_| run.torch_step(1, 1));
    for _ in 0..200 {
        run.mark(StepMark::CopyIn, 0, MS);
        run.mark(StepMark::Graph, 1, 4 * MS);
        run.collect_new_steps();
    }
    assert_eq!(run.detector.boundary_mark(), Some(StepMark::Graph));
    assert_eq!(run.summary().median_ns, 5 * MS);
    assert!(run.detector.step_count() >= 199);
}

#[test]
fn the_rarer_of_two_equal_kinds_is_the_boundary() {
    // Gradients are reduced after every second backward pass; then twice per backward pass.
    for (backwards, reduces, rarer) in [(2, 1, StepMark::Reduce), (1, 2, StepMark::Backward)] {
        let mut run = TrainingLoop::new();
        for _ in 0..100 {
            for _ in 0..backwards {
                run.mark(StepMark::CopyIn, 0, MS);
                run.mark(StepMark::Backward, 9, MS);
            }
            for _ in 0..reduces {
                run.mark(StepMark::Reduce, 3, MS);
                run.mark(StepMark::Wait, 3, MS);
            }
            run.collect_new_steps();
        }
        assert_eq!(run.detector.boundary_mark(), Some(rarer));
        run.collect_new_steps();
        let step_ns = 2 * (backwards + reduces) * MS;
        assert_eq!(run.summary().median_ns, step_ns);
    }
}

#[test]
fn a_substitute_boundary_is_kept() {
    let step = |run: &mut TrainingLoop| {
        (0..4).for_each(|_| run.mark(StepMark::Backward, 100, 3 * MS));
        run.mark(StepMark::Optimizer, 100, MS);
        run.mark(StepMark::Wait, 0, MS);
        run.collect_new_steps();
    };
    let mut run = TrainingLoop::new();
    (0..1000).for_each(|_| step(&mut run));
    let restarts = run.detector.restart_count();
    run.detector
        .ignore_marks(&[StepMark::Optimizer, StepMark::CopyOut]);
    (0..1000).for_each(|_| step(&mut run));
    assert_eq!(run.detector.boundary_mark(), Some(StepMark::Wait));
    assert_eq!(
        (run.detector.step_count(), run.detector.restart_count()),
        (2000, restarts)
    );
    assert_eq!(run.summary().longest_ns, 14 * MS);
}

#[test]
fn a_mark_not_seen_recently_is_no_substitute() {
    let step = |run: &mut TrainingLoop| {
        for _ in 0..150 {
            run.mark(StepMark::Reduce, 1, MS / 10);
            run.mark(StepMark::Wait, 1, MS / 10);
        }
        run.mark(StepMark::Backward, 1, MS);
        run.mark(StepMark::Optimizer, 1, MS);
    };
    let mut run = TrainingLoop::new();
    (0..10).for_each(|_| run.mark(StepMark::CopyOut, 1, MS));
    (0..100).for_each(|_| step(&mut run));
    run.detector.ignore_marks(&[StepMark::Optimizer]);
    assert_eq!(run.detector.boundary_mark(), Some(StepMark::Backward));
}

#[test]
fn a_mark_that_stops_does_not_turn_a_stall_into_a_pause() {
    let mut run = TrainingLoop::new();
    for step in 0..200 {
        run.now_ns += if step == 5 { 100 * MS } else { 0 };
        run.mark(StepMark::Backward, 100, 3 * MS);
        if step < 10 {
            run.mark(StepMark::CopyOut, 0, MS);
        }
        run.collect_new_steps();
    }
    let summary = run.summary();
    assert_eq!((summary.pauses.len(), summary.stalls.len()), (0, 1));
}

#[test]
fn without_a_substitute_the_count_restarts() {
    let accumulate = |run: &mut TrainingLoop| {
        (0..4).for_each(|_| run.mark(StepMark::Backward, 100, 3 * MS));
        run.mark(StepMark::Optimizer, 100, MS);
    };
    let mut run = TrainingLoop::new();
    (0..40).for_each(|_| accumulate(&mut run));
    let restarts = run.detector.restart_count();
    run.detector.ignore_marks(&[StepMark::Optimizer]);
    assert_eq!(run.detector.boundary_mark(), None);
    assert_eq!(
        (run.detector.step_count(), run.detector.restart_count()),
        (0, restarts + 1)
    );
    for _ in 0..40 {
        accumulate(&mut run);
        run.collect_new_steps();
    }
    assert_eq!(run.detector.boundary_mark(), Some(StepMark::Backward));
    assert_eq!(run.summary().median_ns, 3 * MS);
    assert_eq!(
        run.summary().longest_ns,
        4 * MS,
        "no step mixes both boundaries"
    );
}

#[test]
fn steps_that_lie_whole_in_a_window_have_exact_launches() {
    let mut run = TrainingLoop::new();
    for step in 0..60 {
        // A window is open for six steps out of twenty.
        let launches = match step % 20 {
            0..6 => Launches::InWindow(100 + step % 3),
            _ => Launches::Unknown,
        };
        run.now_ns += 10 * MS;
        run.detector
            .record_mark(StepMark::Backward, run.now_ns, launches);
    }
    let steps = run.detector.take_window_steps();
    // The first three marks made it the boundary.
    let launches: Vec<u32> = steps.iter().map(|step| step.launches).collect();
    let expected = (3..6).chain(20..26).chain(40..46);
    assert!(launches.into_iter().eq(expected.map(|step| 100 + step % 3)));
    assert!(steps.iter().all(|step| step.duration_ns == 10 * MS));
    assert_eq!(run.detector.take_window_steps(), []);
    let mut recent = run.detector.recent_steps().iter();
    assert!(recent.all(|step| step.launches.is_none()));
    // Launches that are counted all the time are in the steps themselves.
    (0..20).for_each(|_| run.mark(StepMark::Backward, 100, MS));
    assert_eq!(run.detector.take_window_steps(), []);
}

#[test]
fn missing_marks_do_not_turn_a_stall_into_a_pause() {
    let mut run = TrainingLoop::new();
    for step in 0..120 {
        // The copies of a checkpoint fill the buffer: the marks of the rest of its step and of the next
        // step are lost.
        let (copies, is_complete, late_ms) = match step {
            50 => (1000, false, 150),
            51 => (0, false, 40),
            _ => (2, true, 0),
        };
        for _ in 0..copies {
            run.mark(StepMark::CopyOut, 1, MS / 10);
            run.mark(StepMark::Wait, 1, MS / 10);
        }
        if !is_complete {
            run.detector.record_gap(&[StepMarkClass::GpuUse]);
        }
        run.mark(StepMark::Reduce, 30, (10 + late_ms) * MS);
        run.collect_new_steps();
    }
    let summary = run.summary();
    assert_eq!(run.detector.step_count(), 120);
    assert_eq!((summary.pauses.len(), summary.stalls.len()), (1, 1));
}
