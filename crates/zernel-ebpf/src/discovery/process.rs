//! Processes and the files they map.

use std::path::PathBuf;

use procfs::process::Process;
use zernel_model::snapshot::PROC_START_TIME_UNIT_NS;

/// A process. The start time distinguishes the process from earlier ones with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessKey {
    /// The pid of the process in the initial pid namespace: the thread group.
    pub pid: u32,
    /// Start of the process in nanoseconds since boot, suspended time included, rounded down to the 10 ms of procfs.
    pub start_ns: u64,
}

impl ProcessKey {
    /// From the `start_boottime` of the kernel's task.
    #[must_use]
    pub fn new(pid: u32, start_boottime_ns: u64) -> Self {
        Self {
            pid,
            start_ns: start_boottime_ns / PROC_START_TIME_UNIT_NS * PROC_START_TIME_UNIT_NS,
        }
    }

    /// From `/proc/PID/stat`; `None` if the process is a zombie.
    pub(super) fn from_procfs(process: &Process) -> Option<Self> {
        let stat = process.stat().ok()?;
        let is_dead = matches!(stat.state, 'Z' | 'X') && stat.num_threads <= 1;
        let pid = u32::try_from(stat.pid).ok()?;
        (!is_dead).then(|| Self::new(pid, stat.starttime.saturating_mul(PROC_START_TIME_UNIT_NS)))
    }

    /// Whether the process still runs: it has not exited, and its pid was not reused.
    #[must_use]
    pub fn is_alive(self) -> bool {
        let pid = i32::try_from(self.pid).unwrap_or(i32::MAX);
        let process = Process::new(pid).ok();
        process.and_then(|process| Self::from_procfs(&process)) == Some(self)
    }
}

/// A file that a process maps, as the kernel shows the mapping.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MappedFile {
    /// The device of the mapped inode, encoded as in `stat`. On overlayfs and btrfs, `stat` shows another device and
    /// another inode.
    pub device: u64,
    /// The mapped inode: the one that a uprobe on the file is attached to.
    pub inode: u64,
    /// The path as `/proc/PID/maps` shows it, possibly followed by ` (deleted)`. In the mount namespace of this
    /// program, the path may name another file.
    pub path: PathBuf,
    /// `/proc/PID/map_files/START-END`: opens exactly the mapped file, whatever the mount namespace
    /// of the process, and also after it was deleted.
    pub map_files: PathBuf,
    /// First address of the mapping in the process.
    pub start: u64,
    /// The end of the mapping, exclusive.
    pub end: u64,
    /// Offset of the mapping in the file, in bytes.
    pub offset: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_pid_is_another_process() {
        let own = ProcessKey::from_procfs(&Process::myself().unwrap()).unwrap();
        assert_eq!(own.pid, std::process::id());
        assert!(own.is_alive());
        let predecessor = ProcessKey::new(own.pid, own.start_ns - 1);
        assert!(!predecessor.is_alive());
    }

    #[test]
    fn both_sources_of_a_start_time_agree() {
        assert_eq!(ProcessKey::new(1, 123_456_789).start_ns, 120_000_000);
    }
}
