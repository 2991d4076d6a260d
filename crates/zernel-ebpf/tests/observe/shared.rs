//! Task states in pinned maps, for a scheduler.

use std::path::{Path, PathBuf};
use std::process::Command;

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
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

/// An observer of another version was killed: its pins are replaced. While it lives, they stay.
pub(crate) fn pinned_by_another_version() {
    let stage = Stage::alone(Prologue::Push);
    let bpffs = Bpffs::mount(stage.path().join("bpffs"));
    let pins = bpffs.0.join("zernel");
    std::fs::create_dir(&pins).expect("our directory");
    let other = pins.join("tasks-01234567");
    let heartbeat = pins.join("heartbeat");
    let owner = std::process::id();
    let _other_pins = (
        pin(&other, &[0; 8]),
        pin(&heartbeat, &long_heartbeat(u64::MAX, owner)),
    );
    let beside = observe(&stage, &pins);
    let reason = beside.shared_state().expect_err("they belong to the other");
    assert!(reason.contains(&format!("pid {owner}")), "{reason}");
    drop(beside);
    assert!(other.exists() && heartbeat.exists());

    std::fs::remove_file(&heartbeat).expect("it is pinned");
    let _dead = pin(&heartbeat, &long_heartbeat(0, owner));
    let after = observe(&stage, &pins);
    let path = after.shared_state().expect("the other is dead");
    pinned_id(&path);
    assert!(!other.exists(), "the pin of the other layout is removed");
    drop(after);
    assert!(!pins.exists(), "nothing stays pinned");
}

/// A heartbeat as a later version may have it: with more fields than this one.
fn long_heartbeat(beat_ns: u64, owner: u32) -> Vec<u8> {
    let mut value = beat_ns.to_ne_bytes().to_vec();
    value.extend(owner.to_ne_bytes());
    value.resize(32, 0);
    value
}

/// Pins an array with one value.
fn pin(path: &Path, value: &[u8]) -> MapHandle {
    let options = libbpf_rs::libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as u64,
        ..Default::default()
    };
    let size = value.len() as u32;
    let map = MapHandle::create(MapType::Array, Some("other"), 4, size, 1, &options);
    let mut map = map.expect("an array");
    map.update(&0_u32.to_ne_bytes(), value, MapFlags::ANY)
        .expect("it has an element");
    map.pin(path).expect("a bpffs");
    map
}

pub(crate) fn without_bpffs() {
    let stage = Stage::alone(Prologue::Push);
    let observer = observe(&stage, &stage.path().join("zernel"));
    let reason = observer.shared_state().expect_err("there is no bpffs");
    assert!(reason.contains("no bpffs"), "{reason}");
}
