//! The doctor's findings as a table for people.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use super::row::{Row, Status};
use super::{Report, Verdict};

/// Width of the column of names.
const NAME_WIDTH: usize = 20;

pub(super) fn table(out: &mut impl Write, report: &Report) -> io::Result<()> {
    for section in &report.sections {
        let bold = Style::new().bold();
        writeln!(out, "{bold}{}{bold:#}", section.title)?;
        for row in &section.rows {
            line(out, row)?;
        }
        writeln!(out)?;
    }
    verdict(out, &report.observe)
}

fn line(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let (word, colour) = match row.status {
        Status::Ok => ("ok", AnsiColor::Green),
        Status::Degraded => ("degraded", AnsiColor::Yellow),
        Status::Missing => ("missing", AnsiColor::Red),
    };
    let style = colour.on_default();
    writeln!(
        out,
        "  {style}{word:<9}{style:#} {:<NAME_WIDTH$} {}",
        row.name, row.finding
    )?;
    let details = [("so: ", &row.consequence), ("fix: ", &row.remedy)];
    for (label, text) in details {
        if let Some(text) = text {
            writeln!(out, "  {:<9} {:<NAME_WIDTH$} {label}{text}", "", "")?;
        }
    }
    Ok(())
}

fn verdict(out: &mut impl Write, verdict: &Verdict) -> io::Result<()> {
    match verdict.rung {
        Some(rung) if verdict.possible => {
            writeln!(out, "zernel observe can work here, attaching with {rung}")
        }
        _ => writeln!(
            out,
            "zernel observe cannot work here; missing: {}",
            verdict.blocked_by.join(", ")
        ),
    }
}
