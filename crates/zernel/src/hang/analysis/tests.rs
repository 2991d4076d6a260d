//! Findings in synthetic snapshots.

use super::*;
use zernel_identity::Identity;
use zernel_model::snapshot::{NcclSnapshot, PhaseSnapshot, ProbeSnapshots, Role};

/// Pid of a stopped process.
const STOPPED_PID: u32 = 109;
const TEST_THRESHOLD: HangThreshold = HangThreshold {
    seconds: 5.0,
    allows_longest_gap: true,
};

fn process_in_collective(rank: u32, sequence: u64, op: &str, seconds: f64) -> ProcessSnapshot {
    ProcessSnapshot {
        pid: 100 + rank,
        role: Role::Trainer,
        probes: ProbeSnapshots {
            nccl: NcclSnapshot {
                communicators: vec![CommunicatorSnapshot {
                    communicator: "ab".to_owned(),
                    rank: Some(rank),
                    ranks: Some(4),
                    sequence,
                    op: op.to_owned().into(),
                    entered_seconds_ago: Some(seconds),
                    longest_gap_seconds: 2.0,
                    last_ops: vec![op.to_owned().into()],
                    ..CommunicatorSnapshot::default()
                }],
                ..NcclSnapshot::default()
            },
            ..ProbeSnapshots::default()
        },
        ..ProcessSnapshot::default()
    }
}

fn exited_rank(process: ProcessSnapshot) -> ProcessSnapshot {
    ProcessSnapshot {
        ended_seconds_ago: Some(20.0),
        ..process
    }
}

/// The problems by rank, and whether each is a hang.
fn problems_by_rank(
    observed: Vec<ProcessSnapshot>,
    exited_ranks: Vec<ProcessSnapshot>,
    threshold: HangThreshold,
) -> Vec<(u32, RankProblem, bool)> {
    let snapshot = Snapshot {
        observed,
        gone_ranks: exited_ranks,
        ..Snapshot::default()
    };
    let communicators = local_communicators_of_job(&snapshot, None);
    let findings = communicators.iter().flat_map(|communicator| {
        communicator.find_late_ranks(threshold, |process| process.pid == STOPPED_PID)
    });
    findings
        .map(|finding| {
            let rank = finding.member.state.rank.unwrap();
            (rank, finding.problem, finding.hangs)
        })
        .collect()
}

/// The problems that are hangs.
fn hanging_problems(observed: Vec<ProcessSnapshot>) -> Vec<(u32, RankProblem)> {
    let found = problems_by_rank(observed, vec![], TEST_THRESHOLD).into_iter();
    let hangs = found.filter(|(_, _, hangs)| *hangs);
    hangs.map(|(rank, problem, _)| (rank, problem)).collect()
}

fn different_operation_problem(sequence: u64, own: &str, others: &str) -> RankProblem {
    RankProblem::Different {
        sequence,
        own: own.to_owned(),
        others: others.to_owned(),
    }
}

#[test]
fn a_rank_that_never_entered_is_behind() {
    let found = hanging_problems(vec![
        process_in_collective(0, 7, "AllReduce", 29.0),
        process_in_collective(1, 6, "AllReduce", 40.0),
        process_in_collective(2, 7, "AllReduce", 30.0),
    ]);
    let behind = RankProblem::Behind {
        leaders: 2,
        next: 7,
    };
    assert_eq!(found, [(1, behind)]);
}

#[test]
fn a_rank_that_never_entered_any_is_behind() {
    let mut first = process_in_collective(1, 0, "AllReduce", 0.0);
    first.probes.nccl.communicators[0].entered_seconds_ago = None;
    let found = hanging_problems(vec![process_in_collective(0, 1, "AllReduce", 29.0), first]);
    let behind = RankProblem::Behind {
        leaders: 1,
        next: 1,
    };
    assert_eq!(found, [(1, behind)]);
}

#[test]
fn a_short_wait_is_not_reported() {
    let observed = vec![
        process_in_collective(0, 7, "AllReduce", 0.1),
        process_in_collective(1, 6, "AllReduce", 0.3),
    ];
    assert_eq!(problems_by_rank(observed, vec![], TEST_THRESHOLD), []);
}

#[test]
fn a_rank_that_is_as_slow_as_before_is_late() {
    let mut slow = process_in_collective(1, 6, "AllReduce", 40.0);
    slow.probes.nccl.communicators[0].longest_gap_seconds = 60.0;
    let observed = vec![process_in_collective(0, 7, "AllReduce", 30.0), slow];
    let hangs = |threshold| {
        let found = problems_by_rank(observed.clone(), vec![], threshold);
        assert_eq!(found.len(), 1);
        found[0].2
    };
    assert!(!hangs(TEST_THRESHOLD));
    // With --after, only the seconds that the other ranks have waited count.
    assert!(hangs(HangThreshold {
        allows_longest_gap: false,
        ..TEST_THRESHOLD
    }));
}

#[test]
fn a_slow_rank_that_is_stopped_hangs() {
    let mut slow = process_in_collective(STOPPED_PID - 100, 6, "AllReduce", 40.0);
    slow.probes.nccl.communicators[0].longest_gap_seconds = 60.0;
    let found = hanging_problems(vec![process_in_collective(0, 7, "AllReduce", 30.0), slow]);
    assert_eq!(found.len(), 1);
}

#[test]
fn all_ranks_that_are_behind_are_reported() {
    let found = hanging_problems(vec![
        process_in_collective(0, 7, "AllReduce", 30.0),
        process_in_collective(1, 6, "AllReduce", 40.0),
        process_in_collective(2, 5, "Broadcast", 50.0),
    ]);
    let ranks: Vec<u32> = found.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(ranks, [1, 2]);
}

#[test]
fn a_different_operation_is_reported() {
    let found = hanging_problems(vec![
        process_in_collective(0, 7, "AllReduce", 30.0),
        process_in_collective(1, 7, "Broadcast", 30.0),
        process_in_collective(2, 7, "AllReduce", 30.0),
    ]);
    assert_eq!(
        found,
        [(1, different_operation_problem(7, "Broadcast", "AllReduce"))]
    );
}

#[test]
fn a_rank_ahead_after_a_different_operation_is_reported() {
    let mut ahead = process_in_collective(1, 8, "AllReduce", 30.0);
    ahead.probes.nccl.communicators[0].last_ops = vec!["AllReduce".into(), "Broadcast".into()];
    let found = hanging_problems(vec![
        process_in_collective(0, 7, "AllReduce", 30.0),
        ahead,
        process_in_collective(2, 7, "AllReduce", 30.0),
    ]);
    assert_eq!(
        found,
        [(1, different_operation_problem(7, "Broadcast", "AllReduce"))]
    );
}

#[test]
fn a_rank_in_a_call_is_reported_if_others_have_left_it() {
    let mut stuck = process_in_collective(1, 7, "AllReduce", 30.0);
    stuck.probes.nccl.communicators[0].in_call = true;
    let found = hanging_problems(vec![
        process_in_collective(0, 7, "AllReduce", 30.0),
        stuck.clone(),
    ]);
    assert_eq!(found, [(1, RankProblem::InCall)]);
    assert_eq!(hanging_problems(vec![stuck.clone(), stuck]), []);
}

#[test]
fn a_rank_stopped_in_a_common_collective_is_reported() {
    let found = hanging_problems(
        (8..11)
            .map(|rank| process_in_collective(rank, 7, "AllReduce", 30.0))
            .collect(),
    );
    assert_eq!(found, [(9, RankProblem::Stopped)]);
}

#[test]
fn an_exited_rank_is_reported_if_others_wait_for_it() {
    let waiting = || {
        vec![
            process_in_collective(0, 7, "AllReduce", 30.0),
            process_in_collective(1, 7, "AllReduce", 30.0),
        ]
    };
    let behind = exited_rank(process_in_collective(2, 6, "AllReduce", 40.0));
    assert_eq!(
        problems_by_rank(waiting(), vec![behind], TEST_THRESHOLD),
        [(2, RankProblem::Exited, true)]
    );
    // The exited rank had entered the same collective. The phases of the other ranks show whether they wait.
    let equal = || vec![exited_rank(process_in_collective(2, 7, "AllReduce", 30.0))];
    assert_eq!(problems_by_rank(waiting(), equal(), TEST_THRESHOLD), []);
    let mut waiting = waiting();
    waiting[1].phases.phase = Some(WorkloadPhase::NcclCollective);
    assert_eq!(
        problems_by_rank(waiting, equal(), TEST_THRESHOLD),
        [(2, RankProblem::Exited, true)]
    );
}

#[test]
fn a_long_computation_is_no_hang() {
    let found = hanging_problems(
        (0..4)
            .map(|rank| process_in_collective(rank, 7, "AllReduce", 600.0))
            .collect(),
    );
    assert_eq!(found, []);
}

#[test]
fn ranks_that_all_wait_for_their_gpus_may_wait_for_another_node() {
    let all_ranks_wait = |phase, seconds| {
        let process = |rank| ProcessSnapshot {
            phases: PhaseSnapshot {
                phase: Some(phase),
                ..PhaseSnapshot::default()
            },
            ..process_in_collective(rank, 7, "AllReduce", seconds)
        };
        let snapshot = Snapshot {
            observed: vec![process(0), process(1)],
            ..Snapshot::default()
        };
        local_communicators_of_job(&snapshot, None)[0].all_ranks_wait(TEST_THRESHOLD)
    };
    assert!(all_ranks_wait(WorkloadPhase::GpuCompute, 30.0));
    assert!(!all_ranks_wait(WorkloadPhase::GpuCompute, 1.0));
    assert!(!all_ranks_wait(WorkloadPhase::DataLoading, 30.0));
}

/// Three of four ranks that have waited `seconds` for the fourth to join, and the fourth.
fn ranks_waiting_to_join(seconds: f64, fourth: ProcessSnapshot) -> Vec<ProcessSnapshot> {
    let identity = |rank| {
        Some(Identity {
            job: Some("job".to_owned()),
            rank: Some(rank),
            world_size: Some(4),
            ..Identity::default()
        })
    };
    let mut processes: Vec<ProcessSnapshot> = (0..3)
        .map(|rank| process_in_collective(rank, 0, "", seconds))
        .collect();
    for process in &mut processes {
        process.probes.nccl.communicators[0].is_being_made = true;
    }
    processes.push(fourth);
    for (rank, process) in (0..).zip(&mut processes) {
        process.identity = identity(rank);
    }
    processes
}

#[test]
fn a_rank_that_does_not_join_is_late_and_then_hangs() {
    let absent = |pid| ProcessSnapshot {
        pid,
        role: Role::Trainer,
        ..ProcessSnapshot::default()
    };
    let hangs = |seconds, pid| {
        let snapshot = Snapshot {
            observed: ranks_waiting_to_join(seconds, absent(pid)),
            ..Snapshot::default()
        };
        let communicators = local_communicators_of_job(&snapshot, None);
        let found =
            communicators[0].find_late_ranks(TEST_THRESHOLD, |process| process.pid == STOPPED_PID);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].problem, RankProblem::NotJoined);
        assert_eq!(found[0].member.rank(), Some(3));
        found[0].hangs
    };
    assert!(!hangs(30.0, 103));
    assert!(hangs(90.0, 103));
    assert!(hangs(30.0, STOPPED_PID));
}

#[test]
fn a_rank_of_a_communicator_of_another_size_is_not_expected_to_join() {
    let mut other = process_in_collective(3, 7, "AllReduce", 90.0);
    other.probes.nccl.communicators[0].communicator = "cd".to_owned();
    let mut observed = ranks_waiting_to_join(90.0, other);
    for process in &mut observed[..3] {
        process.probes.nccl.communicators[0].ranks = Some(3);
    }
    assert_eq!(problems_by_rank(observed, vec![], TEST_THRESHOLD), []);
}

#[test]
fn only_running_processes_of_the_selected_job_count() {
    let snapshot = Snapshot {
        observed: vec![
            exited_rank(process_in_collective(0, 6, "AllReduce", 40.0)),
            process_in_collective(1, 7, "AllReduce", 30.0),
        ],
        ..Snapshot::default()
    };
    assert_eq!(
        local_communicators_of_job(&snapshot, None)[0].members.len(),
        1
    );
    assert!(local_communicators_of_job(&snapshot, Some("another")).is_empty());
}
