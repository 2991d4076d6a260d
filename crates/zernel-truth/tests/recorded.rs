//! Recorded traces in `truth/data` reach the bars beside them, with the tracker of this version.
//!
//! Each recording is a folder with a trace and the stamp logs of its processes, compressed. `bars.toml` has a table of
//! bars for each.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use zernel_truth::bars::Bars;
use zernel_truth::detected::PhaseSource;
use zernel_truth::render::render;
use zernel_truth::report::score;
use zernel_truth::stamps::StampLog;
use zernel_truth::trace::TraceFile;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../truth/data")
}

fn unpacked(path: &Path) -> Vec<u8> {
    let output = Command::new("gzip").arg("-dc").arg(path).output();
    let output = output.expect("gzip runs");
    assert!(output.status.success(), "{}", path.display());
    output.stdout
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder exists");
    let mut paths: Vec<PathBuf> = entries.map(|it| it.expect("readable").path()).collect();
    paths.sort();
    paths
}

/// The trace and the stamp logs of a recording.
fn recording(folder: &Path) -> (TraceFile, Vec<StampLog>) {
    let trace = unpacked(&folder.join("trace.gz"));
    let trace = TraceFile::parse(&trace).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let stamps = children(folder).into_iter().filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("stamps-")
    });
    let stamps = stamps.map(|path| {
        let text = String::from_utf8(unpacked(&path)).expect("UTF-8");
        StampLog::parse(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"))
    });
    (trace, stamps.collect())
}

fn bars() -> BTreeMap<String, Bars> {
    let text = fs::read_to_string(data().join("bars.toml")).expect("readable");
    toml::from_str(&text).expect("bars")
}

#[test]
fn every_recording_has_bars_and_reaches_them() {
    let mut bars = bars();
    let folders = children(&data());
    let mut missed = Vec::new();
    for folder in folders.iter().filter(|path| path.is_dir()) {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let bars = bars.remove(&name);
        let bars = bars.unwrap_or_else(|| panic!("bars.toml has no table {name}"));
        assert_ne!(bars, Bars::default(), "{name} has no bar");
        let (trace, stamps) = recording(folder);
        let report = score(&trace, &stamps, PhaseSource::Replayed);
        println!("{}", render(&report));
        missed.extend(
            bars.missed(&report)
                .iter()
                .map(|it| format!("{name}: {it}")),
        );
    }
    assert!(missed.is_empty(), "{missed:#?}");
    assert!(bars.is_empty(), "bars without recording: {bars:?}");
}

/// The bars can fail: without events nothing is detected.
#[test]
fn a_detector_without_events_misses_the_bars() {
    for (name, bars) in bars() {
        let (mut trace, stamps) = recording(&data().join(&name));
        trace.entries.clear();
        let report = score(&trace, &stamps, PhaseSource::Replayed);
        assert!(!bars.missed(&report).is_empty(), "{name}");
    }
}
