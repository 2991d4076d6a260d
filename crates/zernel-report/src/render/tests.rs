use super::*;
use zernel_model::snapshot::{CollectiveTotals, DataWaits};

use crate::phases::PhaseSeconds;
use crate::process::{ProcessReport, TrainingTime};
use crate::report::ObservationReport;
use crate::steps::StepReport;
use crate::times::{ProcessTimes, RankTimes, TimePart};
use crate::verdict::{SlowestRank, judge_ranks};

fn example_rank(number: u32) -> ProcessReport {
    ProcessReport {
        pid: 4_000_000 + number,
        comm: "a-very-long-command-name".to_owned(),
        rank: Some(number),
        complete: Some(true),
        times: ProcessTimes {
            wall_seconds: 123_456.78,
            phases: PhaseSeconds {
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
            ..ProcessTimes::default()
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
        launches_error: Some(12_345),
        copies: 1_234_567,
        copies_error: Some(54_321),
        copied_bytes: 123_456_789_012,
        gpu_memory_peak_bytes: 80_000_000_000,
        ..ProcessReport::default()
    }
}

fn example_report(ranks: u32) -> Report {
    let times = RankTimes {
        wall: 123_456.78,
        data_waits: 23_456.78,
        data_prepare: 23_456.78,
        gpu_waits: 90_000.0,
        max_loader_busy_share: Some(1.0),
        ..RankTimes::default()
    };
    Report {
        command: vec!["torchrun".to_owned(), "--nproc-per-node=8 ".repeat(20)],
        began_unix_seconds: 0,
        wall_seconds: 123_500.0,
        ended: Some(CommandExit {
            code: Some(0),
            signal: None,
            user_seconds: 1_234_567.0,
            system_seconds: 123_456.0,
        }),
        observing_began_seconds: None,
        not_observed: None,
        ranks: (0..ranks).map(example_rank).collect(),
        loaders: 0,
        others: 0,
        verdict: judge_ranks(&vec![times; ranks as usize]),
        slowest: (ranks > 1).then_some(SlowestRank {
            index: 1,
            seconds: 345.6,
            reason: Some(TimePart::Prepare),
            more_seconds: 340.0,
            is_excess_mostly_compiling: false,
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

fn render_plain(report: &Report) -> String {
    render_plain_in_width(report, None)
}

fn render_plain_in_width(report: &Report, width: Option<usize>) -> String {
    anstream::adapter::strip_str(&render_text(report, width)).to_string()
}

#[test]
fn the_report_fits_a_screen() {
    for ranks in [0, 1, 2, 3, 8, 64] {
        let text = render_plain(&example_report(ranks));
        for line in text.lines() {
            assert!(line.chars().count() <= MAX_LINE_WIDTH, "{line}");
        }
        assert!(text.lines().count() <= 40, "{text}");
    }
}

#[test]
fn the_report_fits_a_narrow_terminal() {
    for (terminal, width) in [(40, 60), (60, 60), (72, 72), (80, 80), (99, 99), (200, 100)] {
        for ranks in [0, 1, 2, 64] {
            let mut report = example_report(ranks);
            for rank in &mut report.ranks {
                rank.steps = Some(StepReport::default());
            }
            let text = render_plain_in_width(&report, Some(terminal));
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest <= Some(width), "{width}: {text}");
            assert!(ranks == 0 || longest > Some(width - 10), "{width}: {text}");
        }
    }
}

#[test]
fn the_report_has_all_key_numbers() {
    let text = render_plain(&example_report(2));
    for part in [
        "rank 0",
        "rank 1",
        "DataLoading 23456.78 s 19 %",
        "prepare 12000.00",
        "1234567 AllReduce × 23.8 MiB",
        "123456789 ± 12345 launches",
        "1234567 ± 54321 copies",
        "input-bound",
        "saves at most 23456.8 s (19 %)",
        "cuLaunchKernel",
        "12 processes lost",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn start_up_time_is_shown_if_it_is_known_and_not_negligible() {
    let text_with = |before_first_call_seconds| {
        let mut report = example_report(1);
        report.ranks[0].steps = Some(StepReport::default());
        report.ranks[0].training = Some(TrainingTime::default());
        report.ranks[0].before_first_call_seconds = before_first_call_seconds;
        // The line breaks do not matter.
        let text = render_plain(&report);
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let text = text_with(Some(5.42));
    assert!(
        text.contains("5.4 s to the first call, 0.0 s to the first step"),
        "{text}"
    );
    for nothing in [None, Some(0.09)] {
        let text = text_with(nothing);
        assert!(!text.contains("to the first call"), "{text}");
        assert!(text.contains(" 0.0 s to the first step"), "{text}");
    }
}

#[test]
fn ranks_without_collectives_have_no_slowest_rank() {
    let mut report = example_report(2);
    report.slowest = None;
    assert!(render_plain(&report).contains("no rank stands out"));
    for rank in &mut report.ranks {
        rank.times.phases.nccl_collective = 0.0;
    }
    assert!(
        render_plain(&report).contains("no rank spent more than 1 % of its time in collectives")
    );
}

#[test]
fn a_run_that_was_not_observed_shows_the_reason() {
    let mut report = example_report(0);
    report.not_observed = Some("not root".to_owned());
    let text = render_plain(&report);
    assert!(
        text.contains("not root") && text.contains("missing"),
        "{text}"
    );
    assert!(!text.contains("bound"), "{text}");
}
