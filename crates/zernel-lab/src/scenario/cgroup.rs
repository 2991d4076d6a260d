//! The cgroups of a scenario: their settings, and their folders in the virtual machine.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The folder in which the cgroups are made. The virtual machine has no other user of cgroups.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The period of `cpu.max` in microseconds, which is the kernel's default.
const CPU_MAX_PERIOD_US: u64 = 100_000;

/// A cgroup as a scenario file states it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScenarioCgroup {
    /// The path of the cgroup below the root, such as `a` or `a/b`.
    pub name: String,
    /// The names of the groups that start in the cgroup.
    pub groups: Vec<String>,
    /// The cgroup's `cpu.weight`, 1 to 10000.
    pub weight: Option<u32>,
    /// The cgroup's `cpuset.cpus`.
    pub cpus: Option<BTreeSet<usize>>,
    /// CPU time that the cgroup may use per 100 ms, in milliseconds (`cpu.max`).
    pub max_ms_per_100ms: Option<u64>,
    /// Whether the cgroup runs only when no other task wants the CPU (`cpu.idle`).
    pub idle: Option<bool>,
}

impl ScenarioCgroup {
    pub(super) fn check_settings(&self) -> Result<(), String> {
        let problem =
            |key: &str, text: &str| Err(format!("cgroup `{}`, key `{key}`: {text}", self.name));
        let is_bad_part = |part: &str| part.is_empty() || part.starts_with('.');
        if self.name.split('/').any(is_bad_part) {
            return problem("name", "use a relative path such as `a` or `a/b`");
        }
        if self
            .weight
            .is_some_and(|weight| !(1..=10_000).contains(&weight))
        {
            return problem("weight", "use 1 to 10000");
        }
        if self.max_ms_per_100ms == Some(0) {
            return problem("max_ms_per_100ms", "use at least 1");
        }
        if self.cpus.as_ref().is_some_and(BTreeSet::is_empty) {
            return problem("cpus", "name at least one CPU");
        }
        Ok(())
    }

    fn kernel_files_and_values(&self) -> impl Iterator<Item = (&'static str, String)> {
        let list = |cpus: &BTreeSet<usize>| {
            let cpus: Vec<String> = cpus.iter().map(ToString::to_string).collect();
            ("cpuset.cpus", cpus.join(","))
        };
        let quota = |ms: u64| ("cpu.max", format!("{} {CPU_MAX_PERIOD_US}", ms * 1000));
        [
            self.cpus.as_ref().map(list),
            self.weight.map(|weight| ("cpu.weight", weight.to_string())),
            self.max_ms_per_100ms.map(quota),
            self.idle
                .map(|idle| ("cpu.idle", u8::from(idle).to_string())),
        ]
        .into_iter()
        .flatten()
    }

    /// Makes the folder of the cgroup and writes its settings. The parent of the cgroup must exist.
    pub(super) fn create_in_kernel(&self) -> io::Result<()> {
        let folder = cgroup_folder(&self.name);
        if let Some(parent) = folder.parent() {
            write_existing_file(&parent.join("cgroup.subtree_control"), "+cpu +cpuset")?;
        }
        fs::create_dir(&folder)?;
        self.write_settings()
    }

    /// Writes the settings of the cgroup to its files.
    pub(super) fn write_settings(&self) -> io::Result<()> {
        let folder = cgroup_folder(&self.name);
        self.kernel_files_and_values()
            .try_for_each(|(file, text)| write_existing_file(&folder.join(file), &text))
    }
}

fn cgroup_folder(name: &str) -> PathBuf {
    Path::new(CGROUP_ROOT).join(name)
}

/// Makes a leaf below a cgroup, or below the root, moves processes into the leaf, and returns its path.
///
/// A leaf has no controllers: it counts CPU time, also that of processes that have exited, and changes nothing for the
/// scheduler.
pub(super) fn move_to_leaf_cgroup(
    parent: Option<&str>,
    group: &str,
    pids: &[i32],
) -> io::Result<PathBuf> {
    let leaf = format!("group-{group}");
    let path = parent.map_or_else(
        || PathBuf::from(&leaf),
        |parent| Path::new(parent).join(&leaf),
    );
    let folder = Path::new(CGROUP_ROOT).join(&path);
    match fs::create_dir(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let file = folder.join("cgroup.procs");
    pids.iter()
        .try_for_each(|pid| write_existing_file(&file, &pid.to_string()))?;
    Ok(path)
}

/// CPU time that all processes of a cgroup have used so far, in nanoseconds.
pub(super) fn used_cpu_ns(path: &Path) -> u64 {
    let text =
        fs::read_to_string(Path::new(CGROUP_ROOT).join(path).join("cpu.stat")).unwrap_or_default();
    let usage = text
        .lines()
        .find_map(|line| line.strip_prefix("usage_usec "));
    usage
        .and_then(|us| us.trim().parse::<u64>().ok())
        .unwrap_or(0)
        * 1000
}

/// Freezes or thaws a cgroup.
pub(super) fn set_frozen(name: &str, is_frozen: bool) -> io::Result<()> {
    write_existing_file(
        &cgroup_folder(name).join("cgroup.freeze"),
        if is_frozen { "1" } else { "0" },
    )
}

/// Switches a CPU off or on.
pub(super) fn set_cpu_online(cpu: usize, is_online: bool) -> io::Result<()> {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    write_existing_file(Path::new(&file), if is_online { "1" } else { "0" })
}

/// Writes a text to a file that exists. Errors name the file and the text.
fn write_existing_file(path: &Path, text: &str) -> io::Result<()> {
    let result = fs::OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    result.map_err(|error| {
        let text = format!("cannot write `{text}` to {}: {error}", path.display());
        io::Error::new(error.kind(), text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_settings_become_kernel_files_and_values() {
        let cgroup = ScenarioCgroup {
            name: "a".to_owned(),
            cpus: Some([0, 2].into()),
            weight: Some(300),
            max_ms_per_100ms: Some(150),
            idle: Some(true),
            ..ScenarioCgroup::default()
        };
        let settings: Vec<(&str, String)> = cgroup.kernel_files_and_values().collect();
        let expected = [
            ("cpuset.cpus", "0,2"),
            ("cpu.weight", "300"),
            ("cpu.max", "150000 100000"),
            ("cpu.idle", "1"),
        ];
        assert_eq!(
            settings,
            expected.map(|(file, text)| (file, text.to_owned()))
        );
    }

    #[test]
    fn cgroup_names_outside_root_are_refused() {
        for name in ["", "/a", "a/", "..", "a/../b", ".hidden"] {
            let cgroup = ScenarioCgroup {
                name: name.to_owned(),
                ..ScenarioCgroup::default()
            };
            assert!(cgroup.check_settings().is_err(), "{name}");
        }
    }
}
