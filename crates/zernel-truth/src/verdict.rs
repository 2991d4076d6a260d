//! Whether the verdict of the run's report is the one that is known by construction.

use serde::Serialize;
use serde_json::Value;

/// The verdict of a recorded run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReportedVerdict {
    /// The resource, `straggler` or `cannot-tell`.
    pub bound: String,
    /// The measurements behind it.
    pub evidence: String,
    /// Whether it is the known one; `None`: that is not known.
    pub is_right: Option<bool>,
    /// Whether the job would need negative time after the most that the report promises.
    pub overstates: bool,
}

impl ReportedVerdict {
    /// Reads the verdict from a report. `known`: the right one, as stamps name it.
    #[must_use]
    pub fn new(report: &Value, known: Option<&str>) -> Option<Self> {
        let verdict = report.get("verdict")?;
        let text = |key: &str| Some(verdict.get(key)?.as_str()?.to_owned());
        let (bound, evidence) = (text("bound")?, text("evidence")?);
        let seconds = |of: &Value, key: &str| of.get(key).and_then(Value::as_f64);
        let at_most = seconds(verdict, "at_most_seconds").unwrap_or(0.0);
        let wall = seconds(report, "wall_seconds")?;
        let known = known.filter(|known| !known.is_empty());
        Some(Self {
            is_right: known.map(|known| is_right(known, &bound, &evidence)),
            overstates: at_most > wall,
            bound,
            evidence,
        })
    }
}

/// A job that compiles, or that is no machine learning, must get no verdict. Inference may be bound by anything, but must
/// not be taken for training.
fn is_right(known: &str, bound: &str, evidence: &str) -> bool {
    match known {
        "host" => ["host", "cpu-scheduler"].contains(&bound),
        "compile" | "none" => bound == "cannot-tell",
        "inference" => bound == "cannot-tell" || evidence.contains("nothing shows training"),
        _ => bound == known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bound: &str, evidence: &str) -> Value {
        serde_json::json!({
            "wall_seconds": 10.0,
            "verdict": {"bound": bound, "evidence": evidence, "at_most_seconds": 11.0},
        })
    }

    #[test]
    fn a_verdict_is_compared_with_the_known_one() {
        let is_right = |known: &str, bound: &str, evidence: &str| {
            let verdict = ReportedVerdict::new(&report(bound, evidence), Some(known)).unwrap();
            verdict.is_right
        };
        assert_eq!(is_right("gpu", "gpu", ""), Some(true));
        assert_eq!(is_right("gpu", "host", ""), Some(false));
        assert_eq!(is_right("host", "cpu-scheduler", ""), Some(true));
        assert_eq!(is_right("compile", "host", ""), Some(false));
        assert_eq!(is_right("compile", "cannot-tell", ""), Some(true));
        assert_eq!(
            is_right("inference", "host", "; nothing shows training: …"),
            Some(true)
        );
        assert_eq!(is_right("inference", "host", "the host works"), Some(false));
        assert_eq!(is_right("", "host", ""), None);
    }

    #[test]
    fn a_gain_above_the_wall_time_is_overstated() {
        let verdict = ReportedVerdict::new(&report("gpu", ""), None).unwrap();
        assert!(verdict.overstates);
        assert_eq!(ReportedVerdict::new(&Value::Null, None), None);
    }
}
