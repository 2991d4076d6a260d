//! Tables of the ranks.

use super::charts::PHASES;
use super::markup::{Escaped, count, percent, push, seconds, share, table, time};
use crate::process::ProcessReport;
use crate::render::rank_name;
use crate::text::{bytes, estimated};

/// Time in each phase.
pub(crate) fn phase_table(ranks: &[ProcessReport]) -> String {
    let mut head = vec!["Rank"];
    head.extend(PHASES.iter().map(|(phase, _)| *phase));
    head.push("total");
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
                    "<p class=\"soft\">{}: several training threads, so the phases add up to {} more than the wall time.</p>\n",
                    Escaped(&rank_name(rank)),
                    seconds(times.phases.more_than_wall)
                ),
            );
        }
    }
    out
}

/// Steps, waits, work and collectives.
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
        "pauses",
        "stalls",
        "to the first call",
        "to the first step",
        "after the last step",
    ];
    table("Steps", &head, &rows)
        + "<p class=\"soft\">A pause is rare extra work between steps, such as an evaluation or a checkpoint. A stall is an \
           ordinary step that took at least three times the median and one and a half times the 90th percentile. \
           Median, 99th percentile and longest exclude warm-up and pauses.</p>\n"
}

/// The time before the first and after the last step of a rank.
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
        + "<p class=\"soft\">While a rank waited for data, its loaders ran on CPUs (prepare), waited for disk or network \
           (fetch), were runnable without a CPU (sched), or did none of these (other).</p>\n"
}

fn work_table(ranks: &[ProcessReport]) -> String {
    let rows = ranks.iter().map(|rank| {
        let copies = estimated(rank.copies, rank.copies_error, count);
        vec![
            rank_name(rank),
            format!("{} {}", rank.pid, rank.comm),
            estimated(rank.launches, rank.launches_error, count),
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
    table("Work, from the first probed call to the end", &head, &rows)
}

fn completeness(rank: &ProcessReport) -> String {
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
            count(collective.calls),
            bytes(collective.bytes / collective.calls.max(1)),
            bytes(collective.bytes),
            collective
                .until_sync_median_seconds
                .map_or("–".to_owned(), time),
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
    table("Collectives", &head, &rows)
}
