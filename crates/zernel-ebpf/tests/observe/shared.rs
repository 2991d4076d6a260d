//! Task states in pinned maps, for a scheduler.

use std::path::{Path, PathBuf};
use std::process::Command;

use libbpf_rs::{MapCore, MapHandle, MapType};
use zernel_ebpf::observer::{Observer, ObserverOptions};
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::Stage;

use crate::harness::{exact, start};

/// A bpffs that is unmounted on drop.
struct Bpffs(PathBuf);

impl Bpffs {
    fn mount(at: PathBuf) -> Self {
        std::fs::create_dir(&at).expect("our directory");
        let mut command = Command::new("mount");
        let status = command.args(["-t", "bpf", "bpf"]).arg(&at).status();
        assert!(status.expect("mount runs").success());
        Self(at)
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn pinned_id(path: &Path) -> u32 {
    let map = MapHandle::from_pinned_path(path).expect("it is pinned");
    assert_eq!(map.map_type(), MapType::TaskStorage);
    map.info().expect("a map").info.id
}

fn observe(stage: &Stage, pins: &Path) -> Observer {
    start(&ObserverOptions {
        pins: pins.to_owned(),
        ..exact(stage)
    })
}

pub(crate) fn pinned() {
    let stage = Stage::alone(Prologue::Push);
    let bpffs = Bpffs::mount(stage.path().join("bpffs"));
    let pins = bpffs.0.join("zernel");

    let first = observe(&stage, &pins);
    let path = first.shared_state().expect("there is a bpffs");
    let id = pinned_id(&path);
    // A second one leaves them alone while the first one lives.
    let second = observe(&stage, &pins);
    let reason = second.shared_state().expect_err("they belong to the first");
    assert!(reason.contains("another observer"), "{reason}");
    drop(second);
    assert_eq!(pinned_id(&path), id);

    let mut target = stage.target("launches", 5);
    target.step();
    let state = first.task_state(target.pid()).expect("the map is there");
    assert_eq!(state.map(|state| state.tgid), Some(target.pid()));
    drop(first);
    assert!(!pins.exists(), "nothing stays pinned");
}

pub(crate) fn without_bpffs() {
    let stage = Stage::alone(Prologue::Push);
    let observer = observe(&stage, &stage.path().join("zernel"));
    let reason = observer.shared_state().expect_err("there is no bpffs");
    assert!(reason.contains("no bpffs"), "{reason}");
}
