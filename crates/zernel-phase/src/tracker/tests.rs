use super::*;
use ThreadEvent::*;
use WorkloadPhase::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

/// Runs `events` (in ms) and returns the intervals as `(phase, start, end)` in ms.
fn track(events: &[(u64, ThreadEvent)], end: u64) -> Vec<(WorkloadPhase, u64, u64)> {
    track_faulty(events, end).0
}

fn track_faulty(
    events: &[(u64, ThreadEvent)],
    end: u64,
) -> (Vec<(WorkloadPhase, u64, u64)>, TrackerFaults) {
    let mut closed = Vec::new();
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
    for (at, event) in events {
        tracker.observe(at * MS, *event, &mut closed);
    }
    let faults = tracker.finish(end * MS, &mut closed);
    let in_ms = |i: PhaseInterval| (i.phase, i.start_ns / MS, i.end_ns / MS);
    (closed.into_iter().map(in_ms).collect(), faults)
}

#[test]
fn a_training_step_without_markers() {
    let step = [
        (0, Block(BlockReason::Poll)),
        (10, Unblock),
        (12, CopyToDevice),
        (13, Launch),
        (15, GpuSyncEnter),
        (15, Block(BlockReason::Futex)),
        (25, Unblock),
        (25, GpuSyncLeave),
        (26, CollectiveEnter),
        (27, CollectiveLeave),
        (27, GpuSyncEnter),
        (35, GpuSyncLeave),
        (38, Block(BlockReason::Futex)),
    ];
    let (intervals, faults) = track_faulty(&step, 50);
    assert_eq!(
        intervals,
        [
            (DataLoading, 0, 13),
            (GpuCompute, 13, 25),
            (OptimizerStep, 25, 26),
            (NcclCollective, 26, 27),
            (NcclCollective, 27, 35),
            (OptimizerStep, 35, 38),
            (DataLoading, 38, 50),
        ]
    );
    assert_eq!(faults, TrackerFaults::default());
}

#[test]
fn an_eager_step_with_markers() {
    let step = [
        (0, CopyToDevice),
        (1, Launch),
        (2, Block(BlockReason::Futex)), // backward runs on its own thread
        (8, Unblock),
        (9, OptimizerMarker),
        (9, Launch),
        (11, GpuSyncEnter),
        (20, GpuSyncLeave),
        (21, Block(BlockReason::Futex)),
    ];
    assert_eq!(
        track(&step, 30),
        [
            (DataLoading, 0, 1),
            (GpuCompute, 1, 9),
            (OptimizerStep, 9, 11),
            (GpuCompute, 11, 20),
            (Unknown, 20, 21), // marked steps are not guessed
            (DataLoading, 21, 30),
        ]
    );
}

#[test]
fn launches_long_after_a_marker_are_the_next_step() {
    assert_eq!(
        track(&[(1, OptimizerMarker), (1, Launch), (2, Launch)], 10),
        [(Unknown, 0, 1), (OptimizerStep, 1, 2), (GpuCompute, 2, 10)]
    );
}

#[test]
fn ddp_collectives_between_launches_do_not_disturb_them() {
    let backward = [
        (0, Launch),
        (2, CollectiveEnter),
        (2, Launch),
        (3, CollectiveLeave),
        (4, Launch),
        (5, GpuSyncEnter),
    ];
    assert_eq!(
        track(&backward, 10),
        [
            (GpuCompute, 0, 2),
            (NcclCollective, 2, 3),
            (GpuCompute, 3, 10)
        ]
    );
}

#[test]
fn a_sync_inside_a_collective_belongs_to_it() {
    let events = [
        (0, CollectiveEnter),
        (1, GpuSyncEnter),
        (2, GpuSyncLeave),
        (3, CopyToDevice),
        (5, CollectiveLeave),
    ];
    let (intervals, faults) = track_faulty(&events, 5);
    assert_eq!(intervals, [(NcclCollective, 0, 5)]);
    assert_eq!(faults, TrackerFaults::default());
}

#[test]
fn the_burst_after_a_sync_is_an_optimizer_step_only_while_short() {
    assert_eq!(
        track(&[(0, GpuSyncEnter), (10, GpuSyncLeave)], 100),
        [
            (GpuCompute, 0, 10),
            (OptimizerStep, 10, 15),
            (Unknown, 15, 100)
        ]
    );
    // What it waits for afterwards is still its next batch.
    assert_eq!(
        track(
            &[
                (0, GpuSyncEnter),
                (10, GpuSyncLeave),
                (20, Block(BlockReason::Futex))
            ],
            30
        )[2..],
        [(Unknown, 15, 20), (DataLoading, 20, 30)]
    );
}

#[test]
fn a_loader_thread_loads() {
    let events = [
        (1, Block(BlockReason::Io)),
        (4, Unblock),
        (9, Block(BlockReason::Futex)),
        (12, Unblock),
    ];
    assert_eq!(track(&events, 20), [(Unknown, 0, 1), (DataLoading, 1, 20)]);
}

#[test]
fn waits_that_say_nothing_change_nothing() {
    let events = [
        (1, Block(BlockReason::Futex)),
        (2, Unblock),
        (3, Block(BlockReason::Other)),
    ];
    assert_eq!(track(&events, 10), [(Unknown, 0, 10)]);
}

#[test]
fn a_wait_for_data_longer_than_its_deadline_resumes_on_waking() {
    let events = [(0, Block(BlockReason::Poll)), (15_000, Unblock)];
    assert_eq!(
        track(&events, 15_010),
        [
            (DataLoading, 0, 10_000),
            (Unknown, 10_000, 15_000),
            (DataLoading, 15_000, 15_010)
        ]
    );
}

#[test]
fn a_lost_leave_ends_at_the_next_proof_or_at_its_deadline() {
    let (intervals, faults) = track_faulty(&[(0, GpuSyncEnter), (7, CopyToDevice)], 8);
    assert_eq!(intervals, [(GpuCompute, 0, 7), (DataLoading, 7, 8)]);
    assert_eq!(faults.lost_leaves, 1);

    let (intervals, faults) = track_faulty(&[(0, CollectiveEnter), (100, Launch)], 90_000);
    assert_eq!(
        intervals,
        [(NcclCollective, 0, 60_000), (Unknown, 60_000, 90_000)]
    );
    assert_eq!((faults.lost_leaves, faults.expired), (1, 1));

    let (intervals, faults) = track_faulty(&[(0, CollectiveEnter), (9, OptimizerMarker)], 10);
    assert_eq!(intervals, [(NcclCollective, 0, 9), (OptimizerStep, 9, 10)]);
    assert_eq!(faults.lost_leaves, 1);
}

#[test]
fn a_lost_enter_still_tells_that_the_sync_is_over() {
    let (intervals, faults) = track_faulty(&[(0, Launch), (5, GpuSyncLeave)], 6);
    assert_eq!(intervals, [(GpuCompute, 0, 5), (OptimizerStep, 5, 6)]);
    assert_eq!(faults.lost_enters, 1);
}

#[test]
fn a_late_leave_ends_its_own_call_and_no_other() {
    let late_but_matching = [
        (0, GpuSyncEnter),
        (6, Block(BlockReason::Other)),
        (5, GpuSyncLeave),
    ];
    let (intervals, faults) = track_faulty(&late_but_matching, 8);
    assert_eq!(intervals, [(GpuCompute, 0, 6), (OptimizerStep, 6, 8)]);
    assert_eq!(faults.late, 1);

    let of_an_earlier_call = [(10, GpuSyncEnter), (9, GpuSyncLeave)];
    let (intervals, _) = track_faulty(&of_an_earlier_call, 20);
    assert_eq!(intervals, [(Unknown, 0, 10), (GpuCompute, 10, 20)]);
}

#[test]
fn an_enter_that_comes_after_its_leave_does_not_open_a_call() {
    let (intervals, faults) = track_faulty(&[(5, GpuSyncLeave), (3, GpuSyncEnter)], 100);
    assert_eq!(intervals[1..], [(OptimizerStep, 5, 10), (Unknown, 10, 100)]);
    assert_eq!((faults.late, faults.lost_enters), (1, 1));
}

#[test]
fn the_phase_can_be_asked_for_between_events() {
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
    let mut closed = Vec::new();
    tracker.observe(0, GpuSyncEnter, &mut closed);
    assert_eq!(tracker.phase_at(59_999 * MS), GpuCompute);
    assert_eq!(tracker.phase_at(60_000 * MS), Unknown);
    assert!(closed.is_empty());
}

#[test]
fn clocks_at_their_end_do_not_overflow() {
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), u64::MAX - 1);
    let mut times = PhaseTimeAccumulator::default();
    tracker.observe(u64::MAX - 1, GpuSyncEnter, &mut times);
    tracker.observe(u64::MAX, GpuSyncLeave, &mut times);
    tracker.observe(0, Launch, &mut times);
    tracker.finish(u64::MAX, &mut times);
    assert_eq!(times.gpu_compute_ns, 1);
}

fn any_event() -> impl Strategy<Value = ThreadEvent> {
    prop::sample::select(vec![
        GpuSyncEnter,
        GpuSyncLeave,
        CollectiveEnter,
        CollectiveLeave,
        Launch,
        CopyToDevice,
        Block(BlockReason::Io),
        Block(BlockReason::Futex),
        Block(BlockReason::Poll),
        Block(BlockReason::Other),
        Unblock,
        OptimizerMarker,
    ])
}

/// Small limits, so that random events run into them.
fn tight() -> TrackerConfig {
    TrackerConfig {
        call_max_ns: 60,
        activity_max_ns: 40,
        optimizer_max_ns: 20,
        optimizer_burst_max_ns: 10,
        optimizer_launch_max_ns: 5,
    }
}

/// A training step: its events, stamped from its start, and the true time in each phase.
struct Step {
    events: Vec<(u64, ThreadEvent)>,
    truth: PhaseTimeAccumulator,
}

fn step(wait: u64, launches: u64, sync: u64, collective: u64, burst: u64) -> Step {
    let mut at = 0;
    let mut events = Vec::new();
    let mut add = |elapsed: u64, event| {
        at += elapsed;
        events.push((at, event));
    };
    add(0, Block(BlockReason::Poll));
    add(wait, Unblock);
    add(0, CopyToDevice);
    for _ in 0..launches {
        add(1, Launch);
    }
    add(1, GpuSyncEnter);
    add(sync, GpuSyncLeave);
    add(0, CollectiveEnter);
    add(collective, CollectiveLeave);
    add(burst, Block(BlockReason::Poll));
    let truth = PhaseTimeAccumulator {
        data_loading_ns: wait + 1,
        gpu_compute_ns: launches + sync,
        nccl_collective_ns: collective,
        optimizer_step_ns: burst,
        unknown_ns: 0,
    };
    Step { events, truth }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever comes, in whatever order: the intervals tile the time from start to end.
    #[test]
    fn intervals_have_no_gaps_and_no_overlaps(
        start in 0_u64..100,
        events in prop::collection::vec((0_u64..1_000, any_event()), 0..200),
        end in 0_u64..2_000,
    ) {
        let mut closed = Vec::new();
        let mut times = PhaseTimeAccumulator::default();
        let mut tracker = PhaseTracker::new(tight(), start);
        let mut shadow = tracker.clone();
        for (at, event) in &events {
            tracker.observe(*at, *event, &mut closed);
            shadow.observe(*at, *event, &mut times);
        }
        tracker.finish(end, &mut closed);
        shadow.finish(end, &mut times);

        let mut at = start;
        for interval in &closed {
            prop_assert_eq!(interval.start_ns, at);
            prop_assert!(interval.end_ns > at);
            at = interval.end_ns;
        }
        let last = events.iter().map(|e| e.0).max().unwrap_or(0).max(start).max(end);
        prop_assert_eq!(at, last);
        prop_assert_eq!(times.total_ns(), last - start);
    }

    /// A thread that falls silent is Unknown once the longest deadline has passed, whatever was lost.
    #[test]
    fn no_phase_outlives_its_evidence(
        events in prop::collection::vec((0_u64..1_000, any_event()), 1..100),
    ) {
        let mut closed = Vec::new();
        let mut tracker = PhaseTracker::new(tight(), 0);
        for (at, event) in &events {
            tracker.observe(*at, *event, &mut closed);
        }
        let last = events.iter().map(|e| e.0).max().unwrap();
        prop_assert_eq!(tracker.phase_at(last + 60), Unknown);
    }

    /// Asking beforehand gives what is recorded afterwards.
    #[test]
    fn what_was_foretold_is_what_is_recorded(
        events in prop::collection::vec((0_u64..30, any_event()), 1..50),
        ahead in 0_u64..200,
    ) {
        let mut closed = Vec::new();
        let mut tracker = PhaseTracker::new(tight(), 0);
        let mut now = 0;
        for (elapsed, event) in &events {
            now += elapsed;
            tracker.observe(now, *event, &mut closed);
        }
        let foretold = tracker.phase_at(now + ahead);
        tracker.finish(now + ahead + 1, &mut closed);
        prop_assert_eq!(closed.last().unwrap().phase, foretold);
    }

    /// Well-formed steps are recorded to the nanosecond.
    #[test]
    fn whole_steps_are_exact(
        steps in prop::collection::vec(
            (1_u64..9_000, 1_u64..400, 1_u64..9_000, 1_u64..9_000, 1_u64..4_000), 1..20),
    ) {
        let mut times = PhaseTimeAccumulator::default();
        let mut truth = PhaseTimeAccumulator::default();
        let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
        let mut begin = 0;
        for (wait, launches, sync, collective, burst) in steps {
            let step = step(wait, launches, sync, collective, burst);
            for (at, event) in &step.events {
                tracker.observe(begin + at, *event, &mut times);
            }
            for phase in WorkloadPhase::ALL {
                truth.record(phase, step.truth.phase_ns(phase));
            }
            begin += step.events.last().unwrap().0;
        }
        prop_assert_eq!(tracker.faults(), TrackerFaults::default());
        tracker.finish(begin, &mut times);
        prop_assert_eq!(times, truth);
    }

    /// One event lost costs at most the step it is in: the next step is exact again.
    #[test]
    fn a_lost_event_spoils_one_step_only(lost in 0_usize..12, launches in 1_u64..4) {
        let Step { events, truth } = step(100, launches, 200, 300, 50);
        let length = events.last().unwrap().0;
        let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
        let mut spoiled = Vec::new();
        for (index, (at, event)) in events.iter().enumerate() {
            if index != lost {
                tracker.observe(*at, *event, &mut spoiled);
            }
        }
        // One whole step to recover, then one to be exact.
        for (at, event) in &events {
            tracker.observe(length + at, *event, &mut spoiled);
        }
        let mut closed = Vec::new();
        for (at, event) in &events[1..] {
            tracker.observe(2 * length + at, *event, &mut closed);
        }
        let mut times = PhaseTimeAccumulator::default();
        times.extend(closed);
        prop_assert_eq!(times, truth);
    }
}
