//! The report as text that fits a screen.

mod ranks;
#[cfg(test)]
mod tests;
mod verdict;

use std::fmt::Write;

use anstyle::Style;

use super::report::{Ended, Report};
use crate::text::{shortened, wrapped};
pub(crate) use ranks::{no_ranks, rank_name};
pub(crate) use verdict::{evidence, slowest};

/// How wide lines are, unless a terminal is narrower.
const WIDTH: usize = 100;
/// In a terminal that is narrower than this, they are too long.
const MIN_WIDTH: usize = 60;
/// What there is always room for of a command.
const MIN_COMMAND_WIDTH: usize = 20;
/// Where what is told begins, beside its title.
const INDENT: usize = 10;
const BOLD: Style = Style::new().bold();

/// A text that is written in lines of a width.
struct Sheet {
    text: String,
    width: usize,
}

impl Write for Sheet {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.text.write_str(text)
    }
}

/// The whole report, for a terminal of that width.
pub fn text(report: &Report, width: Option<usize>) -> String {
    let mut out = Sheet {
        text: String::new(),
        width: width.unwrap_or(WIDTH).clamp(MIN_WIDTH, WIDTH),
    };
    // Writing to a string does not fail.
    let _ = write_report(&mut out, report);
    out.text
}

fn write_report(out: &mut Sheet, report: &Report) -> std::fmt::Result {
    summary(out, report)?;
    if let Some(reason) = &report.not_observed {
        let text = format!(
            "phases, waits, collectives, launches, GPU memory, and so what bounds the run: {reason}"
        );
        paragraph(out, "not seen", &text)?;
        return Ok(());
    }
    ranks::write_ranks(out, report)?;
    verdict::write_verdict(out, report)?;
    overhead(out, report)
}

fn summary(out: &mut Sheet, report: &Report) -> std::fmt::Result {
    let (what, how) = match &report.ended {
        None => ("zernel attach", "observed".to_owned()),
        Some(ended) => ("zernel run", exit_text(ended)),
    };
    let rest = format!(": {:.2} s, {how}", report.wall_seconds);
    let command = report.command.join(" ");
    let room = out.width - what.len() - 1;
    let command = shortened(
        &command,
        room.saturating_sub(rest.len()).max(MIN_COMMAND_WIDTH),
    );
    let text = format!("{command}{rest}");
    // A command may have spaces of its own, which count.
    let lines = match text.chars().count() <= room {
        true => vec![text],
        false => wrapped(&text, room),
    };
    writeln!(out, "{BOLD}{what}{BOLD:#} {}", lines[0])?;
    let indent = what.len();
    (lines[1..].iter()).try_for_each(|line| writeln!(out, "{:indent$} {line}", ""))
}

/// The end of a command in words.
pub(crate) fn exit_text(ended: &Ended) -> String {
    let how = match (ended.code, ended.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    };
    let (user, system) = (ended.user_seconds, ended.system_seconds);
    format!("{how}; CPU {user:.2} s user, {system:.2} s system")
}

fn overhead(out: &mut Sheet, report: &Report) -> std::fmt::Result {
    let has_paid = report.ranks.len() + report.others + report.loaders > 0;
    if let Some(observing) = report.observing.as_ref().filter(|_| has_paid) {
        let sampled = match observing.sampled.is_empty() {
            true => "nothing was sampled".to_owned(),
            false => format!("sampled: {}", observing.sampled.join(", ")),
        };
        let text = format!(
            "about {:.3} s of all threads, {:.2} % of the rank that paid most ({:.1} µs a call); {sampled}",
            observing.cost_seconds,
            100.0 * observing.cost_share,
            1e6 * observing.call_cost_seconds
        );
        paragraph(out, "observing", &text)?;
    }
    for problem in &report.problems {
        paragraph(out, "problem", problem)?;
    }
    Ok(())
}

/// A text with a title, in as many lines as it takes.
fn paragraph(out: &mut Sheet, title: &str, text: &str) -> std::fmt::Result {
    for (number, line) in wrapped(text, out.width - INDENT).into_iter().enumerate() {
        let title = if number == 0 { title } else { "" };
        writeln!(out, "{BOLD}{title:<9}{BOLD:#} {line}")?;
    }
    Ok(())
}
