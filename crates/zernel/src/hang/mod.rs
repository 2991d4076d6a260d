//! `zernel hang`: which rank the others wait for.
//!
//! | part | subject |
//! |---|---|
//! | `analysis` | from a snapshot to who keeps others waiting. Pure |
//! | `doing` | what a process does instead |
//! | `syscalls` | the system calls in which a process may be stuck |
//! | `report` | what was found, and its JSON |
//! | `render` | the same for people |

mod activity;
mod analysis;
mod render;
mod report;
mod syscalls;

use std::error::Error;
use std::process::ExitCode;

use clap::Args;
use zernel_model::snapshot::ProcessSnapshot;

use crate::client::Socket;
use activity::Target;
use analysis::HangThreshold;
use report::{HangReport, HangVerdict};

/// For how many seconds others must have waited, unless that is asked for: ranks are always apart for a moment.
const SECONDS: f64 = 5.0;

/// Say which rank of a hanging job the others wait for
///
/// Every rank counts the collectives that it enters on a communicator (zernel sees the calls of NCCL). CommunicatorReport that have
/// come furthest wait for the others, so who has entered fewer is who they wait for; who has entered another
/// operation at the same place never meets them; who has ended never comes. All ranks are listed with
/// their last collective, and those that are waited for with what they do instead: stopped, on CPU, in I/O
/// (with the file), waiting for a lock, gone.
///
/// A slow rank is not a hang. It is called one when others have waited for 5 s for it, and when it has gone
/// longer without a collective than ever before; until then it is called late. A rank that is stopped, gone or
/// in another operation is not given that time. One that has not begun to make a communicator with the others
/// is late for a minute: programs begin at different times. With --after, only those seconds count.
///
/// Needs a running `zernel observe`, which must have been there when the communicators were made. Root sees all
/// ranks of this node, others see their own; no one sees those of other nodes: ask there too.
///
/// Exits with 0 if nothing hangs, with 1 if something does, and with 2 if that cannot be told: no daemon, no
/// such job, ranks of which no communicator is known, or all ranks here wait for something that is not here.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The job, as `zernel ps` names it; all jobs if it is left out
    #[arg(value_name = "JOB")]
    job: Option<String>,
    /// Call it a hang when others have waited for so many seconds, however slow the job is
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    after: Option<f64>,
    /// Tell programs, not people
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: Socket,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds >= 0.0 => Ok(seconds),
        _ => Err("a number of seconds is 0 or more, such as 5 or 0.5".to_owned()),
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
    let snapshot = options.socket.snapshot()?;
    let threshold = HangThreshold {
        seconds: options.after.unwrap_or(SECONDS),
        allows_longest_gap: options.after.is_none(),
    };
    let job = options.job.as_deref();
    let is_stopped = |process: &ProcessSnapshot| activity::is_stopped(target(process));
    let report = HangReport::new(&snapshot, job, threshold, is_stopped, |process| {
        activity::inspect(target(process))
    });
    let text = match options.json {
        true => format!("{:#}\n", serde_json::to_value(&report)?),
        false => render::text(&report),
    };
    crate::print(text.as_bytes())?;
    Ok(report.verdict)
}

fn target(process: &ProcessSnapshot) -> Target {
    let identity = process.identity.as_ref();
    Target {
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
