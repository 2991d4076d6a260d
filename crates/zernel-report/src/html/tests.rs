use roxmltree::{Document, Node, ParsingOptions};
use zernel_model::snapshot::{CollectiveTotals, DataWaits};
use zernel_phase::steps::{Step, StepMark};

use super::render_html;

use crate::phases::PhaseSeconds;
use crate::process::{ProcessReport, TrainingTime};
use crate::record::RecordSample;
use crate::report::{CommandExit, ObservationReport, Report};
use crate::steps::{Interruption, StepReport};
use crate::times::{ProcessTimes, RankTimes, TimePart};
use crate::verdict::tests::{
    communication_verdict_without_time, rank_waiting_for_gpu, rank_waiting_for_peer,
};
use crate::verdict::{SlowestRank, judge_ranks};

const SECOND_NS: u64 = 1_000_000_000;
const BEGIN_NS: u64 = 77 * SECOND_NS;
const STEP_NS: u64 = 25_000_000;

fn example_times(wall_seconds: f64) -> ProcessTimes {
    ProcessTimes {
        wall_seconds,
        phases: PhaseSeconds {
            data_loading: 0.25 * wall_seconds,
            gpu_compute: 0.5 * wall_seconds,
            nccl_collective: 0.125 * wall_seconds,
            optimizer_step: 0.0625 * wall_seconds,
            unknown: 0.0625 * wall_seconds,
            more_than_wall: 0.0,
        },
        data_waits: DataWaits {
            prepare: 0.2 * wall_seconds,
            fetch: 0.05 * wall_seconds,
            ..DataWaits::default()
        },
        peer_wait_seconds: 0.125 * wall_seconds,
        gpu_wait_seconds: 0.4 * wall_seconds,
        cpu_seconds: 1.5 * wall_seconds,
        run_delay_seconds: 0.01 * wall_seconds,
        ..ProcessTimes::default()
    }
}

fn example_steps(count: u64) -> StepReport {
    let step = |number: u64| Step {
        begin_ns: BEGIN_NS + number * STEP_NS,
        // Some overlap the next step. The charts do not mind.
        end_ns: BEGIN_NS
            + (number + 1) * STEP_NS
            + number % 97 * 100_000
            + u64::from(number == count / 2) * 2 * SECOND_NS,
        launches: None,
        marks: [0; 7],
        lacks_marks: false,
    };
    StepReport {
        count,
        separated_by: Some(StepMark::Backward),
        median_seconds: 0.025,
        p99_seconds: 0.034,
        longest_seconds: 2.03,
        warm_up: 2,
        warm_up_seconds: 0.05,
        pauses: vec![Interruption {
            at_seconds: 12.5,
            seconds: 3.25,
        }],
        pause_seconds: 3.25,
        stalls: vec![Interruption {
            at_seconds: count as f64 / 2.0 * 0.025,
            seconds: 2.03,
        }],
        stalled: 1,
        series: (0..count).map(step).collect(),
        ..StepReport::default()
    }
}

/// A rank with `step_count` steps, sampled five times per second.
fn example_rank(number: u32, step_count: u64) -> ProcessReport {
    let wall_seconds = step_count as f64 * STEP_NS as f64 / 1e9;
    let samples = 1 + (5.0 * wall_seconds) as u64;
    let sample = |number: u64| {
        let mut times = example_times(number as f64 / 5.0);
        // Columns differ, so that none can be merged.
        let swing = 0.001 * (number * 7919 % 31) as f64;
        times.phases.data_loading += swing;
        times.phases.gpu_compute -= swing;
        RecordSample {
            at_ns: BEGIN_NS + number * SECOND_NS / 5,
            times,
            memory_bytes: number.min(20) << 28,
        }
    };
    ProcessReport {
        pid: 4_000_000 + number,
        comm: "python3".to_owned(),
        rank: Some(number),
        complete: Some(true),
        before_first_call_seconds: Some(5.42),
        times: example_times(wall_seconds),
        training: Some(TrainingTime {
            begin_seconds: 0.0,
            times: example_times(wall_seconds),
        }),
        steps: Some(example_steps(step_count)),
        collectives: vec![CollectiveTotals {
            op: "AllReduce".into(),
            calls: 1_234_567,
            bytes: 1_234_567 << 20,
            until_sync_median_seconds: Some(0.012_345),
            until_sync_mean_seconds: None,
            ..CollectiveTotals::default()
        }],
        launches: 123_456_789,
        launches_error: Some(12_345),
        copies: 4321,
        copied_bytes: 5 << 30,
        gpu_memory_peak_bytes: 6 << 30,
        timeline: (1..samples).map(sample).take(1024).collect(),
        ..ProcessReport::default()
    }
}

fn report_on(ranks: Vec<ProcessReport>) -> Report {
    let times = ranks.iter().map(|rank| RankTimes {
        wall: rank.times.wall_seconds,
        data_waits: rank.times.data_waits.total_seconds(),
        data_prepare: rank.times.data_waits.prepare,
        gpu_waits: rank.times.phases.gpu_compute,
        max_loader_busy_share: Some(1.0),
        ..RankTimes::default()
    });
    Report {
        command: ["torchrun", "--nproc-per-node=2", "train.py"]
            .map(str::to_owned)
            .to_vec(),
        began_unix_seconds: 1_709_251_199,
        wall_seconds: ranks.first().map_or(3.0, |rank| rank.times.wall_seconds),
        ended: Some(CommandExit {
            code: Some(3),
            signal: None,
            user_seconds: 12.0,
            system_seconds: 3.0,
        }),
        observing_began_seconds: None,
        not_observed: None,
        loaders: 2 * ranks.len(),
        others: 0,
        verdict: judge_ranks(&times.collect::<Vec<_>>()),
        slowest: (ranks.len() > 1).then_some(SlowestRank {
            index: 1,
            seconds: 1.5,
            reason: Some(TimePart::Prepare),
            more_seconds: 1.25,
            is_excess_mostly_compiling: false,
        }),
        ranks,
        observing: Some(ObservationReport {
            rung: "uprobes".to_owned(),
            cost_seconds: 0.123,
            sampled: vec!["cuLaunchKernel".to_owned()],
            ..ObservationReport::default()
        }),
        problems: vec!["12 processes lost".to_owned()],
    }
}

fn example_ranks(count: u32, steps: u64) -> Vec<ProcessReport> {
    (0..count)
        .map(|number| example_rank(number, steps))
        .collect()
}

/// Renders a page, parses it strictly, and checks what every page must fulfil.
fn render_and_check(report: &Report) -> String {
    let page = render_html(report);
    let options = ParsingOptions {
        allow_dtd: true,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(&page, options).expect("well-formed");
    for node in document.descendants().filter(Node::is_element) {
        assert_is_harmless(&node);
    }
    let mut ids: Vec<&str> = document
        .descendants()
        .filter_map(|node| node.attribute("id"))
        .collect();
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all, "an id occurs twice");
    assert!(!page.contains("http://") && !page.contains("https://"));
    assert!(!page.contains("NaN"), "{page}");
    page
}

fn assert_is_harmless(node: &Node) {
    let tag = node.tag_name().name();
    assert!(
        !["script", "link", "img", "iframe", "object"].contains(&tag),
        "{tag}"
    );
    for attribute in node.attributes() {
        let (name, value) = (attribute.name(), attribute.value());
        assert!(
            !name.starts_with("on") && name != "src" && name != "style",
            "{name}"
        );
        let is_number = |value: &str| value.parse::<f64>().is_ok_and(f64::is_finite);
        match name {
            "href" => assert!(value.starts_with('#'), "{value}"),
            "x" | "y" | "width" | "height" => assert!(is_number(value), "{tag} {name} {value}"),
            "d" => {
                let mut numbers = value.split(|c: char| c.is_ascii_alphabetic() || c == ' ');
                assert!(
                    numbers.all(|number| number.is_empty() || is_number(number)),
                    "{value}"
                );
            }
            _ => {}
        }
    }
    if tag == "svg" {
        assert_eq!(node.attribute("role"), Some("img"));
        let names: Vec<&str> = node
            .children()
            .map(|child| child.tag_name().name())
            .collect();
        assert!(
            names.contains(&"title") && names.contains(&"desc"),
            "{names:?}"
        );
    }
}

#[test]
fn the_page_has_all_key_numbers() {
    let page = render_and_check(&report_on(example_ranks(2, 10_000)));
    for part in [
        "torchrun --nproc-per-node=2 train.py",
        "2024-02-29 23:59:59 UTC",
        "250.00 s",
        "exit code 3",
        "input-bound",
        "more loaders if CPUs are free",
        "rank 0",
        "rank 1",
        "GPU compute 125.00 s · 50 %",
        "data loading 62.50 s · 25 %",
        "1\u{202f}234\u{202f}567",
        "AllReduce",
        "12.3 ms",
        "123\u{202f}456\u{202f}789 ± 12\u{202f}345",
        "to the first call",
        "5.42 s",
        "pause 3.25 s",
        "stall 2.03 s",
        "99th percentile",
        "6.0 GiB",
        "it waited 1.5 s less in collectives",
        "cuLaunchKernel",
        "12 processes lost",
    ] {
        assert!(page.contains(part), "{part} is missing");
    }
}

/// The page agrees with the JSON key `complete`.
#[test]
fn a_rank_is_complete_only_if_all_of_it_was_observed() {
    for (complete, text) in [
        (Some(true), "completely"),
        (Some(false), "without its first calls"),
        (None, "from an unknown time on"),
    ] {
        let process = ProcessReport {
            complete,
            launches: 0,
            ..example_rank(0, 100)
        };
        let page = render_and_check(&report_on(vec![process]));
        assert!(page.contains(&format!("<td>{text}</td>")), "{text}");
    }
}

#[test]
fn a_straggler_is_named() {
    let mut report = report_on(example_ranks(4, 200));
    report.verdict = judge_ranks(&[
        rank_waiting_for_peer(),
        rank_waiting_for_peer(),
        rank_waiting_for_peer(),
        rank_waiting_for_gpu(),
    ]);
    assert!(render_and_check(&report).contains("rank 3: its peers waited for it"));
}

#[test]
fn the_page_is_small() {
    let length = |page: String| page.len() / 1024;
    let (two, many) = (
        report_on(example_ranks(2, 10_000)),
        report_on(example_ranks(64, 10_000)),
    );
    let (two, many) = (
        length(render_and_check(&two)),
        length(render_and_check(&many)),
    );
    assert!(two <= 300 && many <= 2048, "{two} KiB, {many} KiB");
}

#[test]
fn any_number_of_ranks_has_a_page() {
    for (count, folded) in [(0, 0), (1, 0), (16, 0), (17, 3), (64, 3)] {
        let page = render_and_check(&report_on(example_ranks(count, 200)));
        assert_eq!(page.matches("<details>").count(), folded, "{count}");
        let timelines = page.matches("Phases, share of the time").count();
        assert_eq!(timelines, count as usize);
    }
}

#[test]
fn a_run_of_no_length_has_a_page() {
    let still = RecordSample {
        at_ns: BEGIN_NS,
        times: ProcessTimes::default(),
        memory_bytes: 0,
    };
    for timeline in [vec![], vec![still], vec![still; 3]] {
        let process = ProcessReport {
            timeline,
            steps: Some(StepReport::default()),
            ..ProcessReport::default()
        };
        let mut report = report_on(vec![process.clone(), ProcessReport { pid: 1, ..process }]);
        report.wall_seconds = 0.0;
        report.verdict = communication_verdict_without_time();
        render_and_check(&report);
    }
}

#[test]
fn nan_and_infinity_are_not_drawn() {
    let mut strange = example_rank(0, 50);
    strange.times = example_times(f64::NAN);
    strange.training = None;
    for sample in &mut strange.timeline {
        sample.times = example_times(f64::INFINITY);
    }
    let page = render_html(&report_on(vec![strange]));
    assert!(!page.contains("=\"NaN") && !page.contains("=\"inf"));
}

#[test]
fn a_page_without_steps_says_so() {
    let mut process = example_rank(0, 1000);
    process.steps = None;
    process.training = None;
    let page = render_and_check(&report_on(vec![process]));
    assert!(page.contains("No steps were detected"));
    assert!(!page.contains("99th percentile"));
}

#[test]
fn a_run_that_was_not_observed_shows_the_reason() {
    let mut report = report_on(Vec::new());
    report.not_observed = Some("not <root>".to_owned());
    report.observing = None;
    let page = render_and_check(&report);
    assert!(page.contains("Missing") && page.contains("not &lt;root&gt;"));
}

#[test]
fn a_long_command_is_cut_in_the_title_only() {
    let mut report = report_on(Vec::new());
    report.command.push("--flag ".repeat(1000) + "--last");
    let page = render_and_check(&report);
    assert!(page.contains("Full command") && page.contains("--last</code>"));
    assert!(page.contains("…</h1>"));
}

#[test]
fn hostile_texts_are_escaped() {
    let hostile = "</title></style><script>alert(\"1\")</script><img src='x' onerror=alert(1)>&amp;\0\x1b]0;\u{202e}";
    let invalid = String::from_utf8_lossy(b"\xff\xfe<b>").into_owned();
    let mut process = example_rank(0, 100);
    process.comm = hostile.to_owned();
    process.job = Some(hostile.to_owned());
    process.collectives[0].op = hostile.to_owned().into();
    let mut report = report_on(vec![process]);
    report.command = vec![hostile.to_owned(), invalid];
    report.problems = vec![hostile.to_owned()];
    if let Some(observing) = &mut report.observing {
        observing.sampled = vec![hostile.to_owned()];
        observing.rung = hostile.to_owned();
    }
    let page = render_and_check(&report);
    assert!(page.contains("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;"));
    assert!(page.contains("\u{fffd}\u{fffd}&lt;b&gt;"));
    assert!(page.chars().all(|c| c == '\n' || !c.is_control()));
}
