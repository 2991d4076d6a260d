//! A report of an earlier day, to fail against.

use super::statistics::{SignTest, SignTestOutcome, median};
use super::{ComparisonReport, ScenarioReport, SchedulerRow};

/// The change of a median that counts where there are too few seeds for the sign test, in percent.
const LARGEST_CHANGE_PERCENT: f64 = 5.0;
/// Seeds that the sign test needs.
const SEEDS_FOR_SIGN_TEST: usize = 6;

/// What became worse than in the baseline: a verdict, or the compared figure by the sign test over the seeds that both
/// have. With fewer than six seeds the median may change by 5 %.
#[must_use]
pub fn regressions(report: &ComparisonReport, baseline: &ComparisonReport) -> Vec<String> {
    let mut found = Vec::new();
    for scenario in &report.scenarios {
        let before = baseline
            .scenarios
            .iter()
            .find(|before| before.name == scenario.name);
        for row in &scenario.rows {
            let same = |before: &&SchedulerRow| before.scheduler == row.scheduler;
            let Some(before) = before.and_then(|before| before.rows.iter().find(same)) else {
                continue;
            };
            found.extend(regression(scenario, row, before));
        }
    }
    found
}

fn regression(
    scenario: &ScenarioReport,
    row: &SchedulerRow,
    before: &SchedulerRow,
) -> Option<String> {
    let place = format!("{}, {}", scenario.name, row.scheduler);
    if row.verdict > before.verdict {
        let problem = row.problem.as_deref().unwrap_or_default();
        return Some(format!(
            "{place}: {} instead of {}: {problem}",
            row.verdict, before.verdict
        ));
    }
    let pairs: Vec<(f64, f64)> = before
        .by_seed
        .iter()
        .zip(&row.by_seed)
        .filter_map(|(before, now)| Some(((*before)?, (*now)?)))
        .collect();
    let (old, new): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let (old, new) = (median(&old)?, median(&new)?);
    let higher = scenario.metric.higher_is_better();
    let worse = match pairs.len() >= SEEDS_FOR_SIGN_TEST {
        true => SignTest::of(pairs, higher).outcome() == SignTestOutcome::Worse,
        false => {
            let change_percent = (new / old - 1.0) * 100.0;
            let loss_percent = if higher {
                -change_percent
            } else {
                change_percent
            };
            loss_percent > LARGEST_CHANGE_PERCENT
        }
    };
    worse.then(|| {
        format!(
            "{place}: {} was {old:.1}, is {new:.1}",
            scenario.metric.label()
        )
    })
}
