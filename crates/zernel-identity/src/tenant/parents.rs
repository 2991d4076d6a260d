//! Finds the cgroups below which the kubelet and slurmd create the cgroups of tenants. The BPF programs look for
//! tenants below these cgroups.

use std::fs;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{
    KUBELET_CGROUP_NAMES, POD_QOS_CLASSES, PODS_CGROUP_NAMES, Tenant, is_slurm_root, is_slurm_scope,
};

/// A cgroup below which cgroups of tenants are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantParent {
    /// Path of the cgroup below the root of the hierarchy.
    pub path: PathBuf,
    /// Inode number of the cgroup, by which the kernel identifies it.
    pub id: u64,
    /// How many levels below this cgroup the cgroups of tenants are.
    pub levels_to_tenant: u32,
}

/// Finds the cgroups of a hierarchy below which cgroups of tenants are. `root` is where the hierarchy is mounted.
#[must_use]
pub fn tenant_parents(root: &Path) -> Vec<TenantParent> {
    let mut parents = Vec::new();
    let mut add = |path: PathBuf, levels| {
        if let Ok(found) = fs::metadata(root.join(&path)) {
            let id = found.ino();
            parents.push(TenantParent {
                path,
                id,
                levels_to_tenant: levels,
            });
        }
    };
    for above in [""].iter().chain(&KUBELET_CGROUP_NAMES) {
        for pods in PODS_CGROUP_NAMES {
            let pods_path = Path::new(above).join(pods);
            for class in POD_QOS_CLASSES {
                let slice = pods.strip_suffix(".slice");
                let class = slice.map_or(class.to_owned(), |it| format!("{it}-{class}.slice"));
                add(pods_path.join(class), 1);
            }
            add(pods_path, 1);
        }
    }
    for name in names_in_folder(root).filter(|name| is_slurm_root(name)) {
        add(name.into(), 2);
    }
    let system = Path::new("system.slice");
    for name in names_in_folder(&root.join(system)).filter(|name| is_slurm_scope(name)) {
        add(system.join(name), 1);
    }
    parents
}

/// The tenant whose cgroup has this id, below one of `parents`; `None` if it has been removed.
#[must_use]
pub fn tenant_with_cgroup(root: &Path, parents: &[TenantParent], id: u64) -> Option<Tenant> {
    parents.iter().find_map(|parent| {
        let path = find_cgroup_below(root, &parent.path, parent.levels_to_tenant, id)?;
        Tenant::from_cgroups([format!("/{}", path.display()).as_str()])
    })
}

fn find_cgroup_below(root: &Path, path: &Path, levels: u32, id: u64) -> Option<PathBuf> {
    let entries = fs::read_dir(root.join(path)).ok()?.flatten();
    let mut folders = entries.filter(|entry| entry.file_type().is_ok_and(|it| it.is_dir()));
    if levels <= 1 {
        let found = folders.find(|entry| entry.ino() == id);
        return found.map(|entry| path.join(entry.file_name()));
    }
    folders.find_map(|entry| find_cgroup_below(root, &path.join(entry.file_name()), levels - 1, id))
}

fn names_in_folder(folder: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD_UID: &str = "0e4f3c5a-1b2c-4d3e-9f80-a1b2c3d4e5f6";

    /// Creates a temporary folder with these folders in it.
    fn create_folders(paths: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for path in paths {
            fs::create_dir_all(root.path().join(path)).unwrap();
        }
        root
    }

    #[test]
    fn tenants_are_found_below_their_parents() {
        let slice = POD_UID.replace('-', "_");
        let cases = [
            (
                format!("kubepods.slice/kubepods-pod{slice}.slice"),
                Tenant::Pod(POD_UID.into()),
            ),
            (
                format!(
                    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice"
                ),
                Tenant::Pod(POD_UID.into()),
            ),
            (
                format!("kubepods/besteffort/pod{POD_UID}"),
                Tenant::Pod(POD_UID.into()),
            ),
            (
                format!("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{slice}.slice"),
                Tenant::Pod(POD_UID.into()),
            ),
            (
                "system.slice/n1_slurmstepd.scope/job_7".into(),
                Tenant::SlurmJob("7".into()),
            ),
            (
                "slurm_n1/uid_1000/job_8".into(),
                Tenant::SlurmJob("8".into()),
            ),
        ];
        for (path, tenant) in cases {
            let root = create_folders(&[&path, "user.slice/kubepods/podx"]);
            let id = fs::metadata(root.path().join(&path)).unwrap().ino();
            let parents = tenant_parents(root.path());
            let found = tenant_with_cgroup(root.path(), &parents, id);
            assert_eq!(found, Some(tenant), "{path}");
            assert_eq!(tenant_with_cgroup(root.path(), &parents, u64::MAX), None);
            assert!(parents.iter().all(|it| !it.path.starts_with("user.slice")));
        }
    }

    #[test]
    fn a_machine_without_pods_and_jobs_has_no_parents() {
        let root = create_folders(&[
            "user.slice/kubepods.slice",
            "system.slice/ssh.service",
            "kubepodsx",
        ]);
        assert_eq!(tenant_parents(root.path()), []);
    }
}
