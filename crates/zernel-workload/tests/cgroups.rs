//! Workers in cgroups: placement by process and by thread, workload files with cgroups, and their
//! removal.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::{
    CLONE_MODES, helper_command, process_exists, run_helper, send_signal, spinner_config,
    wait_for_progress,
};
use rustix::process::Signal;
use zernel_lab::{KernelRequest, VmSpec};
use zernel_testkit::{Need, eventually, root, trial, vm};
use zernel_workload::work::CgroupChurn;
use zernel_workload::{
    CloneMode, WorkType, WorkerExitInfo, WorkloadConfig, WorkloadHandle, WorkloadSpec,
};

fn main() -> ExitCode {
    if let Some(helper) = common::requested_helper() {
        run_as_helper(&helper);
        return ExitCode::SUCCESS;
    }
    let cgroup2 = [root(), CGROUP2_NEED];
    let guest = [root(), GUEST_NEED];
    zernel_testkit::main([
        trial(
            "oom_kill_is_reported_as_oom_kill",
            &[root(), MEMORY_CGROUP_NEED],
            oom_kill_is_reported_as_oom_kill,
        ),
        trial(
            "thread_workers_can_be_placed_with_cgroup_threads",
            &cgroup2,
            thread_workers_can_be_placed_with_cgroup_threads,
        ),
        trial(
            "cgroup_churn_moves_only_the_worker",
            &cgroup2,
            cgroup_churn_moves_only_the_worker,
        ),
        trial(
            "a_spec_runs_in_its_cgroups_and_removes_them",
            &cgroup2,
            a_spec_runs_in_its_cgroups_and_removes_them,
        ),
        trial(
            "cgroups_are_removed_after_a_killed_caller",
            &cgroup2,
            || {
                kill_spec_caller(Signal::KILL);
            },
        ),
        trial(
            "cgroups_are_removed_after_an_interrupted_caller",
            &cgroup2,
            || {
                kill_spec_caller(Signal::INT);
            },
        ),
        trial("a_run_ends_while_another_goes_on", &cgroup2, || {
            run_helper("concurrent");
        }),
        trial("settings_hold_for_a_caller_in_the_root", &guest, || {
            run_helper("settings fork");
            run_helper("settings thread");
        }),
        trial("settings_hold_for_a_caller_in_a_session", &guest, || {
            let session = TestCgroup::new(&cgroup2_root().unwrap());
            run_helper(&format!("settings fork {}", session.0));
            run_helper(&format!("settings thread {}", session.0));
        }),
        trial(
            "settings_hold_for_no_caller_that_was_killed",
            &guest,
            settings_hold_for_no_caller_that_was_killed,
        ),
        trial(
            "settings_hold_until_the_last_of_two_runs_ends",
            &guest,
            || {
                let session = TestCgroup::new(&cgroup2_root().unwrap());
                for mode in ["fork", "thread"] {
                    run_helper(&format!("concurrent-settings {mode}"));
                    run_helper(&format!("concurrent-settings {mode} {}", session.0));
                }
            },
        ),
        trial(
            "settings_hold_only_where_no_busy_cgroup_has_to_change",
            &guest,
            settings_hold_only_where_no_busy_cgroup_has_to_change,
        ),
        trial(
            "cgroups_work_where_there_are_controllers",
            &[vm::newest_kernel_need()],
            cgroups_work_where_there_are_controllers,
        ),
    ])
}

/// Runs a helper.
fn run_as_helper(helper: &str) {
    let words: Vec<&str> = helper.split(' ').collect();
    if let Some(cgroup) = words.get(2) {
        fs::write(format!("{cgroup}/cgroup.procs"), "0").unwrap();
    }
    match words[0] {
        "concurrent" => run_concurrently(SPEC_WITH_CGROUPS),
        "concurrent-settings" => check_concurrent_settings(words[1]),
        "idle" => drop(std::io::stdin().read_line(&mut String::new())),
        "settings" => run_with_applied_settings(words[1]),
        "no-settings" => run_without_applied_settings(words[1]),
        "caller" => run_spec_until_killed(&spec_with_settings(words[1])),
        _ => run_spec_until_killed(SPEC_WITH_CGROUPS),
    }
}

const MEMORY_CGROUP_NEED: Need = Need {
    name: "memory-cgroup",
    check: || match fs::exists("/sys/fs/cgroup/memory/memory.limit_in_bytes") {
        Ok(true) => Ok(()),
        _ => Err("no cgroup v1 memory controller".into()),
    },
};

const CGROUP2_NEED: Need = Need {
    name: "cgroup2",
    check: || {
        cgroup2_root()
            .map(|_| ())
            .ok_or_else(|| "cgroup v2 is not mounted".into())
    },
};

/// Set in the virtual machine.
const IN_GUEST_VARIABLE: &str = "ZERNEL_CGROUP_GUEST";

/// The need for a cgroup hierarchy with controllers and without other users.
const GUEST_NEED: Need = Need {
    name: "guest",
    check: || match std::env::var_os(IN_GUEST_VARIABLE) {
        Some(_) => Ok(()),
        None => Err("run in a virtual machine by another test".into()),
    },
};

/// A file of a cgroup; empty if it has no such file.
fn read_cgroup_file(folder: &str, file: &str) -> String {
    fs::read_to_string(format!("{folder}/{file}")).unwrap_or_default()
}

fn cgroup2_root() -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    fields
        .find(|fields| fields.get(2) == Some(&"cgroup2"))
        .map(|fields| fields[1].to_owned())
}

/// A cgroup that is removed on drop.
struct TestCgroup(String);

impl TestCgroup {
    fn new(parent: &str) -> Self {
        static NEXT_CGROUP_NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NEXT_CGROUP_NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = format!("{parent}/test-{}-{number}", std::process::id());
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(format!("{}/{file}", self.0), text).unwrap();
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let limit = Instant::now() + Duration::from_secs(5);
        for inner in fs::read_dir(&self.0).unwrap().flatten() {
            let _ = fs::remove_dir(inner.path());
        }
        while fs::remove_dir(&self.0).is_err() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn oom_kill_is_reported_as_oom_kill() {
    let cgroup = TestCgroup::new("/sys/fs/cgroup/memory");
    cgroup.write("memory.limit_in_bytes", "16777216");
    let greedy = WorkType::custom("greedy", |worker| {
        let mut hoard = Vec::new();
        while worker.should_do_another_round() {
            hoard.push(vec![1_u8; 1 << 20]);
            worker.count_round(1);
        }
    });
    let config = WorkloadConfig::default().work_type(greedy);
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    let pid = handle.worker_pids_for_cgroup_procs().unwrap()[0];
    cgroup.write("cgroup.procs", &pid.to_string());
    handle.start();
    eventually("the death of the greedy worker", || !process_exists(pid));
    let reports = handle.stop_and_collect();
    assert_eq!(reports[0].exit_info, Some(WorkerExitInfo::OomKilled));
    assert!(reports[0].unfinished_work_units > 0);
}

fn thread_workers_can_be_placed_with_cgroup_threads() {
    let cgroup = TestCgroup::new(&cgroup2_root().unwrap());
    cgroup.write("cgroup.type", "threaded");
    let mut handle = WorkloadHandle::spawn(&spinner_config(CloneMode::Thread, 2)).unwrap();
    let tids = handle.worker_pids();
    tids.iter()
        .for_each(|tid| cgroup.write("cgroup.threads", &tid.to_string()));
    let placed = fs::read_to_string(format!("{}/cgroup.threads", cgroup.0)).unwrap();
    let placed: BTreeSet<i32> = placed.lines().map(|tid| tid.parse().unwrap()).collect();
    assert_eq!(placed, tids.iter().copied().collect());
    handle.start();
    wait_for_progress(&handle);
    assert!(
        handle
            .stop_and_collect()
            .iter()
            .all(|report| report.completed)
    );
}

fn cgroup_of(task: &str) -> String {
    let cgroups = fs::read_to_string(format!("/proc/{task}/cgroup")).unwrap();
    cgroups
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap()
        .to_owned()
}

fn cgroup_churn_moves_only_the_worker() {
    let before = cgroup_of("self");
    let cgroup = TestCgroup::new(&cgroup2_root().unwrap());
    let folders = ["a", "b"].map(|name| {
        let folder = format!("{}/{name}", cgroup.0);
        fs::create_dir(&folder).unwrap();
        folder
    });
    for mode in CLONE_MODES {
        if mode == CloneMode::Thread {
            cgroup.write("cgroup.type", "threaded");
            folders.iter().for_each(|folder| {
                fs::write(format!("{folder}/cgroup.type"), "threaded").unwrap();
            });
        }
        let cgroups = folders.iter().map(Into::into).collect();
        let churn = WorkType::CgroupChurn(CgroupChurn {
            cgroups,
            spin_us: 10,
        });
        let config = spinner_config(mode, 2).work_type(churn);
        let mut handle = WorkloadHandle::spawn(&config).unwrap();
        handle.start();
        eventually("several moves", || {
            handle.snapshot_iterations().iter().all(|count| *count > 5)
        });
        let tid = handle.worker_pids()[0];
        let task = if mode == CloneMode::Fork {
            tid.to_string()
        } else {
            format!("self/task/{tid}")
        };
        eventually("a worker in one of its cgroups", || {
            let now = cgroup_of(&task);
            folders.iter().any(|folder| folder.ends_with(&now))
        });
        assert_eq!(cgroup_of("self"), before);
        let reports = handle.stop_and_collect();
        assert!(
            reports.iter().all(|report| report.completed),
            "{reports:#?}"
        );
    }
    for folder in folders {
        eventually("an empty cgroup", || fs::remove_dir(&folder).is_ok());
    }
}

const SPEC_WITH_CGROUPS: &str = r#"
    duration_ms = 600000
    [[group]]
    name = "spinners"
    workers = 2
    [[group]]
    name = "boxed"
    workers = 2
    pcomm = "box"
    [[group]]
    name = "outside"
    [[cgroup]]
    name = "inner"
    groups = ["spinners", "boxed"]
    weight = 50
"#;

/// The cgroups that workloads of this process have made, wherever they are.
fn cgroups_of(pid: u32) -> Vec<String> {
    let prefix = format!("zernel-{pid}-");
    let name = |path: &String| path.rsplit('/').next().unwrap().to_owned();
    let mut all = folders_below(&cgroup2_root().unwrap());
    all.retain(|path| name(path).starts_with(&prefix));
    all
}

fn folders_below(folder: &str) -> Vec<String> {
    // It may be removed meanwhile.
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders
        .map(|entry| entry.path().to_string_lossy().into_owned())
        .flat_map(|path| {
            let inner = folders_below(&path);
            [path].into_iter().chain(inner)
        })
        .collect()
}

fn a_spec_runs_in_its_cgroups_and_removes_them() {
    for mode in ["fork", "thread"] {
        let text = format!("clone_mode = \"{mode}\"\n{SPEC_WITH_CGROUPS}");
        // A process cannot be in the threaded cgroup that threads of another process need.
        let text = if mode == "thread" {
            text.replace("pcomm", "comm")
        } else {
            text
        };
        let spec = WorkloadSpec::parse(&text, "job.toml").unwrap();
        let mut members = 0;
        let outcome = spec.run(|progress| {
            let mine = cgroups_of(std::process::id());
            let file = if mode == "fork" {
                "cgroup.procs"
            } else {
                "cgroup.threads"
            };
            let tasks = fs::read_to_string(format!("{}/inner/{file}", mine[0])).unwrap();
            members = tasks.lines().count();
            let done = progress.rounds.iter().all(|(_, rounds)| *rounds > 0);
            if done {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let outcome = outcome.unwrap();
        assert_eq!(members, if mode == "fork" { 3 } else { 4 }, "{outcome:#?}");
        assert!(outcome.reports.iter().all(|report| report.completed));
        // Not every machine can set a weight. Then the outcome reports it.
        let refused = |text: &String| text.contains("`inner`") && text.contains("`weight`");
        assert!(
            outcome.not_applied.iter().all(refused),
            "{:?}",
            outcome.not_applied
        );
        assert!(cgroups_of(std::process::id()).is_empty());
    }
}

fn run_spec_until_killed(text: &str) {
    let spec = WorkloadSpec::parse(text, "job.toml").unwrap();
    let mut is_announced = false;
    let _ = spec.run(|progress| {
        if !is_announced && progress.rounds.iter().all(|(_, rounds)| *rounds > 0) {
            println!("running");
            is_announced = true;
        }
        ControlFlow::Continue(())
    });
}

fn kill_spec_caller(signal: Signal) {
    kill_caller_and_check_cgroups("spec", signal);
}

fn kill_caller_and_check_cgroups(helper: &str, signal: Signal) {
    let mut caller = helper_command(helper)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(caller.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line, "running\n");
    assert_eq!(cgroups_of(caller.id()).len(), 1);
    send_signal(i32::try_from(caller.id()).unwrap(), signal);
    caller.wait().unwrap();
    eventually("the removal of its cgroups", || {
        cgroups_of(caller.id()).is_empty()
    });
}

/// Two runs of one process. The first ends while the second is running. Both must leave the cgroup
/// hierarchy as it was.
fn check_concurrent_settings(mode: &str) {
    let before = read_hierarchy();
    run_concurrently(&spec_with_settings(mode));
    assert_eq!(read_hierarchy(), before);
}

fn run_concurrently(text: &str) {
    let spec = WorkloadSpec::parse(text, "job.toml").unwrap();
    let [is_first_up, is_second_up, is_over] = [const { AtomicBool::new(false) }; 3];
    let run = |is_up: &AtomicBool, is_over: &AtomicBool| {
        spec.run(|_| {
            is_up.store(true, Ordering::Relaxed);
            match is_over.load(Ordering::Relaxed) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })
        .unwrap();
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| run(&is_first_up, &is_second_up));
        eventually("the first run", || is_first_up.load(Ordering::Relaxed));
        scope.spawn(|| run(&is_second_up, &is_over));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            eventually("the end of the first run", || first.is_finished());
        }));
        is_over.store(true, Ordering::Relaxed);
        ended.unwrap();
    });
}

fn spec_with_settings(mode: &str) -> String {
    format!(
        r#"
        duration_ms = 600000
        clone_mode = "{mode}"
        [[group]]
        name = "spinners"
        workers = 2
        [[cgroup]]
        name = "inner"
        groups = ["spinners"]
        weight = 50
        max_ms_per_100ms = 70
        cpus = [0]
        "#
    )
}

/// Every cgroup with its type and its controllers. A workload must not change this.
fn read_hierarchy() -> Vec<[String; 3]> {
    let root = cgroup2_root().unwrap();
    let mut folders = folders_below(&root);
    folders.push(root);
    folders.sort();
    let describe = |folder: String| {
        let kind = read_cgroup_file(&folder, "cgroup.type");
        let controllers = read_cgroup_file(&folder, "cgroup.subtree_control");
        [folder, kind, controllers]
    };
    folders.into_iter().map(describe).collect()
}

/// Runs a spec with settings, and checks that the hierarchy is unchanged afterwards. Returns the settings
/// during the run, and those that were not applied.
fn run_with_settings(mode: &str) -> ([String; 3], Vec<String>) {
    let before = read_hierarchy();
    let spec = WorkloadSpec::parse(&spec_with_settings(mode), "job.toml").unwrap();
    let mut settings = [const { String::new() }; 3];
    let mut members = 0;
    let outcome = spec.run(|_| {
        let inner = format!("{}/inner", cgroups_of(std::process::id())[0]);
        settings =
            ["cpu.weight", "cpu.max", "cpuset.cpus"].map(|file| read_cgroup_file(&inner, file));
        members = read_cgroup_file(&inner, "cgroup.threads").lines().count();
        ControlFlow::Break(())
    });
    assert_eq!(members, 2);
    assert_eq!(read_hierarchy(), before);
    (settings, outcome.unwrap().not_applied)
}

fn run_with_applied_settings(mode: &str) {
    let (settings, not_applied) = run_with_settings(mode);
    assert_eq!(settings, ["50\n", "70000 100000\n", "0\n"]);
    assert!(not_applied.is_empty(), "{not_applied:?}");
}

fn run_without_applied_settings(mode: &str) {
    let (settings, not_applied) = run_with_settings(mode);
    assert_eq!(settings, ["", "", ""]);
    for field in ["`weight`", "`max_ms_per_100ms`", "`cpus`"] {
        let is_named = not_applied.iter().any(|text| text.contains(field));
        assert!(is_named, "{field} is not in {not_applied:?}");
    }
}

/// Threads stay below the caller's cgroup, which gets its controllers from one with processes.
fn settings_hold_only_where_no_busy_cgroup_has_to_change() {
    let busy = TestCgroup::new(&cgroup2_root().unwrap());
    let session = TestCgroup::new(&busy.0);
    let mut idle = helper_command("idle")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    busy.write("cgroup.procs", &idle.id().to_string());
    run_helper(&format!("settings fork {}", session.0));
    run_helper(&format!("no-settings thread {}", session.0));
    drop(idle.stdin.take());
    idle.wait().unwrap();
}

fn settings_hold_for_no_caller_that_was_killed() {
    let session = TestCgroup::new(&cgroup2_root().unwrap());
    let before = read_hierarchy();
    for mode in ["fork", "thread"] {
        kill_caller_and_check_cgroups(&format!("caller {mode} {}", session.0), Signal::KILL);
        eventually("the hierarchy as it was", || read_hierarchy() == before);
    }
}

/// Runs those tests of this program that need controllers, in a virtual machine.
fn cgroups_work_where_there_are_controllers() {
    let outcome = VmSpec::new(vm::obtain_kernel(&KernelRequest::NewestWithSchedExt).unwrap())
        .environment(IN_GUEST_VARIABLE, "1")
        .command_timeout(Duration::from_secs(300))
        .run(
            std::env::current_exe().unwrap(),
            ["settings_hold", "--test-threads=1"],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let output = String::from_utf8_lossy(&outcome.stdout);
    let complaints = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{output}\n{complaints}");
    assert!(output.contains("5 passed"), "{output}");
}
