//! `zernel hang`: which rank the others wait for.
//!
//! | part | subject |
//! |---|---|
//! | `analysis` | from a snapshot to who is behind. Pure |
//! | `doing` | what a process is doing instead |

mod analysis;
mod doing;

use std::error::Error;
use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;

use crate::client::Socket;
use crate::text::{bytes, shortened, wrapped};
use analysis::{Finding, Group, Member, Problem};

/// Say which rank of a hanging job the others wait for
///
/// Every rank counts the collectives that it enters on a communicator. A rank that has entered fewer than others
/// is the one that they wait for; one that entered another operation never meets them. For each it is told
/// what the process does instead. Needs a running `zernel observe`, and sees the ranks of this node only.
///
/// Exits with 0 if nothing hangs, with 2 if something does.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The job, as `zernel ps` names it; all jobs if it is left out
    #[arg(value_name = "JOB")]
    job: Option<String>,
    /// For how many seconds others must have waited: ranks are always apart for a moment
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    after: f64,
    #[command(flatten)]
    socket: Socket,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let snapshot = options.socket.snapshot()?;
    let groups = analysis::groups(&snapshot, options.job.as_deref());
    let mut text = String::new();
    let mut hangs = false;
    for group in &groups {
        let findings = group.findings(options.after, doing::is_stopped);
        hangs |= !findings.is_empty();
        tell(&mut text, group, &findings, doing::describe)?;
    }
    if groups.is_empty() {
        text.push_str(&nothing_to_tell(options.job.as_deref()));
    }
    crate::print(text.as_bytes())?;
    Ok(ExitCode::from(if hangs { 2 } else { 0 }))
}

fn nothing_to_tell(job: Option<&str>) -> String {
    let whose = job.map_or(String::new(), |job| format!(" of job {job}"));
    format!(
        "no process{whose} that you may see has a NCCL communicator whose making was observed\n"
    )
}

fn tell(
    out: &mut String,
    group: &Group<'_>,
    findings: &[Finding<'_>],
    describe: impl Fn(u32) -> String,
) -> std::fmt::Result {
    let job = group.job().map_or(String::new(), |job| {
        format!(" of job {}", shortened(job, 30))
    });
    let here = group.members.len();
    let on_this_node = match group.ranks() {
        Some(ranks) => format!("{here} of {ranks} ranks are on this node"),
        None => format!("{here} ranks are on this node"),
    };
    writeln!(out, "communicator {}{job}: {on_this_node}", group.hash)?;
    if findings.is_empty() {
        return lines(out, &idle(group));
    }
    for finding in findings {
        let doing = describe(finding.member.process.pid);
        lines(out, &format!("{}; {doing}", explain(finding)))?;
    }
    Ok(())
}

/// What there is to say of a communicator whose ranks have all come equally far.
fn idle(group: &Group<'_>) -> String {
    let Some(last) = group.members.iter().max_by_key(|member| member.of.sequence) else {
        return String::new();
    };
    let ago = seconds_ago(last.of.entered_seconds_ago);
    let elsewhere = match group.ranks() {
        Some(ranks) if ranks as usize > group.members.len() => {
            "; the other ranks are on other nodes, or have ended"
        }
        _ => "",
    };
    format!(
        "no rank hangs; the last collective was {}{ago}{elsewhere}",
        call(last)
    )
}

fn explain(finding: &Finding<'_>) -> String {
    let member = finding.member;
    let comm = shortened(member.process.comm(), 15);
    let rank = member
        .of
        .rank
        .map_or("a rank".to_owned(), |rank| format!("rank {rank}"));
    let who = format!("{rank} (pid {} {comm})", member.process.pid);
    match &finding.problem {
        Problem::Behind {
            leaders,
            next,
            seconds,
        } => format!(
            "{who} has not entered collective {next}, for which {leaders} other ranks have waited for {seconds:.1} s; \
             its last was {}{}",
            call(member),
            seconds_ago(member.of.entered_seconds_ago)
        ),
        Problem::InCall { seconds } => format!(
            "{who} has been in the call of {} for {seconds:.1} s, which others have left",
            call(member)
        ),
        Problem::Stopped { seconds } => format!(
            "{who} entered {} {seconds:.1} s ago, as the others did, and may not have done its part",
            call(member)
        ),
        Problem::Different { others } => format!(
            "{who} entered {}, where the others entered {others}",
            call(member)
        ),
    }
}

fn call(member: &Member<'_>) -> String {
    let of = member.of;
    format!("{} {} ({})", of.op, of.sequence, bytes(of.bytes))
}

fn seconds_ago(seconds: Option<f64>) -> String {
    seconds.map_or(String::new(), |seconds| format!(", {seconds:.1} s ago"))
}

fn lines(out: &mut String, text: &str) -> std::fmt::Result {
    for (number, line) in wrapped(text, 94).into_iter().enumerate() {
        let indent = if number == 0 { "  " } else { "      " };
        writeln!(out, "{indent}{line}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_rank_that_is_behind_is_named_with_what_it_does_instead() {
        let member = |rank: u32, sequence: u64| {
            json!({
                "pid": 100 + rank, "role": "trainer",
                "identity": {"comm": "python-with-a-name", "job": "slurm-7"},
                "communicators": [{
                    "communicator": "00000000000000ab", "rank": rank, "ranks": 8,
                    "sequence": sequence, "op": "AllReduce", "bytes": 4 << 20, "in_call": false,
                    "entered_seconds_ago": 30.0,
                }],
            })
        };
        let observed = [member(0, 7), member(1, 7), member(2, 6), member(3, 7)];
        let snapshot: zernel_ebpf::observer::snapshot::Snapshot =
            serde_json::from_value(json!({"observed": observed})).unwrap();
        let groups = analysis::groups(&snapshot, Some("slurm-7"));
        let findings = groups[0].findings(5.0, |_| false);
        let mut text = String::new();
        tell(&mut text, &groups[0], &findings, |_| {
            "it is stopped".to_owned()
        })
        .unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        let words = words.join(" ");
        for part in [
            "4 of 8 ranks are on this node",
            "rank 2 (pid 102 python-with-a-…) has not entered collective 7",
            "3 other ranks have waited for 30.0 s",
            "its last was AllReduce 6 (4.0 MiB), 30.0 s ago; it is stopped",
        ] {
            assert!(words.contains(part), "{part} is not in\n{text}");
        }
        assert!(
            text.lines().all(|line| line.chars().count() <= 100),
            "{text}"
        );
    }
}
