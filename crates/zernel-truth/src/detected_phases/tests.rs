use super::*;
use crate::trace::TraceHeader;

const MS_IN_NS: u64 = 1_000_000;

/// A trace of one thread whose kernel side is the tracker itself.
fn trace_of_events(events: &[(u64, ThreadEvent)]) -> RecordedTrace {
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), events[0].0);
    let mut entries = vec![TraceEntry::Process(ProcessEntry {
        handle: 1,
        pid: 7,
        is_loader: false,
        trainer_handle: 0,
    })];
    let (mut sequence, mut start_ns) = (0, events[0].0);
    let mut phase = WorkloadPhase::Unknown;
    for (at_ns, event) in events {
        let mut closed_intervals: Vec<PhaseInterval> = Vec::new();
        tracker.observe(*at_ns, *event, &mut closed_intervals);
        let current_phase = tracker.phase_at(*at_ns);
        if current_phase != phase || !closed_intervals.is_empty() {
            start_ns = closed_intervals.last().map_or(*at_ns, |last| last.end_ns);
            sequence += 1;
            phase = current_phase;
        }
        entries.push(TraceEntry::Event(EventEntry {
            at_ns: *at_ns,
            tid: 7,
            process_handle: 1,
            event_number: raw_event(*event),
            symbol_number: None,
            phase,
            sequence,
            phase_start_ns: start_ns,
            deadline_ns: tracker.deadline_ns(),
            tracker_flags: RawTracker::TRAINING_THREAD,
        }));
    }
    RecordedTrace {
        header: TraceHeader {
            began_ns: 0,
            ended_ns: 3000 * MS_IN_NS,
            events: event_numbers_of_header(),
            ..TraceHeader::default()
        },
        entries,
    }
}

fn event_numbers_of_header() -> BTreeMap<String, u8> {
    let events = zernel_phase::shared::EVENT_MIRROR.values.iter();
    let events = events.map(|(name, number)| ((*name).to_owned(), *number as u8));
    events.collect()
}

/// An event that is added to the tracker must be added to the list here, or replays would ignore it.
#[test]
fn every_event_of_the_tracker_can_be_replayed() {
    let numbers: Vec<i64> = TRACKER_EVENTS
        .iter()
        .map(|event| raw_event(*event).into())
        .collect();
    for (name, number) in zernel_phase::shared::EVENT_MIRROR.values {
        assert!(numbers.contains(number), "{name}");
    }
}

#[test]
fn a_replay_gives_the_recorded_phases() {
    let events = [
        (MS_IN_NS, ThreadEvent::CopyToDevice),
        (2 * MS_IN_NS, ThreadEvent::Launch),
        (3 * MS_IN_NS, ThreadEvent::Launch),
        (4 * MS_IN_NS, ThreadEvent::GpuSyncEnter),
        (5 * MS_IN_NS, ThreadEvent::Block(BlockReason::Other)),
        (14 * MS_IN_NS, ThreadEvent::Unblock),
        (15 * MS_IN_NS, ThreadEvent::GpuSyncLeave),
        (16 * MS_IN_NS, ThreadEvent::OptimizerMarker),
        (17 * MS_IN_NS, ThreadEvent::Launch),
        // After this event, the deadline of the phase passes.
        (2500 * MS_IN_NS, ThreadEvent::CopyToDevice),
    ];
    let trace = trace_of_events(&events);
    let recorded = detect_phases(&trace, PhaseSource::Recorded);
    let replayed = detect_phases(&trace, PhaseSource::Replayed);
    assert_eq!(recorded[&7].activities(), replayed[&7].activities());
    let activities = recorded[&7].activities().unwrap();
    assert_eq!(
        activities.value_at(10 * MS_IN_NS),
        Some(StepActivity::GpuWait)
    );
    let thread = |processes: &BTreeMap<u32, DetectedProcess>| processes[&7].threads[&7].clone();
    let (recorded, replayed) = (thread(&recorded), thread(&replayed));
    assert_eq!(recorded.phases, replayed.phases);
    assert_eq!(recorded.live_phases, replayed.live_phases);
    assert_eq!(
        recorded.phases.value_at(10 * MS_IN_NS),
        Some(WorkloadPhase::GpuCompute)
    );
    let classes = recorded.scheduler_classes(false);
    assert_eq!(classes.value_at(2 * MS_IN_NS), Some(ThreadClass::Critical));
    assert_eq!(classes.value_at(10 * MS_IN_NS), Some(ThreadClass::GpuWait));
    assert_eq!(
        recorded.phases.value_at(2000 * MS_IN_NS),
        Some(WorkloadPhase::Unknown)
    );
}

/// The kernel changes a phase twice at such an event, and records the second change.
#[test]
fn corrections_missing_in_a_trace_are_restored() {
    let ms = |count: u64| count * MS_IN_NS;
    let (gpu, update) = (WorkloadPhase::GpuCompute, WorkloadPhase::OptimizerStep);
    let undecided = RawTracker::TRAINING_THREAD | RawTracker::UNDECIDED;
    let trained = RawTracker::TRAINING_THREAD;
    let entry = |at_ms, event, phase, sequence, start_ms, tracker_flags| {
        TraceEntry::Event(EventEntry {
            at_ns: ms(at_ms),
            tid: 7,
            process_handle: 1,
            event_number: raw_event(event),
            symbol_number: None,
            phase,
            sequence,
            phase_start_ns: ms(start_ms),
            deadline_ns: u64::MAX,
            tracker_flags,
        })
    };
    let mut trace = trace_of_events(&[(ms(1), ThreadEvent::Launch)]);
    trace.entries.truncate(1);
    trace.entries.extend([
        entry(1, ThreadEvent::OptimizerBegin, update, 1, 1, trained),
        entry(2, ThreadEvent::UpdateEnd, gpu, 2, 2, undecided),
        entry(30, ThreadEvent::CopyToDevice, gpu, 4, 30, trained),
        entry(
            40,
            ThreadEvent::Block(BlockReason::Futex),
            gpu,
            4,
            30,
            trained,
        ),
        entry(60, ThreadEvent::AwaitedCompile, gpu, 6, 60, trained),
        entry(70, ThreadEvent::OptimizerBegin, update, 7, 70, trained),
        entry(72, ThreadEvent::CopyToHostEnter, update, 7, 70, trained),
        entry(78, ThreadEvent::CopyToHostLeave, update, 9, 78, trained),
    ]);
    let phases = detect_phases(&trace, PhaseSource::Recorded)[&7].threads[&7]
        .phases
        .clone();
    for (at_ms, phase) in [
        (1, update),
        (2, WorkloadPhase::DataLoading),
        (29, WorkloadPhase::DataLoading),
        (30, gpu),
        (40, WorkloadPhase::Unknown),
        (60, gpu),
        (71, update),
        (72, gpu),
        (78, update),
    ] {
        assert_eq!(phases.value_at(ms(at_ms)), Some(phase), "{at_ms} ms");
    }
}

#[test]
fn a_loader_has_class_feed_while_it_runs_or_reads() {
    let events = [
        (MS_IN_NS, ThreadEvent::Unblock),
        (2 * MS_IN_NS, ThreadEvent::Block(BlockReason::Io)),
        (3 * MS_IN_NS, ThreadEvent::Unblock),
        (4 * MS_IN_NS, ThreadEvent::Block(BlockReason::Poll)),
    ];
    let detected = detect_phases(&trace_of_events(&events), PhaseSource::Recorded);
    let classes = detected[&7].threads[&7].scheduler_classes(true);
    assert_eq!(classes.value_at(2 * MS_IN_NS), Some(ThreadClass::Feed));
    assert_eq!(classes.value_at(3 * MS_IN_NS), Some(ThreadClass::Feed));
    assert_eq!(classes.value_at(4 * MS_IN_NS), Some(ThreadClass::Other));
}

/// The training thread waits for the thread of its backward pass, which waits for its peers.
#[test]
fn a_collective_of_an_awaited_thread_counts() {
    let events = [
        (MS_IN_NS, ThreadEvent::CopyToDevice),
        (2 * MS_IN_NS, ThreadEvent::BackwardBegin),
        (3 * MS_IN_NS, ThreadEvent::Block(BlockReason::Futex)),
        (9 * MS_IN_NS, ThreadEvent::UnblockAfterLaunches),
    ];
    let backward_thread_events = [
        (4 * MS_IN_NS, ThreadEvent::Launch),
        (5 * MS_IN_NS, ThreadEvent::CollectiveEnter),
        (7 * MS_IN_NS, ThreadEvent::CollectiveLeave),
        (10 * MS_IN_NS, ThreadEvent::CollectiveEnter),
    ];
    let mut trace = trace_of_events(&events);
    for mut entry in trace_of_events(&backward_thread_events)
        .entries
        .into_iter()
        .skip(1)
    {
        if let TraceEntry::Event(event) = &mut entry {
            event.tid = 8;
            event.tracker_flags = 0;
        }
        trace.entries.push(entry);
    }
    let detected = detect_phases(&trace, PhaseSource::Replayed);
    let phases = detected[&7].phases().unwrap();
    for (at_ms, phase) in [
        (4, WorkloadPhase::GpuCompute),
        (6, WorkloadPhase::NcclCollective),
        (8, WorkloadPhase::GpuCompute),
        (11, WorkloadPhase::GpuCompute),
    ] {
        assert_eq!(
            phases.value_at(at_ms * MS_IN_NS),
            Some(phase),
            "at {at_ms} ms"
        );
    }
    let activities = detected[&7].activities().unwrap();
    assert_eq!(
        activities.value_at(6 * MS_IN_NS),
        Some(StepActivity::PeerWait)
    );
}

#[test]
fn the_sampled_rule_gets_the_recorded_samples() {
    let mut trace = trace_of_events(&[(1, ThreadEvent::Launch)]);
    for number in 0..10 {
        trace.entries.push(TraceEntry::Sample(SampleEntry {
            at_ns: number * 100 * MS_IN_NS,
            tid: 7,
            pid: 7,
            last_gpu_sync_ns: 0,
            cpu_burst_ns: 0,
            io_wait_q16: 0,
            futex_waits: 0,
            gpu_utilization_percent: 100,
            nccl_active: false,
        }));
    }
    let phases = sampled_phases(&trace, 7);
    assert_eq!(phases.value_at(0), Some(WorkloadPhase::Unknown));
    assert_eq!(
        phases.value_at(900 * MS_IN_NS),
        Some(WorkloadPhase::GpuCompute)
    );
}
