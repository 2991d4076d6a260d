//! A snapshot as JSON.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::{ProcessSnapshot, Scope, Snapshot, TaskStateMapPath};

/// A snapshot within a scope. A scoped snapshot is serialised directly, because a [`Value`] takes several times the
/// memory and the time.
#[derive(Serialize)]
struct SnapshotOnWire<'a> {
    format: u32,
    zernel_version: &'static str,
    #[serde(flatten)]
    aggregated: Value,
    shared_state: &'a TaskStateMapPath,
    observed: Vec<&'a ProcessSnapshot>,
    gone_ranks: Vec<&'a ProcessSnapshot>,
    sampled: &'a [String],
    rung: &'a str,
    problems: Vec<String>,
    call_cost_seconds: f64,
    age_seconds: f64,
}

/// Number of the format of snapshots. The number changes when a reader of the previous format would misread a snapshot: not
/// for a new key, because readers skip keys that they do not know, and take the default of missing ones.
pub const SNAPSHOT_FORMAT: u32 = 1;

/// The version of this program.
pub const ZERNEL_VERSION: &str = env!("CARGO_PKG_VERSION");

/// A snapshot older than this is late: four of the observer's rounds.
const MAX_TIMELY_SNAPSHOT_AGE: Duration = Duration::from_secs(2);

/// Whether an observer should have published another snapshot by now.
#[must_use]
pub fn is_snapshot_late(age: Duration) -> bool {
    age > MAX_TIMELY_SNAPSHOT_AGE
}

/// The sentence about a late snapshot, for the list of problems.
#[must_use]
pub fn late_snapshot_problem(age: Duration) -> String {
    let seconds = age.as_secs_f64();
    format!("the observer is late: these figures are {seconds:.1} s old")
}

impl Snapshot {
    /// The snapshot as JSON, with the processes within a scope and its age. The JSON can be read back as a
    /// [`Snapshot`].
    #[must_use]
    pub fn to_json(&self, scope: Scope, age: Duration) -> String {
        let exited = self.gone_ranks.iter();
        let scoped = SnapshotOnWire {
            format: SNAPSHOT_FORMAT,
            zernel_version: ZERNEL_VERSION,
            aggregated: self.aggregated_json(scope),
            shared_state: &self.shared_state,
            observed: self.processes_in_scope(scope).collect(),
            gone_ranks: exited
                .filter(|rank| scope.contains_process(rank.identity.as_ref()))
                .collect(),
            sampled: &self.sampled,
            rung: &self.rung,
            problems: self.problems_json(scope, age),
            call_cost_seconds: self.call_cost_seconds,
            age_seconds: age.as_secs_f64(),
        };
        serde_json::to_string(&scoped).expect("every key is a string")
    }

    /// The metrics that every source has. For the machine, the scalars merge all processes and the details are empty.
    fn aggregated_json(&self, scope: Scope) -> Value {
        if scope != Scope::Machine {
            return self.to_aggregated_metrics(scope).to_ws_snapshot();
        }
        let mut merged = self.to_aggregated_metrics(Scope::All).to_ws_snapshot();
        merged["gpu_utilization"] = json!([]);
        merged["processes"] = json!({});
        merged
    }

    /// The sentences about problems. Outside [`Scope::All`] these sentences name no process that the scope hides.
    fn problems_json(&self, scope: Scope, age: Duration) -> Vec<String> {
        let pids: Vec<u32> = self
            .processes_in_scope(scope)
            .map(|process| process.pid)
            .collect();
        let problems = self.problems.iter();
        let problems = problems.map(|problem| match scope {
            Scope::All => problem.clone(),
            Scope::User(_) | Scope::Pod(_) | Scope::Machine => hide_pids_except(problem, &pids),
        });
        problems
            .chain(is_snapshot_late(age).then(|| late_snapshot_problem(age)))
            .collect()
    }
}

/// Replaces the pids in a text, except those in `visible`.
pub(super) fn hide_pids_except(text: &str, visible: &[u32]) -> String {
    let mut words = Vec::new();
    let mut follows_process = false;
    for word in text.split(' ') {
        let digits = word.trim_matches(|character: char| !character.is_ascii_digit());
        let is_hidden = digits.parse().is_ok_and(|pid| !visible.contains(&pid));
        words.push(match follows_process && is_hidden {
            true => word.replace(digits, "(hidden)"),
            false => word.to_owned(),
        });
        follows_process = matches!(word, "process" | "pid");
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;

    fn process_snapshot(pid: u32, uid: u32) -> ProcessSnapshot {
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
    fn a_pod_sees_its_own_processes() {
        use super::super::PodUid;
        let process = |pid, pod: Option<&str>| ProcessSnapshot {
            pid,
            identity: Some(crate::identity::Identity {
                pid,
                pod_uid: pod.map(str::to_owned),
                pod_is_certain: pid < 5,
                ..Default::default()
            }),
            ..ProcessSnapshot::default()
        };
        let own = "0f0e0d0c-0b0a-0908-0706-050403020100";
        let snapshot = Snapshot {
            observed: vec![
                process(1, Some(own)),
                process(2, Some("11111111-1111-1111-1111-111111111111")),
                process(3, Some("not a uid")),
                process(4, None),
                // The cgroup of this process has the name of the pod's cgroup, at another place.
                process(5, Some(own)),
            ],
            ..Snapshot::default()
        };
        let scope = Scope::Pod(PodUid::parse(&own.replace('-', "_")).unwrap());
        let pids: Vec<u32> = snapshot
            .processes_in_scope(scope)
            .map(|it| it.pid)
            .collect();
        assert_eq!(pids, [1]);
        assert_eq!(PodUid::parse("+f0e0d0c0b0a09080706050403020100"), None);
        assert_eq!(PodUid::parse("0f"), None);
    }

    #[test]
    fn a_user_reads_back_only_own_processes() {
        let snapshot = Snapshot {
            observed: vec![process_snapshot(1, 1000), process_snapshot(2, 1001)],
            gone_ranks: vec![process_snapshot(3, 1000), process_snapshot(4, 1001)],
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
    fn machine_scope_has_sums_and_no_process() {
        let mut trainer = process_snapshot(4711, 1000);
        let mut launches = crate::aggregation::LatencyHistogram::default();
        launches.record(8000);
        trainer.probes.cuda_trace.launch_times = Some(launches.into());
        trainer.probes.gpu_mem.memory = vec![Default::default()];
        let snapshot = Snapshot {
            observed: vec![trainer.clone()],
            gone_ranks: vec![trainer],
            problems: vec!["the overhead of process 4711 exceeded the ceiling".to_owned()],
            ..Snapshot::default()
        };
        let text = snapshot.to_json(Scope::Machine, Duration::ZERO);
        assert!(!text.contains("4711"), "{text}");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["cuda_latency_p50_us"], 8.0);
        assert_eq!(value["observed"], json!([]));
        let all = snapshot.to_json(Scope::All, Duration::ZERO);
        assert!(all.contains("process 4711 exceeded"), "{all}");
    }

    #[test]
    fn problems_name_only_processes_within_the_scope() {
        let snapshot = Snapshot {
            observed: vec![process_snapshot(1, 1000), process_snapshot(2, 1001)],
            problems: vec!["the overhead of process 2 exceeded the ceiling 2 times".to_owned()],
            ..Snapshot::default()
        };
        let problem = |uid| snapshot.problems_json(Scope::User(uid), Duration::ZERO);
        assert_eq!(problem(1001), snapshot.problems);
        assert_eq!(
            problem(1000),
            ["the overhead of process (hidden) exceeded the ceiling 2 times"]
        );
    }

    #[test]
    fn a_late_snapshot_has_a_problem_sentence() {
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
