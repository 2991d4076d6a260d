//! The report as text for a terminal.
//!
//! | module | subject |
//! |---|---|
//! | `ranks` | phases, steps, waits and work of each rank |
//! | `verdict` | verdict, remedy and slowest rank |

mod ranks;
#[cfg(test)]
mod tests;
mod verdict;

use std::fmt::Write;

use anstyle::Style;

use super::report::{CommandExit, Report};
use crate::text::{shorten_text, wrap_lines};
pub(crate) use ranks::{no_ranks_reason, rank_name};
pub(crate) use verdict::{evidence_text, next_step_text, slowest_rank_text};

/// Line width, unless the terminal is narrower.
const MAX_LINE_WIDTH: usize = 100;
/// Narrowest supported line. Narrower terminals wrap the lines themselves.
const MIN_LINE_WIDTH: usize = 60;
/// Columns that the command line always gets.
const MIN_COMMAND_WIDTH: usize = 20;
/// Width of the column with the titles.
const TITLE_COLUMN_WIDTH: usize = 10;

const BOLD_STYLE: Style = Style::new().bold();

/// Text with a line width.
struct TextPage {
    text: String,
    width: usize,
}

impl Write for TextPage {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.text.write_str(text)
    }
}

/// Renders the report for a terminal with `width` columns; `None` for anything else.
pub fn render_text(report: &Report, width: Option<usize>) -> String {
    let mut out = TextPage {
        text: String::new(),
        width: width
            .unwrap_or(MAX_LINE_WIDTH)
            .clamp(MIN_LINE_WIDTH, MAX_LINE_WIDTH),
    };
    // Writing to a string cannot fail.
    let _ = write_report(&mut out, report);
    out.text
}

fn write_report(out: &mut TextPage, report: &Report) -> std::fmt::Result {
    write_summary(out, report)?;
    if let Some(reason) = &report.not_observed {
        let text = format!("phases, steps, waits, collectives, GPU memory, verdict: {reason}");
        return write_paragraph(out, "missing", &text);
    }
    ranks::write_ranks(out, report)?;
    verdict::write_verdict(out, report)?;
    write_overhead(out, report)
}

fn write_summary(out: &mut TextPage, report: &Report) -> std::fmt::Result {
    let (title, end) = match &report.ended {
        None => ("zernel attach", attach_time_text(report)),
        Some(ended) => ("zernel run", exit_text(ended)),
    };
    let rest = format!(": {:.2} s, {end}", report.wall_seconds);
    let room = out.width - title.len() - 1;
    let command_width = room.saturating_sub(rest.len()).max(MIN_COMMAND_WIDTH);
    let command = shorten_text(&report.command.join(" "), command_width);
    let text = format!("{command}{rest}");
    // Wrapping would merge consecutive spaces of the command.
    let lines = match text.chars().count() <= room {
        true => vec![text],
        false => wrap_lines(&text, room),
    };
    writeln!(out, "{BOLD_STYLE}{title}{BOLD_STYLE:#} {}", lines[0])?;
    let indent = title.len();
    (lines[1..].iter()).try_for_each(|line| writeln!(out, "{:indent$} {line}", ""))
}

/// Since when a job that was attached to was observed.
fn attach_time_text(report: &Report) -> String {
    match report.observing_began_seconds {
        Some(seconds) => format!("observed from {seconds:.2} s on"),
        None => "observed".to_owned(),
    }
}

/// How the command ended, and its CPU time.
pub(crate) fn exit_text(ended: &CommandExit) -> String {
    let end = match (ended.code, ended.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "exited".to_owned(),
    };
    let (user, system) = (ended.user_seconds, ended.system_seconds);
    format!("{end}; CPU {user:.2} s user, {system:.2} s system")
}

fn write_overhead(out: &mut TextPage, report: &Report) -> std::fmt::Result {
    let observed = report.ranks.len() + report.others + report.loaders;
    if let Some(observing) = report.observing.as_ref().filter(|_| observed > 0) {
        let sampled = match observing.sampled.is_empty() {
            true => "no function was sampled".to_owned(),
            false => format!("sampled: {}", observing.sampled.join(", ")),
        };
        let text = format!(
            "{:.2} % of the most affected rank; all threads about {:.3} s, {:.1} µs per call; {sampled}",
            100.0 * observing.cost_share,
            observing.cost_seconds,
            1e6 * observing.call_cost_seconds
        );
        write_paragraph(out, "overhead", &text)?;
    }
    for problem in &report.problems {
        write_paragraph(out, "problem", problem)?;
    }
    Ok(())
}

/// Writes a title and, beside it, a text wrapped to the line width.
fn write_paragraph(out: &mut TextPage, title: &str, text: &str) -> std::fmt::Result {
    for (number, line) in wrap_lines(text, out.width - TITLE_COLUMN_WIDTH)
        .into_iter()
        .enumerate()
    {
        let title = if number == 0 { title } else { "" };
        writeln!(out, "{BOLD_STYLE}{title:<9}{BOLD_STYLE:#} {line}")?;
    }
    Ok(())
}
