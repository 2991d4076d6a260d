//! Ranks and checks that the tests of all verdicts share.

use serde_json::{Value, json};

use super::job::TotalTime;
use super::resource::ResourceTime;
use super::{Verdict, communication, judge_ranks};
use crate::times::{RankTimeParts, RankTimes};

/// A rank that waits for its GPU.
pub(crate) fn rank_waiting_for_gpu() -> RankTimes {
    RankTimes {
        wall: 100.0,
        communication: 8.0,
        gpu_waits: 80.0,
        peer_waits: 8.0,
        until_sync: 8.0,
        launching: 2.0,
        launches: 400_000.0,
        unknown: 5.0,
        data_waits: 2.0,
        data_prepare: 1.0,
        data_fetch: 0.5,
        data_cpu_delay: 0.5,
        training_cpu: 20.0,
        run_delay: 1.0,
        max_loader_busy_share: Some(0.2),
        ..RankTimes::default()
    }
}

/// A rank that waits for loaders that never rest.
pub(super) fn rank_waiting_for_loaders() -> RankTimes {
    RankTimes {
        data_waits: 30.0,
        data_prepare: 27.0,
        data_fetch: 1.0,
        gpu_waits: 60.0,
        max_loader_busy_share: Some(0.98),
        ..rank_waiting_for_gpu()
    }
}

/// A rank that waits for a peer.
pub(crate) fn rank_waiting_for_peer() -> RankTimes {
    RankTimes {
        communication: 50.0,
        peer_waits: 50.0,
        ..rank_waiting_for_gpu()
    }
}

/// The verdict that communication bounds a job, although it took no time.
pub(crate) fn communication_verdict_without_time() -> Verdict {
    let time = ResourceTime {
        seconds: 0.0,
        total: TotalTime {
            ranks: 2,
            wall_seconds: 1.0,
            warm_up_seconds: 0.0,
        },
        other_resources: Vec::new(),
        at_most_seconds: 0.0,
        next_steps: Vec::new(),
    };
    (communication::RESOURCE.verdict)(time, &[])
}

/// The value of the JSON key `bound`.
pub(super) fn json_bound_of(verdict: &Verdict) -> String {
    let json = serde_json::to_value(verdict).expect("JSON");
    json["bound"].as_str().expect("a text").to_owned()
}

pub(super) fn remedy_of_verdict(verdict: &Verdict) -> &'static str {
    verdict.describe().helps.expect("a remedy")
}

/// Checks the verdict on each of these ranks, alone and with peers that are like it.
pub(super) fn assert_bound_of_cases(bound: &str, cases: &[(&str, RankTimes)]) {
    for (name, rank) in cases {
        for ranks in [vec![*rank], vec![*rank; 8]] {
            let verdict = judge_ranks(&ranks);
            let description = verdict.describe();
            assert_eq!(
                json_bound_of(&verdict),
                bound,
                "{name}: {}",
                description.evidence
            );
            assert!(!description.evidence.is_empty());
            let has_gain = bound != "cannot-tell";
            assert_eq!(description.at_most_seconds.is_some(), has_gain, "{name}");
        }
    }
}

/// Checks the JSON of the verdict on ranks, without its two sentences. `values` are in the order of the keys.
pub(super) fn assert_verdict_json(ranks: &[RankTimes], values: &Value) {
    let mut json = serde_json::to_value(judge_ranks(ranks)).expect("JSON");
    let keys = json.as_object_mut().expect("an object");
    let sentences = ["evidence", "helps"].map(|key| keys.remove(key).expect(key));
    let steps = keys.remove("next_steps").expect("next steps");
    assert!(steps.as_array().is_some_and(|steps| steps.len() <= 3));
    let expected = json!({
        "bound": values[0],
        "cause": values[1],
        "straggler": values[2],
        "share": values[3],
        "at_most_seconds": values[4],
    });
    assert_eq!(json, expected);
    assert!(sentences[0].is_string(), "{sentences:?}");
    assert_eq!(sentences[1].is_string(), !values[4].is_null());
}

#[test]
fn parts_add_up_to_at_most_the_wall_time() {
    let overlapping = RankTimes {
        data_waits: 50.0,
        data_prepare: 80.0,
        communication: 60.0,
        gpu_waits: 100.0,
        run_delay: 500.0,
        training_cpu: 1000.0,
        ..rank_waiting_for_gpu()
    };
    for rank in [
        rank_waiting_for_gpu(),
        rank_waiting_for_loaders(),
        overlapping,
    ] {
        assert!(RankTimeParts::new(&rank).total_seconds() <= rank.wall + 1e-9);
    }
}
