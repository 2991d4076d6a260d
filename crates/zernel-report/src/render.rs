//! The report as text that fits a screen.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};

use super::process::ProcessReport;
use super::report::Ended;
use super::report::Report;
use super::steps::{Interruption, StepReport};
use super::verdict::Slowest;
use crate::text::{bytes, shortened, time, unbroken, wrapped};

/// How wide lines are, unless a terminal is narrower.
const WIDTH: usize = 100;
/// In a terminal that is narrower than this, they are too long.
const MIN_WIDTH: usize = 60;
/// Width of a bar, and what else a line with one has at most.
const BAR_WIDTH: usize = 40;
const WIDTH_BESIDE_BAR: usize = 52;
/// What there is always room for of a command.
const MIN_COMMAND_WIDTH: usize = 20;
/// Where what is told begins, beside its title.
const INDENT: usize = 10;
/// With more ranks than this, only the one that matters is told in detail.
const MAX_DETAILED_RANKS: usize = 2;
/// With more ranks than this, even their bars do not fit a screen.
const MAX_SHOWN_RANKS: usize = 16;

/// The colours of the phases, in their order.
const COLOURS: [AnsiColor; 5] = [
    AnsiColor::Yellow,
    AnsiColor::Green,
    AnsiColor::Magenta,
    AnsiColor::Cyan,
    AnsiColor::BrightBlack,
];
/// Their letters in a bar.
const LETTERS: [char; 5] = ['D', 'G', 'N', 'O', '.'];

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
    ranks(out, report)?;
    verdict(out, report)?;
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

/// What was seen instead of ranks.
pub(crate) fn no_ranks(report: &Report) -> String {
    match report.others + report.loaders {
        0 => "no call to CUDA, NCCL or torch that trains was seen".to_owned(),
        1 => "one process was observed, and did not train".to_owned(),
        count => format!("{count} processes were observed, and none trained"),
    }
}

fn ranks(out: &mut Sheet, report: &Report) -> std::fmt::Result {
    if report.ranks.is_empty() {
        return paragraph(out, "ranks", &no_ranks(report));
    }
    if let Some(gpus) = report.gpus() {
        paragraph(out, "GPUs", &gpus)?;
    }
    legend(out)?;
    let slowest = report.slowest.map_or(0, |slowest| slowest.index);
    for (index, rank) in report.ranks.iter().enumerate() {
        let is_detailed = report.ranks.len() <= MAX_DETAILED_RANKS || index == slowest;
        if index < MAX_SHOWN_RANKS || is_detailed {
            bar(out, rank)?;
        }
        if is_detailed {
            details(out, rank)?;
        }
    }
    let hidden = report.ranks.len().saturating_sub(MAX_SHOWN_RANKS);
    if hidden > 0 {
        paragraph(out, "more", &format!("{hidden} ranks; --json tells of all"))?;
    }
    Ok(())
}

fn legend(out: &mut Sheet) -> std::fmt::Result {
    let names = [
        "data loading",
        "GPU compute",
        "NCCL collective",
        "optimizer step",
        "unknown",
    ];
    const TITLE: &str = "phases:";
    write!(out, "{TITLE}")?;
    let mut column = TITLE.len();
    for ((name, letter), colour) in names.into_iter().zip(LETTERS).zip(COLOURS) {
        let length = name.len() + 4;
        if column + length > out.width {
            column = TITLE.len();
            write!(out, "\n{:column$}", "")?;
        }
        column += length;
        let style = colour.on_default();
        write!(out, "  {style}{letter}{style:#} {name}")?;
    }
    writeln!(out)
}

/// What a rank is called.
pub(crate) fn rank_name(rank: &ProcessReport) -> String {
    match rank.rank {
        Some(number) => format!("rank {number}"),
        None => format!("pid {}", rank.pid),
    }
}

fn bar(out: &mut Sheet, rank: &ProcessReport) -> std::fmt::Result {
    write!(out, "{BOLD}{:<9}{BOLD:#} ", rank_name(rank))?;
    let phases = &rank.training_times().phases;
    let total = phases.total();
    let width = BAR_WIDTH.min(out.width - WIDTH_BESIDE_BAR);
    let (mut seconds, mut drawn) = (0.0, 0);
    for (index, (_, phase)) in phases.by_name().into_iter().enumerate() {
        seconds += phase;
        let until = match total > 0.0 {
            true => (width as f64 * seconds / total).round() as usize,
            false => 0,
        };
        let style = COLOURS[index].on_default();
        let letters = LETTERS[index].to_string().repeat(until - drawn);
        write!(out, "{style}{letters}{style:#}")?;
        drawn = until;
    }
    let comm = shortened(&rank.comm, 15);
    let gaps = " ".repeat(width - drawn);
    writeln!(
        out,
        "{gaps} {:8.2} s  pid {} {comm}",
        rank.training_times().wall_seconds,
        rank.pid
    )
}

fn details(out: &mut Sheet, rank: &ProcessReport) -> std::fmt::Result {
    if let Some(steps) = &rank.steps {
        paragraph(out, "", &step_times(rank, steps))?;
    }
    let times = rank.training_times();
    let total = times.phases.total();
    let phases = times.phases.by_name().map(|(name, seconds)| {
        let share = if total > 0.0 {
            100.0 * seconds / total
        } else {
            0.0
        };
        unbroken(&format!("{name} {seconds:.2} s {share:.0} %"))
    });
    paragraph(out, "", &phases.join(", "))?;
    if times.phases.more_than_wall > 0.01 * times.wall_seconds {
        let more = times.phases.more_than_wall;
        paragraph(
            out,
            "",
            &format!(
                "more than one thread drove steps: the phases are {more:.2} s more than the time"
            ),
        )?;
    }
    if times.data_waits.total() > 0.0 {
        let causes = times.data_waits.by_name();
        let causes = causes.map(|(name, seconds)| format!("{name} {seconds:.2}"));
        let total = times.data_waits.total();
        paragraph(
            out,
            "",
            &format!("waits for data {total:.2} s: {}", causes.join(", ")),
        )?;
    }
    if times.peer_wait_seconds > 0.0 {
        let waits = format!("waits for other ranks {:.2} s", times.peer_wait_seconds);
        paragraph(out, "", &waits)?;
    }
    if !rank.collectives.is_empty() {
        paragraph(out, "", &collectives(rank))?;
    }
    paragraph(out, "", &work(rank))
}

/// How many steps, how long they take, and what lay between them.
fn step_times(rank: &ProcessReport, steps: &StepReport) -> String {
    let at_least = if steps.at_least { "at least " } else { "" };
    let mut parts = vec![
        format!("{at_least}{} steps", steps.count),
        format!("median {}", time(steps.median_seconds)),
        format!("p99 {}", time(steps.p99_seconds)),
        format!("longest {}", time(steps.longest_seconds)),
    ];
    let start = rank.start_up_seconds();
    parts.extend(start.map(|seconds| format!("{seconds:.1} s before its first call")));
    if let Some(training) = &rank.training {
        let then = if start.is_some() { "then " } else { "" };
        let after = rank.times.wall_seconds - training.begin_seconds - training.times.wall_seconds;
        parts.push(format!("{then}{:.1} s before them", training.begin_seconds));
        parts.push(format!("{:.1} s after", after.max(0.0)));
    }
    if steps.warm_up > 0 {
        let seconds = time(steps.warm_up_seconds);
        parts.push(format!("{} of warm-up took {seconds}", steps.warm_up));
    }
    if steps.thinned {
        parts.push("pauses and stalls only of a part of them".to_owned());
    }
    if !steps.pauses.is_empty() {
        let seconds = time(steps.pause_seconds);
        parts.push(format!("pauses of {seconds} in all:"));
        parts.extend(steps.pauses.iter().map(interruption));
    }
    if !steps.stalls.is_empty() {
        parts.push(format!("{} stalls:", steps.stalled));
        parts.extend(steps.stalls.iter().map(interruption));
    }
    let parts: Vec<String> = parts.iter().map(|part| unbroken(part)).collect();
    parts.join(", ").replace(":, ", ": ")
}

fn interruption(one: &Interruption) -> String {
    format!("{} at {:.1} s", time(one.seconds), one.at_seconds)
}

fn collectives(rank: &ProcessReport) -> String {
    let each = rank.collectives.iter().map(|of| {
        let median = of.until_sync_median_seconds;
        let median = median.map_or(String::new(), |seconds| {
            unbroken(&format!("done after {:.2} ms (median)", 1e3 * seconds))
        });
        let calls = format!(
            "{} {} × {}",
            of.calls,
            of.op,
            bytes(of.bytes / of.calls.max(1))
        );
        format!("{} {median}", unbroken(&calls))
            .trim_end()
            .to_owned()
    });
    each.collect::<Vec<_>>().join("; ")
}

fn work(rank: &ProcessReport) -> String {
    let off_by = |error| match error {
        0 => String::new(),
        error => format!(" ± {error}"),
    };
    let parts = [
        format!("{}{} launches", rank.launches, off_by(rank.launches_error)),
        format!(
            "{}{} copies of {} in all",
            rank.copies,
            off_by(rank.copies_error),
            bytes(rank.copied_bytes)
        ),
        format!("GPU memory peak {}", bytes(rank.gpu_memory_peak_bytes)),
        format!("CPU {:.2} s", rank.times.cpu_seconds),
        format!("run-queue delay {:.2} s", rank.times.run_delay_seconds),
    ];
    let mut text = parts.map(|part| unbroken(&part)).join(", ");
    if rank.complete == Some(false) {
        text.push_str("; not seen from its first call on");
    }
    if rank.still_running {
        text.push_str("; still running");
    }
    text
}

/// What the verdict rests on, and who is meant by it.
pub(crate) fn evidence(report: &Report) -> String {
    let verdict = &report.verdict;
    let straggler = verdict.straggler();
    let straggler = straggler.and_then(|index| report.ranks.get(index));
    let straggler = straggler.map_or(String::new(), |rank| format!("{}: ", rank_name(rank)));
    format!("{straggler}{}", verdict.evidence())
}

fn verdict(out: &mut Sheet, report: &Report) -> std::fmt::Result {
    let verdict = &report.verdict;
    let text = format!("{}: {}", verdict.name(), evidence(report));
    paragraph(out, "verdict", &text)?;
    if let (Some(remedy), Some(seconds)) = (verdict.remedy(), verdict.at_most_seconds()) {
        let share = 100.0 * seconds / report.wall_seconds.max(seconds);
        let at_most = unbroken(&format!("at most {seconds:.1} s ({share:.0} %)"));
        let text = format!("{}; {at_most}", remedy.text());
        paragraph(out, "helps", &text)?;
    }
    match slowest(report) {
        Some(text) => paragraph(out, "slowest", &text),
        None => Ok(()),
    }
}

/// Which rank the others wait for; `None` if it is alone.
pub(crate) fn slowest(report: &Report) -> Option<String> {
    let text = match report.slowest {
        _ if report.ranks.len() < 2 => return None,
        Some(slowest) => format!(
            "{}: it waited {:.1} s less in collectives than the one that waited longest{}",
            rank_name(&report.ranks[slowest.index]),
            slowest.seconds,
            excess(&slowest)
        ),
        None if uses_collectives(report) => {
            "none stands out: all wait for each other about as long".to_owned()
        }
        None => "can't tell: the ranks were hardly ever seen in collectives".to_owned(),
    };
    Some(text)
}

fn excess(slowest: &Slowest) -> String {
    match slowest.more_seconds {
        0.0 => String::new(),
        more => format!(
            ", and spent {more:.1} s more {} than its peers",
            slowest.spent()
        ),
    }
}

/// Whether a rank spent a hundredth of its time in collectives.
fn uses_collectives(report: &Report) -> bool {
    let mut ranks = report.ranks.iter();
    ranks.any(|rank| {
        rank.training_times().communication_seconds() > 0.01 * rank.training_times().wall_seconds
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use zernel_model::snapshot::{CollectiveTotals, DataWaits};

    use crate::parts::{Part, RankTimes};
    use crate::process::{Phases, Times, Training};
    use crate::report::ObservationReport;
    use crate::verdict::judge;

    fn rank(number: u32) -> ProcessReport {
        ProcessReport {
            pid: 4_000_000 + number,
            comm: "a-very-long-command-name".to_owned(),
            rank: Some(number),
            complete: Some(true),
            times: Times {
                wall_seconds: 123_456.78,
                phases: Phases {
                    data_loading: 23_456.78,
                    gpu_compute: 90_000.0,
                    nccl_collective: 5_000.0,
                    optimizer_step: 3_000.0,
                    unknown: 2_000.0,
                    more_than_wall: 0.0,
                },
                data_waits: DataWaits {
                    prepare: 12_000.0,
                    fetch: 1_000.0,
                    sched: 456.78,
                    other: 10_000.0,
                },
                ..Times::default()
            },
            collectives: ["AllReduce", "ReduceScatter", "AllGather"]
                .map(|op| CollectiveTotals {
                    op: op.into(),
                    calls: 1_234_567,
                    bytes: 1_234_567 * 25_000_000,
                    until_sync_median_seconds: Some(0.012_345),
                    until_sync_mean_seconds: Some(0.012_345),
                    ..CollectiveTotals::default()
                })
                .to_vec(),
            launches: 123_456_789,
            launches_error: 12_345,
            copies: 1_234_567,
            copies_error: 54_321,
            copied_bytes: 123_456_789_012,
            gpu_memory_peak_bytes: 80_000_000_000,
            ..ProcessReport::default()
        }
    }

    fn report(ranks: u32) -> Report {
        let times = RankTimes {
            wall: 123_456.78,
            data_waits: 23_456.78,
            data_prepare: 23_456.78,
            gpu_waits: 90_000.0,
            loader_busy: Some(1.0),
            ..RankTimes::default()
        };
        Report {
            command: vec!["torchrun".to_owned(), "--nproc-per-node=8 ".repeat(20)],
            began_unix_seconds: 0,
            wall_seconds: 123_500.0,
            ended: Some(Ended {
                code: Some(0),
                signal: None,
                user_seconds: 1_234_567.0,
                system_seconds: 123_456.0,
            }),
            not_observed: None,
            ranks: (0..ranks).map(rank).collect(),
            loaders: 0,
            others: 0,
            verdict: judge(&vec![times; ranks as usize]),
            slowest: (ranks > 1).then_some(Slowest {
                index: 1,
                seconds: 345.6,
                reason: Some(Part::Prepare),
                more_seconds: 340.0,
            }),
            observing: Some(ObservationReport {
                sampled: ["cuLaunchKernel", "cuMemcpyHtoDAsync", "cuEventRecord"]
                    .map(str::to_owned)
                    .to_vec(),
                ..ObservationReport::default()
            }),
            problems: vec!["12 processes lost".to_owned()],
        }
    }

    fn plain(report: &Report) -> String {
        plain_in(report, None)
    }

    fn plain_in(report: &Report, width: Option<usize>) -> String {
        anstream::adapter::strip_str(&text(report, width)).to_string()
    }

    #[test]
    fn it_fits_a_screen() {
        for ranks in [0, 1, 2, 3, 8, 64] {
            let text = plain(&report(ranks));
            for line in text.lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
            }
            assert!(text.lines().count() <= 40, "{text}");
        }
    }

    #[test]
    fn it_fits_a_narrow_terminal() {
        for (terminal, width) in [(40, 60), (60, 60), (72, 72), (80, 80), (99, 99), (200, 100)] {
            for ranks in [0, 1, 2, 64] {
                let mut report = report(ranks);
                for rank in &mut report.ranks {
                    rank.steps = Some(StepReport::default());
                }
                let text = plain_in(&report, Some(terminal));
                let longest = text.lines().map(|line| line.chars().count()).max();
                assert!(longest <= Some(width), "{width}: {text}");
                assert!(ranks == 0 || longest > Some(width - 10), "{width}: {text}");
            }
        }
    }

    #[test]
    fn it_says_what_matters() {
        let text = plain(&report(2));
        for part in [
            "rank 0",
            "rank 1",
            "DataLoading 23456.78 s 19 %",
            "prepare 12000.00",
            "1234567 AllReduce × 23.8 MiB",
            "123456789 ± 12345 launches",
            "1234567 ± 54321 copies",
            "input-bound",
            "at most 23456.8 s (19 %)",
            "cuLaunchKernel",
            "12 processes lost",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn what_came_before_the_first_call_is_told() {
        let told = |before_first_call_seconds| {
            let mut report = report(1);
            report.ranks[0].steps = Some(StepReport::default());
            report.ranks[0].training = Some(Training::default());
            report.ranks[0].before_first_call_seconds = before_first_call_seconds;
            // Wherever lines end.
            let text = plain(&report);
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let text = told(Some(5.42));
        assert!(
            text.contains("5.4 s before its first call, then 0.0 s before them"),
            "{text}"
        );
        for nothing in [None, Some(0.09)] {
            let text = told(nothing);
            assert!(!text.contains("before its first call"), "{text}");
            assert!(text.contains(" 0.0 s before them"), "{text}");
            assert!(!text.contains("then 0.0 s before them"), "{text}");
        }
    }

    #[test]
    fn ranks_that_never_meet_have_no_slowest() {
        let mut report = report(2);
        report.slowest = None;
        assert!(plain(&report).contains("none stands out"));
        for rank in &mut report.ranks {
            rank.times.phases.nccl_collective = 0.0;
        }
        assert!(plain(&report).contains("hardly ever seen in collectives"));
    }

    #[test]
    fn a_run_that_was_not_observed_says_why() {
        let mut report = report(0);
        report.not_observed = Some("not root".to_owned());
        let text = plain(&report);
        assert!(
            text.contains("not root") && text.contains("not seen"),
            "{text}"
        );
        assert!(!text.contains("verdict"), "{text}");
    }
}
