use serde_json::json;

use super::*;
use crate::parts::{Parts, RankTimes};

/// Waits for its GPU.
const RANK: RankTimes = RankTimes {
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
    data_sched: 0.5,
    cpu: 20.0,
    run_delay: 1.0,
    loader_busy: Some(0.2),
    loaders_fill_cpus: false,
    gpu_busy: None,
};

/// Waits for loaders that never rest.
const STARVED: RankTimes = RankTimes {
    data_waits: 30.0,
    data_prepare: 27.0,
    data_fetch: 1.0,
    gpu_waits: 60.0,
    loader_busy: Some(0.98),
    ..RANK
};

/// The value of the JSON key `bound`.
fn bound_of(verdict: &Verdict) -> String {
    let json = serde_json::to_value(verdict).expect("JSON");
    json["bound"].as_str().expect("a text").to_owned()
}

fn remedy_of(verdict: &Verdict) -> &'static str {
    verdict.remedy().expect("a remedy").text()
}

#[test]
fn what_can_be_gained_most_by_bounds() {
    let cases = [
        ("waits for its GPU", RANK, "gpu"),
        ("waits for loaders, which limit it", STARVED, "input"),
        (
            "waits for loaders that could be faster, less than for the GPU",
            RankTimes {
                loader_busy: Some(0.3),
                ..STARVED
            },
            "gpu",
        ),
        (
            "loads most of the time itself",
            RankTimes {
                data_waits: 60.0,
                data_prepare: 50.0,
                gpu_waits: 30.0,
                loader_busy: None,
                ..RANK
            },
            "input",
        ),
        (
            "waits for loaders that do not get to run",
            RankTimes {
                data_prepare: 5.0,
                data_sched: 24.0,
                ..STARVED
            },
            "cpu-scheduler",
        ),
        (
            "does not get to run itself",
            RankTimes {
                run_delay: 50.0,
                gpu_waits: 38.0,
                ..RANK
            },
            "cpu-scheduler",
        ),
        (
            "waits for peers",
            RankTimes {
                communication: 55.0,
                peer_waits: 55.0,
                ..RANK
            },
            "communication",
        ),
        (
            "launches all the time",
            RankTimes {
                gpu_waits: 10.0,
                cpu: 90.0,
                ..RANK
            },
            "host",
        ),
        (
            "waits in launches, because the queue is full",
            RankTimes {
                gpu_waits: 10.0,
                launching: 70.0,
                cpu: 90.0,
                ..RANK
            },
            "gpu",
        ),
        (
            "spins while it waits",
            RankTimes { cpu: 99.0, ..RANK },
            "gpu",
        ),
        (
            "sleeps, nobody knows why",
            RankTimes {
                gpu_waits: 10.0,
                cpu: 10.0,
                ..RANK
            },
            "cannot-tell",
        ),
        (
            "mostly unknown",
            RankTimes {
                unknown: 90.0,
                gpu_waits: 8.0,
                cpu: 90.0,
                ..RANK
            },
            "cannot-tell",
        ),
        (
            "a bit of everything",
            RankTimes {
                gpu_waits: 33.0,
                peer_waits: 8.0,
                communication: 8.0,
                data_waits: 20.0,
                data_prepare: 20.0,
                data_fetch: 0.0,
                data_sched: 0.0,
                loader_busy: None,
                run_delay: 15.0,
                cpu: 25.0,
                ..RANK
            },
            "cannot-tell",
        ),
        (
            "too short",
            RankTimes {
                wall: 0.3,
                gpu_waits: 0.3,
                ..RankTimes::default()
            },
            "cannot-tell",
        ),
    ];
    for (name, rank, bound) in cases {
        for ranks in [vec![rank], vec![rank; 8]] {
            let verdict = judge(&ranks);
            assert_eq!(bound_of(&verdict), bound, "{name}: {}", verdict.evidence());
            assert!(!verdict.evidence().is_empty());
            let is_judged = bound != "cannot-tell";
            assert_eq!(verdict.at_most_seconds().is_some(), is_judged, "{name}");
        }
    }
}

#[test]
fn an_idle_python_and_a_compiler_cannot_be_told() {
    let verdict = judge(&[]);
    assert_eq!(bound_of(&verdict), "cannot-tell");
    assert!(verdict.evidence().contains("no process was seen"));
    // It initialised CUDA and slept: all of its time is unknown.
    let idle = RankTimes {
        wall: 60.0,
        unknown: 60.0,
        cpu: 0.1,
        ..RankTimes::default()
    };
    assert_eq!(bound_of(&judge(&[idle])), "cannot-tell");
}

#[test]
fn parts_add_up_to_no_more_than_the_time() {
    let overlapping = RankTimes {
        data_waits: 50.0,
        data_prepare: 80.0,
        communication: 60.0,
        gpu_waits: 100.0,
        run_delay: 500.0,
        cpu: 1000.0,
        ..RANK
    };
    for rank in [RANK, STARVED, overlapping] {
        assert!(Parts::new(&rank).total() <= rank.wall + 1e-9);
    }
}

#[test]
fn waits_for_the_gpu_and_for_collectives_count_once() {
    let parts = Parts::new(&RANK);
    assert_eq!(parts.seconds_in(Part::Gpu), 72.0);
    assert_eq!(parts.seconds_in(Part::Communication), 8.0);
    let overlaps = RankTimes {
        communication: 0.0,
        peer_waits: 0.0,
        until_sync: 70.0,
        ..RANK
    };
    let verdict = judge(&[overlaps; 2]);
    assert_eq!(bound_of(&verdict), "gpu");
    assert!(remedy_of(&verdict).contains("fewer bytes"));
    assert!(
        verdict.evidence().contains("collectives to do, too"),
        "{}",
        verdict.evidence()
    );
}

#[test]
fn who_has_no_gpu_is_not_told_to_feed_it() {
    let computes = RankTimes {
        wall: 100.0,
        cpu: 300.0,
        unknown: 10.0,
        ..RankTimes::default()
    };
    let verdict = judge(&[computes]);
    assert_eq!(bound_of(&verdict), "host");
    assert!(verdict.evidence().contains("none of them used a GPU"));
    assert!(!remedy_of(&verdict).contains("CUDA"));
}

/// Waits for a peer, and has slack.
const WAITING: RankTimes = RankTimes {
    communication: 50.0,
    peer_waits: 50.0,
    ..RANK
};

#[test]
fn the_slowest_rank_is_the_one_that_never_waits() {
    let found = slowest(&[WAITING, RANK, WAITING]).unwrap();
    assert_eq!((found.index, found.seconds), (1, 42.0));
    assert_eq!((found.reason, found.more_seconds), (Some(Part::Gpu), 42.0));
    assert_eq!(slowest(&[RANK, RANK]), None);
    assert_eq!(slowest(&[RANK]), None);
    assert_eq!(slowest(&[]), None);
}

#[test]
fn one_slow_rank_is_a_straggler_whatever_slows_it() {
    let slow = RankTimes {
        gpu_waits: 38.0,
        ..RANK
    };
    let cases = [
        (RANK, Part::Gpu),
        (RankTimes { cpu: 90.0, ..slow }, Part::Host),
        (
            RankTimes {
                run_delay: 45.0,
                ..slow
            },
            Part::CpuDelay,
        ),
        (
            RankTimes {
                data_waits: 50.0,
                data_fetch: 45.0,
                loader_busy: Some(0.95),
                ..slow
            },
            Part::Fetch,
        ),
    ];
    for (rank, cause) in cases {
        for peers in [1, 7] {
            let mut ranks = vec![WAITING; peers];
            ranks.push(rank);
            let verdict = judge(&ranks);
            assert_eq!(bound_of(&verdict), "straggler", "{}", verdict.evidence());
            assert_eq!(verdict.cause(), Some(cause), "{}", verdict.evidence());
            assert_eq!(verdict.straggler(), Some(peers));
            assert_eq!(verdict.at_most_seconds(), Some(42.0));
        }
    }
}

/// Without a GPU and an optimizer that is known there are no phases.
#[test]
fn without_a_gpu_work_on_cpus_is_known() {
    let alone = RankTimes {
        wall: 100.0,
        unknown: 100.0,
        cpu: 95.0,
        ..RankTimes::default()
    };
    let verdict = judge(&[alone]);
    assert_eq!(bound_of(&verdict), "host", "{}", verdict.evidence());
    let waiting = RankTimes {
        cpu: 12.0,
        communication: 80.0,
        peer_waits: 80.0,
        ..alone
    };
    let asleep = RankTimes { cpu: 12.0, ..alone };
    let verdict = judge(&[waiting, asleep]);
    assert_eq!(bound_of(&verdict), "straggler", "{}", verdict.evidence());
    assert_eq!(verdict.straggler(), Some(1));
}

/// It sleeps, or waits for a lock: that is not seen, but everyone waits for it.
#[test]
fn a_straggler_may_be_held_up_by_what_is_not_seen() {
    let asleep = RankTimes {
        gpu_waits: 8.0,
        cpu: 10.0,
        ..RANK
    };
    let ranks = [WAITING, asleep, WAITING, WAITING];
    let verdict = judge(&ranks);
    assert_eq!(bound_of(&verdict), "straggler", "{}", verdict.evidence());
    assert_eq!((verdict.cause(), verdict.straggler()), (None, Some(1)));
    assert!(
        verdict.evidence().contains("blocked by what is not seen"),
        "{}",
        verdict.evidence()
    );
}

/// Of ranks that are all held up by their loaders, one is always the slowest, and hides the others' waits.
#[test]
fn the_slowest_of_many_starved_ranks_is_no_straggler() {
    let ahead = RankTimes {
        data_waits: 3.0,
        data_prepare: 3.0,
        communication: 35.0,
        peer_waits: 35.0,
        gpu_waits: 87.0,
        loader_busy: Some(0.95),
        ..RANK
    };
    let mut ranks = vec![ahead; 7];
    ranks.push(STARVED);
    let verdict = judge(&ranks);
    assert_eq!(bound_of(&verdict), "input", "{}", verdict.evidence());
    assert_eq!(verdict.cause(), Some(Part::Prepare));
    // Nor is one whose peers would wait less than it does, but more than they gained.
    let lacks_cpus = RankTimes {
        data_waits: 77.0,
        data_prepare: 4.0,
        data_fetch: 0.0,
        data_sched: 73.0,
        communication: 5.0,
        peer_waits: 5.0,
        gpu_waits: 10.0,
        run_delay: 5.0,
        cpu: 3.0,
        loader_busy: Some(0.99),
        ..RANK
    };
    let ahead = RankTimes {
        data_waits: 0.0,
        data_prepare: 0.0,
        data_sched: 0.0,
        communication: 80.0,
        peer_waits: 80.0,
        gpu_waits: 85.0,
        loader_busy: Some(0.75),
        ..lacks_cpus
    };
    let verdict = judge(&[ahead, lacks_cpus]);
    assert_eq!(
        bound_of(&verdict),
        "cpu-scheduler",
        "{}",
        verdict.evidence()
    );
}

#[test]
fn a_gain_is_no_more_than_what_the_worst_rank_wasted() {
    let verdict = judge(&[STARVED, STARVED]);
    assert_eq!(bound_of(&verdict), "input");
    assert_eq!(verdict.at_most_seconds(), Some(29.5));
    assert_eq!(verdict.share(), Some(0.295));
}

#[test]
fn a_gpu_that_is_never_idle_waits_for_nobody() {
    let works = RankTimes {
        gpu_waits: 5.0,
        cpu: 100.0,
        ..RANK
    };
    assert_eq!(bound_of(&judge(&[works])), "host");
    let is_ahead = RankTimes {
        gpu_busy: Some(97.0),
        ..works
    };
    let verdict = judge(&[is_ahead]);
    assert_eq!(bound_of(&verdict), "gpu");
    assert!(
        verdict.evidence().contains("NVML"),
        "{}",
        verdict.evidence()
    );
    let has_gaps = RankTimes {
        gpu_busy: Some(70.0),
        ..works
    };
    assert_eq!(bound_of(&judge(&[has_gaps])), "host");
}

#[test]
fn more_loaders_help_only_where_there_are_cpus_for_them() {
    let full = RankTimes {
        loaders_fill_cpus: true,
        ..STARVED
    };
    let helps = |ranks: &[RankTimes]| remedy_of(&judge(ranks));
    assert!(helps(&[STARVED]).contains("more loaders"));
    assert!(helps(&[full, STARVED]).contains("more loaders"));
    let advice = helps(&[full, full]);
    assert!(!advice.contains("more loaders"), "{advice}");
    assert!(advice.contains("as many loaders as CPUs"), "{advice}");
}

/// The JSON of one verdict of each kind, without its two sentences.
#[test]
fn the_json_of_a_verdict_keeps_its_keys() {
    let rank = |rank: RankTimes| vec![rank];
    let delayed = RankTimes {
        run_delay: 50.0,
        gpu_waits: 38.0,
        ..RANK
    };
    let launching = RankTimes {
        gpu_waits: 10.0,
        cpu: 90.0,
        ..RANK
    };
    let blocked = RankTimes {
        gpu_waits: 8.0,
        cpu: 10.0,
        ..RANK
    };
    let cases = [
        (
            rank(STARVED),
            json!(["input", "prepare", null, 0.295, 29.5]),
        ),
        (rank(RANK), json!(["gpu", "gpu", null, 0.72, 72.0])),
        (
            rank(WAITING),
            json!(["communication", "communication", null, 0.5, 50.0]),
        ),
        (
            rank(delayed),
            json!(["cpu-scheduler", "cpu-delay", null, 0.505, 50.5]),
        ),
        (rank(launching), json!(["host", "host", null, 0.82, 82.0])),
        (
            vec![WAITING, RANK],
            json!(["straggler", "gpu", 1, 0.21, 42.0]),
        ),
        (
            vec![WAITING, blocked],
            json!(["straggler", null, 1, 0.21, 42.0]),
        ),
        (vec![], json!(["cannot-tell", null, null, null, null])),
    ];
    for (ranks, values) in cases {
        let mut json = serde_json::to_value(judge(&ranks)).expect("JSON");
        let keys = json.as_object_mut().expect("an object");
        let sentences = ["evidence", "helps"].map(|key| keys.remove(key).expect(key));
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
}
