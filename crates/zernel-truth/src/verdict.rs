//! Whether the verdict of the run's report is the one that is known by construction.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

/// The verdict that is right for each process that trains, by pid. `None`: the right verdict is not known.
pub type KnownVerdicts = BTreeMap<u32, Option<String>>;

/// The verdict of a recorded run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReportedVerdict {
    /// The resource, `straggler` or `cannot-tell`.
    pub bound: String,
    /// The measurements behind it.
    pub evidence: String,
    /// Whether the reported verdict is right; `None` if the right one is not known.
    pub is_right: Option<bool>,
    /// Whether the gain that the report promises at most is longer than the wall time of the run.
    pub overstates: bool,
}

impl ReportedVerdict {
    /// Reads the verdict from a report. `known_verdicts`: the right one for each process that trains, by pid, as stamps name it.
    #[must_use]
    pub fn from_report(report: &Value, known_verdicts: &KnownVerdicts) -> Option<Self> {
        let verdict = report.get("verdict")?;
        let text_at = |key: &str| Some(verdict.get(key)?.as_str()?.to_owned());
        let (bound, evidence) = (text_at("bound")?, text_at("evidence")?);
        let seconds_at = |object: &Value, key: &str| object.get(key).and_then(Value::as_f64);
        let at_most_seconds = seconds_at(verdict, "at_most_seconds").unwrap_or(0.0);
        let wall_seconds = seconds_at(report, "wall_seconds")?;
        let is_right = match straggler_and_cause(report) {
            Some((pid, cause)) if known_verdicts_differ(known_verdicts) => {
                Some(is_known_cause_of_straggler(known_verdicts, pid, cause))
            }
            _ => {
                let right_verdict = known_verdicts.values().next()?.as_deref();
                let right_verdict = right_verdict.filter(|verdict| !verdict.is_empty());
                right_verdict.map(|verdict| is_right_verdict(verdict, &bound, &evidence))
            }
        };
        Some(Self {
            is_right,
            overstates: at_most_seconds > wall_seconds,
            bound,
            evidence,
        })
    }
}

/// Whether the ranks have different bottlenecks.
fn known_verdicts_differ(known_verdicts: &KnownVerdicts) -> bool {
    known_verdicts
        .values()
        .any(|verdict| Some(verdict) != known_verdicts.values().next())
}

/// Pid of the straggler, and the part of its time that makes it slow.
fn straggler_and_cause(report: &Value) -> Option<(u32, &str)> {
    let verdict = report.get("verdict")?;
    let index = usize::try_from(verdict.get("straggler")?.as_u64()?).ok()?;
    let pid = report.get("ranks")?.get(index)?.get("pid")?.as_u64()?;
    Some((u32::try_from(pid).ok()?, verdict.get("cause")?.as_str()?))
}

/// Whether a part of the straggler's time belongs to its bottleneck, and its peers are known to wait for others.
fn is_known_cause_of_straggler(known_verdicts: &KnownVerdicts, pid: u32, cause: &str) -> bool {
    let bottleneck_parts: &[&str] = match known_verdicts.get(&pid).and_then(Option::as_deref) {
        Some("input") => &["prepare", "fetch", "other-data"],
        Some("host") => &["host", "cpu-delay"],
        Some("gpu") => &["gpu"],
        Some("throttled") => &["throttled"],
        _ => &[],
    };
    let mut peers = known_verdicts.iter().filter(|(other, _)| **other != pid);
    bottleneck_parts.contains(&cause)
        && peers.all(|(_, verdict)| verdict.as_deref() == Some("communication"))
}

/// A job that is no machine learning must get no verdict. A job that compiles most of the time must get none either, or the
/// evidence says that its verdict leaves out the warm-up. Inference may be bound by anything, but must
/// not be taken for training.
fn is_right_verdict(known: &str, bound: &str, evidence: &str) -> bool {
    match known {
        "host" => ["host", "cpu-scheduler"].contains(&bound),
        "none" => bound == "cannot-tell",
        "compile" => bound == "cannot-tell" || evidence.contains("the warm-up took"),
        "inference" => bound == "cannot-tell" || evidence.contains("nothing shows training"),
        _ => bound == known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report_with_verdict(bound: &str, evidence: &str) -> Value {
        serde_json::json!({
            "wall_seconds": 10.0,
            "verdict": {"bound": bound, "evidence": evidence, "at_most_seconds": 11.0},
        })
    }

    #[test]
    fn a_verdict_is_compared_with_the_known_one() {
        let verdict_is_right = |known: &str, bound: &str, evidence: &str| {
            let known = BTreeMap::from([(7, Some(known.to_owned()))]);
            let verdict =
                ReportedVerdict::from_report(&report_with_verdict(bound, evidence), &known)
                    .unwrap();
            verdict.is_right
        };
        assert_eq!(verdict_is_right("gpu", "gpu", ""), Some(true));
        assert_eq!(verdict_is_right("gpu", "host", ""), Some(false));
        assert_eq!(verdict_is_right("host", "cpu-scheduler", ""), Some(true));
        assert_eq!(verdict_is_right("compile", "host", ""), Some(false));
        assert_eq!(verdict_is_right("compile", "cannot-tell", ""), Some(true));
        assert_eq!(
            verdict_is_right(
                "compile",
                "gpu",
                "; the warm-up took 16.0 s and is left out"
            ),
            Some(true)
        );
        assert_eq!(
            verdict_is_right("inference", "host", "; nothing shows training: …"),
            Some(true)
        );
        assert_eq!(
            verdict_is_right("inference", "host", "the host works"),
            Some(false)
        );
        assert_eq!(verdict_is_right("", "host", ""), None);
    }

    #[test]
    fn a_gain_above_the_wall_time_is_overstated() {
        let known = BTreeMap::from([(7, None)]);
        let verdict =
            ReportedVerdict::from_report(&report_with_verdict("gpu", ""), &known).unwrap();
        assert!(verdict.overstates);
        assert_eq!(ReportedVerdict::from_report(&Value::Null, &known), None);
    }

    /// One rank loads slowly and the other waits for it: naming the slow rank and its cause says both.
    #[test]
    fn a_straggler_is_right_if_its_own_bottleneck_is_the_cause() {
        let known = BTreeMap::from([
            (7, Some("communication".to_owned())),
            (8, Some("input".to_owned())),
        ]);
        let verdict_is_right = |known_verdicts: &KnownVerdicts, straggler: usize, cause: &str| {
            let mut report = report_with_verdict("straggler", "");
            report["ranks"] = serde_json::json!([{"pid": 7}, {"pid": 8}]);
            report["verdict"]["straggler"] = straggler.into();
            report["verdict"]["cause"] = cause.into();
            ReportedVerdict::from_report(&report, known_verdicts)
                .unwrap()
                .is_right
        };
        assert_eq!(verdict_is_right(&known, 1, "other-data"), Some(true));
        assert_eq!(verdict_is_right(&known, 1, "host"), Some(false));
        assert_eq!(verdict_is_right(&known, 0, "other-data"), Some(false));
        let same_bottleneck = BTreeMap::from([(7, known[&7].clone()), (8, known[&7].clone())]);
        assert_eq!(
            verdict_is_right(&same_bottleneck, 1, "other-data"),
            Some(false)
        );
    }
}
