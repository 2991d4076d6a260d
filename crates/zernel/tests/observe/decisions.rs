//! `zernel sched --dry-run` as a person uses it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use serde_json::Value;
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::Stage;

use crate::{ZERNEL_PATH, start_launching_target};

pub(crate) fn a_dry_run_prints_its_decisions() {
    let stage = Stage::new(Prologue::Push);
    // Probes are attached to the library that this one maps before the next one starts.
    let _first = start_launching_target(&stage, 10);
    let mut child = Command::new(ZERNEL_PATH)
        .args(["sched", "--dry-run", "--for", "4s", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("zernel runs");
    let mut messages = BufReader::new(child.stderr.take().expect("it is piped"));
    let mut line = String::new();
    messages.read_line(&mut line).expect("text");
    assert!(line.contains("nothing is scheduled"), "{line}");
    let target = start_launching_target(&stage, 10_000);
    let mut text = String::new();
    let mut output = child.stdout.take().expect("it is piped");
    output.read_to_string(&mut text).expect("text");
    assert!(child.wait().expect("it ends").success());
    let printed: Value = serde_json::from_str(&text).expect("JSON");
    assert!(printed["seconds"].as_f64() >= Some(4.0), "{printed}");
    let jobs = printed["jobs"].as_array().expect("a list");
    let job = jobs.iter().find(|job| job["pid"] == target.pid());
    let job = job.unwrap_or_else(|| panic!("it was observed: {printed:#}"));
    let critical = &job["classes"]["critical"];
    assert!(critical["run_ns"].as_u64() > Some(0), "{job:#}");
    assert!(critical["would_lend"] == 0, "{job:#}");
}
