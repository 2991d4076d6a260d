//! CPU weights as on a machine with systemd: the service has the weight of its unit below `system.slice`, and the users are
//! below `user.slice`. The cgroups of the test together outweigh what else the machine does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::OnceLock;

/// Where controllers are mounted.
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// `CPUWeight=` of `deploy/zernel.service`.
const SERVICE_WEIGHT: u64 = 50;
/// The weight of a cgroup that has no setting.
const DEFAULT_CGROUP_WEIGHT: u64 = 100;
/// The largest weight.
const MAX_CGROUP_WEIGHT: u64 = 10_000;

/// The cgroup of a process, below that of this test.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ProcessCgroup {
    Service,
    Clients,
    Victim,
    Attacker,
}

impl ProcessCgroup {
    fn path(self) -> &'static str {
        match self {
            Self::Service => "system.slice/zernel.service",
            Self::Clients => "system.slice/clients.service",
            Self::Victim => "user.slice/victim",
            Self::Attacker => "user.slice/attacker",
        }
    }
}

/// All cgroups of the test with their weights, outer cgroups first.
const CGROUP_WEIGHTS: [(&str, u64); 7] = [
    ("", MAX_CGROUP_WEIGHT),
    ("system.slice", DEFAULT_CGROUP_WEIGHT),
    ("user.slice", DEFAULT_CGROUP_WEIGHT),
    ("system.slice/zernel.service", SERVICE_WEIGHT),
    ("system.slice/clients.service", DEFAULT_CGROUP_WEIGHT),
    ("user.slice/victim", DEFAULT_CGROUP_WEIGHT),
    ("user.slice/attacker", DEFAULT_CGROUP_WEIGHT),
];

/// The cgroup of this test; `None` on machines without a CPU controller.
static TEST_CGROUP: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Creates the cgroups, and puts this process into that of the clients.
pub(crate) fn create_test_cgroups() {
    let test = TEST_CGROUP.get_or_init(|| {
        let mount = cpu_controller_mount()?;
        let test = mount.join(format!("zernel-attacks-{}", process::id()));
        for (path, weight) in CGROUP_WEIGHTS {
            create_cgroup_with_weight(&test.join(path), weight)?;
        }
        Some(test)
    });
    if test.is_none() {
        println!("no CPU weights: this machine has no cgroup controller for CPUs");
    }
    move_process_to_cgroup(ProcessCgroup::Clients, process::id());
}

/// Puts a process into a cgroup. Its children follow it.
pub(crate) fn move_process_to_cgroup(group: ProcessCgroup, pid: u32) {
    if let Some(test) = TEST_CGROUP.get().and_then(Option::as_ref) {
        let members = test.join(group.path()).join("cgroup.procs");
        fs::write(members, pid.to_string()).expect("it runs, and we are root");
    }
}

/// Removes the cgroups. Cgroups with a process that does not die stay.
pub(crate) fn remove_test_cgroups() {
    let Some(test) = TEST_CGROUP.get().and_then(Option::as_ref) else {
        return;
    };
    if let Some(mount) = test.parent() {
        let _ = fs::write(mount.join("cgroup.procs"), process::id().to_string());
    }
    for (path, _) in CGROUP_WEIGHTS.iter().rev() {
        let _ = fs::remove_dir(test.join(path));
    }
}

/// The mount of the CPU controller, with cgroup v1 or v2.
fn cpu_controller_mount() -> Option<PathBuf> {
    let root = Path::new(CGROUP_MOUNT);
    let first_version = root.join("cpu");
    if first_version.join("cpu.shares").exists() {
        return Some(first_version);
    }
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).ok()?;
    let has_cpu = controllers.split_whitespace().any(|name| name == "cpu");
    has_cpu.then(|| root.to_owned())
}

fn create_cgroup_with_weight(path: &Path, weight: u64) -> Option<()> {
    let parent = path.parent()?;
    if parent.join("cgroup.subtree_control").exists() {
        fs::write(parent.join("cgroup.subtree_control"), "+cpu").ok()?;
    }
    fs::create_dir(path).ok()?;
    let shares = weight * 1024 / DEFAULT_CGROUP_WEIGHT;
    let first_version = fs::write(path.join("cpu.shares"), shares.to_string());
    first_version
        .or_else(|_| fs::write(path.join("cpu.weight"), weight.to_string()))
        .ok()
}
