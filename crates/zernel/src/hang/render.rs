//! The findings as text.

use std::fmt::Write;

use super::analysis::RankProblem;
use super::report::{CommunicatorReport, HangReport, HangVerdict, LateRankReport, RankReport};
use zernel_report::text::{format_bytes, join_with_no_break_spaces, shorten_text, wrap_lines};

/// Renders the whole report.
pub(super) fn render_text(report: &HangReport) -> String {
    let mut out = String::new();
    for ranks in &report.communicators {
        write_communicator(&mut out, ranks);
    }
    if report.communicators.is_empty() {
        let verdict = match report.verdict {
            HangVerdict::NothingHangs => "no rank hangs",
            _ => "can't tell",
        };
        let job = report.job.as_deref();
        let of_job = job.map_or(String::new(), |job| {
            format!(" of job {}", shorten_text(job, 30))
        });
        let note =
            format!("{verdict}: no process{of_job} that you may see has a known NCCL communicator");
        push_paragraph(&mut out, "", &note);
    }
    if !report.pids_without_communicator.is_empty() {
        let pids: Vec<String> = report
            .pids_without_communicator
            .iter()
            .map(u32::to_string)
            .collect();
        let note = format!(
            "not checked: pids {}, which have no communicator, or created it before `zernel observe` started",
            pids.join(", ")
        );
        push_paragraph(&mut out, "", &note);
    }
    out
}

fn write_communicator(out: &mut String, ranks: &CommunicatorReport) {
    let job = ranks.job.as_deref();
    let job = job.map_or(String::new(), |job| {
        format!(" of job {}", shorten_text(job, 30))
    });
    let exited = ranks
        .members
        .iter()
        .filter(|member| member.ended_seconds_ago.is_some());
    let exited = exited.count();
    let here = ranks.members.len() - exited;
    let mut on_this_node = match ranks.ranks {
        Some(ranks) => format!("{here} of {ranks} ranks are on this node"),
        None => format!("{here} ranks are on this node"),
    };
    if exited > 0 {
        let _ = write!(on_this_node, ", {exited} exited");
    }
    push_line(
        out,
        &format!("communicator {}{job}: {on_this_node}", ranks.communicator),
    );
    push_line(
        out,
        &format_row([
            "RANK",
            "PID",
            "NAME",
            "COLLECTIVE",
            "OPERATION",
            "BYTES",
            "ENTERED",
        ]),
    );
    for member in &ranks.members {
        push_line(out, &member_row(member));
    }
    for found in &ranks.findings {
        push_paragraph(out, "  ", &finding_text(found));
    }
    let conclusion = match ranks.verdict {
        HangVerdict::Hang => return,
        HangVerdict::NothingHangs => "no rank hangs".to_owned(),
        HangVerdict::CannotTell => all_ranks_wait_text(ranks),
    };
    push_paragraph(out, "  ", &conclusion);
}

fn member_row(member: &RankReport) -> String {
    let when = match (member.ended_seconds_ago, member.entered_seconds_ago) {
        (Some(ended), _) => format!("exited {ended:.1} s ago"),
        (None, Some(entered)) if member.is_being_made => format!("joining for {entered:.1} s"),
        (None, Some(entered)) if member.in_call => format!("{entered:.1} s ago, in the call"),
        (None, Some(entered)) => format!("{entered:.1} s ago"),
        (None, None) => "never".to_owned(),
    };
    let is_any = member.sequence > 0;
    format_row([
        &member.rank.map_or("-".to_owned(), |rank| rank.to_string()),
        &member.pid.to_string(),
        &shorten_text(&member.comm, 15),
        &member.sequence.to_string(),
        if is_any { &member.op } else { "-" },
        &if is_any {
            format_bytes(member.bytes)
        } else {
            "-".to_owned()
        },
        &when,
    ])
}

fn format_row(cells: [&str; 7]) -> String {
    let [rank, pid, name, collective, operation, bytes, entered] = cells;
    format!(
        "  {rank:>4} {pid:>8} {name:<15} {collective:>10} {operation:<14} {bytes:>10}  {entered}"
    )
}

/// The text for a communicator whose ranks on this node all wait, and none of them is the cause.
fn all_ranks_wait_text(ranks: &CommunicatorReport) -> String {
    let waited = ranks
        .members
        .iter()
        .filter_map(|member| member.entered_seconds_ago);
    let waited = waited.fold(0.0, f64::max);
    let elsewhere = ranks
        .ranks
        .is_none_or(|all| all as usize > ranks.members.len());
    let why = match elsewhere {
        true => {
            "a rank of another node is missing (run `zernel hang` there), the network or a GPU has failed"
        }
        false => "the network or a GPU has failed",
    };
    if ranks.members.iter().any(|member| member.is_being_made) {
        return format!(
            "can't tell: all ranks here have waited for {} for others to join: {why}",
            format_seconds(waited)
        );
    }
    format!(
        "can't tell: all ranks here have entered the same collective and have waited for their GPUs for {waited:.1} s, \
         longer than ever before: {why}, or they compute for longer than usual"
    )
}

fn finding_text(found: &LateRankReport) -> String {
    let verdict = if found.hangs { "HANG" } else { "late" };
    let mut text = format!("{verdict}: {}", problem_text(found));
    for other in &found.activity.meanwhile {
        // Writing to a string cannot fail.
        let _ = write!(text, "; {other}");
    }
    if let Some(communicator) = &found.waits_itself_on {
        let _ = write!(
            text,
            "; it waits itself on communicator {communicator}: see there"
        );
    }
    if !found.hangs && found.rank.longest_gap_seconds >= 1.0 {
        let _ = write!(
            text,
            "; it has gone {} without a collective before, so it may just be slow",
            format_seconds(found.rank.longest_gap_seconds)
        );
    }
    text
}

/// The text on a late rank: what the rank has not done, and what it does instead.
fn problem_text(found: &LateRankReport) -> String {
    let rank = &found.rank;
    let subject = match rank.rank {
        Some(number) => format!("rank {number} (pid {})", rank.pid),
        None => format!("a rank (pid {})", rank.pid),
    };
    let activity = &found.activity.text;
    let waited = format_seconds(found.waited_seconds);
    let last = join_with_no_break_spaces(&format!("{} {}", rank.op, rank.sequence));
    match &found.problem {
        RankProblem::Exited => format!(
            "{subject} {activity}; its last collective was {last}, and others have waited for {waited}"
        ),
        RankProblem::NotJoined => format!(
            "{subject} has not joined the communicator; others have waited for {waited}; it {activity}"
        ),
        RankProblem::Behind { leaders, next } => format!(
            "{subject} has not entered collective {next}; {leaders} others have waited in it for {waited}; it {activity}"
        ),
        RankProblem::InCall => format!(
            "{subject} has been in the call of {last} for {waited}; others have left it; it {activity}"
        ),
        RankProblem::Stopped => format!(
            "{subject} entered {last} with the others {waited} ago, but it may be incomplete; it {activity}"
        ),
        RankProblem::Different {
            sequence,
            own,
            others,
        } => format!(
            "{subject} entered {own} as collective {sequence}, the others entered {others}: neither can complete; the \
             others have waited for {waited}; it {activity}"
        ),
    }
}

fn format_seconds(seconds: f64) -> String {
    join_with_no_break_spaces(&format!("{seconds:.1} s"))
}

fn push_line(out: &mut String, line: &str) {
    out.push_str(line.trim_end());
    out.push('\n');
}

fn push_paragraph(out: &mut String, indent: &str, text: &str) {
    for (number, line) in wrap_lines(text, 94).into_iter().enumerate() {
        let more = if number == 0 { "" } else { "    " };
        push_line(out, &format!("{indent}{more}{line}"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::activity::{ProcessActivity, ProcessActivityKind};
    use super::super::analysis::HangThreshold;
    use super::*;
    use zernel_model::snapshot::Snapshot;

    fn report_text(members: &[serde_json::Value]) -> String {
        let snapshot: Snapshot = serde_json::from_value(json!({"observed": members})).unwrap();
        let threshold = HangThreshold {
            seconds: 5.0,
            allows_longest_gap: true,
        };
        let inspect = |_: &_| ProcessActivity::new(ProcessActivityKind::Stopped, "is stopped");
        render_text(&HangReport::new(
            &snapshot,
            Some("slurm-7"),
            threshold,
            |_| false,
            inspect,
        ))
    }

    fn member_json(rank: u32, sequence: u64, longest: f64) -> serde_json::Value {
        json!({
            "pid": 100 + rank, "role": "trainer",
            "identity": {"comm": "python-with-a-name", "job": "slurm-7"},
            "communicators": [{
                "communicator": "00000000000000ab", "rank": rank, "ranks": 8,
                "sequence": sequence, "op": "AllReduce", "bytes": 4 << 20, "in_call": false,
                "entered_seconds_ago": 30.0, "longest_gap_seconds": longest,
            }],
        })
    }

    fn assert_contains(text: &str, parts: &[&str]) {
        let words: Vec<&str> = text.split_whitespace().collect();
        let words = words.join(" ");
        for part in parts {
            assert!(words.contains(part), "{part} is not in\n{text}");
        }
        let narrow = |line: &str| line.chars().count() <= 100;
        assert!(text.lines().all(narrow), "{text}");
    }

    #[test]
    fn a_rank_that_is_behind_is_reported_with_its_activity() {
        let text = report_text(&[
            member_json(0, 7, 1.0),
            member_json(1, 7, 1.0),
            member_json(2, 6, 1.0),
        ]);
        assert_contains(
            &text,
            &[
                "of job slurm-7: 3 of 8 ranks are on this node",
                "2 102 python-with-a-… 6 AllReduce 4.0 MiB 30.0 s ago",
                "HANG: rank 2 (pid 102) has not entered collective 7; 2 others have waited in it for 30.0 s",
                "; it is stopped",
            ],
        );
    }

    #[test]
    fn a_slow_rank_is_late_and_no_hang() {
        let text = report_text(&[member_json(0, 7, 1.0), member_json(2, 6, 60.0)]);
        assert_contains(
            &text,
            &[
                "late: rank 2",
                "it has gone 60.0 s without a collective before",
                "no rank hangs",
            ],
        );
    }

    #[test]
    fn a_missing_job_is_reported() {
        assert_contains(
            &report_text(&[]),
            &["no process of job slurm-7 that you may see"],
        );
    }
}
