//! The doctor's findings as a table for people.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use super::row::{CheckRow, CheckStatus};
use super::{DoctorReport, ObservingVerdict};

/// Width of the column of names.
const NAME_WIDTH: usize = 20;

pub(super) fn write_table(out: &mut impl Write, report: &DoctorReport) -> io::Result<()> {
    for section in &report.sections {
        let bold = Style::new().bold();
        writeln!(out, "{bold}{}{bold:#}", section.title)?;
        for row in &section.rows {
            write_row(out, row)?;
        }
        writeln!(out)?;
    }
    write_verdict(out, &report.observe)
}

fn write_row(out: &mut impl Write, row: &CheckRow) -> io::Result<()> {
    let (word, colour) = match row.status {
        CheckStatus::Ok => ("ok", AnsiColor::Green),
        CheckStatus::Degraded => ("degraded", AnsiColor::Yellow),
        CheckStatus::Missing => ("missing", AnsiColor::Red),
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

fn write_verdict(out: &mut impl Write, verdict: &ObservingVerdict) -> io::Result<()> {
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
