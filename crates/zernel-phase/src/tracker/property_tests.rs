use super::*;
use crate::task_state::PhaseTimeAccumulator;
use ThreadEvent::*;
use WorkloadPhase::*;
use proptest::prelude::*;

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
        Block(BlockReason::Request),
        Block(BlockReason::Sleep),
        Unblock,
        OptimizerMarker,
        UnblockAfterLaunches,
        DataBegin,
        ForwardBegin,
        BackwardBegin,
        OptimizerBegin,
        ZeroGradients,
        NotObserved,
        Preempt,
        Resume,
        OtherWorkBegin,
        UpdateEnd,
        CompileBegin,
        CompileEnd,
        Fork,
        AwaitedCompile,
        CopyToHostEnter,
        CopyToHostLeave,
    ])
}

/// Limits so small that random events exceed them.
fn tight() -> TrackerConfig {
    TrackerConfig {
        sync_max_ns: 60,
        collective_max_ns: 50,
        blocked_max_ns: 70,
        loading_max_ns: 40,
        launching_max_ns: 30,
        optimizer_max_ns: 20,
        optimizer_launch_max_ns: 5,
        short_wait_max_ns: 4,
    }
}

/// A training step: its events, timed from its start, and the true time in each phase.
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
        data_loading_ns: wait,
        gpu_compute_ns: 1 + launches + sync + burst,
        nccl_collective_ns: collective,
        optimizer_step_ns: 0,
        unknown_ns: 0,
    };
    Step { events, truth }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// For any events in any order, the intervals tile the time from start to end.
    #[test]
    fn intervals_tile_the_time_without_gaps_or_overlaps(
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

    /// A thread without events is `Unknown` after the longest deadline, whichever events were lost. It must run or be
    /// blocked meanwhile: while it waits for a CPU, deadlines stand still.
    #[test]
    fn a_silent_thread_becomes_unknown(
        events in prop::collection::vec((0_u64..1_000, any_event()), 1..100),
    ) {
        let mut closed = Vec::new();
        let mut tracker = PhaseTracker::new(tight(), 0);
        for (at, event) in &events {
            tracker.observe(*at, *event, &mut closed);
        }
        let last = events.iter().map(|e| e.0).max().unwrap();
        if tracker.queued_since_ns.is_some() {
            tracker.observe(last, Resume, &mut closed);
        }
        prop_assert_eq!(tracker.phase_at(last + 70), Unknown);
    }

    /// `phase_at` returns the phase that is recorded later.
    #[test]
    fn phase_at_predicts_the_recorded_phase(
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
        let predicted = tracker.phase_at(now + ahead);
        tracker.finish(now + ahead + 1, &mut closed);
        prop_assert_eq!(closed.last().unwrap().phase, predicted);
    }

    /// Well-formed steps are recorded to the nanosecond.
    #[test]
    fn complete_steps_are_recorded_exactly(
        steps in prop::collection::vec(
            (1_u64..9_000, 1_u64..400, 1_u64..9_000, 1_u64..9_000, 1_u64..4_000), 1..20),
    ) {
        let mut times = PhaseTimeAccumulator::default();
        let mut truth = PhaseTimeAccumulator::default();
        let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
        tracker.observe(0, CopyToDevice, &mut times); // the first evidence that it is a training thread
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

    /// After a lost event at most two steps are wrong; the third is exact again.
    #[test]
    fn a_lost_event_affects_at_most_two_steps(lost in 0_usize..12, launches in 1_u64..4) {
        let Step { events, truth } = step(100, launches, 200, 300, 50);
        let length = events.last().unwrap().0;
        let mut tracker = PhaseTracker::new(TrackerConfig::default(), 0);
        let mut affected = Vec::new();
        tracker.observe(0, CopyToDevice, &mut affected);
        for (index, (at, event)) in events.iter().enumerate() {
            if index != lost {
                tracker.observe(*at, *event, &mut affected);
            }
        }
        for (at, event) in &events {
            tracker.observe(length + at, *event, &mut affected);
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
