//! A snapshot as JSON.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::{ProcessSnapshot, Scope, SharedState, Snapshot};

/// A snapshot within a scope. It is serialised directly: a [`Value`] of it takes several times the memory and the time.
#[derive(Serialize)]
struct ScopedSnapshot<'a> {
    #[serde(flatten)]
    aggregated: Value,
    shared_state: &'a SharedState,
    observed: Vec<&'a ProcessSnapshot>,
    gone_ranks: Vec<&'a ProcessSnapshot>,
    sampled: &'a [String],
    rung: &'a str,
    problems: Vec<&'a str>,
    call_cost_seconds: f64,
    age_seconds: f64,
}

/// A snapshot older than this is late: four of the observer's rounds.
const LATE: Duration = Duration::from_secs(2);

/// Whether an observer should have published another snapshot by now.
#[must_use]
pub fn is_late(age: Duration) -> bool {
    age > LATE
}

/// The problem that a late snapshot is.
#[must_use]
pub fn lateness(age: Duration) -> String {
    let seconds = age.as_secs_f64();
    format!("the observer is late: these figures are {seconds:.1} s old")
}

impl Snapshot {
    /// The snapshot as JSON, with the processes within a scope and its age. It can be read back as a [`Snapshot`].
    #[must_use]
    pub fn to_json(&self, scope: Scope, age: Duration) -> String {
        let gone = self.gone_ranks.iter();
        let late = is_late(age).then(|| lateness(age));
        let problems = self.problems.iter().chain(&late);
        let scoped = ScopedSnapshot {
            aggregated: self.aggregated(scope).to_ws_snapshot(),
            shared_state: &self.shared_state,
            observed: self.processes(scope).collect(),
            gone_ranks: gone
                .filter(|rank| scope.contains(rank.identity.as_ref()))
                .collect(),
            sampled: &self.sampled,
            rung: &self.rung,
            problems: problems.map(String::as_str).collect(),
            call_cost_seconds: self.call_cost_seconds,
            age_seconds: age.as_secs_f64(),
        };
        serde_json::to_string(&scoped).expect("every key is a string")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;

    fn process(pid: u32, uid: u32) -> ProcessSnapshot {
        ProcessSnapshot {
            pid,
            identity: Some(Identity {
                uid,
                ..Identity::default()
            }),
            ..ProcessSnapshot::default()
        }
    }

    #[test]
    fn a_user_reads_back_only_own_processes() {
        let snapshot = Snapshot {
            observed: vec![process(1, 1000), process(2, 1001)],
            gone_ranks: vec![process(3, 1000), process(4, 1001)],
            problems: vec!["a problem".to_owned()],
            ..Snapshot::default()
        };
        let pids = |scope| {
            let text = snapshot.to_json(scope, Duration::ZERO);
            let read: Snapshot = serde_json::from_str(&text).expect("it is a snapshot");
            assert_eq!(read.problems, snapshot.problems);
            let all = read.observed.iter().chain(&read.gone_ranks);
            all.map(|process| process.pid).collect::<Vec<_>>()
        };
        assert_eq!(pids(Scope::All), [1, 2, 3, 4]);
        assert_eq!(pids(Scope::User(1001)), [2, 4]);
    }

    #[test]
    fn a_late_snapshot_says_so() {
        let problems = |age| {
            let text = Snapshot::default().to_json(Scope::All, age);
            let read: Snapshot = serde_json::from_str(&text).expect("it is a snapshot");
            assert_eq!(read.age_seconds, age.as_secs_f64());
            read.problems
        };
        assert!(problems(Duration::from_millis(600)).is_empty());
        let late = problems(Duration::from_secs(7));
        assert_eq!(late, ["the observer is late: these figures are 7.0 s old"]);
    }

    #[test]
    fn an_object_without_keys_is_a_snapshot() {
        let text = r#"{"observed": [{"pid": 7, "new_key": 1, "role": "spectator"}]}"#;
        let read: Snapshot = serde_json::from_str(text).expect("missing keys have defaults");
        assert_eq!(read.observed[0].pid, 7);
        assert_eq!(read.observed[0].probes.cuda_trace.launches, 0);
    }
}
