//! The section of the text report that has the verdict.

use super::{Sheet, paragraph, rank_name};
use crate::report::Report;
use crate::text::unbroken;
use crate::verdict::Slowest;

/// What the verdict rests on, and who is meant by it.
pub(crate) fn evidence(report: &Report) -> String {
    let verdict = &report.verdict;
    let straggler = verdict.straggler();
    let straggler = straggler.and_then(|index| report.ranks.get(index));
    let straggler = straggler.map_or(String::new(), |rank| format!("{}: ", rank_name(rank)));
    format!("{straggler}{}", verdict.evidence())
}

pub(super) fn write_verdict(out: &mut Sheet, report: &Report) -> std::fmt::Result {
    let verdict = &report.verdict;
    let text = format!("{}: {}", verdict.name(), evidence(report));
    paragraph(out, "verdict", &text)?;
    if let (Some(remedy), Some(seconds)) = (verdict.remedy(), verdict.at_most_seconds()) {
        let share = 100.0 * seconds / report.wall_seconds.max(seconds);
        let at_most = unbroken(&format!("at most {seconds:.1} s ({share:.0} %)"));
        let text = format!("{}; {at_most}", remedy.text());
        paragraph(out, "helps", &text)?;
    }
    match slowest(report) {
        Some(text) => paragraph(out, "slowest", &text),
        None => Ok(()),
    }
}

/// Which rank the others wait for; `None` if it is alone.
pub(crate) fn slowest(report: &Report) -> Option<String> {
    let text = match report.slowest {
        _ if report.ranks.len() < 2 => return None,
        Some(slowest) => format!(
            "{}: it waited {:.1} s less in collectives than the one that waited longest{}",
            rank_name(&report.ranks[slowest.index]),
            slowest.seconds,
            excess(&slowest)
        ),
        None if uses_collectives(report) => {
            "none stands out: all wait for each other about as long".to_owned()
        }
        None => "can't tell: the ranks were hardly ever seen in collectives".to_owned(),
    };
    Some(text)
}

fn excess(slowest: &Slowest) -> String {
    match slowest.more_seconds {
        0.0 => String::new(),
        more => format!(
            ", and spent {more:.1} s more {} than its peers",
            slowest.spent()
        ),
    }
}

/// Whether a rank spent a hundredth of its time in collectives.
fn uses_collectives(report: &Report) -> bool {
    let mut ranks = report.ranks.iter();
    ranks.any(|rank| {
        rank.training_times().communication_seconds() > 0.01 * rank.training_times().wall_seconds
    })
}
