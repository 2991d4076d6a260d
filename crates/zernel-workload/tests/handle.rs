//! The handle as a user calls it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use zernel_testkit::eventually;
use zernel_workload::{
    Affinity, CloneMode, Error, MemoryPolicy, SchedPolicy, WorkSpec, WorkType, WorkerExitInfo,
    WorkerReport, WorkloadConfig, WorkloadHandle,
};

const CLONE_MODES: [CloneMode; 2] = [CloneMode::Fork, CloneMode::Thread];

fn spinner_config(mode: CloneMode, workers: usize) -> WorkloadConfig {
    WorkloadConfig::default()
        .workers(workers)
        .work_type(WorkType::SpinWait)
        .clone_mode(mode)
}

fn all_completed(reports: &[WorkerReport]) -> bool {
    reports
        .iter()
        .all(|report| report.completed && report.exit_info.is_none())
}

fn comm_of(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm"))
        .unwrap()
        .trim()
        .to_owned()
}

#[test]
fn workload_handle_is_send_and_sync() {
    fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<WorkloadHandle>();
}

#[test]
fn workers_block_until_started_and_then_make_progress() {
    for mode in CLONE_MODES {
        let mut handle = WorkloadHandle::spawn(&spinner_config(mode, 3)).unwrap();
        assert_eq!(handle.worker_pids().len(), 3);
        assert!(handle.worker_pids().iter().all(|pid| *pid > 0));
        assert_eq!(handle.snapshot_iterations(), [0, 0, 0]);
        handle.start();
        handle.start();
        eventually("progress of every worker", || {
            handle.snapshot_iterations().iter().all(|count| *count > 10)
        });
        let pids = handle.worker_pids();
        let reports = handle.stop_and_collect();
        assert!(all_completed(&reports), "{reports:#?}");
        assert!(
            reports
                .iter()
                .all(|report| report.work_units > 10 && report.cpu_ns > 0 && report.wall_ns > 0)
        );
        assert_eq!(
            reports.iter().map(|report| report.tid).collect::<Vec<_>>(),
            pids
        );
    }
}

#[test]
fn stopping_starts_workers_that_were_never_started() {
    for mode in CLONE_MODES {
        let reports = WorkloadHandle::spawn(&spinner_config(mode, 16))
            .unwrap()
            .stop_and_collect();
        assert_eq!(reports.len(), 16);
        assert!(all_completed(&reports));
        assert!(reports.iter().all(|report| report.start_delay_ns.is_some()));
    }
}

/// Far more spinners than CPUs: those that have worked are held until the last one has.
#[test]
fn all_of_512_spinners_work_and_complete() {
    for mode in CLONE_MODES {
        let mut handle = WorkloadHandle::spawn(&spinner_config(mode, 512)).unwrap();
        handle.start();
        let reports = handle.stop_and_collect();
        assert_eq!(reports.len(), 512);
        assert!(all_completed(&reports), "{reports:#?}");
        for report in reports {
            assert!(report.work_units > 0 && report.iterations > 0);
            assert_eq!((report.blocked.count, report.wake_latency.count), (0, 0));
            assert!(report.cpu_ns > 0 && report.wall_ns > 0);
            assert!(report.largest_gap.unwrap().ns <= report.wall_ns);
        }
    }
}

/// A function of the caller may wait for another one of its own.
#[test]
fn custom_work_is_not_held_while_another_waits_for_it() {
    let rounds = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&rounds);
    let work = WorkType::custom("relay", move |worker| match worker.index() {
        0 => {
            while worker.should_do_another_round() {
                seen.fetch_add(1, Relaxed);
                worker.count_round(1);
            }
        }
        _ => {
            while worker.should_do_another_round() {
                if seen.load(Relaxed) >= 1000 {
                    worker.count_round(1);
                }
            }
        }
    });
    let config = spinner_config(CloneMode::Thread, 2).work_type(work);
    let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
    assert!(all_completed(&reports), "{reports:#?}");
    assert!(rounds.load(Relaxed) >= 1000 && reports[1].work_units > 0);
}

#[test]
fn forked_workers_are_processes_and_threads_are_threads_of_the_caller() {
    let own = i32::try_from(std::process::id()).unwrap();
    let forked = WorkloadHandle::spawn(&spinner_config(CloneMode::Fork, 2)).unwrap();
    for pid in forked.worker_pids() {
        assert!(std::path::Path::new(&format!("/proc/{pid}/task/{pid}")).exists());
        assert_ne!(pid, own);
    }
    assert_eq!(
        forked.worker_pids_for_cgroup_procs().unwrap(),
        forked.worker_pids()
    );
    let threads = WorkloadHandle::spawn(&spinner_config(CloneMode::Thread, 2)).unwrap();
    for tid in threads.worker_pids() {
        assert!(std::path::Path::new(&format!("/proc/{own}/task/{tid}")).exists());
    }
    let error = threads
        .worker_pids_for_cgroup_procs()
        .unwrap_err()
        .to_string();
    assert!(error.contains("cgroup.threads"), "{error}");
}

#[test]
fn set_affinity_with_bad_index_is_error() {
    for mode in CLONE_MODES {
        let handle = WorkloadHandle::spawn(&spinner_config(mode, 2)).unwrap();
        let error = handle.set_affinity(2, &BTreeSet::from([0])).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NoSuchWorker {
                    index: 2,
                    workers: 2
                }
            ),
            "{error}"
        );
        let error = handle
            .set_affinity(usize::MAX, &BTreeSet::from([0]))
            .unwrap_err();
        assert!(error.to_string().contains("the handle has 2"), "{error}");
    }
}

#[test]
fn affinity_set_before_start_holds_and_bad_one_is_refused() {
    for mode in CLONE_MODES {
        let mut handle = WorkloadHandle::spawn(&spinner_config(mode, 2)).unwrap();
        let cpu = first_usable_cpu();
        handle.set_affinity(1, &BTreeSet::from([cpu])).unwrap();
        let error = handle
            .set_affinity(0, &BTreeSet::from([1023]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("worker 0") && error.contains("CPUs 1023"),
            "{error}"
        );
        handle.start();
        eventually("progress", || {
            handle.snapshot_iterations().iter().all(|count| *count > 10)
        });
        let reports = handle.stop_and_collect();
        assert_eq!(reports[1].cpus_used, BTreeSet::from([cpu]));
        assert_eq!(reports[1].migrations, 0);
    }
}

fn first_usable_cpu() -> usize {
    *zernel_workload::Topology::read()
        .unwrap()
        .cpus
        .first()
        .unwrap()
}

#[test]
fn handle_without_workers_has_no_reports() {
    for mode in CLONE_MODES {
        let mut handle = WorkloadHandle::spawn(&spinner_config(mode, 0)).unwrap();
        handle.start();
        assert!(handle.worker_pids().is_empty() && handle.snapshot_iterations().is_empty());
        assert!(handle.stop_and_collect().is_empty());
    }
}

#[test]
fn sigusr1_stops_a_forked_worker() {
    let mut handle = WorkloadHandle::spawn(&spinner_config(CloneMode::Fork, 2)).unwrap();
    handle.start();
    eventually("progress", || {
        handle.snapshot_iterations().iter().all(|count| *count > 10)
    });
    let pid = handle.worker_pids()[0];
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::USR1,
    )
    .unwrap();
    eventually("the end of the worker", || {
        !std::path::Path::new(&format!("/proc/{pid}")).exists()
    });
    assert!(all_completed(&handle.stop_and_collect()));
}

#[test]
fn worker_index_is_its_index_in_its_group() {
    let place = WorkType::custom("place", |worker| {
        worker.count_round(worker.index() as u64 + 1);
    });
    for mode in CLONE_MODES {
        let config =
            spinner_config(mode, 2).group(WorkSpec::new().workers(3).work_type(place.clone()));
        let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
        let places: Vec<u64> = reports[2..]
            .iter()
            .map(|report| report.work_units)
            .collect();
        assert_eq!(places, [1, 2, 3]);
    }
}

#[test]
fn a_panic_is_reported_and_ends_only_its_own_worker() {
    let panics = WorkType::custom("panics", |worker| {
        worker.count_round(3);
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    for mode in CLONE_MODES {
        let config = spinner_config(mode, 2).group(WorkSpec::new().work_type(panics.clone()));
        let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
        assert!(all_completed(&reports[..2]));
        assert!(!reports[2].completed);
        let ended = reports[2].exit_info.as_ref().unwrap();
        match mode {
            CloneMode::Fork => assert!(
                matches!(ended, WorkerExitInfo::Signaled { signal: 6, .. }),
                "{ended:?}"
            ),
            CloneMode::Thread => assert_eq!(*ended, WorkerExitInfo::Panicked),
        }
        assert_eq!(
            (reports[2].work_units, reports[2].unfinished_work_units),
            (0, 3)
        );
    }
}

#[test]
fn exit_of_worker_gives_sentinel_report_with_code() {
    let exits = WorkType::custom("exits", |_| std::process::exit(7));
    let reports = WorkloadHandle::spawn(&WorkloadConfig::default().work_type(exits))
        .unwrap()
        .stop_and_collect();
    assert_eq!(
        reports[0].exit_info,
        Some(WorkerExitInfo::Exited { code: 7 })
    );
    assert_eq!((reports[0].work_units, reports[0].completed), (0, false));
}

#[test]
fn a_container_is_one_process_with_its_name_and_a_thread_per_worker() {
    let specs = [
        WorkSpec::new().workers(3).comm("spin"),
        WorkSpec::new().workers(2).work_type(WorkType::YieldHeavy),
    ];
    let mut handle =
        WorkloadHandle::spawn_pcomm_cgroup("exactly15bytes!", None, None, &specs).unwrap();
    let pids = handle.worker_pids();
    assert_eq!(pids.len(), 1);
    assert_eq!(comm_of(pids[0]), "exactly15bytes!");
    assert_eq!(
        std::fs::read_dir(format!("/proc/{}/task", pids[0]))
            .unwrap()
            .count(),
        6
    );
    assert_eq!(handle.worker_pids_for_cgroup_procs().unwrap(), pids);
    let error = handle
        .set_affinity(0, &BTreeSet::from([0]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("WorkSpec::affinity"), "{error}");
    handle.start();
    eventually("progress", || {
        handle.snapshot_iterations().iter().all(|count| *count > 10)
    });
    let reports = handle.stop_and_collect();
    assert_eq!(reports.len(), 5);
    assert!(all_completed(&reports), "{reports:#?}");
    let tids: BTreeSet<i32> = reports.iter().map(|report| report.tid).collect();
    assert!(tids.len() == 5 && !tids.contains(&pids[0]));
    assert!(reports.iter().all(|report| report.pid == pids[0]));
}

#[test]
fn sigusr1_stops_a_whole_container() {
    let sleeps = WorkType::custom(
        "sleeps",
        |worker| while worker.sleep(Duration::from_secs(100)) {},
    );
    let specs = [
        WorkSpec::new().workers(2),
        WorkSpec::new().workers(2).work_type(sleeps),
    ];
    let mut handle = WorkloadHandle::spawn_pcomm_cgroup("box", None, None, &specs).unwrap();
    handle.start();
    eventually("progress", || {
        handle.snapshot_iterations()[..2]
            .iter()
            .all(|count| *count > 10)
    });
    let leader = handle.worker_pids()[0];
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(leader).unwrap(),
        rustix::process::Signal::USR1,
    )
    .unwrap();
    eventually("the end of the container", || {
        !std::path::Path::new(&format!("/proc/{leader}")).exists()
    });
    assert!(all_completed(&handle.stop_and_collect()));
}

#[test]
fn container_without_workers_has_no_process() {
    for specs in [vec![], vec![WorkSpec::new().workers(0)]] {
        let handle = WorkloadHandle::spawn_pcomm_cgroup("empty", None, None, &specs).unwrap();
        assert!(handle.worker_pids().is_empty());
        assert!(handle.stop_and_collect().is_empty());
    }
}

#[test]
fn pcomm_longer_than_15_bytes_is_refused() {
    let error =
        WorkloadHandle::spawn_pcomm_cgroup("sixteen bytes...", None, None, &[WorkSpec::new()])
            .unwrap_err();
    assert!(
        error.to_string().contains("`pcomm`") && error.to_string().contains("16 bytes"),
        "{error}"
    );
}

#[test]
fn containers_and_threads_share_a_handle() {
    let config = spinner_config(CloneMode::Thread, 2)
        .group(WorkSpec::new().name("boxed").workers(2).pcomm("box"))
        .group(WorkSpec::new().name("boxed too").workers(1).pcomm("box"));
    let handle = WorkloadHandle::spawn(&config).unwrap();
    let pids = handle.worker_pids();
    assert_eq!(pids.len(), 3, "the leader, then two threads");
    assert_eq!(comm_of(pids[0]), "box");
    let error = handle
        .worker_pids_for_cgroup_procs()
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("2 of the workers"), "{error}");
    let reports = handle.stop_and_collect();
    let groups: Vec<&str> = reports.iter().map(|report| report.group.as_str()).collect();
    assert_eq!(groups, ["boxed", "boxed", "boxed too", "group0", "group0"]);
    assert!(all_completed(&reports));
    assert_eq!(reports[3].tid, pids[1]);
}

#[test]
fn an_invalid_configuration_is_refused_with_group_and_field() {
    let refused = |spec: WorkSpec| {
        let config = WorkloadConfig::from_specs(CloneMode::Fork, vec![spec.name("noisy")]);
        WorkloadHandle::spawn(&config).unwrap_err().to_string()
    };
    for (spec, field) in [
        (WorkSpec::new().nice(20), "nice"),
        (
            WorkSpec::new().policy(SchedPolicy::Fifo { priority: 0 }),
            "policy",
        ),
        (
            WorkSpec::new().affinity(Affinity::Exact(BTreeSet::new())),
            "affinity",
        ),
        (WorkSpec::new().affinity(Affinity::LlcAligned), "affinity"),
        (WorkSpec::new().comm("a name that is too long"), "comm"),
        (WorkSpec::new().workers(usize::MAX), "workers"),
    ] {
        let error = refused(spec);
        assert!(
            error.starts_with(&format!("group `noisy`, field `{field}`: ")),
            "{error}"
        );
    }
    let error = refused(WorkSpec::new().affinity(Affinity::LlcAligned));
    assert!(error.contains("resolve(&Topology::read()?)"), "{error}");
}

#[test]
fn topology_relative_affinity_works_once_resolved() {
    let topology = zernel_workload::Topology::read().unwrap();
    let config = spinner_config(CloneMode::Fork, 2)
        .affinity(Affinity::SingleCpu)
        .resolve(&topology)
        .unwrap();
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    eventually("progress", || {
        handle.snapshot_iterations().iter().all(|count| *count > 10)
    });
    let reports = handle.stop_and_collect();
    assert!(
        reports
            .iter()
            .all(|report| report.cpus_used.len() == 1 && report.setting_errors.is_empty())
    );
}

#[test]
fn refused_affinity_is_in_report() {
    let offline = Affinity::Exact(BTreeSet::from([1023]));
    for mode in CLONE_MODES {
        let config = spinner_config(mode, 1).affinity(offline.clone());
        let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
        assert!(reports[0].completed);
        let errors: Vec<&str> = reports[0]
            .setting_errors
            .iter()
            .map(|error| error.setting.field())
            .collect();
        assert_eq!(errors, ["affinity"]);
    }
}

/// The scheduling policy of a task, as `/proc/PID/stat` numbers it.
fn policy_of(pid: i32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_comm = stat.rsplit_once(')').unwrap().1;
    after_comm
        .split_whitespace()
        .nth(38)
        .unwrap()
        .parse()
        .unwrap()
}

#[test]
fn policies_that_need_no_privilege_are_applied() {
    for (policy, number) in [
        (SchedPolicy::Normal, 0),
        (SchedPolicy::Batch, 3),
        (SchedPolicy::Idle, 5),
    ] {
        for mode in CLONE_MODES {
            let handle =
                WorkloadHandle::spawn(&spinner_config(mode, 1).policy(policy.clone())).unwrap();
            assert_eq!(policy_of(handle.worker_pids()[0]), number);
            assert!(handle.stop_and_collect()[0].setting_errors.is_empty());
        }
    }
}

#[test]
fn refused_memory_policy_is_in_report() {
    let nowhere = MemoryPolicy::Bind(BTreeSet::from([63]));
    let config =
        spinner_config(CloneMode::Fork, 1).change_first_group(|spec| spec.memory_policy(nowhere));
    let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
    assert_eq!(
        reports[0].setting_errors[0].setting.field(),
        "memory_policy"
    );
}

#[test]
fn worker_has_comm_of_its_spec() {
    let config = spinner_config(CloneMode::Fork, 1).change_first_group(|spec| spec.comm("loader"));
    let handle = WorkloadHandle::spawn(&config).unwrap();
    assert_eq!(comm_of(handle.worker_pids()[0]), "loader");
}

#[test]
fn reports_round_trip_through_json_and_print_as_table() {
    let reports = WorkloadHandle::spawn(&spinner_config(CloneMode::Fork, 2))
        .unwrap()
        .stop_and_collect();
    let json = serde_json::to_string(&reports).unwrap();
    assert_eq!(
        serde_json::from_str::<Vec<WorkerReport>>(&json).unwrap(),
        reports
    );
    let table = zernel_workload::ReportTable(&reports).to_string();
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.contains("group0") && table.contains(" ok"), "{table}");
}
