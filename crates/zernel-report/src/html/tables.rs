//! The numbers of the ranks, in tables.

use super::charts::PHASES;
use super::markup::{Escaped, count, percent, push, seconds, share, table, time};
use crate::process::ProcessReport;
use crate::render::rank_name;
use crate::text::bytes;

/// Where the time went.
pub(crate) fn phase_table(ranks: &[ProcessReport]) -> String {
    let mut head = vec!["Rank"];
    head.extend(PHASES.iter().map(|(phase, _)| *phase));
    head.push("all");
    let rows =
        ranks.iter().map(|rank| {
            let phases = &rank.training_times().phases;
            let total = phases.total();
            let mut row = vec![rank_name(rank)];
            row.extend(phases.by_name().map(|(_, spent)| {
                format!("{} · {}", seconds(spent), percent(share(spent, total)))
            }));
            row.push(seconds(total));
            row
        });
    let rows: Vec<Vec<String>> = rows.collect();
    let mut out = table("Phases", &head, &rows);
    for rank in ranks {
        let times = rank.training_times();
        if times.phases.more_than_wall > 0.01 * times.wall_seconds {
            push(
                &mut out,
                format_args!(
                    "<p class=\"soft\">{}: more than one thread drove steps, so the phases are {} more than the time.</p>\n",
                    Escaped(&rank_name(rank)),
                    seconds(times.phases.more_than_wall)
                ),
            );
        }
    }
    out
}

/// What was waited for, and what was done.
pub(crate) fn tables(ranks: &[ProcessReport]) -> String {
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
        let (before, after) = before_and_after_steps(rank);
        vec![
            rank_name(rank),
            format!("{at_least}{}", count(steps.count)),
            time(steps.median_seconds),
            time(steps.p99_seconds),
            time(steps.longest_seconds),
            match steps.warm_up {
                0 => "–".to_owned(),
                steps_of_it => format!("{steps_of_it} · {}", time(steps.warm_up_seconds)),
            },
            time(steps.pause_seconds),
            steps.stalled.to_string(),
            rank.start_up_seconds().map_or("–".to_owned(), time),
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
        "in pauses",
        "stalls",
        "before its first call",
        "before them",
        "after them",
    ];
    table("Steps", &head, &rows)
        + "<p class=\"soft\">A pause is what made a step longer that did what few steps do, such as an evaluation. A stall \
           is a step of the usual kind that took three times the median, and half as long again as nine of \
           ten steps. Neither warm-up nor pauses are in median, 99th percentile and longest.</p>\n"
}

/// How long it was before and after the steps of a rank.
fn before_and_after_steps(rank: &ProcessReport) -> (String, String) {
    let Some(training) = &rank.training else {
        return ("–".to_owned(), "–".to_owned());
    };
    let after = rank.times.wall_seconds - training.begin_seconds - training.times.wall_seconds;
    (time(training.begin_seconds), time(after.max(0.0)))
}

fn wait_table(ranks: &[ProcessReport]) -> String {
    let rows = ranks.iter().map(|rank| {
        let times = rank.training_times();
        let mut row = vec![rank_name(rank), seconds(times.data_waits.total())];
        row.extend(times.data_waits.by_name().map(|(_, spent)| seconds(spent)));
        row.push(seconds(times.peer_wait_seconds));
        row.push(seconds(times.gpu_wait_seconds));
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
    ];
    table("Waits", &head, &rows)
        + "<p class=\"soft\">While a rank waited for data, its loaders were on CPUs (prepare), waited for disk or network \
           (fetch), could have run and did not (sched), or did none of these (other).</p>\n"
}

fn work_table(ranks: &[ProcessReport]) -> String {
    let rows = ranks.iter().map(|rank| {
        let counted = |counted, error| match error {
            0 => count(counted),
            error => format!("{} ± {}", count(counted), count(error)),
        };
        let copies = counted(rank.copies, rank.copies_error);
        vec![
            rank_name(rank),
            format!("{} {}", rank.pid, rank.comm),
            counted(rank.launches, rank.launches_error),
            seconds(rank.times.launch_seconds),
            format!("{copies} · {}", bytes(rank.copied_bytes)),
            bytes(rank.gpu_memory_peak_bytes),
            seconds(rank.times.cpu_seconds),
            seconds(rank.times.run_delay_seconds),
            completeness(rank),
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
    table("Work, from the first event to the end", &head, &rows)
}

fn completeness(rank: &ProcessReport) -> String {
    let how = match rank.complete {
        Some(true) => "whole",
        Some(false) => "not from its first call on",
        None => "from when on is not known",
    };
    match (rank.complete, rank.still_running) {
        (Some(true), true) => "still running".to_owned(),
        (_, true) => format!("{how}; still running"),
        (_, false) => how.to_owned(),
    }
}

fn collective_table(ranks: &[ProcessReport]) -> String {
    let each = ranks
        .iter()
        .flat_map(|rank| rank.collectives.iter().map(move |of| (rank, of)));
    let rows = each.map(|(rank, of)| {
        vec![
            rank_name(rank),
            of.op.to_string(),
            count(of.calls),
            bytes(of.bytes / of.calls.max(1)),
            bytes(of.bytes),
            of.until_sync_median_seconds.map_or("–".to_owned(), time),
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
        "bytes a call",
        "bytes in all",
        "done after (median)",
    ];
    table("Collectives", &head, &rows)
}
