//! Reads `cpu.max` of all cgroups, for kernels that do not report it to a scheduler (before 6.17).

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::DirEntryExt;
use std::path::Path;

/// The limit of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CgroupCpuLimit {
    pub(crate) quota_ns: u64,
    pub(crate) period_ns: u64,
}

/// Limited cgroups by their id.
pub(crate) type LimitsByCgroupId = HashMap<u64, CgroupCpuLimit>;

/// Where cgroup v2 is mounted. A kernel that mixes versions has the CPU controller in version 1, whose cgroups have no
/// `cpu.max`.
pub(crate) const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Reads the limits below a folder. Cgroups that vanish meanwhile have none.
pub(crate) fn read_cpu_limits(root: &Path) -> LimitsByCgroupId {
    let mut limits = LimitsByCgroupId::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let text = fs::read_to_string(entry.path().join("cpu.max")).unwrap_or_default();
            if let Some(limit) = parse_cpu_max(&text) {
                // The inode number of a cgroup's folder is its id.
                limits.insert(entry.ino(), limit);
            }
            folders.push(entry.path());
        }
    }
    limits
}

/// Reads `QUOTA PERIOD` in microseconds; `max PERIOD` is no limit.
fn parse_cpu_max(text: &str) -> Option<CgroupCpuLimit> {
    let (quota, period) = text.trim().split_once(' ')?;
    Some(CgroupCpuLimit {
        quota_ns: quota.parse::<u64>().ok()?.checked_mul(1000)?,
        period_ns: period.parse::<u64>().ok()?.checked_mul(1000)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_nested_cgroups_are_found() {
        let root = tempfile::tempdir().unwrap();
        let nested = root.path().join("pods/one");
        fs::create_dir_all(&nested).unwrap();
        fs::write(root.path().join("pods/cpu.max"), "max 100000\n").unwrap();
        fs::write(nested.join("cpu.max"), "25000 100000\n").unwrap();
        let limits: Vec<CgroupCpuLimit> = read_cpu_limits(root.path()).into_values().collect();
        let expected = CgroupCpuLimit {
            quota_ns: 25_000_000,
            period_ns: 100_000_000,
        };
        assert_eq!(limits, [expected]);
    }

    #[test]
    fn malformed_cpu_max_is_no_limit() {
        for text in [
            "",
            "max 100000",
            "100000",
            "x 1",
            "1 x",
            "18446744073709551615 1",
        ] {
            assert_eq!(parse_cpu_max(text), None, "{text}");
        }
    }
}
