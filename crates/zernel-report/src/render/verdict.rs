//! Text rendering: verdict, remedy and slowest rank.

use super::{TextPage, rank_name, write_paragraph};
use crate::report::Report;
use crate::text::join_with_no_break_spaces;
use crate::verdict::{NextStep, SlowestRank, VerdictDescription};

/// Smallest share of a rank's time in collectives from which the slowest rank can be judged.
const MIN_COLLECTIVE_SHARE: f64 = 0.01;

pub(super) fn write_verdict(out: &mut TextPage, report: &Report) -> std::fmt::Result {
    let verdict = report.verdict.describe();
    let text = format!("{}: {}", verdict.title, evidence_text(report, &verdict));
    write_paragraph(out, "verdict", &text)?;
    if let (Some(helps), Some(seconds)) = (verdict.helps, verdict.at_most_seconds) {
        let share = 100.0 * seconds / report.wall_seconds.max(seconds);
        let at_most =
            join_with_no_break_spaces(&format!("saves at most {seconds:.1} s ({share:.0} %)"));
        write_paragraph(out, "try", &format!("{helps}; {at_most}"))?;
    }
    for step in &verdict.next_steps {
        write_paragraph(out, "", &next_step_text(step))?;
    }
    match slowest_rank_text(report) {
        Some(text) => write_paragraph(out, "slowest", &text),
        None => Ok(()),
    }
}

/// Something to try: what, the line that does it, and its bound.
pub(crate) fn next_step_text(step: &NextStep) -> String {
    let bound = match step.at_most_seconds {
        Some(seconds) => format!("at most {seconds:.1} s"),
        None => "no bound".to_owned(),
    };
    format!(
        "- {}: {} ({})",
        step.what,
        step.line,
        join_with_no_break_spaces(&bound)
    )
}

/// The evidence of the verdict, after the name of the straggler if there is one.
pub(crate) fn evidence_text(report: &Report, verdict: &VerdictDescription) -> String {
    let straggler = verdict.straggler.and_then(|index| report.ranks.get(index));
    let straggler = straggler.map_or(String::new(), |rank| format!("{}: ", rank_name(rank)));
    format!("{straggler}{}", verdict.evidence)
}

/// The rank that the others wait for. `None` if there is only one rank.
pub(crate) fn slowest_rank_text(report: &Report) -> Option<String> {
    let text = match report.slowest {
        _ if report.ranks.len() < 2 => return None,
        Some(slowest) => format!(
            "{}: it waited {:.1} s less in collectives than the rank that waited longest{}",
            rank_name(&report.ranks[slowest.index]),
            slowest.seconds,
            slowest_rank_excess_text(&slowest)
        ),
        None if uses_collectives(report) => {
            "no rank stands out: all waited about equally long in collectives".to_owned()
        }
        None => format!(
            "can't tell: no rank spent more than {:.0} % of its time in collectives",
            100.0 * MIN_COLLECTIVE_SHARE
        ),
    };
    Some(text)
}

fn slowest_rank_excess_text(slowest: &SlowestRank) -> String {
    match slowest.more_seconds {
        0.0 => String::new(),
        more => format!(
            "; it spent {more:.1} s more {} than its peers",
            slowest.excess_activity_text()
        ),
    }
}

fn uses_collectives(report: &Report) -> bool {
    report.ranks.iter().any(|rank| {
        let times = rank.training_times();
        times.communication_seconds() > MIN_COLLECTIVE_SHARE * times.wall_seconds
    })
}
