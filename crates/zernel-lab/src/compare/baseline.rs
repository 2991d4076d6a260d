//! Compares a report with an earlier one, the baseline, and lists what became worse.

use super::statistics::{SignTest, SignTestOutcome, median};
use super::{ComparisonReport, ScenarioReport, SchedulerRow};

/// The change of a median that counts where there are too few seeds for the sign test, in percent.
const LARGEST_CHANGE_PERCENT: f64 = 5.0;
/// Number of seeds that the sign test needs.
const SEEDS_FOR_SIGN_TEST: usize = 6;

/// What became worse than in the baseline: a verdict, or the compared figure by the sign test over the seeds that both
/// have. With fewer than six seeds the median may change by 5 %.
#[must_use]
pub fn find_regressions(report: &ComparisonReport, baseline: &ComparisonReport) -> Vec<String> {
    let mut regressions = Vec::new();
    for scenario in &report.scenarios {
        let earlier = baseline
            .scenarios
            .iter()
            .find(|earlier| earlier.name == scenario.name);
        for row in &scenario.rows {
            let has_same_scheduler = |earlier: &&SchedulerRow| earlier.scheduler == row.scheduler;
            let Some(earlier) =
                earlier.and_then(|earlier| earlier.rows.iter().find(has_same_scheduler))
            else {
                continue;
            };
            regressions.extend(find_regression(scenario, row, earlier));
        }
    }
    regressions
}

fn find_regression(
    scenario: &ScenarioReport,
    row: &SchedulerRow,
    baseline_row: &SchedulerRow,
) -> Option<String> {
    let scenario_and_scheduler = format!("{}, {}", scenario.name, row.scheduler);
    if row.verdict > baseline_row.verdict {
        let problem = row.problem.as_deref().unwrap_or_default();
        return Some(format!(
            "{scenario_and_scheduler}: {} instead of {}: {problem}",
            row.verdict, baseline_row.verdict
        ));
    }
    let pairs: Vec<(f64, f64)> = baseline_row
        .by_seed
        .iter()
        .zip(&row.by_seed)
        .filter_map(|(before, now)| Some(((*before)?, (*now)?)))
        .collect();
    let (old, new): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let (old, new) = (median(&old)?, median(&new)?);
    let higher_is_better = scenario.metric.higher_is_better();
    let is_worse = match pairs.len() >= SEEDS_FOR_SIGN_TEST {
        true => SignTest::from_pairs(pairs, higher_is_better).outcome() == SignTestOutcome::Worse,
        false => {
            let change_percent = (new / old - 1.0) * 100.0;
            let loss_percent = if higher_is_better {
                -change_percent
            } else {
                change_percent
            };
            loss_percent > LARGEST_CHANGE_PERCENT
        }
    };
    is_worse.then(|| {
        format!(
            "{scenario_and_scheduler}: {} was {old:.1}, is {new:.1}",
            scenario.metric.label()
        )
    })
}
