use proptest::prelude::*;

use super::*;

fn event() -> impl Strategy<Value = TraceEntry> {
    let thread = (0_u64..1 << 40, 1_u32..6, 1_u32..3, any::<u8>());
    let state = (any::<Option<u8>>(), 0_usize..5, 0_u16..4096, any::<u16>());
    let times = (0_u64..1 << 40, any::<Option<u32>>());
    (thread, state, times).prop_map(|(thread, state, times)| {
        TraceEntry::Event(EventEntry {
            at_ns: thread.0,
            tid: thread.1,
            process: thread.2,
            event: thread.3,
            symbol: state.0,
            phase: WorkloadPhase::ALL[state.1],
            sequence: state.2,
            phase_start_ns: times.0,
            deadline_ns: times.1.map_or(u64::MAX, |left| thread.0 + u64::from(left)),
            flags: state.3,
        })
    })
}

fn other() -> impl Strategy<Value = TraceEntry> {
    let numbers = (any::<u64>(), any::<u32>(), any::<u32>(), any::<bool>());
    (0..6, numbers).prop_map(|(kind, (at_ns, one, other, flag))| match kind {
        0 => TraceEntry::Process(ProcessEntry {
            handle: one,
            pid: other,
            is_loader: flag,
            trainer: one,
        }),
        1 => TraceEntry::Sample(SampleEntry {
            at_ns,
            tid: one,
            pid: other,
            last_gpu_sync_ns: at_ns,
            cpu_burst_ns: at_ns / 2,
            io_wait_q16: one,
            futex_waits: other,
            gpu_utilization: one as u8,
            nccl_active: flag,
        }),
        2 => TraceEntry::Loss {
            at_ns,
            events: at_ns,
        },
        3 => coverage(at_ns, CoverageEntry::Window(flag)),
        4 => coverage(at_ns, CoverageEntry::AssumedLaunches(flag)),
        _ => coverage(
            at_ns,
            CoverageEntry::Process {
                handle: one,
                observed: flag,
            },
        ),
    })
}

fn coverage(at_ns: u64, coverage: CoverageEntry) -> TraceEntry {
    TraceEntry::Coverage { at_ns, coverage }
}

proptest! {
    #[test]
    fn a_trace_round_trips(entries in prop::collection::vec(prop_oneof![event(), other()], 0..200)) {
        let header = TraceHeader { command: vec!["train\n".to_owned()], ..TraceHeader::default() };
        let mut encoder = TraceEncoder::default();
        entries.iter().for_each(|entry| encoder.push(entry));
        let read = TraceFile::parse(&encoder.finish(&header)).unwrap();
        prop_assert_eq!(read, TraceFile { header, entries });
    }
}

/// The encoding is worth its trouble: a step of a training loop takes a few bytes per event.
#[test]
fn an_event_is_short() {
    let mut encoder = TraceEncoder::default();
    for number in 0..1000 {
        let at_ns = 1_000_000_000_000 + number * 5_000;
        encoder.push(&TraceEntry::Event(EventEntry {
            at_ns,
            tid: 4711,
            process: 1,
            event: 4,
            symbol: Some(3),
            phase: WorkloadPhase::GpuCompute,
            sequence: 7,
            phase_start_ns: 1_000_000_000_000,
            deadline_ns: at_ns + 10_000_000,
            flags: 16,
        }));
    }
    assert!(encoder.len() < 7_000, "{}", encoder.len());
}

#[test]
fn a_damaged_file_is_an_error() {
    let file = TraceEncoder::default().finish(&TraceHeader::default());
    assert!(TraceFile::parse(&file).is_ok());
    let with = |tail: &[u8]| TraceFile::parse(&[&file[..], tail].concat());
    assert!(matches!(with(&[7]), Err(TraceError::Entry(place)) if place == file.len()));
    // An event of a thread without first event.
    assert!(with(&[0, 2, 0, 4]).is_err());
    assert!(TraceFile::parse(&file[..file.len() - 1]).is_err());
    assert!(matches!(
        TraceFile::parse(b"other"),
        Err(TraceError::NoTrace)
    ));
}
