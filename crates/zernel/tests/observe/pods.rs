//! Root in a pod is not root of the machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use zernel_softgpu::install::Prologue;
use zernel_testkit::PodCgroup;
use zernel_testkit::daemon::Daemon;
use zernel_testkit::target::{Stage, Target};

use crate::{ZERNEL_PATH, exported_launches};

/// Starts a job of root in a cgroup; in that of the test if no cgroup is given.
fn start_job(stage: &Stage, cgroup: Option<&Path>) -> Target {
    let mut job = stage.start_target("launches", 10);
    if let Some(cgroup) = cgroup {
        let members = cgroup.join("cgroup.procs");
        fs::write(members, job.pid().to_string()).expect("we are root");
    }
    job.run_part();
    job
}

/// The pids that `zernel ps` lists, for root in a cgroup. `wrapper` is a command that runs another.
fn pids_listed_by_ps(daemon: &Daemon, cgroup: &Path, wrapper: &[&str]) -> BTreeSet<u64> {
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"echo $$ > "$0/cgroup.procs" && exec "$@""#])
        .arg(cgroup)
        .args(wrapper)
        .args([ZERNEL_PATH, "ps", "--json", "--socket"])
        .arg(&daemon.socket);
    let output = command.output().expect("a shell runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{wrapper:?}: {printed}");
    let jobs: Vec<Value> = serde_json::from_slice(&output.stdout).expect("JSON");
    let pids = jobs.iter().map(|job| job["pid"].as_u64().expect("a pid"));
    pids.collect()
}

/// A cgroup that a user could create, with the name of the pod's.
fn create_imitation_of_pod(pod: &PodCgroup) -> PathBuf {
    let name = format!("zernel-test-imitation/kubepods/pod{}", PodCgroup::POD_UID);
    let imitation = pod.hierarchy().join(name);
    fs::create_dir_all(&imitation).expect("we are root");
    imitation
}

pub(crate) fn root_in_a_pod_sees_its_pod() {
    let namespaces = ["unshare", "--user", "--map-root-user", "--pid", "--fork"];
    for pod in PodCgroup::in_each_hierarchy() {
        let stage = Stage::new(Prologue::Push);
        let daemon = Daemon::start(ZERNEL_PATH, &stage);
        let imitation = create_imitation_of_pod(&pod);
        let inside = start_job(&stage, Some(&pod.container_folder()));
        let outside = start_job(&stage, None);
        let imitator = start_job(&stage, Some(&imitation));
        for job in [&inside, &outside, &imitator] {
            daemon.wait_for_metrics_line(&exported_launches(job.pid(), 10));
        }
        let own = BTreeSet::from([u64::from(inside.pid())]);
        for wrapper in [&[][..], &namespaces] {
            assert_eq!(
                pids_listed_by_ps(&daemon, &pod.container_folder(), wrapper),
                own
            );
        }
        let all = pids_listed_by_ps(&daemon, pod.hierarchy(), &[]);
        for job in [&inside, &outside, &imitator] {
            assert!(all.contains(&u64::from(job.pid())), "{all:?}");
        }
        for job in [inside, outside, imitator] {
            job.let_exit();
        }
        for path in imitation.ancestors().take(3) {
            fs::remove_dir(path).expect("nobody is in it");
        }
    }
}
