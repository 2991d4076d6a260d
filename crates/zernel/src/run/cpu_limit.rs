//! How long the CPU limit of a cgroup has made threads wait.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Where cgroup file systems are mounted.
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";

/// Seconds for which the CPU limit of each cgroup of a process has throttled it, summed over CPUs: of its own and of those
/// above. A cgroup that does not count throttled time is left out.
pub(super) fn throttled_seconds_by_cgroup(pid: u32) -> BTreeMap<PathBuf, f64> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let folders = cgroups.lines().filter_map(cgroup_folder);
    let accounts = folders.flat_map(|folder| {
        // A limit of any cgroup above throttles too.
        let above: Vec<PathBuf> = folder.ancestors().map(Path::to_owned).collect();
        let inside = above
            .into_iter()
            .take_while(|path| path.starts_with(CGROUP_MOUNT));
        inside.filter_map(|path| {
            let statistics = fs::read_to_string(path.join("cpu.stat")).ok()?;
            Some((path, throttled_seconds_in(&statistics)?))
        })
    });
    accounts.collect()
}

/// The folder of a cgroup with CPU limits, from a line of `/proc/PID/cgroup`: `0::/path` for version 2, or
/// `4:cpu,cpuacct:/path`.
fn cgroup_folder(line: &str) -> Option<PathBuf> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let path = path.trim_start_matches('/');
    match controllers {
        "" => Some(Path::new(CGROUP_MOUNT).join(path)),
        _ if controllers.split(',').any(|name| name == "cpu") => {
            Some(Path::new(CGROUP_MOUNT).join(controllers).join(path))
        }
        _ => None,
    }
}

/// The throttled time in a `cpu.stat`: microseconds in version 2, nanoseconds in version 1.
fn throttled_seconds_in(statistics: &str) -> Option<f64> {
    let mut values = statistics.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        let value: f64 = value.trim().parse().ok()?;
        match name {
            "throttled_usec" => Some(value / 1e6),
            "throttled_time" => Some(value / 1e9),
            _ => None,
        }
    });
    values.next().filter(|seconds| seconds.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttled_time_is_read_from_both_cgroup_versions() {
        let second = "usage_usec 7\nnr_periods 9\nnr_throttled 3\nthrottled_usec 2500000\n";
        assert_eq!(throttled_seconds_in(second), Some(2.5));
        let first = "nr_periods 9\nnr_throttled 3\nthrottled_time 2500000000\n";
        assert_eq!(throttled_seconds_in(first), Some(2.5));
        assert_eq!(throttled_seconds_in("usage_usec 7\n"), None);
        assert_eq!(throttled_seconds_in("throttled_usec x\n"), None);
    }

    #[test]
    fn the_folder_is_found_with_both_cgroup_versions() {
        let folder = |line| cgroup_folder(line).map(|path| path.display().to_string());
        assert_eq!(folder("0::/job"), Some("/sys/fs/cgroup/job".to_owned()));
        let first = folder("4:cpu,cpuacct:/job");
        assert_eq!(first, Some("/sys/fs/cgroup/cpu,cpuacct/job".to_owned()));
        assert_eq!(folder("5:memory:/job"), None);
        assert_eq!(folder("nonsense"), None);
    }
}
