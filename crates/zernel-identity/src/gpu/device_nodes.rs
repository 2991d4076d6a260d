//! Finds the GPU device nodes that a process can see. In a container, these nodes show the GPUs that the container
//! was assigned.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read};

use procfs::process::{MountInfo, Process};

use crate::{Identity, is_alive};

/// Bytes read of a process's list of mounts. Any user can make a namespace with 100,000 mounts at
/// paths of 4 KiB; the host of many containers has some thousands with up to 2 KiB.
const MAX_MOUNT_BYTES: u64 = 16 << 20;
/// Entries read of a process's `/dev`. The most entries that are read: machines with many disks have some thousands.
const MAX_DEVICE_NODES: usize = 1 << 16;

/// Returns the minor numbers of `/dev/nvidia0` and so on in the process's `/dev`. Returns `None` if the nodes cannot
/// be read, if there is more to read than on any machine, or if the driver created no nodes.
pub(super) fn visible_minors(identity: &Identity) -> Option<Vec<u32>> {
    let process = Process::new(i32::try_from(identity.pid).ok()?).ok()?;
    if !is_kernel_dev(process.open_relative("mountinfo").ok()?) {
        return None;
    }
    let folder = fs::read_dir(format!("/proc/{}/root/dev", identity.pid)).ok()?;
    let minors = gpu_minors(folder.map(|entry| Some(entry.ok()?.file_name())))?;
    // The path contains the pid, which may have been reused.
    (!minors.is_empty() && is_alive(identity)).then_some(minors)
}

/// Returns the minor numbers of GPUs among the entries of a folder. Returns `None` if the folder has too many
/// entries.
fn gpu_minors(entries: impl Iterator<Item = Option<OsString>>) -> Option<Vec<u32>> {
    let mut minors = Vec::new();
    for (count, entry) in entries.enumerate() {
        if count == MAX_DEVICE_NODES {
            return None;
        }
        minors.extend(entry.and_then(|name| gpu_minor(name.to_str()?)));
    }
    Some(minors)
}

/// Whether `/dev` is a kernel file system, by a list of mounts. Reading a FUSE file system, which a process serves,
/// might never return. Returns false if the list of mounts is too long.
fn is_kernel_dev(mounts: impl Read) -> bool {
    let mut lines = BufReader::new(mounts.take(MAX_MOUNT_BYTES + 1));
    let (mut root, mut dev) = (None, None);
    let (mut line, mut total) = (Vec::new(), 0);
    loop {
        line.clear();
        match lines.read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(length) => total += length as u64,
            Err(_) => return false,
        }
        // If several file systems are mounted at one path, the last one is visible.
        let text = String::from_utf8_lossy(&line);
        match text.split(' ').nth(4) {
            Some("/") => root = file_system_type(&text),
            Some("/dev") => dev = file_system_type(&text),
            _ => {}
        }
    }
    total <= MAX_MOUNT_BYTES
        && root.is_some_and(|kind| !kind.starts_with("fuse"))
        && matches!(dev.as_deref(), Some("tmpfs" | "devtmpfs"))
}

/// Returns the type of file system of a mount.
fn file_system_type(line: &str) -> Option<String> {
    let mount = MountInfo::from_line(line.trim_end_matches('\n')).ok()?;
    Some(mount.fs_type)
}

fn gpu_minor(name: &str) -> Option<u32> {
    let number = name.strip_prefix("nvidia")?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| number.parse().ok())?
}

#[cfg(test)]
mod tests {
    use zernel_testkit::fuzz::FuzzTarget;

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
            assert_eq!(gpu_minor(name), expected, "{name}");
        }
    }

    #[test]
    fn only_tmpfs_and_devtmpfs_are_read() {
        const ROOT_MOUNT: &str = "1 0 0:50 / / rw,relatime - overlay overlay rw";
        const TMPFS_DEV_MOUNT: &str =
            "2 1 0:51 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755";
        const DEVTMPFS_DEV_MOUNT: &str =
            "2 1 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,mode=755";
        const FUSE_DEV_MOUNT: &str = "3 1 0:52 / /dev rw,nosuid - fuse.trap trap rw,user_id=1000";
        const FUSE_ROOT_MOUNT: &str = "1 0 0:52 / / rw,nosuid - fuse.trap trap rw,user_id=1000";
        let cases: [(&[&str], bool); 6] = [
            (&[ROOT_MOUNT, TMPFS_DEV_MOUNT], true),
            (&[DEVTMPFS_DEV_MOUNT, ROOT_MOUNT], true),
            (&[ROOT_MOUNT, TMPFS_DEV_MOUNT, FUSE_DEV_MOUNT], false),
            (&[ROOT_MOUNT, FUSE_DEV_MOUNT], false),
            (&[FUSE_ROOT_MOUNT, TMPFS_DEV_MOUNT], false),
            (&[ROOT_MOUNT], false),
        ];
        for (lines, expected) in cases {
            let text = lines.join("\n");
            assert_eq!(is_kernel_dev(text.as_bytes()), expected, "{lines:?}");
        }
    }

    #[test]
    fn a_list_of_mounts_that_is_too_long_is_refused() {
        let head = b"1 0 0:50 / / rw,relatime - overlay overlay rw\n\
            2 1 0:51 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755\n";
        assert!(is_kernel_dev(&head[..]));
        assert!(!is_kernel_dev(head.chain(std::io::repeat(b'x'))));
        let other = b"3 1 0:52 / /mnt rw - tmpfs tmpfs rw\n";
        let list = [&head[..], &other.repeat(500_000)].concat();
        assert!(is_kernel_dev(&list[..MAX_MOUNT_BYTES as usize]));
        assert!(!is_kernel_dev(&list[..=MAX_MOUNT_BYTES as usize]));
    }

    #[test]
    fn a_folder_with_too_many_entries_is_refused() {
        let entries = |count| (0..count).map(|number| Some(format!("nvidia{number}").into()));
        let minors_of = |count| gpu_minors(entries(count)).map(|minors| minors.len());
        assert_eq!(minors_of(MAX_DEVICE_NODES), Some(MAX_DEVICE_NODES));
        assert_eq!(minors_of(MAX_DEVICE_NODES + 1), None);
    }

    #[test]
    fn fuzz_mounts() {
        let mounts = "1 0 0:50 / / rw,relatime shared:1 master:2 - overlay overlay rw,lowerdir=/a\n\
            2 1 0:51 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755\n\
            3 1 0:52 / /mnt/a\\040b rw propagate_from:3 unbindable - fuse.sshfs none rw,user_id=1000\n";
        let words = [
            " - ", " / ", " /dev ", "tmpfs", "fuse", "shared:", ",", "=", "\n", "0:",
        ];
        let mut accepted = 0_u64;
        let target = FuzzTarget::new("mounts", 30_000).input(mounts).words(words);
        let outcome = target.run(|bytes| accepted += u64::from(is_kernel_dev(bytes)));
        assert!(accepted > outcome.inputs / 20, "{accepted}: {outcome:?}");
    }
}
