use super::*;

const MS: u64 = 1_000_000;

/// A process that trains, as its marks show it.
struct Loop {
    detector: StepDetector,
    now_ns: u64,
    collected: Vec<Step>,
    restarts: u32,
    seen: u64,
}

impl Loop {
    fn new() -> Self {
        Self {
            detector: StepDetector::default(),
            now_ns: 5_000 * MS,
            collected: Vec::new(),
            restarts: 0,
            seen: 0,
        }
    }

    fn does(&mut self, mark: Mark, launches: u32, after_ns: u64) {
        self.now_ns += after_ns;
        self.detector
            .mark(mark, self.now_ns, Launches::Counted(launches));
    }

    /// Takes the steps that are new, as a reader does that looks now and then.
    fn look(&mut self) {
        if self.restarts != self.detector.restarts() {
            self.restarts = self.detector.restarts();
            self.collected.clear();
            self.seen = 0;
        }
        let new = (self.detector.count() - self.seen) as usize;
        let recent = self.detector.recent();
        let from = recent.len().saturating_sub(new);
        self.collected.extend(recent.range(from..));
        self.seen = self.detector.count();
    }

    fn summary(&mut self) -> Summary {
        self.look();
        let boundary = self.detector.boundary().expect("a boundary");
        Summary::of(&self.collected, boundary).expect("steps")
    }

    /// As PyTorch moves a model to the device: copy, wait, copy, wait.
    fn load_model(&mut self) {
        for _ in 0..300 {
            self.does(Mark::CopyIn, 0, MS / 20);
            self.does(Mark::Wait, 0, MS / 20);
        }
    }

    /// One step of PyTorch: the batch in two tensors of pageable memory, forward, backward, optimizer, loss.
    fn torch_step(&mut self, accumulated: usize, scale: u64) {
        self.make_gradients(accumulated, scale);
        self.update(scale);
    }

    fn make_gradients(&mut self, accumulated: usize, scale: u64) {
        for _ in 0..accumulated {
            for _ in 0..2 {
                self.does(Mark::CopyIn, 0, MS / 10 * scale);
                self.does(Mark::Wait, 0, MS / 10 * scale);
            }
            self.does(Mark::Backward, 100, 3 * MS * scale);
        }
        for _ in 0..6 {
            self.does(Mark::Reduce, 20, MS / 2 * scale);
        }
    }

    fn update(&mut self, scale: u64) {
        self.does(Mark::Optimizer, 100, MS * scale);
        // A scaler asks whether the gradients were finite in between.
        self.does(Mark::Wait, 5, MS / 10 * scale);
        self.does(Mark::Optimizer, 5, MS / 10 * scale);
        self.does(Mark::CopyOut, 50, MS / 10 * scale);
        self.does(Mark::Wait, 0, 2 * MS * scale);
    }

    fn evaluate(&mut self, batches: usize) {
        for _ in 0..batches {
            self.does(Mark::CopyIn, 0, MS / 10);
            self.does(Mark::Wait, 0, MS / 10);
            self.does(Mark::CopyOut, 100, 2 * MS);
            self.does(Mark::Wait, 0, MS / 10);
        }
    }
}

#[test]
fn the_optimizer_separates_steps() {
    for accumulated in [1, 4] {
        let mut run = Loop::new();
        run.load_model();
        let mut stamps = Vec::new();
        for _ in 0..100 {
            run.torch_step(accumulated, 1);
            stamps.push(run.now_ns);
            run.look();
        }
        let summary = run.summary();
        assert_eq!(run.detector.boundary(), Some(Mark::Optimizer));
        assert_eq!(run.detector.count(), 100);
        assert_eq!(summary.steps, 99, "the first has no beginning");
        assert_eq!(summary.median_ns, stamps[1] - stamps[0]);
        assert_eq!(summary.p99_ns, stamps[1] - stamps[0]);
        assert_eq!((summary.warm_up, summary.pauses.len()), (0, 0));
    }
}

#[test]
fn warm_up_evaluation_and_checkpoints_are_no_steps() {
    let mut run = Loop::new();
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
                (0..30).for_each(|_| run.does(Mark::CopyOut, 0, MS));
                run.does(Mark::Wait, 0, 800 * MS);
            }
            180 => run.now_ns += 100 * MS,
            _ => {}
        }
        run.look();
    }
    let summary = run.summary();
    assert_eq!(run.detector.count(), 200);
    assert_eq!((summary.median_ns, summary.p99_ns), (usual_ns, usual_ns));
    // The first step has no beginning, and the end of the third is in the interval of the fourth.
    assert_eq!(summary.warm_up, 3);
    assert_eq!(summary.pauses.len(), 3, "{summary:?}");
    assert_eq!(summary.pauses[0].duration_ns, 50 * 23 * MS / 10);
    assert_eq!(summary.pauses[2].duration_ns, 830 * MS);
    // The same marks, and only late: that is a stall, and among the steps.
    assert_eq!(summary.stalls.len(), 1);
    assert_eq!(summary.longest_ns, usual_ns + 100 * MS);
}

#[test]
fn without_an_optimizer_gradients_being_reduced_do() {
    let mut run = Loop::new();
    run.load_model();
    for _ in 0..50 {
        for _ in 0..4 {
            run.does(Mark::CopyIn, 0, MS);
            run.does(Mark::Wait, 40, 5 * MS);
        }
        (0..8).for_each(|_| run.does(Mark::Reduce, 3, MS / 4));
        run.does(Mark::Wait, 10, MS);
    }
    assert_eq!(run.detector.boundary(), Some(Mark::Reduce));
    assert_eq!(run.detector.count(), 50);
    assert_eq!(run.summary().median_ns, 27 * MS);
}

#[test]
fn collectives_of_a_sharded_model_are_no_steps() {
    let mut run = Loop::new();
    for _ in 0..50 {
        run.does(Mark::CopyIn, 0, MS);
        run.does(Mark::Backward, 100, 3 * MS);
        for _ in 0..10 {
            run.does(Mark::Reduce, 10, MS / 2);
            run.does(Mark::Wait, 10, MS / 2);
        }
    }
    assert_eq!(run.detector.boundary(), Some(Mark::Backward));
    run.look();
    assert_eq!(run.summary().median_ns, 14 * MS);
}

#[test]
fn without_any_mark_of_training_batches_do_and_evaluation_is_told_by_its_launches() {
    let mut run = Loop::new();
    run.load_model();
    for step in 0..100 {
        // Two tensors, no launch between them.
        run.does(Mark::CopyIn, 0, MS);
        run.does(Mark::Wait, 0, MS);
        run.does(Mark::CopyIn, 0, MS);
        run.does(Mark::Wait, 90, 7 * MS);
        if step % 25 == 24 {
            for _ in 0..10 {
                run.does(Mark::CopyIn, 0, MS);
                run.does(Mark::Wait, 30, 3 * MS);
            }
        }
        run.look();
    }
    assert_eq!(run.detector.boundary(), Some(Mark::CopyIn));
    let summary = run.summary();
    assert_eq!(summary.median_ns, 10 * MS);
    // The batch of an evaluation ends the step before it.
    assert_eq!(summary.steps, 100);
    assert_eq!(summary.pauses.len(), 4);
    assert_eq!(summary.pauses[0].duration_ns, 40 * MS);
}

#[test]
fn what_is_all_there_is_separates_steps() {
    for only in [Mark::Backward, Mark::Graph, Mark::Wait] {
        let mut run = Loop::new();
        for _ in 0..200 {
            run.does(only, 10, 5 * MS);
            run.look();
        }
        assert_eq!(run.detector.boundary(), Some(only));
        assert_eq!(run.summary().median_ns, 5 * MS);
    }
}

#[test]
fn what_came_as_often_takes_the_place_of_what_is_no_longer_seen() {
    for (accumulated, substitute) in [(1, Mark::Backward), (4, Mark::Reduce)] {
        // The boundary is lost between two steps, and in the middle of one.
        for is_amid in [false, true] {
            let mut run = Loop::new();
            run.load_model();
            for _ in 0..50 {
                run.torch_step(accumulated, 1);
                run.look();
            }
            let restarts = run.detector.restarts();
            if is_amid {
                // This step is the one that neither kind ends.
                run.make_gradients(accumulated, 1);
                run.detector.distrust(&[Mark::Optimizer]);
                run.update(1);
            }
            run.detector.distrust(&[Mark::Optimizer]);
            for _ in 0..50 {
                run.torch_step(accumulated, 1);
                run.look();
            }
            assert_eq!(run.detector.boundary(), Some(substitute));
            assert_eq!(run.detector.restarts(), restarts);
            assert_eq!(run.detector.count(), 100);
            let summary = run.summary();
            let shortest = run.collected.iter().map(Step::duration_ns).min();
            assert_eq!(
                shortest,
                Some(summary.median_ns),
                "no part of a step is one"
            );
        }
    }
}

/// Steps that take so many milliseconds, one after the other.
fn steps_of(milliseconds: impl IntoIterator<Item = u64>) -> Vec<Step> {
    let mut now_ns = 0;
    let step = |duration: u64| {
        let begin_ns = now_ns;
        now_ns += duration * MS;
        Step {
            begin_ns,
            end_ns: now_ns,
            launches: None,
            marks: [0, 1, 0, 0, 0, 0, 0],
            lacks_marks: false,
        }
    };
    milliseconds.into_iter().map(step).collect()
}

#[test]
fn a_rhythm_is_no_stall_and_a_stall_in_it_is_one() {
    let stalls = |period: u64, stalled: &[u64]| {
        let milliseconds = (1..=200).map(|number| match number {
            _ if stalled.contains(&number) => 120,
            _ if number % period == 0 => 50,
            _ => 10,
        });
        let steps = steps_of(milliseconds);
        let summary = Summary::of(&steps, Mark::Backward).expect("steps");
        assert_eq!(summary.median_ns, 10 * MS);
        summary.stalls
    };
    // As many loaders take turns, each of which delays a step.
    for period in [2, 3, 8] {
        assert_eq!(stalls(period, &[]), []);
        for stalled in [&[102][..], &[80, 90, 102]] {
            let durations: Vec<u64> = stalls(period, stalled)
                .iter()
                .map(|stall| stall.duration_ns)
                .collect();
            assert_eq!(durations, vec![120 * MS; stalled.len()]);
        }
    }
    // Without a rhythm, three times the median is enough.
    assert_eq!(stalls(201, &[101]).len(), 1);
}

#[test]
fn only_the_first_steps_of_all_are_a_warm_up() {
    let steps = steps_of([50, 50].into_iter().chain([10; 40]));
    let summaries = [Summary::of, Summary::of_later].map(|of| of(&steps, Mark::Backward).unwrap());
    let told = |summary: &Summary| (summary.warm_up, summary.stalls.len(), summary.begin_ns);
    assert_eq!(
        summaries.each_ref().map(told),
        [(2, 0, 100 * MS), (0, 2, 0)]
    );
}

#[test]
fn one_of_few_steps_can_be_a_stall() {
    for count in 3..=12 {
        let steps = steps_of((0..count).map(|number| if number == 1 { 50 } else { 10 }));
        let summary = Summary::of(&steps, Mark::Backward).expect("steps");
        assert_eq!(summary.stalls.len(), 1, "{count}");
    }
}

#[test]
fn no_steps_have_no_summary() {
    assert_eq!(Summary::of(&[], Mark::Wait), None);
    let mut detector = StepDetector::default();
    detector.mark(Mark::Optimizer, 5, Launches::Unknown);
    assert_eq!((detector.boundary(), detector.count()), (None, 0));
}

#[test]
fn marks_that_come_late_do_no_harm() {
    let mut detector = StepDetector::default();
    for at_ns in [50, 40, 60, 10, u64::MAX, 0] {
        detector.mark(Mark::Backward, at_ns, Launches::Counted(u32::MAX));
    }
    let durations = detector.recent().iter().map(Step::duration_ns);
    assert!(durations.eq([0, 20, 0, u64::MAX - 10, 0]));
}

#[test]
fn what_is_kept_is_bounded() {
    let mut run = Loop::new();
    (0..10_000).for_each(|_| run.torch_step(1, 1));
    assert_eq!(run.detector.recent().len(), KEPT);
    assert_eq!(run.detector.count(), 10_000);
}

#[test]
fn what_is_missing_makes_no_long_step() {
    let mut run = Loop::new();
    (0..20).for_each(|_| run.torch_step(1, 1));
    run.detector.gap(&[MarkSort::Use]);
    run.torch_step(1, 1);
    assert_eq!(run.detector.gaps(), 0, "updates are all seen");
    run.detector.gap(&[MarkSort::Training]);
    run.now_ns += 5_000 * MS;
    (0..20).for_each(|_| run.torch_step(1, 1));
    let summary = run.summary();
    assert_eq!((run.detector.count(), run.detector.gaps()), (41, 1));
    assert_eq!(summary.steps, 39);
    assert_eq!(summary.longest_ns, summary.median_ns);
}

#[test]
fn what_lay_between_two_marks_need_not_be_seen() {
    let mut run = Loop::new();
    for _ in 0..20 {
        run.detector.gap(&[MarkSort::Use]);
        (0..4).for_each(|_| run.does(Mark::Reduce, 10, MS));
        run.now_ns += 6 * MS;
    }
    assert_eq!(run.detector.count(), 20);
    assert_eq!(run.summary().median_ns, 10 * MS);
}

#[test]
fn graphs_that_are_replayed_are_steps_although_they_were_captured_in_others() {
    let mut run = Loop::new();
    (0..11).for_each(|_| run.torch_step(1, 1));
    for _ in 0..200 {
        run.does(Mark::CopyIn, 0, MS);
        run.does(Mark::Graph, 1, 4 * MS);
        run.look();
    }
    assert_eq!(run.detector.boundary(), Some(Mark::Graph));
    assert_eq!(run.summary().median_ns, 5 * MS);
    assert!(run.detector.count() >= 199);
}

#[test]
fn twice_as_rare_is_rarer() {
    // Gradients are reduced after every second backward pass; then the other way round.
    for (backwards, reduces, rarer) in [(2, 1, Mark::Reduce), (1, 2, Mark::Backward)] {
        let mut run = Loop::new();
        for _ in 0..100 {
            for _ in 0..backwards {
                run.does(Mark::CopyIn, 0, MS);
                run.does(Mark::Backward, 9, MS);
            }
            for _ in 0..reduces {
                run.does(Mark::Reduce, 3, MS);
                run.does(Mark::Wait, 3, MS);
            }
            run.look();
        }
        assert_eq!(run.detector.boundary(), Some(rarer));
        run.look();
        let step_ns = 2 * (backwards + reduces) * MS;
        assert_eq!(run.summary().median_ns, step_ns);
    }
}

#[test]
fn a_substitute_of_a_worse_kind_stays() {
    let step = |run: &mut Loop| {
        (0..4).for_each(|_| run.does(Mark::Backward, 100, 3 * MS));
        run.does(Mark::Optimizer, 100, MS);
        run.does(Mark::Wait, 0, MS);
        run.look();
    };
    let mut run = Loop::new();
    (0..1000).for_each(|_| step(&mut run));
    let restarts = run.detector.restarts();
    run.detector.distrust(&[Mark::Optimizer, Mark::CopyOut]);
    (0..1000).for_each(|_| step(&mut run));
    assert_eq!(run.detector.boundary(), Some(Mark::Wait));
    assert_eq!(
        (run.detector.count(), run.detector.restarts()),
        (2000, restarts)
    );
    assert_eq!(run.summary().longest_ns, 14 * MS);
}

#[test]
fn what_is_long_past_is_no_substitute() {
    let step = |run: &mut Loop| {
        for _ in 0..150 {
            run.does(Mark::Reduce, 1, MS / 10);
            run.does(Mark::Wait, 1, MS / 10);
        }
        run.does(Mark::Backward, 1, MS);
        run.does(Mark::Optimizer, 1, MS);
    };
    let mut run = Loop::new();
    (0..10).for_each(|_| run.does(Mark::CopyOut, 1, MS));
    (0..100).for_each(|_| step(&mut run));
    run.detector.distrust(&[Mark::Optimizer]);
    assert_eq!(run.detector.boundary(), Some(Mark::Backward));
}

#[test]
fn a_late_step_is_no_pause_because_of_what_is_seen_no_longer() {
    let mut run = Loop::new();
    for step in 0..200 {
        run.now_ns += if step == 5 { 100 * MS } else { 0 };
        run.does(Mark::Backward, 100, 3 * MS);
        if step < 10 {
            run.does(Mark::CopyOut, 0, MS);
        }
        run.look();
    }
    let summary = run.summary();
    assert_eq!((summary.pauses.len(), summary.stalls.len()), (0, 1));
}

#[test]
fn where_nothing_came_as_often_the_count_starts_anew() {
    let accumulate = |run: &mut Loop| {
        (0..4).for_each(|_| run.does(Mark::Backward, 100, 3 * MS));
        run.does(Mark::Optimizer, 100, MS);
    };
    let mut run = Loop::new();
    (0..40).for_each(|_| accumulate(&mut run));
    let restarts = run.detector.restarts();
    run.detector.distrust(&[Mark::Optimizer]);
    assert_eq!(run.detector.boundary(), None);
    assert_eq!(
        (run.detector.count(), run.detector.restarts()),
        (0, restarts + 1)
    );
    for _ in 0..40 {
        accumulate(&mut run);
        run.look();
    }
    assert_eq!(run.detector.boundary(), Some(Mark::Backward));
    assert_eq!(run.summary().median_ns, 3 * MS);
    assert_eq!(run.summary().longest_ns, 4 * MS, "no step is of both kinds");
}

#[test]
fn steps_that_lie_whole_in_a_window_have_exact_launches() {
    let mut run = Loop::new();
    for step in 0..60 {
        // A window is open for six steps out of twenty.
        let launches = match step % 20 {
            0..6 => Launches::InWindow(100 + step % 3),
            _ => Launches::Unknown,
        };
        run.now_ns += 10 * MS;
        run.detector.mark(Mark::Backward, run.now_ns, launches);
    }
    let steps = run.detector.take_window_steps();
    // The first three marks made it the boundary.
    let launches: Vec<u32> = steps.iter().map(|step| step.launches).collect();
    let expected = (3..6).chain(20..26).chain(40..46);
    assert!(launches.into_iter().eq(expected.map(|step| 100 + step % 3)));
    assert!(steps.iter().all(|step| step.duration_ns == 10 * MS));
    assert_eq!(run.detector.take_window_steps(), []);
    let mut recent = run.detector.recent().iter();
    assert!(recent.all(|step| step.launches.is_none()));
    // Launches that are counted all the time are in the steps themselves.
    (0..20).for_each(|_| run.does(Mark::Backward, 100, MS));
    assert_eq!(run.detector.take_window_steps(), []);
}

#[test]
fn a_late_step_is_no_pause_because_not_all_of_it_was_told() {
    let mut run = Loop::new();
    for step in 0..120 {
        // So much is copied for a checkpoint that nobody tells of the rest, nor of what comes next.
        let (copies, is_told, late_ms) = match step {
            50 => (1000, false, 150),
            51 => (0, false, 40),
            _ => (2, true, 0),
        };
        for _ in 0..copies {
            run.does(Mark::CopyOut, 1, MS / 10);
            run.does(Mark::Wait, 1, MS / 10);
        }
        if !is_told {
            run.detector.gap(&[MarkSort::Use]);
        }
        run.does(Mark::Reduce, 30, (10 + late_ms) * MS);
        run.look();
    }
    let summary = run.summary();
    assert_eq!(run.detector.count(), 120);
    assert_eq!((summary.pauses.len(), summary.stalls.len()), (1, 1));
}
