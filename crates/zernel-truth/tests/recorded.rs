//! Recorded traces in `truth/data` reach the bars beside them, with the tracker of this version.
//!
//! Each recording is a folder with a trace and the stamp logs of its processes, compressed. `bars.toml` has a table of
//! bars for each.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use zernel_truth::detected_phases::PhaseSource;
use zernel_truth::render::render_report;
use zernel_truth::report::score_trace;
use zernel_truth::score_limits::ScoreLimits;
use zernel_truth::stamps::StampLog;
use zernel_truth::trace::RecordedTrace;

fn recordings_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../truth/data")
}

fn unpack_gzip(path: &Path) -> Vec<u8> {
    let output = Command::new("gzip").arg("-dc").arg(path).output();
    let output = output.expect("gzip runs");
    assert!(output.status.success(), "{}", path.display());
    output.stdout
}

fn paths_in_folder(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder exists");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("readable").path())
        .collect();
    paths.sort();
    paths
}

/// The trace and the stamp logs of a recording.
fn read_recording(folder: &Path) -> (RecordedTrace, Vec<StampLog>) {
    let trace = unpack_gzip(&folder.join("trace.gz"));
    let trace = RecordedTrace::parse(&trace).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let stamps = paths_in_folder(folder).into_iter().filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("stamps-")
    });
    let stamps = stamps.map(|path| {
        let text = String::from_utf8(unpack_gzip(&path)).expect("UTF-8");
        StampLog::parse(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"))
    });
    (trace, stamps.collect())
}

fn read_score_limits() -> BTreeMap<String, ScoreLimits> {
    let text = fs::read_to_string(recordings_folder().join("bars.toml")).expect("readable");
    toml::from_str(&text).expect("bars")
}

#[test]
fn every_recording_has_limits_and_keeps_them() {
    let mut bars = read_score_limits();
    let folders = paths_in_folder(&recordings_folder());
    let mut missed = Vec::new();
    for folder in folders.iter().filter(|path| path.is_dir()) {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let bars = bars.remove(&name);
        let bars = bars.unwrap_or_else(|| panic!("bars.toml has no table {name}"));
        assert_ne!(bars, ScoreLimits::default(), "{name} has no bar");
        let (trace, stamps) = read_recording(folder);
        let report = score_trace(&trace, &stamps, PhaseSource::Replayed);
        println!("{}", render_report(&report));
        missed.extend(
            bars.violated_limits(&report)
                .iter()
                .map(|sentence| format!("{name}: {sentence}")),
        );
    }
    assert!(missed.is_empty(), "{missed:#?}");
    assert!(bars.is_empty(), "bars without recording: {bars:?}");
}

/// The bars can fail: without events nothing is detected.
#[test]
fn a_detector_without_events_violates_the_limits() {
    for (name, bars) in read_score_limits() {
        let (mut trace, stamps) = read_recording(&recordings_folder().join(&name));
        trace.entries.clear();
        let report = score_trace(&trace, &stamps, PhaseSource::Replayed);
        assert!(!bars.violated_limits(&report).is_empty(), "{name}");
    }
}
