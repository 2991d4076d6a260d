use super::*;
use crate::trace::{EventEntry, ProcessEntry, TraceHeader};
use zernel_phase::WorkloadPhase;
use zernel_phase::shared::RawTracker;

const MS_IN_NS: u64 = 1_000_000;

/// Ten steps of 10 ms: 2 ms of data, 6 of forward, 2 of optimizer.
fn stamp_log_of_ten_steps() -> StampLog {
    let mut text = r#"{"version": 1, "pid": 7, "variant": "made", "begin": 0}"#.to_owned();
    for step in 0..10 {
        let time_ns = |ms: u64| (step * 10 + ms) * MS_IN_NS;
        for (ms, label) in [
            (0, "+step"),
            (0, "+data"),
            (2, "-"),
            (2, "+forward"),
            (8, "-"),
            (8, "+optimizer"),
            (10, "-"),
            (10, "-"),
        ] {
            text += &format!("\n[{}, 7, \"{label}\"]", time_ns(ms));
        }
    }
    StampLog::parse(&(text + "\n{\"end\": 100000000}")).unwrap()
}

/// Phases as the kernel recorded them: each starts `late_ns` after its label.
fn trace_with_delayed_phases(late_ns: u64) -> RecordedTrace {
    let mut entries = vec![TraceEntry::Process(ProcessEntry {
        handle: 1,
        pid: 7,
        is_loader: false,
        trainer_handle: 0,
    })];
    let mut sequence = 0;
    for step in 0..10 {
        for (ms, phase) in [
            (0, WorkloadPhase::DataLoading),
            (2, WorkloadPhase::GpuCompute),
            (8, WorkloadPhase::OptimizerStep),
        ] {
            let at_ns = (step * 10 + ms) * MS_IN_NS + late_ns;
            sequence += 1;
            entries.push(TraceEntry::Event(EventEntry {
                at_ns,
                tid: 7,
                process_handle: 1,
                event_number: 4,
                symbol_number: None,
                phase,
                sequence,
                phase_start_ns: at_ns,
                deadline_ns: u64::MAX,
                tracker_flags: RawTracker::TRAINING_THREAD,
            }));
        }
    }
    let header = TraceHeader {
        ended_ns: 200 * MS_IN_NS,
        ..TraceHeader::default()
    };
    RecordedTrace { header, entries }
}

#[test]
fn a_perfect_detector_scores_one() {
    let report = score_trace(
        &trace_with_delayed_phases(0),
        &[stamp_log_of_ten_steps()],
        PhaseSource::Recorded,
    );
    assert_eq!(report.phases.macro_f1, Some(1.0));
    assert_eq!(report.phases.seconds, 0.1);
    assert_eq!(report.observed_share, 1.0);
    assert_eq!(report.boundaries.median_us, Some(0.0));
    assert_eq!(report.delays.p99_us, Some(0.0));
    assert_eq!(report.median_step_us, Some(10_000.0));
    assert_eq!(report.phases.unknown_share, 0.0);
}

#[test]
fn a_late_detector_scores_less_by_its_delay() {
    let report = score_trace(
        &trace_with_delayed_phases(MS_IN_NS / 2),
        &[stamp_log_of_ten_steps()],
        PhaseSource::Recorded,
    );
    let data = &report.phases.categories[0];
    assert!((data.recall.unwrap() - 0.75).abs() < 1e-9, "{data:?}");
    assert_eq!(report.boundaries.median_us, Some(500.0));
    assert_eq!(report.delays.median_us, Some(500.0));
    assert!(report.phases.macro_f1.unwrap() < 0.9);
    let text = crate::render::render_report(&report);
    assert!(text.contains("macro-F1 0.8"), "{text}");
}

#[test]
fn time_that_was_not_observed_is_shown() {
    let mut trace = trace_with_delayed_phases(0);
    for (at_ns, is_attached) in [(20 * MS_IN_NS, false), (70 * MS_IN_NS, true)] {
        let coverage = CoverageEntry::ProbesAttached(is_attached);
        trace.entries.push(TraceEntry::Coverage { at_ns, coverage });
    }
    let report = score_trace(&trace, &[stamp_log_of_ten_steps()], PhaseSource::Recorded);
    assert!((report.observed_share - 0.5).abs() < 1e-9);
}

#[test]
fn a_process_without_events_is_unknown() {
    let mut trace = trace_with_delayed_phases(0);
    trace.entries.clear();
    let report = score_trace(&trace, &[stamp_log_of_ten_steps()], PhaseSource::Recorded);
    assert_eq!(report.phases.macro_f1, Some(0.0));
    assert_eq!(report.phases.unknown_share, 1.0);
    assert_eq!(report.classes.seconds, 0.1);
}

#[test]
fn a_worse_detector_violates_the_limits() {
    let bars = crate::score_limits::ScoreLimits {
        phase_f1: Some(0.9),
        boundary_us: Some(100.0),
        unknown_share: Some(0.05),
        ..Default::default()
    };
    let report = |late_ns| {
        score_trace(
            &trace_with_delayed_phases(late_ns),
            &[stamp_log_of_ten_steps()],
            PhaseSource::Recorded,
        )
    };
    assert_eq!(bars.violated_limits(&report(0)), Vec::<String>::new());
    let missed = bars.violated_limits(&report(MS_IN_NS)).concat();
    assert!(
        missed.contains("phase_f1") && missed.contains("boundary_us"),
        "{missed}"
    );
}
