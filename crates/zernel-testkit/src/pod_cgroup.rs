//! Creates the cgroup of a Kubernetes pod, at a place where the kubelet creates it.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::Need;

/// The cgroup of a pod, with its containers. It is removed when this value is dropped.
pub struct PodCgroup {
    root: PathBuf,
    path: PathBuf,
}

impl PodCgroup {
    /// The UID of the pod in the name of its cgroup.
    pub const POD_UID: &'static str = "0e4f3c5a-1b2c-4d3e-9f80-a1b2c3d4e5f6";

    /// Creates the cgroup of a pod in each hierarchy, one after the other: the unified one, and that of the memory
    /// controller of cgroup v1.
    pub fn in_each_hierarchy() -> impl Iterator<Item = Self> {
        mounted_hierarchies()
            .into_iter()
            .map(|(root, path)| Self::new(&root, &path))
    }

    fn new(root: &Path, path: &str) -> Self {
        fs::create_dir_all(root.join(path)).expect("we are root");
        Self {
            root: root.to_owned(),
            path: path.into(),
        }
    }

    /// The mount point of the hierarchy in which the pod's cgroup is.
    pub fn hierarchy(&self) -> &Path {
        &self.root
    }

    /// The directory of the pod's container. It is created if need be.
    pub fn container_folder(&self) -> PathBuf {
        let container = self.root.join(&self.path).join("container");
        fs::create_dir_all(&container).expect("we are root");
        container
    }

    /// Moves a process into the pod's container.
    pub fn move_into_container(&self, process: u32) {
        let members = self.container_folder().join("cgroup.procs");
        fs::write(members, process.to_string()).expect("we are root");
    }
}

impl Drop for PodCgroup {
    fn drop(&mut self) {
        let pod = self.root.join(&self.path);
        for _ in 0..200 {
            // The cgroup is busy until its last process has exited.
            if fs::remove_dir(pod.join("container")).is_ok() {
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        for path in self.path.ancestors().filter(|it| *it != Path::new("")) {
            let _ = fs::remove_dir(self.root.join(path));
        }
    }
}

/// The mounted cgroup hierarchies in which a pod may be, with the pod's path in each.
fn mounted_hierarchies() -> Vec<(PathBuf, String)> {
    let mount = Path::new("/sys/fs/cgroup");
    let unified = match mount.join("cgroup.controllers").exists() {
        true => mount.to_owned(),
        false => mount.join("unified"),
    };
    let uid = PodCgroup::POD_UID;
    let slice = uid.replace('-', "_");
    let all = [
        (
            unified,
            format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice"),
        ),
        (
            mount.join("memory"),
            format!("kubepods/besteffort/pod{uid}"),
        ),
    ];
    let is_there = |(root, _): &(PathBuf, String)| root.join("cgroup.procs").exists();
    all.into_iter().filter(is_there).collect()
}

/// The need for a machine on which a test can create the cgroup of a pod.
pub const NO_KUBELET_NEED: Need = Need {
    name: "no-kubelet",
    check: || {
        let hierarchies = mounted_hierarchies();
        if hierarchies.is_empty() {
            return Err("no hierarchy of cgroups is mounted".into());
        }
        for (root, path) in hierarchies {
            let first = root.join(path.split('/').next().unwrap_or_default());
            if first.exists() {
                return Err(format!("{} exists", first.display()));
            }
            fs::create_dir(&first).map_err(|error| format!("{}: {error}", first.display()))?;
            fs::remove_dir(&first).map_err(|error| format!("{}: {error}", first.display()))?;
        }
        Ok(())
    },
};
