//! Finds the GPU device nodes that a process can see. In a container these are its assigned GPUs.

use std::fs;

use procfs::process::{MountInfo, Process};

use crate::{Identity, is_alive};

/// Returns the minor numbers of `/dev/nvidia0` and so on in the process's `/dev`. `None` if they
/// cannot be read, or if the driver created no nodes.
pub(super) fn visible_minors(identity: &Identity) -> Option<Vec<u32>> {
    let process = Process::new(i32::try_from(identity.pid).ok()?).ok()?;
    let mounts = process.mountinfo().ok()?;
    if !is_kernel_dev(&mounts.0) {
        return None;
    }
    let folder = fs::read_dir(format!("/proc/{}/root/dev", identity.pid)).ok()?;
    let minors: Vec<u32> = folder
        .filter_map(|entry| minor(entry.ok()?.file_name().to_str()?))
        .collect();
    // The path contains the pid, which may have been reused.
    (!minors.is_empty() && is_alive(identity)).then_some(minors)
}

/// Whether `/dev` is a kernel file system. Reading a FUSE file system, which a process serves,
/// might never return.
fn is_kernel_dev(mounts: &[MountInfo]) -> bool {
    // The last of several mounts at one path is visible.
    let kind = |place: &str| {
        let mut seen = mounts.iter().rev();
        seen.find(|mount| mount.mount_point.as_os_str() == place)
            .map(|mount| mount.fs_type.as_str())
    };
    kind("/").is_some_and(|kind| !kind.starts_with("fuse"))
        && matches!(kind("/dev"), Some("tmpfs" | "devtmpfs"))
}

fn minor(name: &str) -> Option<u32> {
    let number = name.strip_prefix("nvidia")?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| number.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gpu_device_nodes_are_counted() {
        let cases = [
            ("nvidia0", Some(0)),
            ("nvidia15", Some(15)),
            ("nvidiactl", None),
            ("nvidia-uvm", None),
            ("nvidia-caps", None),
            ("nvidia", None),
            ("nvidia+1", None),
            ("nvme0", None),
        ];
        for (name, expected) in cases {
            assert_eq!(minor(name), expected, "{name}");
        }
    }

    #[test]
    fn only_tmpfs_and_devtmpfs_are_read() {
        const ROOT: &str = "1 0 0:50 / / rw,relatime - overlay overlay rw";
        const TMPFS: &str = "2 1 0:51 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755";
        const DEVTMPFS: &str = "2 1 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,mode=755";
        const FUSE: &str = "3 1 0:52 / /dev rw,nosuid - fuse.trap trap rw,user_id=1000";
        const FUSE_ROOT: &str = "1 0 0:52 / / rw,nosuid - fuse.trap trap rw,user_id=1000";
        let cases: [(&[&str], bool); 6] = [
            (&[ROOT, TMPFS], true),
            (&[DEVTMPFS, ROOT], true),
            (&[ROOT, TMPFS, FUSE], false),
            (&[ROOT, FUSE], false),
            (&[FUSE_ROOT, TMPFS], false),
            (&[ROOT], false),
        ];
        for (lines, expected) in cases {
            let mounts: Vec<_> = lines
                .iter()
                .map(|line| MountInfo::from_line(line).unwrap())
                .collect();
            assert_eq!(is_kernel_dev(&mounts), expected, "{lines:?}");
        }
    }
}
