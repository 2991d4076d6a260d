use super::*;
use zernel_model::snapshot::{CollectiveTotals, DataWaits};

use crate::parts::{Part, RankTimes};
use crate::process::{Phases, ProcessReport, Times, Training};
use crate::report::ObservationReport;
use crate::steps::StepReport;
use crate::verdict::{Slowest, judge};

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
