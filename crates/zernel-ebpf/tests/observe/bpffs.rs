//! A bpffs of a test, and the pinned maps in it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A bpffs that is unmounted on drop.
pub(crate) struct MountedBpffs(pub(crate) PathBuf);

impl MountedBpffs {
    pub(crate) fn mount(at: PathBuf) -> Self {
        std::fs::create_dir(&at).expect("our directory");
        let mut command = Command::new("mount");
        let status = command.args(["-t", "bpf", "bpf"]).arg(&at).status();
        assert!(status.expect("mount runs").success());
        Self(at)
    }
}

impl Drop for MountedBpffs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

pub(crate) fn open_pinned_map(path: &Path) -> MapHandle {
    MapHandle::from_pinned_path(path).expect("it is pinned")
}

pub(crate) fn id_of_map(map: &MapHandle) -> u32 {
    map.info().expect("a map").info.id
}

/// Returns the value of a process in a task storage map, whose keys are pidfds.
pub(crate) fn value_of_task(map: &MapHandle, pid: u32) -> Option<Vec<u8>> {
    let key = pidfd_key_of(pid);
    let value = map.lookup(&key.as_raw_fd().to_ne_bytes(), MapFlags::ANY);
    value.expect("a map of task storage")
}

pub(crate) fn set_value_of_task(map: &MapHandle, pid: u32, value: &[u8]) {
    let key = pidfd_key_of(pid);
    map.update(&key.as_raw_fd().to_ne_bytes(), value, MapFlags::ANY)
        .expect("a map of task storage");
}

fn pidfd_key_of(pid: u32) -> OwnedFd {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pidfd_open(pid.expect("a pid"), PidfdFlags::empty()).expect("it runs")
}
