//! Failures: slow, starved, killed and hung workers, and callers that die.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    CLONE_MODES, helper_command, process_exists, run_helper, send_signal, spinner_config,
    wait_for_progress,
};
use rustix::process::{DumpableBehavior, Pid, Signal, dumpable_behavior, set_child_subreaper};
use zernel_testkit::{eventually, root, trial};
use zernel_workload::work::{PipePingPong, ThunderingHerd};
use zernel_workload::{
    Affinity, CloneMode, Topology, WorkSpec, WorkType, WorkerExitInfo, WorkloadConfig,
    WorkloadHandle,
};

fn main() -> ExitCode {
    if let Some(name) = common::requested_helper() {
        run_as_helper(&name);
        return ExitCode::SUCCESS;
    }
    zernel_testkit::main([
        trial(
            "worker_that_ignores_stop_does_not_lose_other_reports",
            &[],
            worker_that_ignores_stop_does_not_lose_other_reports,
        ),
        trial(
            "starved_workers_still_report",
            &[root()],
            starved_workers_still_report,
        ),
        trial(
            "dropping_a_sleeping_thread_worker_ends_it",
            &[],
            dropping_a_sleeping_thread_worker_ends_it,
        ),
        trial(
            "dropping_a_deaf_thread_worker_neither_crashes_nor_leaks",
            &[],
            || {
                run_helper("deaf_thread");
            },
        ),
        trial(
            "uid_of_thread_worker_does_not_change_caller",
            &[root()],
            uid_of_thread_worker_does_not_change_caller,
        ),
        trial(
            "uid_is_set_for_processes_and_containers",
            &[root()],
            uid_is_set_for_processes_and_containers,
        ),
        trial(
            "workers_outlive_the_thread_that_spawned_them",
            &[],
            workers_outlive_the_thread_that_spawned_them,
        ),
        trial("workers_die_with_a_killed_caller", &[], || {
            workers_die_with_caller("wait", Some(Signal::KILL));
        }),
        trial("held_workers_die_with_a_killed_caller", &[], || {
            workers_die_with_caller("stop", Some(Signal::KILL));
        }),
        trial(
            "held_workers_end_if_one_worker_does_no_round",
            &[],
            held_workers_end_if_one_worker_does_no_round,
        ),
        trial("workers_die_with_an_interrupted_caller", &[], || {
            workers_die_with_caller("wait", Some(Signal::INT));
        }),
        trial("workers_die_with_a_caller_that_exits", &[], || {
            workers_die_with_caller("exit", None);
        }),
        trial("workers_die_with_a_caller_that_panics", &[], || {
            workers_die_with_caller("panic", None);
        }),
        trial(
            "workers_of_another_user_die_with_the_caller",
            &[root()],
            || {
                workers_die_with_caller("other_user", Some(Signal::KILL));
            },
        ),
        trial("workers_die_under_a_subreaper", &[], || {
            run_helper("subreaper");
        }),
        trial(
            "workers_ignore_int_quit_term_and_hup",
            &[],
            workers_ignore_int_quit_term_and_hup,
        ),
        trial(
            "dropping_handle_ends_128_running_workers",
            &[],
            dropping_handle_ends_128_running_workers,
        ),
        trial(
            "kill_by_handle_is_distinguished_from_other_kill",
            &[],
            kill_by_handle_is_distinguished_from_other_kill,
        ),
        trial(
            "wake_latency_counts_from_the_first_of_many_wake_ups",
            &[],
            wake_latency_counts_from_the_first_of_many_wake_ups,
        ),
        trial(
            "gap_before_kill_is_in_report",
            &[],
            gap_before_kill_is_in_report,
        ),
        trial("forked_workers_need_few_file_descriptors", &[], || {
            run_helper("few_files");
        }),
        trial(
            "forking_from_a_busy_multi_threaded_caller_is_safe",
            &[],
            || {
                run_helper("busy_caller");
            },
        ),
        trial(
            "other_children_of_caller_are_not_reaped",
            &[],
            other_children_of_caller_are_not_reaped,
        ),
        trial(
            "a_caller_that_ignores_sigchld_still_gets_reports",
            &[],
            || {
                run_helper("ignored_sigchld");
            },
        ),
        trial("failed_spawn_leaves_no_process_or_file", &[], || {
            run_helper("failed_spawn");
        }),
    ])
}

fn run_as_helper(name: &str) {
    match name {
        "deaf_thread" => drop_a_thread_that_ignores_the_stop(),
        "wait" | "exit" | "panic" | "other_user" => run_workers_and_end(name),
        "stop" => stop_and_be_killed(),
        "subreaper" => workers_die_with_caller_under_subreaper(),
        "few_files" => forked_workers_need_few_file_descriptors(),
        "busy_caller" => spawn_works_while_other_threads_hold_locks(),
        "ignored_sigchld" => workers_are_reaped_with_ignored_sigchld(),
        "failed_spawn" => failed_spawn_leaves_no_process_or_file(),
        other => panic!("no helper is called {other}"),
    }
}

/// Whether a process has exited: its pid is free, or it is a zombie that its parent has to reap.
fn is_dead(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX")
}

fn is_thread_of_ours(tid: i32) -> bool {
    Path::new(&format!("/proc/self/task/{tid}")).exists()
}

/// How many shared regions of handles this process has mapped.
fn shared_regions() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("zernel-workload"))
        .count()
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Work that ignores the stop request.
fn work_that_ignores_the_stop() -> WorkType {
    WorkType::custom("deaf", |worker| {
        loop {
            worker.count_round(1);
            std::hint::spin_loop();
        }
    })
}

/// Work that never does a round, so that a stop waits for it and holds all others.
fn work_that_does_no_round() -> WorkType {
    WorkType::custom("idle", |worker| {
        while worker.should_do_another_round() {
            worker.sleep(Duration::from_millis(1));
        }
    })
}

fn held_workers_end_if_one_worker_does_no_round() {
    for mode in CLONE_MODES {
        let config =
            spinner_config(mode, 4).group(WorkSpec::new().work_type(work_that_does_no_round()));
        let mut handle = WorkloadHandle::spawn(&config).unwrap();
        handle.start();
        let reports = handle.stop_and_collect();
        assert!(
            reports.iter().all(|report| report.completed),
            "{reports:#?}"
        );
        let (spinners, idle) = reports.split_at(4);
        assert_eq!(idle[0].work_units, 0);
        for spinner in spinners {
            // The stop gave the idle one five seconds, in which the others were held.
            assert!(spinner.work_units > 0 && spinner.wall_ns < idle[0].wall_ns);
            assert!(spinner.largest_gap.unwrap().ns <= spinner.wall_ns);
        }
    }
}

/// Stops workers, one of which never does a round. The caller is killed while it waits.
fn stop_and_be_killed() {
    let config = spinner_config(CloneMode::Fork, 4)
        .group(WorkSpec::new().work_type(work_that_does_no_round()));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    eventually("progress of every spinner", || {
        handle.snapshot_iterations()[..4]
            .iter()
            .all(|count| *count > 0)
    });
    let pids = handle.worker_pids();
    std::thread::spawn(move || {
        // A spinner sleeps only when it is held.
        let is_held = |pid: &i32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.contains("State:\tS")
        };
        eventually("the hold of all spinners", || pids[..4].iter().all(is_held));
        let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
        println!("{}", pids.join(" "));
        std::io::stdout().flush().unwrap();
    });
    let _ = handle.stop_and_collect();
    panic!("nobody killed this process");
}

fn worker_that_ignores_stop_does_not_lose_other_reports() {
    let reports = {
        let config = spinner_config(CloneMode::Fork, 4)
            .group(WorkSpec::new().work_type(work_that_ignores_the_stop()));
        let mut handle = WorkloadHandle::spawn(&config).unwrap();
        handle.start();
        wait_for_progress(&handle);
        handle.stop_and_collect()
    };
    assert!(
        reports[..4]
            .iter()
            .all(|report| report.completed && report.work_units > 0)
    );
    assert_eq!(reports[4].exit_info, Some(WorkerExitInfo::TimedOutKilled));
    assert_eq!((reports[4].work_units, reports[4].completed), (0, false));
    assert!(reports[4].unfinished_work_units > 0 && reports[4].cpu_ns > 0);

    let release = Arc::new(AtomicBool::new(false));
    let held = Arc::clone(&release);
    let slow = WorkType::custom("slow", move |worker| {
        worker.count_round(1);
        while !held.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let config = spinner_config(CloneMode::Thread, 4).group(WorkSpec::new().work_type(slow));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let reports = handle.stop_and_collect();
    release.store(true, Ordering::Relaxed);
    assert!(
        reports[..4]
            .iter()
            .all(|report| report.completed && report.work_units > 0)
    );
    assert_eq!(reports[4].exit_info, Some(WorkerExitInfo::LeftBehind));
    eventually("the end of the slow thread", || {
        !is_thread_of_ours(reports[4].tid)
    });
}

fn starved_workers_still_report() {
    let cpu = Affinity::Exact(BTreeSet::from([*Topology::read()
        .unwrap()
        .cpus
        .last()
        .unwrap()]));
    for mode in CLONE_MODES {
        let hog = WorkloadConfig::default().affinity(cpu.clone()).nice(-20);
        let mut hog = WorkloadHandle::spawn(&hog).unwrap();
        let config = spinner_config(mode, 8).affinity(cpu.clone()).nice(19);
        let mut handle = WorkloadHandle::spawn(&config).unwrap();
        hog.start();
        wait_for_progress(&hog);
        handle.start();
        std::thread::sleep(Duration::from_millis(100));
        let reports = handle.stop_and_collect();
        for report in &reports {
            assert!(report.completed, "{report:#?}");
            assert!(report.setting_errors.is_empty() && report.tid > 0);
            assert!(report.start_delay_ns.is_some(), "{report:#?}");
        }
        assert!(
            reports
                .iter()
                .all(|report| !is_thread_of_ours(report.tid) && !process_exists(report.tid))
        );
        assert!(hog.stop_and_collect()[0].completed);
    }
}

fn dropping_a_sleeping_thread_worker_ends_it() {
    let ended = Arc::new(AtomicBool::new(false));
    let witness = Arc::clone(&ended);
    let sleeps = WorkType::custom("sleeps", move |worker| {
        worker.count_round(1);
        worker.sleep(Duration::from_secs(8));
        witness.store(true, Ordering::Relaxed);
    });
    let config = WorkloadConfig::default()
        .work_type(sleeps)
        .clone_mode(CloneMode::Thread);
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let tid = handle.worker_pids()[0];
    drop(handle);
    assert!(ended.load(Ordering::Relaxed), "the sleep was not cut short");
    assert!(!is_thread_of_ours(tid));
}

fn drop_a_thread_that_ignores_the_stop() {
    let files = open_files();
    let sleeps = WorkType::custom("sleeps", |worker| {
        worker.count_round(1);
        std::thread::sleep(Duration::from_secs(8));
        // Writes after the handle is dropped.
        worker.count_round(1);
    });
    let config = WorkloadConfig::default()
        .work_type(sleeps)
        .clone_mode(CloneMode::Thread);
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let tid = handle.worker_pids()[0];
    drop(handle);
    assert!(
        is_thread_of_ours(tid),
        "the worker was to sleep longer than the handle waits"
    );
    assert_eq!(
        shared_regions(),
        1,
        "the memory is the worker's as long as it runs"
    );
    eventually("the end of the worker", || !is_thread_of_ours(tid));
    eventually("the release of its memory", || shared_regions() == 0);
    assert_eq!(open_files(), files);
}

fn uid_line(task: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{task}/status")).unwrap();
    status
        .lines()
        .find(|line| line.starts_with("Uid:"))
        .unwrap()
        .to_owned()
}

fn uid_of_thread_worker_does_not_change_caller() {
    let before = uid_line("self");
    assert_eq!(dumpable_behavior(), Ok(DumpableBehavior::Dumpable));
    let config =
        spinner_config(CloneMode::Thread, 2).change_first_group(|spec| spec.uid(65534).gid(65534));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    for tid in handle.worker_pids() {
        assert_eq!(
            uid_line(&format!("self/task/{tid}")),
            "Uid:\t65534\t65534\t65534\t65534"
        );
    }
    assert_eq!(dumpable_behavior(), Ok(DumpableBehavior::Dumpable));
    assert_eq!(uid_line("self"), before);
    assert_eq!(uid_line("thread-self"), before);
    handle.start();
    wait_for_progress(&handle);
    let reports = handle.stop_and_collect();
    assert!(
        reports
            .iter()
            .all(|report| report.completed && report.setting_errors.is_empty())
    );
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    for task in tasks {
        let task = format!("self/task/{}", task.file_name().to_string_lossy());
        assert!(!fs::exists(format!("/proc/{task}")).unwrap() || uid_line(&task) == before);
    }
}

fn uid_is_set_for_processes_and_containers() {
    let other_user = "Uid:\t65534\t65534\t65534\t65534";
    let config = spinner_config(CloneMode::Fork, 1).change_first_group(|spec| spec.uid(65534));
    let handle = WorkloadHandle::spawn(&config).unwrap();
    assert_eq!(uid_line(&handle.worker_pids()[0].to_string()), other_user);
    assert!(handle.stop_and_collect()[0].completed);

    let specs = [WorkSpec::new().workers(2)];
    let handle =
        WorkloadHandle::spawn_pcomm_cgroup("other", Some(65534), Some(65534), &specs).unwrap();
    assert_eq!(uid_line(&handle.worker_pids()[0].to_string()), other_user);
    assert!(
        handle
            .stop_and_collect()
            .iter()
            .all(|report| report.completed)
    );
}

fn workers_outlive_the_thread_that_spawned_them() {
    let config = spinner_config(CloneMode::Fork, 2).group(WorkSpec::new().workers(2).pcomm("box"));
    let spawn = move || WorkloadHandle::spawn(&config).unwrap();
    let mut handle = std::thread::spawn(spawn).join().unwrap();
    handle.start();
    wait_for_progress(&handle);
    assert!(
        handle
            .stop_and_collect()
            .iter()
            .all(|report| report.completed)
    );
}

/// A caller with running workers of every kind. It prints their pids and then ends as `how` states.
fn run_workers_and_end(how: &str) {
    let spec = |spec: WorkSpec| {
        if how == "other_user" {
            spec.uid(65534)
        } else {
            spec
        }
    };
    let config = spinner_config(CloneMode::Fork, 3)
        .change_first_group(spec)
        .group(spec(WorkSpec::new().workers(2).pcomm("box")))
        .group(spec(
            WorkSpec::new().work_type(work_that_ignores_the_stop()),
        ));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let pids: Vec<String> = handle
        .worker_pids()
        .iter()
        .map(ToString::to_string)
        .collect();
    println!("{}", pids.join(" "));
    std::io::stdout().flush().unwrap();
    match how {
        "exit" => std::process::exit(0),
        "panic" => panic!("on purpose"),
        _ => std::thread::sleep(Duration::from_secs(600)),
    }
}

fn start_caller(how: &str) -> (Child, Vec<i32>) {
    let mut caller = helper_command(how)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(caller.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let pids: Vec<i32> = line
        .split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect();
    assert_eq!(pids.len(), 5, "{line}");
    (caller, pids)
}

fn workers_die_with_caller(how: &str, signal: Option<Signal>) {
    let (mut caller, pids) = start_caller(how);
    if let Some(signal) = signal {
        assert!(pids.iter().all(|pid| !is_dead(*pid)));
        send_signal(i32::try_from(caller.id()).unwrap(), signal);
    }
    caller.wait().unwrap();
    eventually("the death of all workers", || {
        pids.iter().all(|pid| is_dead(*pid))
    });
}

/// The same for a caller with a subreaper, so that orphans get a parent that is not init.
fn workers_die_with_caller_under_subreaper() {
    set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let (mut caller, pids) = start_caller("wait");
    send_signal(i32::try_from(caller.id()).unwrap(), Signal::KILL);
    caller.wait().unwrap();
    for pid in pids {
        let pid = Pid::from_raw(pid);
        let (_, status) = rustix::process::waitpid(pid, rustix::process::WaitOptions::empty())
            .unwrap()
            .unwrap();
        assert_eq!(status.terminating_signal(), Some(9));
    }
}

fn workers_ignore_int_quit_term_and_hup() {
    let config = spinner_config(CloneMode::Fork, 1).group(WorkSpec::new().workers(2).pcomm("box"));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    for signal in [Signal::INT, Signal::QUIT, Signal::TERM, Signal::HUP] {
        handle
            .worker_pids()
            .iter()
            .for_each(|pid| send_signal(*pid, signal));
    }
    let reports = handle.stop_and_collect();
    assert!(
        reports.iter().all(|report| report.completed),
        "{reports:#?}"
    );
}

fn dropping_handle_ends_128_running_workers() {
    for mode in CLONE_MODES {
        let mut handle = WorkloadHandle::spawn(&spinner_config(mode, 128)).unwrap();
        let tids = handle.worker_pids();
        handle.start();
        eventually("progress of one", || {
            handle.snapshot_iterations().iter().any(|count| *count > 0)
        });
        let dropped = Instant::now();
        drop(handle);
        // It takes milliseconds, unless it waits until each worker has run.
        assert!(dropped.elapsed() < Duration::from_secs(3), "{mode:?}");
        assert!(
            tids.iter()
                .all(|tid| !process_exists(*tid) && !is_thread_of_ours(*tid))
        );
    }
}

fn kill_by_handle_is_distinguished_from_other_kill() {
    let config = spinner_config(CloneMode::Fork, 2)
        .group(WorkSpec::new().work_type(work_that_ignores_the_stop()));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let pids = handle.worker_pids();
    send_signal(pids[0], Signal::KILL);
    eventually("the reaping of the killed worker", || {
        !process_exists(pids[0])
    });
    let reports = handle.stop_and_collect();
    let killed = WorkerExitInfo::Signaled {
        signal: 9,
        core_dumped: false,
    };
    assert_eq!(reports[0].exit_info, Some(killed));
    assert!(
        reports[0].unfinished_work_units > 0 && reports[0].cpu_ns > 0,
        "{:#?}",
        reports[0]
    );
    assert_eq!(reports[0].work_units, 0);
    assert!(reports[1].completed);
    assert_eq!(reports[2].exit_info, Some(WorkerExitInfo::TimedOutKilled));
    for report in &reports {
        assert!(report.wall_ns >= report.cpu_ns, "{report:#?}");
        assert_eq!(report.off_cpu_ns, report.wall_ns - report.cpu_ns);
    }
}

/// Stops a process, and waits until it is stopped.
fn stop_process(pid: i32) {
    send_signal(pid, Signal::STOP);
    eventually("the halt of the worker", || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status.contains("State:\tT")
    });
}

fn wake_latency_counts_from_the_first_of_many_wake_ups() {
    let herd = ThunderingHerd {
        interval_us: 5_000,
        compute_us: 0,
    };
    let config = spinner_config(CloneMode::Fork, 2).work_type(WorkType::ThunderingHerd(herd));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let waiter = handle.worker_pids()[1];
    let span = Duration::from_millis(200);
    // More than once, because it may be halted in one of the rare moments when it does not wait.
    for _ in 0..3 {
        stop_process(waiter);
        let stampedes = handle.snapshot_iterations()[0];
        eventually("a stampede", || handle.snapshot_iterations()[0] > stampedes);
        std::thread::sleep(span);
        send_signal(waiter, Signal::CONT);
        let rounds = handle.snapshot_iterations()[1];
        eventually("another round", || {
            handle.snapshot_iterations()[1] > rounds + 1
        });
    }
    let report = &handle.stop_and_collect()[1];
    assert!(
        u128::from(report.wake_latency.max_ns) >= span.as_nanos(),
        "{report:#?}"
    );
}

fn gap_before_kill_is_in_report() {
    let mut handle = WorkloadHandle::spawn(&spinner_config(CloneMode::Fork, 1)).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let pid = handle.worker_pids()[0];
    stop_process(pid);
    let span = Duration::from_millis(300);
    std::thread::sleep(span);
    send_signal(pid, Signal::KILL);
    eventually("the reaping of the killed worker", || !process_exists(pid));
    let report = &handle.stop_and_collect()[0];
    let gap = report.largest_gap.unwrap();
    assert!(u128::from(gap.ns) >= span.as_nanos(), "{report:#?}");
    assert!(u128::from(report.off_cpu_ns) >= span.as_nanos());
    assert!(report.cpus_used.contains(&(gap.cpu as usize)));
}

fn forked_workers_need_few_file_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(1024),
            maximum,
        },
    )
    .unwrap();
    let files = open_files();
    // A thousand pairs have two thousand pipes between them.
    let pairs = WorkType::PipePingPong(PipePingPong::default());
    for (workers, work) in [(4096, WorkType::SpinWait), (2000, pairs)] {
        let config = spinner_config(CloneMode::Fork, workers).work_type(work);
        let mut handle = WorkloadHandle::spawn(&config).unwrap();
        assert_eq!(open_files(), files);
        handle.start();
        let reports = handle.stop_and_collect();
        assert_eq!(reports.len(), workers);
        let not_completed = reports.iter().find(|report| !report.completed);
        assert!(not_completed.is_none(), "{not_completed:#?}");
        assert_eq!(open_files(), files);
    }
}

/// Spawns while other threads allocate, start threads and hold the standard streams' locks.
fn spawn_works_while_other_threads_hold_locks() {
    let stop = Arc::new(AtomicBool::new(false));
    let busy = |work: fn()| {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                work();
            }
        })
    };
    let threads = [
        busy(|| drop(std::hint::black_box(vec![vec![0_u8; 100]; 100]))),
        busy(|| std::thread::spawn(|| ()).join().unwrap()),
        busy(|| std::io::stdout().lock().flush().unwrap()),
        busy(|| std::env::set_current_dir("/").unwrap()),
    ];
    for round in 0..25 {
        let config = spinner_config(CloneMode::Fork, 8)
            .group(WorkSpec::new().workers(8).pcomm("box"))
            .group(WorkSpec::new().workers(8).pcomm("another"));
        let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
        let failed = reports.iter().find(|report| !report.completed);
        assert!(failed.is_none(), "round {round}: {failed:#?}");
    }
    stop.store(true, Ordering::Relaxed);
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

fn other_children_of_caller_are_not_reaped() {
    let mut child = Command::new("sh")
        .args(["-c", "exit 5"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let reports = WorkloadHandle::spawn(&spinner_config(CloneMode::Fork, 8))
        .unwrap()
        .stop_and_collect();
    assert!(reports.iter().all(|report| report.completed));
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

fn workers_are_reaped_with_ignored_sigchld() {
    // SAFETY: sets a disposition in a helper process that does nothing else.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let config = spinner_config(CloneMode::Fork, 4)
        .group(WorkSpec::new().work_type(work_that_ignores_the_stop()));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    wait_for_progress(&handle);
    let pids = handle.worker_pids();
    let reports = handle.stop_and_collect();
    assert!(reports[..4].iter().all(|report| report.completed));
    assert_eq!(reports[4].exit_info, Some(WorkerExitInfo::StatusLost));
    assert!(pids.iter().all(|pid| !process_exists(*pid)));
}

fn failed_spawn_leaves_no_process_or_file() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let files = open_files();
    if rustix::process::geteuid().is_root() {
        // The limit does not hold for root. This user has no other processes.
        let user = rustix::process::Uid::from_raw(54_321);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
    }
    let limit = Rlimit {
        current: Some(12),
        maximum: Some(12),
    };
    setrlimit(Resource::Nproc, limit).unwrap();
    for config in [
        spinner_config(CloneMode::Fork, 64),
        spinner_config(CloneMode::Thread, 64),
        spinner_config(CloneMode::Fork, 64).change_first_group(|spec| spec.pcomm("box")),
    ] {
        let error = WorkloadHandle::spawn(&config).unwrap_err().to_string();
        assert!(error.starts_with("group `group0`"), "{error}");
        eventually("the end of all workers", || {
            let children = fs::read_to_string("/proc/thread-self/children").unwrap();
            fs::read_dir("/proc/self/task").unwrap().count() == 1 && children.is_empty()
        });
        eventually("the release of the memory", || shared_regions() == 0);
        assert_eq!(open_files(), files);
    }
}
