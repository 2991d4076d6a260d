use proptest::prelude::*;

use super::*;

fn event_strategy() -> impl Strategy<Value = TraceEntry> {
    let thread = (0_u64..1 << 40, 1_u32..6, 1_u32..3, any::<u8>());
    let state = (any::<Option<u8>>(), 0_usize..5, 0_u16..4096, any::<u16>());
    let times = (0_u64..1 << 40, any::<Option<u32>>());
    (thread, state, times).prop_map(|(thread, state, times)| {
        TraceEntry::Event(EventEntry {
            at_ns: thread.0,
            tid: thread.1,
            process_handle: thread.2,
            event_number: thread.3,
            symbol_number: state.0,
            phase: WorkloadPhase::ALL[state.1],
            sequence: state.2,
            phase_start_ns: times.0,
            deadline_ns: times.1.map_or(u64::MAX, |left| thread.0 + u64::from(left)),
            tracker_flags: state.3,
        })
    })
}

fn other_entry_strategy() -> impl Strategy<Value = TraceEntry> {
    let numbers = (any::<u64>(), any::<u32>(), any::<u32>(), any::<bool>());
    (0..6, numbers).prop_map(
        |(kind, (at_ns, first_number, second_number, flag))| match kind {
            0 => TraceEntry::Process(ProcessEntry {
                handle: first_number,
                pid: second_number,
                is_loader: flag,
                trainer_handle: first_number,
            }),
            1 => TraceEntry::Sample(SampleEntry {
                at_ns,
                tid: first_number,
                pid: second_number,
                last_gpu_sync_ns: at_ns,
                cpu_burst_ns: at_ns / 2,
                io_wait_q16: first_number,
                futex_waits: second_number,
                gpu_utilization_percent: first_number as u8,
                nccl_active: flag,
            }),
            2 => TraceEntry::Loss {
                at_ns,
                lost_events: at_ns,
            },
            3 => coverage_entry(at_ns, CoverageEntry::WindowOpen(flag)),
            4 => coverage_entry(at_ns, CoverageEntry::LaunchesAssumed(flag)),
            _ => coverage_entry(
                at_ns,
                CoverageEntry::ProcessObserved {
                    handle: first_number,
                    is_observed: flag,
                },
            ),
        },
    )
}

fn coverage_entry(at_ns: u64, coverage: CoverageEntry) -> TraceEntry {
    TraceEntry::Coverage { at_ns, coverage }
}

proptest! {
    #[test]
    fn a_trace_round_trips(entries in prop::collection::vec(prop_oneof![event_strategy(), other_entry_strategy()], 0..200)) {
        let header = TraceHeader { command: vec!["train\n".to_owned()], ..TraceHeader::default() };
        let mut encoder = TraceEncoder::default();
        entries.iter().for_each(|entry| encoder.push_entry(entry));
        let parsed = RecordedTrace::parse(&encoder.into_file(&header)).unwrap();
        prop_assert_eq!(parsed, RecordedTrace { header, entries });
    }
}

/// The encoding is worth its trouble: a step of a training loop takes a few bytes per event.
#[test]
fn an_event_is_short() {
    let mut encoder = TraceEncoder::default();
    for number in 0..1000 {
        let at_ns = 1_000_000_000_000 + number * 5_000;
        encoder.push_entry(&TraceEntry::Event(EventEntry {
            at_ns,
            tid: 4711,
            process_handle: 1,
            event_number: 4,
            symbol_number: Some(3),
            phase: WorkloadPhase::GpuCompute,
            sequence: 7,
            phase_start_ns: 1_000_000_000_000,
            deadline_ns: at_ns + 10_000_000,
            tracker_flags: 16,
        }));
    }
    assert!(encoder.len() < 7_000, "{}", encoder.len());
}

#[test]
fn a_damaged_file_is_an_error() {
    let file = TraceEncoder::default().into_file(&TraceHeader::default());
    assert!(RecordedTrace::parse(&file).is_ok());
    let parse_with_tail = |tail: &[u8]| RecordedTrace::parse(&[&file[..], tail].concat());
    assert!(
        matches!(parse_with_tail(&[7]), Err(TraceError::DamagedEntry(place)) if place == file.len())
    );
    // An event of a thread without first event.
    assert!(parse_with_tail(&[0, 2, 0, 4]).is_err());
    assert!(RecordedTrace::parse(&file[..file.len() - 1]).is_err());
    assert!(matches!(
        RecordedTrace::parse(b"other"),
        Err(TraceError::NotATrace)
    ));
}
