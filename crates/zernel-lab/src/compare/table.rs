//! Formats the result of a comparison as a table of text, in the form of Markdown.

use std::fmt;

use super::statistics::SignTestOutcome;
use super::{ComparisonReport, ScenarioReport, SchedulerRow};
use crate::assertion::Verdict;

const COLUMN_HEADINGS: [&str; 11] = [
    "scheduler",
    "per s",
    "of ref",
    "step p50 | p99 ms",
    "wake p50 | p99 | max µs",
    "CPU-ms/step",
    "noise CPUs",
    "longest wait ms",
    "wins : losses",
    "against the first",
    "verdict",
];

impl fmt::Display for ComparisonReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "Rule: {}.", self.rule)?;
        for scenario in &self.scenarios {
            write!(formatter, "\n{scenario}")?;
        }
        Ok(())
    }
}

impl fmt::Display for ScenarioReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "### {}\n\n{}", self.name, self.about)?;
        writeln!(formatter, "Compared: {}.\n", self.metric.label())?;
        let cells: Vec<[String; 11]> = self.rows.iter().map(|row| self.row_cells(row)).collect();
        let width = |column: usize| {
            let texts = cells.iter().map(|row| row[column].chars().count());
            texts
                .chain([COLUMN_HEADINGS[column].chars().count()])
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..COLUMN_HEADINGS.len()).map(width).collect();
        let mut write_line = |cells: &[String]| {
            let padded = cells
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"));
            // A `|` inside a cell would end the cell, so it is replaced.
            let padded: Vec<String> = padded.map(|cell| cell.replace(" | ", " / ")).collect();
            writeln!(formatter, "| {} |", padded.join(" | "))
        };
        write_line(&COLUMN_HEADINGS.map(str::to_owned))?;
        write_line(
            &widths
                .iter()
                .map(|width| "-".repeat(*width))
                .collect::<Vec<String>>(),
        )?;
        cells.iter().try_for_each(|row| write_line(row))?;
        for row in &self.rows {
            if let Some(problem) = row
                .problem
                .as_ref()
                .filter(|_| row.verdict != Verdict::Pass)
            {
                let first_line = problem.lines().next().unwrap_or_default();
                writeln!(
                    formatter,
                    "\n{}: {} ({first_line})",
                    row.scheduler, row.verdict
                )?;
            }
        }
        Ok(())
    }
}

impl ScenarioReport {
    fn row_cells(&self, row: &SchedulerRow) -> [String; 11] {
        let reference = self
            .rows
            .iter()
            .find(|row| row.scheduler == "ref")
            .and_then(|row| row.rate);
        let of_reference = row
            .rate
            .zip(reference)
            .map(|(rate, reference)| rate / reference);
        let is_first = self
            .rows
            .first()
            .is_some_and(|first| first.scheduler == row.scheduler);
        let sign_test = &row.against_first;
        let against_first = match (is_first, sign_test.outcome()) {
            (true, _) => "-".to_owned(),
            (_, SignTestOutcome::Better) => format!("better, p = {:.3}", sign_test.p_value()),
            (_, SignTestOutcome::Worse) => format!("worse, p = {:.3}", sign_test.p_value()),
            (_, SignTestOutcome::Undecided) => format!("undecided, p = {:.3}", sign_test.p_value()),
        };
        [
            row.scheduler.clone(),
            format_number(row.rate, 1),
            format_number(of_reference, 2),
            join_unless_all_missing(&[
                format_number(row.step_p50_ms, 2),
                format_number(row.step_p99_ms, 2),
            ]),
            join_unless_all_missing(&[
                format_number(row.wake_p50_us, 0),
                format_number(row.wake_p99_us, 0),
                format_number(row.wake_max_us, 0),
            ]),
            format_number(row.cpu_ms_per_step, 2),
            format_number(row.noise_cpus, 2),
            format_number(row.longest_wait_ms, 1),
            match is_first {
                true => "-".to_owned(),
                false => format!("{} : {}", sign_test.wins, sign_test.losses),
            },
            against_first,
            row.verdict.to_string(),
        ]
    }
}

fn format_number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn join_unless_all_missing(parts: &[String]) -> String {
    match parts.iter().all(|part| part == "-") {
        true => "-".to_owned(),
        false => parts.join(" | "),
    }
}
