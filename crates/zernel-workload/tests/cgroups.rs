//! Workers in cgroups: placement by process and by thread, spec files with cgroups, and their
//! removal.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::{MODES, eventually, exists, helper_command, kill, spinners, wait_for_progress};
use rustix::process::Signal;
use zernel_testkit::{Need, root, trial};
use zernel_workload::work::CgroupChurn;
use zernel_workload::{CloneMode, Spec, WorkType, WorkerExitInfo, WorkloadConfig, WorkloadHandle};

fn main() -> ExitCode {
    if common::helper().is_some() {
        spec_caller();
        return ExitCode::SUCCESS;
    }
    let cgroup2 = [root(), CGROUP2];
    zernel_testkit::main([
        trial(
            "an_oom_kill_is_told_from_others",
            &[root(), MEMORY_CGROUP],
            oom_kill,
        ),
        trial(
            "thread_workers_can_be_placed_with_cgroup_threads",
            &cgroup2,
            cgroup_threads,
        ),
        trial("cgroup_churn_moves_only_the_worker", &cgroup2, cgroup_churn),
        trial(
            "a_spec_runs_in_its_cgroups_and_removes_them",
            &cgroup2,
            spec_cgroups,
        ),
        trial(
            "cgroups_are_removed_after_a_killed_caller",
            &cgroup2,
            || {
                killed_spec_caller(Signal::KILL);
            },
        ),
        trial(
            "cgroups_are_removed_after_an_interrupted_caller",
            &cgroup2,
            || {
                killed_spec_caller(Signal::INT);
            },
        ),
    ])
}

const MEMORY_CGROUP: Need = Need {
    name: "memory-cgroup",
    check: || match fs::exists("/sys/fs/cgroup/memory/memory.limit_in_bytes") {
        Ok(true) => Ok(()),
        _ => Err("no cgroup v1 memory controller".into()),
    },
};

const CGROUP2: Need = Need {
    name: "cgroup2",
    check: || {
        cgroup2_root()
            .map(|_| ())
            .ok_or_else(|| "cgroup v2 is not mounted".into())
    },
};

fn cgroup2_root() -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    fields
        .find(|fields| fields.get(2) == Some(&"cgroup2"))
        .map(|fields| fields[1].to_owned())
}

/// A cgroup that is removed again, whatever happens.
struct Cgroup(String);

impl Cgroup {
    fn new(parent: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = format!("{parent}/test-{}-{number}", std::process::id());
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(format!("{}/{file}", self.0), text).unwrap();
    }
}

impl Drop for Cgroup {
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

fn oom_kill() {
    let cgroup = Cgroup::new("/sys/fs/cgroup/memory");
    cgroup.write("memory.limit_in_bytes", "16777216");
    let greedy = WorkType::custom("greedy", |worker| {
        let mut hoard = Vec::new();
        while worker.proceed() {
            hoard.push(vec![1_u8; 1 << 20]);
            worker.done(1);
        }
    });
    let config = WorkloadConfig::default().work_type(greedy);
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    let pid = handle.worker_pids_for_cgroup_procs().unwrap()[0];
    cgroup.write("cgroup.procs", &pid.to_string());
    handle.start();
    eventually("the death of the greedy worker", || !exists(pid));
    let reports = handle.stop_and_collect();
    assert_eq!(reports[0].exit_info, Some(WorkerExitInfo::OomKilled));
    assert!(reports[0].unfinished_work_units > 0);
}

fn cgroup_threads() {
    let cgroup = Cgroup::new(&cgroup2_root().unwrap());
    cgroup.write("cgroup.type", "threaded");
    let mut handle = WorkloadHandle::spawn(&spinners(CloneMode::Thread, 2)).unwrap();
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

fn cgroup_churn() {
    let before = cgroup_of("self");
    let cgroup = Cgroup::new(&cgroup2_root().unwrap());
    let folders = ["a", "b"].map(|name| {
        let folder = format!("{}/{name}", cgroup.0);
        fs::create_dir(&folder).unwrap();
        folder
    });
    for mode in MODES {
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
        let config = spinners(mode, 2).work_type(churn);
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

const SPEC: &str = r#"
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

/// The cgroups that workloads of this process have made.
fn cgroups_of(pid: u32) -> Vec<String> {
    let prefix = format!("zernel-{pid}-");
    let own = format!("{}{}", cgroup2_root().unwrap(), cgroup_of("self"));
    let entries = fs::read_dir(own).unwrap().flatten();
    entries
        .map(|entry| entry.path().to_string_lossy().into_owned())
        .filter(|path| path.contains(&prefix))
        .collect()
}

fn spec_cgroups() {
    for mode in ["fork", "thread"] {
        let text = format!("clone_mode = \"{mode}\"\n{SPEC}");
        // A process cannot be in the threaded cgroup that threads of another process need.
        let text = if mode == "thread" {
            text.replace("pcomm", "comm")
        } else {
            text
        };
        let spec = Spec::parse(&text, "job.toml").unwrap();
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
        // Whether a weight can be had depends on the machine; if not, the outcome says so.
        let refused = |text: &String| text.contains("`inner`") && text.contains("`weight`");
        assert!(
            outcome.not_applied.iter().all(refused),
            "{:?}",
            outcome.not_applied
        );
        assert!(cgroups_of(std::process::id()).is_empty());
    }
}

fn spec_caller() {
    let spec = Spec::parse(SPEC, "job.toml").unwrap();
    let mut told = false;
    let _ = spec.run(|progress| {
        if !told && progress.rounds.iter().all(|(_, rounds)| *rounds > 0) {
            println!("running");
            told = true;
        }
        ControlFlow::Continue(())
    });
}

fn killed_spec_caller(signal: Signal) {
    let mut caller = helper_command("spec")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(caller.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line, "running\n");
    assert_eq!(cgroups_of(caller.id()).len(), 1);
    kill(i32::try_from(caller.id()).unwrap(), signal);
    caller.wait().unwrap();
    eventually("the removal of its cgroups", || {
        cgroups_of(caller.id()).is_empty()
    });
}
