//! Arbitrary text as the JSON of a snapshot.

use std::time::Duration;

use zernel_model::identity::Identity;
use zernel_model::snapshot::{ProcessSnapshot, Scope, Snapshot};
use zernel_testkit::allocation::CountingAllocator;
use zernel_testkit::fuzz::FuzzTarget;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn example_process(pid: u32) -> ProcessSnapshot {
    ProcessSnapshot {
        pid,
        identity: Some(Identity {
            pid,
            uid: 1000,
            comm: "python3".to_owned(),
            ..Identity::default()
        }),
        ..ProcessSnapshot::default()
    }
}

#[test]
fn fuzz_snapshot() {
    let snapshot = Snapshot {
        observed: vec![example_process(1), example_process(2)],
        gone_ranks: vec![example_process(3)],
        problems: vec!["a problem".to_owned()],
        ..Snapshot::default()
    };
    let text = snapshot.to_json(Scope::All, Duration::ZERO);
    let words = [
        "null",
        "-1",
        "1e999",
        "18446744073709551616",
        "[",
        "{",
        "\"\"",
        "\\u0000",
        "[[[[[[[[",
        "{\"\":",
    ];
    let mut read = 0_u64;
    let target = FuzzTarget::new("snapshot", 60_000)
        .input(text)
        .input(*br#"{"observed": [{"pid": 7, "new_key": 1, "role": "spectator"}]}"#)
        .words(words);
    let outcome = target.run(|bytes| {
        let Ok(snapshot) = serde_json::from_slice::<Snapshot>(bytes) else {
            return;
        };
        read += 1;
        let text = snapshot.to_json(Scope::All, Duration::ZERO);
        serde_json::from_str::<Snapshot>(&text).expect("what is written can be read");
        let own = snapshot.to_json(Scope::User(1000), Duration::from_secs(7));
        serde_json::from_str::<Snapshot>(&own).expect("what is written can be read");
        assert!(snapshot.ledger_json(Scope::All).is_object());
        let metrics = snapshot.to_aggregated_metrics(Scope::All).to_prometheus();
        assert!(!metrics.is_empty());
    });
    assert!(read > outcome.inputs / 50, "{read} snapshots: {outcome:?}");
}
