//! Text rendering: phases, steps, waits and work of each rank.

use std::fmt::Write;

use anstyle::AnsiColor;

use super::{BOLD_STYLE, TextPage, write_paragraph};
use crate::process::ProcessReport;
use crate::report::Report;
use crate::steps::{Interruption, StepReport};
use crate::text::{
    format_bytes, format_estimate, format_time, join_with_no_break_spaces, shorten_text,
};

/// Width of a phase bar.
const BAR_WIDTH: usize = 40;
/// Columns that the rest of a line with a bar needs at most.
const WIDTH_BESIDE_BAR: usize = 52;
/// With more ranks than this, only the slowest one gets details.
const MAX_DETAILED_RANKS: usize = 2;
/// Ranks that get a bar, so that the report fits a screen.
const MAX_SHOWN_RANKS: usize = 16;

/// Colours of the phases, in the order of `PhaseSeconds::seconds_by_phase_name`.
const PHASE_COLOURS: [AnsiColor; 5] = [
    AnsiColor::Yellow,
    AnsiColor::Green,
    AnsiColor::Magenta,
    AnsiColor::Cyan,
    AnsiColor::BrightBlack,
];
/// Letters of the phases in a bar, in the same order.
const PHASE_LETTERS: [char; 5] = ['D', 'G', 'N', 'O', '.'];

/// Why there are no ranks.
pub(crate) fn no_ranks_reason(report: &Report) -> String {
    match report.others + report.loaders {
        0 => "no process made a training call to CUDA, NCCL or torch".to_owned(),
        1 => "1 process was observed, but it did not train".to_owned(),
        count => format!("{count} processes were observed, but none trained"),
    }
}

pub(super) fn write_ranks(out: &mut TextPage, report: &Report) -> std::fmt::Result {
    if report.ranks.is_empty() {
        return write_paragraph(out, "ranks", &format!("none: {}", no_ranks_reason(report)));
    }
    if let Some(gpus) = report.gpus() {
        write_paragraph(out, "GPUs", &gpus)?;
    }
    write_phase_legend(out)?;
    let slowest = report.slowest.map_or(0, |slowest| slowest.index);
    for (index, rank) in report.ranks.iter().enumerate() {
        let is_detailed = report.ranks.len() <= MAX_DETAILED_RANKS || index == slowest;
        if index < MAX_SHOWN_RANKS || is_detailed {
            write_phase_bar(out, rank)?;
        }
        if is_detailed {
            write_rank_details(out, rank)?;
        }
    }
    let hidden = report.ranks.len().saturating_sub(MAX_SHOWN_RANKS);
    if hidden > 0 {
        write_paragraph(
            out,
            "more",
            &format!("{hidden} ranks; --json FILE lists all"),
        )?;
    }
    Ok(())
}

fn write_phase_legend(out: &mut TextPage) -> std::fmt::Result {
    let names = [
        "data loading",
        "GPU compute",
        "NCCL collective",
        "optimizer step",
        "unknown",
    ];
    const LEGEND_TITLE: &str = "phases:";
    write!(out, "{LEGEND_TITLE}")?;
    let mut column = LEGEND_TITLE.len();
    for ((name, letter), colour) in names.into_iter().zip(PHASE_LETTERS).zip(PHASE_COLOURS) {
        let length = name.len() + 4;
        if column + length > out.width {
            column = LEGEND_TITLE.len();
            write!(out, "\n{:column$}", "")?;
        }
        column += length;
        let style = colour.on_default();
        write!(out, "  {style}{letter}{style:#} {name}")?;
    }
    writeln!(out)
}

/// The name of a rank: its number, or its pid if it has none.
pub(crate) fn rank_name(rank: &ProcessReport) -> String {
    match rank.rank {
        Some(number) => format!("rank {number}"),
        None => format!("pid {}", rank.pid),
    }
}

fn write_phase_bar(out: &mut TextPage, rank: &ProcessReport) -> std::fmt::Result {
    write!(out, "{BOLD_STYLE}{:<9}{BOLD_STYLE:#} ", rank_name(rank))?;
    let phases = &rank.training_times().phases;
    let total = phases.total_seconds();
    let width = BAR_WIDTH.min(out.width - WIDTH_BESIDE_BAR);
    let (mut seconds, mut drawn) = (0.0, 0);
    for (index, (_, phase)) in phases.seconds_by_phase_name().into_iter().enumerate() {
        seconds += phase;
        let until = match total > 0.0 {
            true => (width as f64 * seconds / total).round() as usize,
            false => 0,
        };
        let style = PHASE_COLOURS[index].on_default();
        let letters = PHASE_LETTERS[index].to_string().repeat(until - drawn);
        write!(out, "{style}{letters}{style:#}")?;
        drawn = until;
    }
    let comm = shorten_text(&rank.comm, 15);
    let gaps = " ".repeat(width - drawn);
    writeln!(
        out,
        "{gaps} {:8.2} s  pid {} {comm}",
        rank.training_times().wall_seconds,
        rank.pid
    )
}

fn write_rank_details(out: &mut TextPage, rank: &ProcessReport) -> std::fmt::Result {
    if let Some(steps) = &rank.steps {
        write_paragraph(out, "", &describe_step_times(rank, steps))?;
    }
    let times = rank.training_times();
    let total = times.phases.total_seconds();
    let phases = times.phases.seconds_by_phase_name().map(|(name, seconds)| {
        let share = if total > 0.0 {
            100.0 * seconds / total
        } else {
            0.0
        };
        join_with_no_break_spaces(&format!("{name} {seconds:.2} s {share:.0} %"))
    });
    write_paragraph(out, "", &phases.join(", "))?;
    if times.phases.more_than_wall > 0.01 * times.wall_seconds {
        let more = times.phases.more_than_wall;
        write_paragraph(
            out,
            "",
            &format!(
                "several training threads: phases add up to {more:.2} s more than the wall time"
            ),
        )?;
    }
    if times.not_observed_seconds > 0.0 {
        let seconds = times.not_observed_seconds;
        let text = format!("not observed for {seconds:.2} s of it, so phases are unknown then");
        write_paragraph(out, "", &text)?;
    }
    let compile_seconds = times.awaited_compile_seconds();
    if compile_seconds > 0.0 {
        let text =
            format!("compiled for {compile_seconds:.2} s of it, which the verdict leaves out");
        write_paragraph(out, "", &text)?;
    }
    let data_waits = times.bounded_data_waits();
    if data_waits.total_seconds() > 0.0 {
        let causes = data_waits.by_name();
        let causes = causes.map(|(name, seconds)| format!("{name} {seconds:.2}"));
        let total = data_waits.total_seconds();
        write_paragraph(
            out,
            "",
            &format!("waits for data {total:.2} s: {}", causes.join(", ")),
        )?;
    }
    if times.peer_wait_seconds > 0.0 {
        let seconds = times.peer_wait_seconds.min(times.wall_seconds);
        let waits = format!("waits for other ranks {seconds:.2} s");
        write_paragraph(out, "", &waits)?;
    }
    if !rank.collectives.is_empty() {
        write_paragraph(out, "", &describe_collectives(rank))?;
    }
    write_paragraph(out, "", &describe_work(rank))
}

/// Number of steps, step time, and the time around and between steps.
fn describe_step_times(rank: &ProcessReport, steps: &StepReport) -> String {
    let at_least = if steps.at_least { "at least " } else { "" };
    let mut parts = vec![
        format!("{at_least}{} steps", steps.count),
        format!("median {}", format_time(steps.median_seconds)),
        format!("p99 {}", format_time(steps.p99_seconds)),
        format!("longest {}", format_time(steps.longest_seconds)),
    ];
    if steps.warm_up > 0 {
        let seconds = format_time(steps.warm_up_seconds);
        let plural = if steps.warm_up == 1 { "" } else { "s" };
        parts.push(format!(
            "warm-up {seconds} ({} step{plural})",
            steps.warm_up
        ));
    }
    let start_up = rank.start_up_seconds();
    parts.extend(start_up.map(|seconds| format!("{seconds:.1} s to the first call")));
    if let Some(training) = &rank.training {
        let after = rank.times.wall_seconds - training.begin_seconds - training.times.wall_seconds;
        parts.push(format!("{:.1} s to the first step", training.begin_seconds));
        parts.push(format!("{:.1} s after the last", after.max(0.0)));
    }
    if steps.thinned {
        parts.push("pauses and stalls of a subset of steps".to_owned());
    }
    let mut text = join_phrases(parts);
    if !steps.pauses.is_empty() {
        let seconds = format_time(steps.pause_seconds);
        text += &format!(
            "; pauses {seconds} in total: {}",
            describe_interruptions(&steps.pauses)
        );
    }
    if !steps.stalls.is_empty() {
        text += &format!(
            "; stalls {}: {}",
            steps.stalled,
            describe_interruptions(&steps.stalls)
        );
    }
    text
}

/// Joins phrases with commas. Lines break between phrases only.
fn join_phrases(phrases: impl IntoIterator<Item = String>) -> String {
    let phrases = phrases
        .into_iter()
        .map(|phrase| join_with_no_break_spaces(&phrase));
    phrases.collect::<Vec<_>>().join(", ")
}

/// The length of each pause or stall, and when it began.
fn describe_interruptions(all: &[Interruption]) -> String {
    let text =
        |one: &Interruption| format!("{} at {:.1} s", format_time(one.seconds), one.at_seconds);
    join_phrases(all.iter().map(text))
}

fn describe_collectives(rank: &ProcessReport) -> String {
    let each = rank.collectives.iter().map(|collective| {
        let median = collective.until_sync_median_seconds;
        let median = median.map_or(String::new(), |seconds| {
            join_with_no_break_spaces(&format!("done in {:.2} ms (median)", 1e3 * seconds))
        });
        let calls = format!(
            "{} {} × {}",
            collective.calls,
            collective.op,
            format_bytes(collective.bytes / collective.calls.max(1))
        );
        format!("{} {median}", join_with_no_break_spaces(&calls))
            .trim_end()
            .to_owned()
    });
    each.collect::<Vec<_>>().join("; ")
}

/// Launches per step, with their 95 % interval if they are an estimate.
fn describe_launches_per_step(rank: &ProcessReport) -> String {
    // An interval that rounds to 0.0 is not shown.
    let error = rank.launches_per_step_error.filter(|error| *error >= 0.05);
    let error = error.map_or(String::new(), |error| format!(" ± {error:.1}"));
    rank.launches_per_step.map_or(String::new(), |launches| {
        format!(" ({launches:.1}{error} launches per step)")
    })
}

fn describe_work(rank: &ProcessReport) -> String {
    let digits = |number: u64| number.to_string();
    let parts = [
        format!(
            "{} launches{}",
            format_estimate(rank.launches, rank.launches_error, digits),
            describe_launches_per_step(rank)
        ),
        format!(
            "{} copies ({})",
            format_estimate(rank.copies, rank.copies_error, digits),
            format_bytes(rank.copied_bytes)
        ),
        format!(
            "GPU memory peak {}",
            format_bytes(rank.gpu_memory_peak_bytes)
        ),
        format!("CPU {:.2} s", rank.times.cpu_seconds),
        format!("run-queue delay {:.2} s", rank.times.run_delay_seconds),
    ];
    let mut text = parts
        .map(|part| join_with_no_break_spaces(&part))
        .join(", ");
    if rank.complete == Some(false) {
        text.push_str("; its first calls were not observed");
    }
    if rank.still_running {
        text.push_str("; still running");
    }
    text
}
