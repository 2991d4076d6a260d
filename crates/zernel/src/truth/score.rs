//! `zernel truth score`: compares a trace with stamp logs.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use zernel_truth::detected_phases::PhaseSource;
use zernel_truth::render::render_report;
use zernel_truth::report::score_trace;
use zernel_truth::stamps::StampLog;
use zernel_truth::trace::RecordedTrace;

use super::gzip;
use crate::help;

/// Score a trace against the stamp logs of its processes
///
/// Prints time-weighted confusion matrices, precision, recall and F1, the errors of shares and boundaries, and delays.
/// Files may be compressed.
#[derive(Debug, Args)]
#[command(after_help = help::TRUTH_SCORE_EXAMPLES)]
pub(super) struct Options {
    /// Trace, as `zernel truth record` writes it
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Stamp logs of the traced processes
    #[arg(value_name = "STAMPS", required = true)]
    stamps: Vec<PathBuf>,
    /// Detect phases anew from the recorded events, with the event tracker of this version
    #[arg(long)]
    replay: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let named = |path: &Path, error: &dyn Error| format!("{}: {error}", path.display());
    let read = |path: &Path| gzip::read_and_decompress(path).map_err(|error| named(path, &error));
    let trace = RecordedTrace::parse(&read(&options.trace)?);
    let trace = trace.map_err(|error| named(&options.trace, &error))?;
    let mut stamps = Vec::new();
    for path in &options.stamps {
        let text = String::from_utf8(read(path)?).map_err(|error| named(path, &error))?;
        stamps.push(StampLog::parse(&text).map_err(|error| named(path, &error))?);
    }
    let source = match options.replay {
        true => PhaseSource::Replayed,
        false => PhaseSource::Recorded,
    };
    let report = score_trace(&trace, &stamps, source);
    let text = match options.json {
        true => serde_json::to_string_pretty(&report)? + "\n",
        false => render_report(&report),
    };
    crate::print_to_stdout(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
