//! Traces and stamp logs of arbitrary content.

use zernel_testkit::allocation::CountingAllocator;
use zernel_testkit::fuzz::FuzzTarget;
use zernel_truth::detected_phases::PhaseSource;
use zernel_truth::report::score_trace;
use zernel_truth::stamps::StampLog;
use zernel_truth::trace::{
    CoverageEntry, EventEntry, ProcessEntry, RecordedTrace, SampleEntry, TraceEncoder, TraceEntry,
    TraceHeader,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const STAMP_LOG: &str = r#"{"version": 1, "pid": 7, "variant": "v", "begin": 0, "known": {"absent": ["NcclCollective"]}}
[1000, 7, "+step"]
[1000, 7, "+data"]
[2000, 7, "-"]
[2500, 7, "+backward"]
[2600, 8, "+gpu"]
[2700, 8, "-"]
[3000, 7, "-"]
[5000, 7, "-"]
{"end": 6000, "gpu_busy": null}
"#;

/// A trace of all kinds of entries, whose process is that of the log.
fn trace_of_all_entry_kinds() -> Vec<u8> {
    let mut encoder = TraceEncoder::default();
    encoder.push_entry(&TraceEntry::Process(ProcessEntry {
        handle: 1,
        pid: 7,
        is_loader: false,
        trainer_handle: 0,
    }));
    for number in 0..40_u16 {
        let at_ns = 1000 + u64::from(number) * 100;
        encoder.push_entry(&TraceEntry::Event(EventEntry {
            at_ns,
            tid: 7 + u32::from(number % 2),
            process_handle: 1,
            event_number: (number % 12) as u8,
            symbol_number: number.is_multiple_of(3).then_some(4),
            phase: zernel_phase::WorkloadPhase::ALL[usize::from(number) % 5],
            sequence: number,
            phase_start_ns: at_ns - 50,
            deadline_ns: at_ns + 1_000,
            tracker_flags: 256,
        }));
    }
    let coverage = CoverageEntry::WindowOpen(true);
    let at_ns = 2000;
    encoder.push_entry(&TraceEntry::Coverage { at_ns, coverage });
    encoder.push_entry(&TraceEntry::Loss {
        at_ns,
        lost_events: 3,
    });
    encoder.push_entry(&TraceEntry::Sample(SampleEntry {
        at_ns,
        tid: 7,
        pid: 7,
        last_gpu_sync_ns: 1,
        cpu_burst_ns: 1,
        io_wait_q16: 1,
        futex_waits: 1,
        gpu_utilization_percent: 1,
        nccl_active: false,
    }));
    let events = zernel_phase::shared::EVENT_MIRROR.values.iter();
    let header = TraceHeader {
        ended_ns: 6000,
        events: events
            .map(|event| (event.0.to_owned(), event.1 as u8))
            .collect(),
        ..TraceHeader::default()
    };
    encoder.into_file(&header)
}

#[test]
fn fuzz_trace() {
    let stamps = [StampLog::parse(STAMP_LOG).unwrap()];
    let target = FuzzTarget::new("trace", 3_000).input(trace_of_all_entry_kinds());
    target.run(|bytes| {
        if let Ok(trace) = RecordedTrace::parse(bytes) {
            for source in [PhaseSource::Recorded, PhaseSource::Replayed] {
                let _ = zernel_truth::render::render_report(&score_trace(&trace, &stamps, source));
            }
        }
    });
}

#[test]
fn fuzz_stamps() {
    let trace = RecordedTrace::parse(&trace_of_all_entry_kinds()).unwrap();
    let words = [
        "\"+step\"",
        "\"+gpu\"",
        "\"-\"",
        "18446744073709551615",
        "\n[",
    ];
    let target = FuzzTarget::new("stamps", 3_000)
        .input(STAMP_LOG)
        .words(words);
    target.run(|bytes| {
        if let Ok(log) = StampLog::parse(&String::from_utf8_lossy(bytes)) {
            let _ = score_trace(&trace, &[log], PhaseSource::Recorded);
        }
    });
}
