//! The report as one self-contained HTML file: inline charts, no script, no network.
//!
//! The page is well-formed XML. Its content security policy forbids loading and running anything, even if a command
//! line contains markup.
//!
//! | module | subject |
//! |---|---|
//! | `markup` | escaped text, numbers and tables |
//! | `svg_plot` | a drawing area with axes |
//! | `charts` | charts of the ranks |
//! | `tables` | tables of the ranks |

mod charts;
mod markup;
mod svg_plot;
mod tables;
#[cfg(test)]
mod tests;

use super::process::ProcessReport;
use super::render::{
    evidence_text, exit_text, next_step_text, no_ranks_reason, rank_name, slowest_rank_text,
};
use super::report::Report;
use super::steps::{Interruption, StepReport};
use crate::text::shorten_text;
use charts::{ChartDetail, PHASE_NAMES_AND_LETTERS};
use markup::{
    EscapedHtml, append_markup, format_date, format_percent, format_time, share_of_whole,
};
use svg_plot::TimeAxis;

/// Ranks shown directly. The others are folded.
const MAX_UNFOLDED_RANKS: usize = 16;

/// Longest title. Longer commands are cut.
const MAX_TITLE_LENGTH: usize = 300;

/// Renders the whole page.
pub fn render_html(report: &Report) -> String {
    let command = report.command.join(" ");
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>{} {}</title>\n<style>\n{}</style></head><body>\n",
        command_name(report),
        EscapedHtml(&shorten_text(&command, MAX_TITLE_LENGTH)),
        include_str!("style.css")
    );
    write_header(&mut out, report, &command);
    write_verdict(&mut out, report);
    match &report.not_observed {
        Some(reason) => append_markup(
            &mut out,
            format_args!(
                "<h2>Missing</h2><p>Phases, steps, waits, collectives, GPU memory, verdict: {}</p>\n",
                EscapedHtml(reason)
            ),
        ),
        None => write_ranks(&mut out, report),
    }
    write_problems_and_footer(&mut out, report);
    out.push_str("</body></html>\n");
    out
}

fn command_name(report: &Report) -> &'static str {
    match report.ended {
        Some(_) => "zernel run",
        None => "zernel attach",
    }
}

fn write_header(out: &mut String, report: &Report, command: &str) {
    let title = shorten_text(command, MAX_TITLE_LENGTH);
    append_markup(
        out,
        format_args!(
            "<header><p class=\"kicker\">{}</p><h1>{}</h1>",
            command_name(report),
            EscapedHtml(&title)
        ),
    );
    if command.chars().count() > MAX_TITLE_LENGTH {
        append_markup(
            out,
            format_args!(
                "<details><summary>Full command</summary><code>{}</code></details>",
                EscapedHtml(command)
            ),
        );
    }
    out.push_str("<dl class=\"facts\">");
    let mut facts = vec![(
        "Start",
        format!("{} UTC", format_date(report.began_unix_seconds)),
    )];
    match &report.ended {
        Some(ended) => facts.extend([
            ("Wall time", format_time(report.wall_seconds)),
            ("End", exit_text(ended)),
        ]),
        None => facts.push(("Observed for", format_time(report.wall_seconds))),
    }
    facts.push(("Ranks", report.ranks.len().to_string()));
    if let Some(gpus) = report.gpus() {
        facts.push(("GPUs", gpus));
    }
    let jobs = report.ranks.iter().filter_map(|rank| rank.job.as_deref());
    let mut jobs: Vec<&str> = jobs.collect();
    jobs.sort_unstable();
    jobs.dedup();
    if !jobs.is_empty() {
        facts.push(("Job", jobs.join(", ")));
    }
    if report.loaders > 0 {
        facts.push(("Data loaders", report.loaders.to_string()));
    }
    for (title, value) in facts {
        let value = EscapedHtml(&value);
        append_markup(
            out,
            format_args!("<div><dt>{title}</dt><dd>{value}</dd></div>"),
        );
    }
    out.push_str("</dl></header>\n");
}

fn write_verdict(out: &mut String, report: &Report) {
    let verdict = report.verdict.describe();
    let class = match verdict.at_most_seconds {
        Some(_) => "verdict",
        None => "verdict open",
    };
    append_markup(
        out,
        format_args!(
            "<section class=\"{class}\"><div class=\"why\"><p class=\"kicker\">Verdict</p><h2>{}</h2><p>{}</p>",
            EscapedHtml(verdict.title),
            EscapedHtml(&evidence_text(report, &verdict))
        ),
    );
    if let Some(helps) = verdict.helps {
        let helps = EscapedHtml(helps);
        append_markup(out, format_args!("<p><strong>Try:</strong> {helps}</p>"));
    }
    for step in &verdict.next_steps {
        let step = next_step_text(step);
        append_markup(out, format_args!("<p>{}</p>", EscapedHtml(&step)));
    }
    if let Some(slowest) = slowest_rank_text(report) {
        append_markup(
            out,
            format_args!(
                "<p><strong>Slowest rank:</strong> {}</p>",
                EscapedHtml(&slowest)
            ),
        );
    }
    if !report.problems.is_empty() {
        out.push_str(
            "<p class=\"soft\">Some numbers are incomplete: <a href=\"#problems\">problems</a>.</p>",
        );
    }
    out.push_str("</div>");
    if let Some(seconds) = verdict.at_most_seconds {
        let part = format_percent(share_of_whole(seconds, report.wall_seconds.max(seconds)));
        append_markup(
            out,
            format_args!(
                "<p class=\"gain\"><small>saves at most</small><b>{}</b><small>{part} of the wall time</small></p>",
                format_time(seconds)
            ),
        );
    }
    out.push_str("</section>\n");
}

fn write_ranks(out: &mut String, report: &Report) {
    if report.ranks.is_empty() {
        append_markup(
            out,
            format_args!("<h2>Ranks</h2><p>None: {}.</p>\n", no_ranks_reason(report)),
        );
        return;
    }
    let (shown, folded) = report
        .ranks
        .split_at(report.ranks.len().min(MAX_UNFOLDED_RANKS));
    out.push_str("<h2>Time by phase</h2>\n");
    append_markup(
        out,
        format_args!(
            "<p class=\"soft\">{}</p>\n",
            describe_time_range(&report.ranks)
        ),
    );
    write_phase_legend(out);
    write_shown_and_folded(out, (shown, folded), |ranks| {
        let id = format!("bars-{}", ranks[0].pid);
        charts::draw_phase_bars(&id, ranks) + &tables::phase_table(ranks)
    });
    if let Some(axis) = charts::common_time_axis(&report.ranks) {
        out.push_str(
            "<h2>Over time</h2>\n<p class=\"soft\">All ranks share one time axis. It begins at the first probed call of any rank.</p>\n",
        );
        write_phase_legend(out);
        let detail = ChartDetail::for_rank_count(report.ranks.len());
        write_shown_and_folded(out, (shown, folded), |ranks| {
            ranks
                .iter()
                .map(|rank| rank_charts(rank, &axis, detail))
                .collect()
        });
    }
    out.push_str("<h2>Steps, waits and work</h2>\n");
    write_shown_and_folded(
        out,
        (shown, folded),
        tables::step_wait_work_and_collective_tables,
    );
}

/// Writes a section for the first ranks, and the same section, folded, for the others.
fn write_shown_and_folded(
    out: &mut String,
    (shown, folded): (&[ProcessReport], &[ProcessReport]),
    part: impl Fn(&[ProcessReport]) -> String,
) {
    out.push_str(&part(shown));
    if !folded.is_empty() {
        let more = folded.len();
        append_markup(
            out,
            format_args!("<details><summary>{more} more ranks</summary>\n"),
        );
        out.push_str(&part(folded));
        out.push_str("</details>\n");
    }
}

/// The time range of the numbers.
fn describe_time_range(ranks: &[ProcessReport]) -> &'static str {
    let stepped = ranks.iter().filter(|rank| rank.training.is_some()).count();
    if stepped == ranks.len() {
        "Each rank from its first step after the warm-up to its last step."
    } else if stepped == 0 {
        "Each rank from its first probed call to its end, because no steps were detected."
    } else {
        "Each rank from its first step after the warm-up to its last step; a rank without detected steps from its first \
         probed call to its end."
    }
}

fn write_phase_legend(out: &mut String) {
    out.push_str("<ul class=\"legend\">");
    for (index, (phase, letter)) in PHASE_NAMES_AND_LETTERS.into_iter().enumerate() {
        append_markup(
            out,
            format_args!("<li><b class=\"p{index}\">{letter}</b>{phase}</li>"),
        );
    }
    out.push_str("</ul>\n");
}

fn rank_charts(rank: &ProcessReport, axis: &TimeAxis, detail: ChartDetail) -> String {
    let process = match rank.rank {
        Some(_) => format!("pid {} {}", rank.pid, rank.comm),
        None => rank.comm.clone(),
    };
    let mut out = format!(
        "<div class=\"rank\"><h3>{} <small>{}</small></h3>\n",
        EscapedHtml(&rank_name(rank)),
        EscapedHtml(&process)
    );
    if rank.timeline.is_empty() {
        out.push_str("<p class=\"soft\">It exited before the second sample.</p></div>\n");
        return out;
    }
    let pid = rank.pid;
    out.push_str("<h4>Phases, share of the time</h4>\n");
    out.push_str(&charts::draw_phase_timeline(
        &format!("phases-{pid}"),
        rank,
        axis,
        detail,
    ));
    let steps = rank.steps.as_ref();
    let id = format!("steps-{pid}");
    let drawn = steps.and_then(|steps| {
        Some((
            steps,
            charts::draw_step_times(&id, rank, steps, axis, detail)?,
        ))
    });
    match drawn {
        Some((steps, drawing)) => {
            let scale = match charts::needs_logarithmic_scale(steps) {
                true => ", on a logarithmic scale",
                false => "",
            };
            append_markup(&mut out, format_args!("<h4>Step time{scale}</h4>\n"));
            out.push_str(&drawing);
            out.push_str(&list_interruptions(steps, axis));
        }
        None => out.push_str("<p class=\"soft\">No steps were detected.</p>\n"),
    }
    match charts::draw_gpu_memory(&format!("memory-{pid}"), rank, axis, detail) {
        Some(drawing) => {
            out.push_str("<h4>GPU memory</h4>\n");
            out.push_str(&drawing);
        }
        None => out.push_str("<p class=\"soft\">No GPU memory was allocated.</p>\n"),
    }
    out.push_str("</div>\n");
    out
}

/// The longest pauses and stalls, with their times on the axis.
fn list_interruptions(steps: &StepReport, axis: &TimeAxis) -> String {
    let first = steps.series.first();
    let begin = first.map_or(0.0, |first| axis.seconds_since_begin(first.begin_ns));
    let listed = |kind: &str, all: &[Interruption]| {
        let each = all.iter().map(|one| {
            format!(
                "{} at {:.1} s",
                format_time(one.seconds),
                begin + one.at_seconds
            )
        });
        let each: Vec<String> = each.collect();
        match each.is_empty() {
            true => String::new(),
            false => format!("{kind}: {}. ", each.join(", ")),
        }
    };
    let text = listed("Longest pauses", &steps.pauses) + &listed("Longest stalls", &steps.stalls);
    match text.is_empty() {
        true => String::new(),
        false => format!("<p class=\"soft\">{text}</p>\n"),
    }
}

fn write_problems_and_footer(out: &mut String, report: &Report) {
    if !report.problems.is_empty() {
        out.push_str("<h2 id=\"problems\">Problems</h2>\n<p>These make the numbers incomplete.</p><ul class=\"problems\">");
        for problem in &report.problems {
            append_markup(out, format_args!("<li>{}</li>", EscapedHtml(problem)));
        }
        out.push_str("</ul>\n");
    }
    out.push_str("<footer class=\"soft\">");
    if let Some(observing) = &report.observing {
        let sampled = match observing.sampled.is_empty() {
            true => "no function was sampled".to_owned(),
            false => format!(
                "sampled functions (counts are estimates): {}",
                observing.sampled.join(", ")
            ),
        };
        let by = if observing.by_daemon {
            " by the daemon"
        } else {
            ""
        };
        append_markup(
            out,
            format_args!(
                "<p>Observed{by} ({}). Overhead: {:.2} % of the most affected rank; all threads about {}, {:.1} µs per \
                 call; {}.</p>",
                EscapedHtml(&observing.rung),
                100.0 * observing.cost_share,
                format_time(observing.cost_seconds),
                1e6 * observing.call_cost_seconds,
                EscapedHtml(&sampled)
            ),
        );
    }
    append_markup(
        out,
        format_args!(
            "<p>Zernel {}. This file is self-contained.</p></footer>\n",
            env!("CARGO_PKG_VERSION")
        ),
    );
}
