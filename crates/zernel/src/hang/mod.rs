//! `zernel hang`: finds the rank that all other ranks of a job wait for.
//!
//! | module | subject |
//! |---|---|
//! | `analysis` | finds the ranks that keep others waiting in a snapshot. Pure |
//! | `activity` | what a process does instead, from /proc |
//! | `syscalls` | system calls in which a process may block |
//! | `report` | the findings as data; their JSON form |
//! | `render` | the findings as text |

mod activity;
mod analysis;
mod render;
mod report;
mod syscalls;

use std::error::Error;
use std::process::ExitCode;

use clap::Args;
use zernel_model::snapshot::ProcessSnapshot;

use crate::daemon_client::DaemonSocket;
use activity::InspectedProcess;
use analysis::HangThreshold;
use report::{HangReport, HangVerdict};

/// Seconds that other ranks must have waited by default so that a late rank counts as a hang. Shorter waits are
/// normal.
const DEFAULT_HANG_SECONDS: f64 = 5.0;

/// Find the rank that a hanging job waits for
///
/// Lists the ranks of every NCCL communicator with the last collective that each has entered. All other ranks wait
/// for a rank that has entered fewer collectives, has entered another operation at the same place, has not joined the
/// communicator, is stopped, or has exited. For such a rank, the report shows what it does instead: on CPU, in I/O
/// (with the file), waiting for a lock, stopped, exited.
///
/// A slow rank is reported as late, not as a hang, until the others have waited for 5 s and the rank has gone a tenth
/// longer without a collective than ever before. A rank that has not joined is late for a minute, because programs start at
/// different times. Stopped and exited ranks and different operations are hangs after 5 s. With --after, only the time that
/// other ranks have waited counts.
///
/// Needs a `zernel observe` that was running when the communicators were created. Root sees all ranks of this node,
/// other users see their own. Ranks of other nodes are not visible: run `zernel hang` on these nodes, too.
///
/// Exit codes: 0 if no rank hangs, 1 if a rank hangs, 2 if that is unknown (no daemon, no such job, unknown
/// communicators, or all ranks here wait for something that is not on this node).
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Check only this job, as listed by `zernel ps` [default: all jobs]
    #[arg(value_name = "JOB")]
    job: Option<String>,
    /// Report a hang after other ranks have waited SECONDS, even if the rank was this slow before
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    after: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: DaemonSocket,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds >= 0.0 => Ok(seconds),
        _ => Err("expected a number of seconds, 0 or more, such as 5 or 0.5".to_owned()),
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    match write_report(options) {
        Ok(verdict) => Ok(ExitCode::from(verdict.exit_code())),
        Err(error) => {
            eprintln!("zernel: {error}");
            Ok(ExitCode::from(HangVerdict::CannotTell.exit_code()))
        }
    }
}

fn write_report(options: &Options) -> Result<HangVerdict, Box<dyn Error>> {
    let snapshot = options.socket.fresh_snapshot()?;
    let threshold = HangThreshold {
        seconds: options.after.unwrap_or(DEFAULT_HANG_SECONDS),
        allows_longest_gap: options.after.is_none(),
    };
    let job = options.job.as_deref();
    let is_stopped = |process: &ProcessSnapshot| activity::is_stopped(inspected_process(process));
    let report = HangReport::new(&snapshot, job, threshold, is_stopped, |process| {
        activity::inspect_process(inspected_process(process))
    });
    let text = match options.json {
        true => format!("{:#}\n", serde_json::to_value(&report)?),
        false => render::render_text(&report),
    };
    crate::print_to_stdout(text.as_bytes())?;
    Ok(report.verdict)
}

fn inspected_process(process: &ProcessSnapshot) -> InspectedProcess {
    let identity = process.identity.as_ref();
    InspectedProcess {
        pid: process.pid,
        start_time: identity.map(|identity| identity.start_time),
        step_thread: process.phases.step_thread,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_not_negative() {
        assert_eq!(parse_seconds("0.5"), Ok(0.5));
        for wrong in ["", "-1", "NaN", "soon"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
