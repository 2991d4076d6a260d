use super::*;
use crate::scenario::figures::{GroupFigures, RunFigures};

fn two_group_scenario() -> Scenario {
    let text = "about = 'shows a thing'\ntraining = ['a']\nnoise = ['b']\n[[group]]\nname = 'a'\n[[group]]\nname = 'b'";
    Scenario::parse(text, "thing.toml").unwrap()
}

fn comparison_with_seeds(seed_count: u64) -> SchedulerComparison {
    SchedulerComparison {
        scenarios: vec![two_group_scenario()],
        schedulers: vec![
            SchedulerChoice::Eevdf,
            SchedulerChoice::LabScheduler("mine".to_owned()),
        ],
        seed_count,
        parallel_boots: 2,
    }
}

fn run_result(scheduler: &str, seed: u64, rounds: u64) -> RunResult {
    let group = |name: &str, rounds| GroupFigures {
        name: name.to_owned(),
        rounds,
        cpu_ns: 500_000_000,
        steps_ns: vec![1_000_000; 0],
        ..GroupFigures::default()
    };
    RunResult {
        scenario: "thing".to_owned(),
        scheduler: scheduler.to_owned(),
        seed,
        figures: Some(RunFigures {
            window_ns: 1_000_000_000,
            groups: vec![group("a", rounds), group("b", 7)],
            ..RunFigures::default()
        }),
        findings: Vec::new(),
        kernel_warning: None,
        console: String::new(),
        host_seconds: 1.0,
    }
}

/// A report in which the second scheduler makes `mine` rounds at each seed and the first one 100.
fn report_of_rounds(mine: &[u64]) -> ComparisonReport {
    let mut results = BTreeMap::new();
    for (seed, rounds) in (1..).zip(mine) {
        results.insert((0, 0, seed), run_result("eevdf", seed, 100));
        results.insert((0, 1, seed), run_result("mine", seed, *rounds));
    }
    comparison_with_seeds(mine.len() as u64).build_report(&results)
}

#[test]
fn report_prints_sign_test_outcome() {
    let better = report_of_rounds(&[120; 6]).to_string();
    assert!(better.contains("better, p = 0.016"), "{better}");
    let worse = report_of_rounds(&[80; 6]).to_string();
    assert!(worse.contains("worse, p = 0.016"), "{worse}");
    let few = report_of_rounds(&[120; 3]).to_string();
    assert!(few.contains("undecided") && few.contains("3 : 0"), "{few}");
    assert!(few.contains("| 120.0 "), "{few}");
    assert!(few.starts_with("Rule: "), "{few}");
}

#[test]
fn report_row_has_rate_and_noise_cpus() {
    let row = &report_of_rounds(&[120; 2]).scenarios[0].rows[1];
    assert_eq!((row.rate, row.noise_cpus), (Some(120.0), Some(0.5)));
    assert_eq!(row.by_seed, [Some(120.0), Some(120.0)]);
}

#[test]
fn svg_plot_has_one_dot_per_run() {
    let svg = report_of_rounds(&[120; 6]).scenarios[0].to_svg();
    assert_eq!(svg.matches("<circle").count(), 12);
    assert!(svg.contains("more is better") && svg.ends_with("</svg>\n"));
}

#[test]
fn regressions_against_baseline_are_found() {
    use super::baseline::find_regressions;
    let old = report_of_rounds(&[120; 6]);
    assert!(find_regressions(&old, &old).is_empty());
    assert!(find_regressions(&report_of_rounds(&[130; 6]), &old).is_empty());
    let regressions = find_regressions(&report_of_rounds(&[119; 6]), &old);
    assert!(
        regressions.len() == 1 && regressions[0].contains("was 120.0, is 119.0"),
        "{regressions:?}"
    );
    assert!(
        find_regressions(&report_of_rounds(&[119; 3]), &report_of_rounds(&[120; 3])).is_empty(),
        "within 5 %"
    );
    assert_eq!(
        find_regressions(&report_of_rounds(&[110; 3]), &report_of_rounds(&[120; 3])).len(),
        1
    );
    let mut failing = report_of_rounds(&[120; 6]);
    failing.scenarios[0].rows[1].verdict = Verdict::Fail;
    assert_eq!(find_regressions(&failing, &old).len(), 1);
}

#[test]
fn run_keys_cover_schedulers_and_seeds() {
    let run_keys = comparison_with_seeds(3).run_keys();
    assert_eq!(run_keys.len(), 6);
    assert_eq!(run_keys[..3], [(0, 0, 1), (0, 1, 1), (0, 0, 2)]);
}
