use serde_json::json;

use super::*;
use crate::times::{Parts, RankTimes};

/// A rank that waits for its GPU.
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

/// A rank that waits for loaders that never rest.
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

/// Ranks, and the value of `bound` in the verdict on them.
const CASES: &[(&str, RankTimes, &str)] = &[
    ("waits for its GPU", RANK, "gpu"),
    ("waits for saturated loaders", STARVED, "input"),
    (
        "waits for loaders that rest, and longer for the GPU",
        RankTimes {
            loader_busy: Some(0.3),
            ..STARVED
        },
        "gpu",
    ),
    (
        "loads data itself most of the time",
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
        "waits for loaders without a CPU",
        RankTimes {
            data_prepare: 5.0,
            data_sched: 24.0,
            ..STARVED
        },
        "cpu-scheduler",
    ),
    (
        "is runnable without a CPU",
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
        "sleeps for an unknown reason",
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
            ..RANK
        },
        "cannot-tell",
    ),
];

#[test]
fn the_largest_possible_gain_bounds_a_job() {
    for (name, rank, bound) in CASES {
        for ranks in [vec![*rank], vec![*rank; 8]] {
            let verdict = judge(&ranks);
            assert_eq!(bound_of(&verdict), *bound, "{name}: {}", verdict.evidence());
            assert!(!verdict.evidence().is_empty());
            let has_gain = *bound != "cannot-tell";
            assert_eq!(verdict.at_most_seconds().is_some(), has_gain, "{name}");
        }
    }
}

#[test]
fn processes_that_do_not_train_have_no_verdict() {
    let verdict = judge(&[]);
    assert_eq!(bound_of(&verdict), "cannot-tell");
    assert!(
        verdict
            .evidence()
            .contains("no training process was observed")
    );
    // A process that initialises CUDA and sleeps has only unknown time.
    let idle = RankTimes {
        wall: 60.0,
        unknown: 60.0,
        cpu: 0.1,
        ..RankTimes::default()
    };
    assert_eq!(bound_of(&judge(&[idle])), "cannot-tell");
}

#[test]
fn parts_add_up_to_at_most_the_wall_time() {
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
        verdict.evidence().contains("may be collectives"),
        "{}",
        verdict.evidence()
    );
}

#[test]
fn a_job_without_a_gpu_gets_no_cuda_remedy() {
    let computes = RankTimes {
        wall: 100.0,
        cpu: 300.0,
        unknown: 10.0,
        ..RankTimes::default()
    };
    let verdict = judge(&[computes]);
    assert_eq!(bound_of(&verdict), "host");
    assert!(verdict.evidence().contains("no rank used a GPU"));
    assert!(!remedy_of(&verdict).contains("CUDA"));
}

/// A rank that waits for a peer.
const WAITING: RankTimes = RankTimes {
    communication: 50.0,
    peer_waits: 50.0,
    ..RANK
};

#[test]
fn the_slowest_rank_waits_least_in_collectives() {
    let found = slowest(&[WAITING, RANK, WAITING]).unwrap();
    assert_eq!((found.index, found.seconds), (1, 42.0));
    assert_eq!((found.reason, found.more_seconds), (Some(Part::Gpu), 42.0));
    assert_eq!(slowest(&[RANK, RANK]), None);
    assert_eq!(slowest(&[RANK]), None);
    assert_eq!(slowest(&[]), None);
}

#[test]
fn one_slow_rank_is_a_straggler_for_every_cause() {
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

/// Without a GPU and a known optimizer all time is in phase Unknown.
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

/// It sleeps or waits for a lock, which no probe reports, while its peers wait for it.
#[test]
fn a_straggler_may_be_blocked_for_an_unknown_reason() {
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
        verdict.evidence().contains("blocked for an unknown reason"),
        "{}",
        verdict.evidence()
    );
}

/// If loaders hold up all ranks, one rank is always the slowest and hides the waits of the others.
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
    // Nor is a rank a straggler if its peers would wait longer for their own loaders than they gain.
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
fn the_gain_is_at_most_the_time_of_the_worst_rank() {
    let verdict = judge(&[STARVED, STARVED]);
    assert_eq!(bound_of(&verdict), "input");
    assert_eq!(verdict.at_most_seconds(), Some(29.5));
    assert_eq!(verdict.share(), Some(0.295));
}

#[test]
fn a_gpu_that_is_never_idle_bounds_the_job() {
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
fn more_loaders_are_a_remedy_only_if_cpus_are_free() {
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
