//! Tables of the ranks.

use super::charts::PHASE_NAMES_AND_LETTERS;
use super::markup::{
    EscapedHtml, append_markup, format_count, format_percent, format_seconds, format_time,
    html_table, share_of_whole,
};
use crate::process::ProcessReport;
use crate::render::rank_name;
use crate::text::{format_bytes, format_estimate};

/// Time in each phase.
pub(crate) fn phase_table(ranks: &[ProcessReport]) -> String {
    let mut head = vec!["Rank"];
    head.extend(PHASE_NAMES_AND_LETTERS.iter().map(|(phase, _)| *phase));
    head.push("total");
    let rows = ranks.iter().map(|rank| {
        let phases = &rank.training_times().phases;
        let total = phases.total_seconds();
        let mut row = vec![rank_name(rank)];
        row.extend(phases.seconds_by_phase_name().map(|(_, spent)| {
            format!(
                "{} · {}",
                format_seconds(spent),
                format_percent(share_of_whole(spent, total))
            )
        }));
        row.push(format_seconds(total));
        row
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let mut out = html_table("Phases", &head, &rows);
    for rank in ranks {
        let times = rank.training_times();
        if times.phases.more_than_wall > 0.01 * times.wall_seconds {
            append_markup(
                &mut out,
                format_args!(
                    "<p class=\"soft\">{}: several training threads, so the phases add up to {} more than the wall time.</p>\n",
                    EscapedHtml(&rank_name(rank)),
                    format_seconds(times.phases.more_than_wall)
                ),
            );
        }
    }
    out
}

/// Steps, waits, work and collectives.
pub(crate) fn step_wait_work_and_collective_tables(ranks: &[ProcessReport]) -> String {
    [
        step_table(ranks),
        wait_table(ranks),
        work_table(ranks),
        collective_table(ranks),
    ]
    .concat()
}

fn step_table(ranks: &[ProcessReport]) -> String {
    let stepped = ranks
        .iter()
        .filter_map(|rank| Some((rank, rank.steps.as_ref()?)));
    let rows = stepped.map(|(rank, steps)| {
        let at_least = if steps.at_least { "≥ " } else { "" };
        let (before, after) = time_before_and_after_steps(rank);
        vec![
            rank_name(rank),
            format!("{at_least}{}", format_count(steps.count)),
            format_time(steps.median_seconds),
            format_time(steps.p99_seconds),
            format_time(steps.longest_seconds),
            match steps.warm_up {
                0 => "–".to_owned(),
                steps_of_it => format!("{steps_of_it} · {}", format_time(steps.warm_up_seconds)),
            },
            format_time(steps.pause_seconds),
            steps.stalled.to_string(),
            rank.start_up_seconds().map_or("–".to_owned(), format_time),
            before,
            after,
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "Rank",
        "steps",
        "median",
        "99th percentile",
        "longest",
        "warm-up",
        "pauses",
        "stalls",
        "to the first call",
        "to the first step",
        "after the last step",
    ];
    html_table("Steps", &head, &rows)
        + "<p class=\"soft\">A pause is rare extra work between steps, such as an evaluation or a checkpoint. A stall is an \
           ordinary step that took at least three times the median and one and a half times the 90th percentile. \
           Median, 99th percentile and longest exclude warm-up and pauses.</p>\n"
}

/// The time before the first and after the last step of a rank.
fn time_before_and_after_steps(rank: &ProcessReport) -> (String, String) {
    let Some(training) = &rank.training else {
        return ("–".to_owned(), "–".to_owned());
    };
    let after = rank.times.wall_seconds - training.begin_seconds - training.times.wall_seconds;
    (
        format_time(training.begin_seconds),
        format_time(after.max(0.0)),
    )
}

fn wait_table(ranks: &[ProcessReport]) -> String {
    let rows = ranks.iter().map(|rank| {
        let times = rank.training_times();
        let mut row = vec![
            rank_name(rank),
            format_seconds(times.data_waits.total_seconds()),
        ];
        row.extend(
            times
                .data_waits
                .by_name()
                .map(|(_, spent)| format_seconds(spent)),
        );
        row.push(format_seconds(times.peer_wait_seconds));
        row.push(format_seconds(times.gpu_wait_seconds));
        row.push(format_seconds(times.awaited_compile_seconds()));
        row
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let head = [
        "Rank",
        "for data",
        "prepare",
        "fetch",
        "sched",
        "other",
        "for other ranks",
        "for the GPU",
        "for the compiler",
    ];
    html_table("Waits", &head, &rows)
        + "<p class=\"soft\">While a rank waited for data, its loaders ran on CPUs (prepare), waited for disk or network \
           (fetch), were runnable without a CPU (sched), or did none of these (other).</p>\n"
}

fn work_table(ranks: &[ProcessReport]) -> String {
    let rows = ranks.iter().map(|rank| {
        let copies = format_estimate(rank.copies, rank.copies_error, format_count);
        vec![
            rank_name(rank),
            format!("{} {}", rank.pid, rank.comm),
            format_estimate(rank.launches, rank.launches_error, format_count),
            format_seconds(rank.times.launch_seconds),
            format!("{copies} · {}", format_bytes(rank.copied_bytes)),
            format_bytes(rank.gpu_memory_peak_bytes),
            format_seconds(rank.times.cpu_seconds),
            format_seconds(rank.times.run_delay_seconds),
            completeness_text(rank),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let head = [
        "Rank",
        "process",
        "launches",
        "in launches",
        "copies",
        "GPU memory peak",
        "CPU",
        "run-queue delay",
        "observed",
    ];
    html_table("Work, from the first probed call to the end", &head, &rows)
}

fn completeness_text(rank: &ProcessReport) -> String {
    let completeness = match rank.complete {
        Some(true) => "completely",
        Some(false) => "without its first calls",
        None => "from an unknown time on",
    };
    match (rank.complete, rank.still_running) {
        (Some(true), true) => "still running".to_owned(),
        (_, true) => format!("{completeness}; still running"),
        (_, false) => completeness.to_owned(),
    }
}

fn collective_table(ranks: &[ProcessReport]) -> String {
    let each = ranks.iter().flat_map(|rank| {
        rank.collectives
            .iter()
            .map(move |collective| (rank, collective))
    });
    let rows = each.map(|(rank, collective)| {
        vec![
            rank_name(rank),
            collective.op.to_string(),
            format_count(collective.calls),
            format_bytes(collective.bytes / collective.calls.max(1)),
            format_bytes(collective.bytes),
            collective
                .until_sync_median_seconds
                .map_or("–".to_owned(), format_time),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "Rank",
        "operation",
        "calls",
        "bytes per call",
        "total bytes",
        "done in (median)",
    ];
    html_table("Collectives", &head, &rows)
}
