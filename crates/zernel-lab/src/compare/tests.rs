use super::*;
use crate::scenario::figures::{GroupFigures, RunFigures};

fn scenario() -> Scenario {
    let text = "about = 'shows a thing'\ntraining = ['a']\nnoise = ['b']\n[[group]]\nname = 'a'\n[[group]]\nname = 'b'";
    Scenario::parse(text, "thing.toml").unwrap()
}

fn comparison(seeds: u64) -> SchedulerComparison {
    SchedulerComparison {
        scenarios: vec![scenario()],
        schedulers: vec![Scheduler::Eevdf, Scheduler::Own("mine".to_owned())],
        seeds,
        jobs: 2,
    }
}

fn result(scheduler: &str, seed: u64, rounds: u64) -> RunResult {
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
fn report(mine: &[u64]) -> ComparisonReport {
    let mut results = BTreeMap::new();
    for (seed, rounds) in (1..).zip(mine) {
        results.insert((0, 0, seed), result("eevdf", seed, 100));
        results.insert((0, 1, seed), result("mine", seed, *rounds));
    }
    comparison(mine.len() as u64).report(&results)
}

#[test]
fn wins_and_losses_are_printed_alike() {
    let better = report(&[120; 6]).to_string();
    assert!(better.contains("better, p = 0.016"), "{better}");
    let worse = report(&[80; 6]).to_string();
    assert!(worse.contains("worse, p = 0.016"), "{worse}");
    let few = report(&[120; 3]).to_string();
    assert!(few.contains("undecided") && few.contains("3 : 0"), "{few}");
    assert!(few.contains("| 120.0 "), "{few}");
    assert!(few.starts_with("Rule: "), "{few}");
}

#[test]
fn noise_is_printed_beside_the_rate() {
    let row = &report(&[120; 2]).scenarios[0].rows[1];
    assert_eq!((row.rate, row.noise_cpus), (Some(120.0), Some(0.5)));
    assert_eq!(row.by_seed, [Some(120.0), Some(120.0)]);
}

#[test]
fn a_plot_has_a_dot_for_each_run() {
    let svg = report(&[120; 6]).scenarios[0].to_svg();
    assert_eq!(svg.matches("<circle").count(), 12);
    assert!(svg.contains("more is better") && svg.ends_with("</svg>\n"));
}

#[test]
fn a_baseline_finds_what_became_worse() {
    use super::baseline::regressions;
    let old = report(&[120; 6]);
    assert!(regressions(&old, &old).is_empty());
    assert!(regressions(&report(&[130; 6]), &old).is_empty());
    let found = regressions(&report(&[119; 6]), &old);
    assert!(
        found.len() == 1 && found[0].contains("was 120.0, is 119.0"),
        "{found:?}"
    );
    assert!(
        regressions(&report(&[119; 3]), &report(&[120; 3])).is_empty(),
        "within 5 %"
    );
    assert_eq!(regressions(&report(&[110; 3]), &report(&[120; 3])).len(), 1);
    let mut failing = report(&[120; 6]);
    failing.scenarios[0].rows[1].verdict = Verdict::Fail;
    assert_eq!(regressions(&failing, &old).len(), 1);
}

#[test]
fn every_run_has_one_place() {
    let places = comparison(3).places();
    assert_eq!(places.len(), 6);
    assert_eq!(places[..3], [(0, 0, 1), (0, 1, 1), (0, 0, 2)]);
}
