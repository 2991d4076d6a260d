//! The verdict of this version on a report that was written earlier, so that changed rules can be checked on recorded runs.

use serde::Deserialize;
use serde_json::Value;

use super::process::ProcessReport;
use super::times::RankTimes;
use super::verdict;

#[derive(Deserialize)]
struct ReportRanks {
    ranks: Vec<ProcessReport>,
}

/// Judges a run again by the JSON form of its report, and returns the JSON form of the verdict. The report has no figures of
/// single loaders, so saturated loaders are recognised by the waits for data only.
pub fn judge_written_report(report: &Value) -> Result<Value, serde_json::Error> {
    let mut report = ReportRanks::deserialize(report)?;
    report.ranks.iter_mut().for_each(restore_training_launches);
    let ranks: Vec<ProcessReport> = ProcessReport::find_ranks(&report.ranks)
        .into_iter()
        .cloned()
        .collect();
    let ranks = &ranks;
    let times: Vec<RankTimes> = ranks
        .iter()
        .map(|rank| RankTimes::new(rank, ranks, ranks))
        .collect();
    serde_json::to_value(verdict::judge_ranks(&times))
}

/// Sets the launches of the process and of its training from a report, which has a total and a mean per step.
fn restore_training_launches(rank: &mut ProcessReport) {
    rank.times.launches = rank.launches as f64;
    if let (Some(training), Some(steps)) = (&mut rank.training, &rank.steps) {
        let steps_after_warm_up = steps.count_after_warm_up() as f64;
        training.times.launches = rank.launches_per_step.unwrap_or(0.0) * steps_after_warm_up;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::report::{Observation, Report};
    use crate::times::ProcessTimes;

    #[test]
    fn a_written_report_gets_the_same_verdict() {
        let rank = ProcessReport {
            launches: 1000,
            times: ProcessTimes {
                wall_seconds: 10.0,
                gpu_wait_seconds: 7.0,
                calling_cpu_seconds: 10.0,
                launches: 1000.0,
                ..ProcessTimes::default()
            },
            ..ProcessReport::default()
        };
        let observation = Observation {
            processes: vec![rank],
            ..Observation::default()
        };
        let wall = Duration::from_secs(10);
        let report = Report::new(vec!["train".to_owned()], wall, None, Ok(observation));
        let mut written = serde_json::to_value(&report).unwrap();
        assert_eq!(written["verdict"]["bound"], "gpu");
        assert_eq!(judge_written_report(&written).unwrap(), written["verdict"]);
        written["ranks"][0]["gpu_wait_seconds"] = Value::from(1.0);
        assert_eq!(judge_written_report(&written).unwrap()["bound"], "host");
    }

    #[test]
    fn a_report_without_ranks_is_refused() {
        assert!(judge_written_report(&Value::Null).is_err());
    }
}
