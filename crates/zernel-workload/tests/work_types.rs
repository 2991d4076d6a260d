//! Each type of work does what its name says.

use std::collections::BTreeSet;
use std::time::Duration;

use zernel_testkit::eventually;
use zernel_workload::work::{
    AffinityChurn, Bursty, FutexFanOut, FutexPingPong, MutexContention, PipePingPong, RandomRead,
    Sequence, ThunderingHerd, TimerDeadline, WakeChain,
};
use zernel_workload::{
    CloneMode, Topology, WorkSpec, WorkType, WorkerReport, WorkloadConfig, WorkloadHandle,
};

/// Ways to host workers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum WorkerHost {
    Fork,
    Thread,
    Container,
}

const WORKER_HOSTS: [WorkerHost; 3] = [WorkerHost::Fork, WorkerHost::Thread, WorkerHost::Container];

fn spawn_workers(host: WorkerHost, workers: usize, work: WorkType) -> WorkloadHandle {
    let spec = WorkSpec::new().workers(workers).work_type(work);
    match host {
        WorkerHost::Fork => {
            WorkloadHandle::spawn(&WorkloadConfig::from_specs(CloneMode::Fork, vec![spec]))
        }
        WorkerHost::Thread => {
            WorkloadHandle::spawn(&WorkloadConfig::from_specs(CloneMode::Thread, vec![spec]))
        }
        WorkerHost::Container => WorkloadHandle::spawn_pcomm_cgroup("box", None, None, &[spec]),
    }
    .unwrap()
}

/// Runs `workers` until each has done `rounds` rounds.
fn run_rounds(host: WorkerHost, workers: usize, work: WorkType, rounds: u64) -> Vec<WorkerReport> {
    let name = work.name().to_owned();
    let mut handle = spawn_workers(host, workers, work);
    handle.start();
    eventually(&format!("{rounds} rounds of {name} in {host:?}"), || {
        handle
            .snapshot_iterations()
            .iter()
            .all(|count| *count >= rounds)
    });
    let reports = handle.stop_and_collect();
    for report in &reports {
        assert!(report.completed, "{name} in {host:?}: {report:#?}");
        assert!(
            report.setting_errors.is_empty() && report.work_units >= rounds,
            "{name}: {report:#?}"
        );
    }
    reports
}

fn types_without_parameters() -> impl Iterator<Item = WorkType> {
    WorkType::all()
        .into_iter()
        .filter(|work| !matches!(work, WorkType::CgroupChurn(_)))
}

/// The types that can be hosted there.
fn types_hosted_in(host: WorkerHost) -> impl Iterator<Item = WorkType> {
    types_without_parameters()
        .filter(move |work| host != WorkerHost::Container || *work != WorkType::ForkExit)
}

#[test]
fn every_work_type_runs_as_fork_thread_and_container() {
    for host in WORKER_HOSTS {
        types_hosted_in(host).for_each(|work| drop(run_rounds(host, 4, work, 2)));
    }
}

#[test]
fn every_work_type_stopped_at_once_did_a_round() {
    let custom = WorkType::custom("custom", |worker| {
        while !worker.is_stopped() {
            worker.count_round(1);
        }
    });
    for host in WORKER_HOSTS {
        for work in types_hosted_in(host).chain([custom.clone()]) {
            let name = work.name().to_owned();
            for report in spawn_workers(host, 4, work).stop_and_collect() {
                assert!(
                    report.completed && report.work_units > 0,
                    "{name} in {host:?}: {report:#?}"
                );
            }
        }
    }
}

#[test]
fn every_work_type_has_unique_name_and_description() {
    let names: BTreeSet<&str> = WorkType::all()
        .iter()
        .map(|work| work.describe().name)
        .collect();
    assert_eq!(names.len(), WorkType::all().len());
    for work in WorkType::all() {
        let about = work.describe();
        assert!(
            about.does.len() > 20 && about.exercises.len() > 20,
            "{about:?}"
        );
        let json = serde_json::to_value(&work).unwrap();
        let name = json.as_str().map_or_else(
            || json.as_object().unwrap().keys().next().unwrap().clone(),
            str::to_owned,
        );
        assert_eq!(name, about.name, "its name in workload files");
        assert_eq!(serde_json::from_value::<WorkType>(json).unwrap(), work);
    }
}

#[test]
fn fork_exit_and_cgroup_churn_are_refused_in_a_container() {
    let specs = [WorkSpec::new()
        .name("children")
        .work_type(WorkType::ForkExit)];
    let error = WorkloadHandle::spawn_pcomm_cgroup("box", None, None, &specs)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`children`") && error.contains("locks"),
        "{error}"
    );

    let cgroups = zernel_workload::work::CgroupChurn::default();
    let specs = [WorkSpec::new().work_type(WorkType::CgroupChurn(cgroups))];
    let error = WorkloadHandle::spawn_pcomm_cgroup("box", None, None, &specs)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("cgroup.procs") || error.contains("work.cgroups"),
        "{error}"
    );
}

#[test]
fn invalid_team_sizes_are_refused() {
    for (work, workers, hint) in [
        (
            WorkType::PipePingPong(PipePingPong::default()),
            3,
            "multiple of 2",
        ),
        (
            WorkType::FutexPingPong(FutexPingPong::default()),
            1,
            "multiple of 2",
        ),
        (
            WorkType::ThunderingHerd(ThunderingHerd::default()),
            1,
            "multiple of 2",
        ),
    ] {
        let error =
            WorkloadHandle::spawn(&WorkloadConfig::default().workers(workers).work_type(work))
                .unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("field `workers`") && error.contains(hint),
            "{error}"
        );
    }
}

#[test]
fn ping_pong_partners_do_equal_rounds() {
    for host in WORKER_HOSTS {
        for work in [
            WorkType::PipePingPong(PipePingPong::default()),
            WorkType::FutexPingPong(FutexPingPong::default()),
            WorkType::WakeChain(WakeChain::default()),
        ] {
            let reports = run_rounds(host, 2, work, 50);
            let counts: Vec<u64> = reports.iter().map(|report| report.iterations).collect();
            assert!(counts[0].abs_diff(counts[1]) <= 1, "{host:?}: {counts:?}");
            // One of them sleeps. The other may find the answer there each time, if its partner
            // preempts it whenever it is woken.
            assert!(reports.iter().any(|report| report.wake_latency.count > 0));
        }
    }
}

#[test]
fn wake_latency_and_block_duration_are_kept_apart() {
    let herd = ThunderingHerd {
        interval_us: 5_000,
        compute_us: 10,
    };
    let reports = run_rounds(WorkerHost::Fork, 3, WorkType::ThunderingHerd(herd), 20);
    for report in &reports[1..] {
        assert!(report.blocked.count >= report.wake_latency.count && report.wake_latency.count > 0);
        // They sleep for most of an interval, and run soon after they are woken.
        let (wake, blocked) = (&report.wake_latency, &report.blocked);
        assert!(
            wake.mean_ns().unwrap() < blocked.mean_ns().unwrap(),
            "{report:#?}"
        );
        assert!(wake.max_ns <= blocked.max_ns);
    }
}

#[test]
fn a_sleeping_worker_switches_voluntarily_and_is_mostly_off_the_cpu() {
    let bursty = Bursty {
        burst_us: 100,
        sleep_us: 5_000,
    };
    for host in WORKER_HOSTS {
        let reports = run_rounds(host, 1, WorkType::Bursty(bursty.clone()), 10);
        let report = &reports[0];
        assert!(report.voluntary_switches >= 9, "{report:#?}");
        assert!(report.off_cpu_ns > report.cpu_ns, "{report:#?}");
        assert!(report.blocked.sum_ns <= report.wall_ns);
    }
}

#[test]
fn run_delay_of_each_worker_is_reported() {
    if !std::fs::exists("/proc/self/schedstat").unwrap() {
        return;
    }
    // Two spinners on one CPU must wait for each other.
    let cpu = *Topology::read().unwrap().cpus.first().unwrap();
    for mode in [CloneMode::Fork, CloneMode::Thread] {
        let affinity = zernel_workload::Affinity::Exact(BTreeSet::from([cpu]));
        let config = WorkloadConfig::default()
            .workers(2)
            .clone_mode(mode)
            .affinity(affinity);
        let mut handle = WorkloadHandle::spawn(&config).unwrap();
        handle.start();
        std::thread::sleep(Duration::from_millis(150));
        let reports = handle.stop_and_collect();
        let delays: Vec<u64> = reports
            .iter()
            .map(|report| report.run_delay_ns.unwrap())
            .collect();
        assert!(delays.iter().sum::<u64>() > 0, "{delays:?}");
        assert!(
            reports
                .iter()
                .all(|report| report.largest_gap.unwrap().ns > 0)
        );
    }
}

#[test]
fn a_periodic_worker_wakes_once_per_period() {
    let timer = TimerDeadline {
        period_us: 2_000,
        compute_us: 10,
    };
    let reports = run_rounds(WorkerHost::Fork, 1, WorkType::TimerDeadline(timer), 20);
    assert!(reports[0].wake_latency.count >= 10);
    let wall_periods = reports[0].wall_ns / 2_000_000;
    assert!(
        reports[0].iterations <= wall_periods + 2,
        "{:#?}",
        reports[0]
    );
}

#[test]
fn mutex_contention_lock_is_exclusive() {
    let contention = MutexContention {
        hold_us: 200,
        think_us: 0,
    };
    let reports = run_rounds(
        WorkerHost::Fork,
        4,
        WorkType::MutexContention(contention),
        5,
    );
    let held_ns: u64 = reports
        .iter()
        .map(|report| report.work_units * 200_000)
        .sum();
    let wall_ns = reports.iter().map(|report| report.wall_ns).max().unwrap();
    assert!(
        held_ns <= wall_ns + 4 * 200_000,
        "held for {held_ns} of {wall_ns} ns"
    );
    assert!(reports.iter().any(|report| report.blocked.count > 0));
}

#[test]
fn futex_fan_out_wakes_every_worker() {
    let reports = run_rounds(
        WorkerHost::Fork,
        4,
        WorkType::FutexFanOut(FutexFanOut::default()),
        5,
    );
    // Every worker did the rounds. The last worker of a round may find that the next round has begun.
    assert!(
        reports[1..]
            .iter()
            .any(|report| report.wake_latency.count > 0)
    );
}

#[test]
fn affinity_churn_visits_every_usable_cpu() {
    let cpus = Topology::read().unwrap().cpus;
    let churn = AffinityChurn { spin_us: 50 };
    let reports = run_rounds(
        WorkerHost::Fork,
        1,
        WorkType::AffinityChurn(churn),
        2 * cpus.len() as u64 + 2,
    );
    assert_eq!(reports[0].cpus_used, cpus);
    assert!(cpus.len() < 2 || reports[0].migrations >= cpus.len() as u64);
}

#[test]
fn work_failure_is_in_exit_info() {
    let read = RandomRead {
        folder: "/proc".into(),
        ..RandomRead::default()
    };
    let config = WorkloadConfig::default().work_type(WorkType::RandomRead(read));
    let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
    let ended = reports[0].exit_info.as_ref().unwrap().to_string();
    assert!(
        ended.starts_with("could not make a temporary file: "),
        "{ended}"
    );
}

#[test]
fn invalid_work_parameters_are_refused() {
    for (work, field) in [
        (
            WorkType::TimerDeadline(TimerDeadline {
                period_us: 0,
                compute_us: 0,
            }),
            "work.period_us",
        ),
        (
            WorkType::Sequence(Sequence { phases: vec![] }),
            "work.phases",
        ),
        (
            WorkType::RandomRead(RandomRead {
                file_kib: 0,
                ..RandomRead::default()
            }),
            "work.file_kib",
        ),
        (WorkType::CgroupChurn(Default::default()), "work.cgroups"),
    ] {
        let error = WorkloadHandle::spawn(&WorkloadConfig::default().work_type(work))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("group `group0`, field `{field}`: ")),
            "{error}"
        );
    }
}
