//! Task states in pinned maps, for a scheduler.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use zernel_ebpf::observer::{Observer, ObserverOptions};
use zernel_phase::shared::{HEART_OBSERVER, HEART_READER, Heartbeat, RawTracker, layout_hash};
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::{Driver, Stage, TargetRole, call, end_part_and_wait, stage_directory};
use zerocopy::{FromBytes, IntoBytes};

use crate::bpffs::{MountedBpffs, id_of_map, open_pinned_map, value_of_task};
use crate::harness::{options_that_count_everything, start_observer};

pub(crate) const SHARED_STATE_ROLES: &[(&str, TargetRole)] = &[
    ("observes", target_observe_until_killed),
    ("opens, then syncs", target_open_then_sync),
];

/// Opens the device, and after a pause makes its only call that is an event for the tracker.
fn target_open_then_sync(driver: &Driver, _rounds: u64) {
    driver.open_first_device();
    end_part_and_wait();
    call!(driver.cuda(), "cuCtxSynchronize");
}

/// Observes until it is killed, with its pins in the stage's bpffs.
fn target_observe_until_killed(_driver: &Driver, _rounds: u64) {
    let _observer = start_observer(&ObserverOptions {
        libraries: vec![stage_directory().join("libcuda.so.1")],
        pins: stage_directory().join("bpffs/zernel"),
        ..ObserverOptions::default()
    });
    end_part_and_wait();
}

fn id_of_pinned_map(path: &Path) -> u32 {
    let map = open_pinned_map(path);
    assert_eq!(map.map_type(), MapType::TaskStorage);
    id_of_map(&map)
}

fn observe_with_pins(stage: &Stage, pins: &Path) -> Observer {
    start_observer(&ObserverOptions {
        pins: pins.to_owned(),
        ..options_that_count_everything(stage)
    })
}

pub(crate) fn states_are_pinned_for_a_scheduler() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let pins = bpffs.0.join("zernel");

    let first = observe_with_pins(&stage, &pins);
    let path = first.shared_state().expect("there is a bpffs");
    let id = id_of_pinned_map(&path);
    // A second observer does not touch the pins while the first one runs.
    let second = observe_with_pins(&stage, &pins);
    let reason = second.shared_state().expect_err("they belong to the first");
    assert!(reason.contains("another observer"), "{reason}");
    drop(second);
    assert_eq!(id_of_pinned_map(&path), id);

    let mut target = stage.start_target("launches", 5);
    target.run_part();
    let state = first.task_state(target.pid()).expect("the map is there");
    assert_eq!(state.map(|state| state.tgid), Some(target.pid()));
    drop(first);
    assert!(!pins.exists(), "nothing stays pinned");
}

/// The first call of a process is an event: its tracker begins no later than that.
pub(crate) fn the_first_event_of_a_process_is_tracked() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut target = stage.start_target("opens, then syncs", 1);
    target.run_part();
    let observer = start_observer(&options_that_count_everything(&stage));
    target.run_part();
    let state = observer.task_state(target.pid()).expect("the map is there");
    let tracker = state.expect("it is observed").tracker;
    assert_ne!(tracker.flags & RawTracker::TRAINING_THREAD, 0);
    assert_eq!(tracker.late_events, 0);
}

/// An observer of another version was killed: its pins are replaced. While that observer lives, its pins stay.
pub(crate) fn pins_of_another_version_are_replaced() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let pins = bpffs.0.join("zernel");
    fs::create_dir(&pins).expect("our directory");
    let other = pins.join("tasks-01234567");
    let heartbeat = pins.join("heartbeat");
    let owner = std::process::id();
    let _other_pins = (
        pin_array(&other, &[0; 8]),
        pin_array(&heartbeat, &long_heartbeat(u64::MAX, owner)),
    );
    let beside = observe_with_pins(&stage, &pins);
    let reason = beside.shared_state().expect_err("they belong to the other");
    assert!(reason.contains(&format!("pid {owner}")), "{reason}");
    drop(beside);
    assert!(other.exists() && heartbeat.exists());

    fs::remove_file(&heartbeat).expect("it is pinned");
    let _dead = pin_array(&heartbeat, &long_heartbeat(0, owner));
    let after = observe_with_pins(&stage, &pins);
    let path = after.shared_state().expect("the other is dead");
    id_of_pinned_map(&path);
    assert!(!other.exists(), "the pin of the other layout is removed");
    drop(after);
    assert!(!pins.exists(), "nothing stays pinned");
}

/// The two maps, as a reader holds them.
struct PinnedMapsReader {
    tasks: MapHandle,
    hearts: MapHandle,
}

impl PinnedMapsReader {
    fn open(pins: &Path) -> Self {
        Self {
            tasks: open_pinned_map(&pins.join(format!("tasks-{:08x}", layout_hash()))),
            hearts: open_pinned_map(&pins.join("heartbeat")),
        }
    }

    fn map_ids(&self) -> (u32, u32) {
        (id_of_map(&self.tasks), id_of_map(&self.hearts))
    }

    fn observer_heartbeat(&self) -> Heartbeat {
        let value = self
            .hearts
            .lookup(&HEART_OBSERVER.to_ne_bytes(), MapFlags::ANY);
        let value = value.expect("an array").expect("it has an element");
        Heartbeat::read_from_bytes(&value).expect("its size")
    }

    /// Beats once, as a reader does five times per second.
    fn beat_as_reader(&self, last_beat_ns: u64) {
        let heartbeat = Heartbeat {
            last_beat_ns,
            owner_pid: std::process::id(),
            layout_hash: layout_hash(),
            since_ns: last_beat_ns,
        };
        let key = HEART_READER.to_ne_bytes();
        self.hearts
            .update(&key, heartbeat.as_bytes(), MapFlags::ANY)
            .expect("an array");
    }
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// An observer is killed. A reader of the observer's maps sees its heart stop within a second. Then the reader sees
/// the heart of the next observer in the same maps, without the states of the killed one.
pub(crate) fn readers_see_a_killed_observer_and_the_next() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let pins = bpffs.0.join("zernel");
    let mut first = stage.start_target("observes", 0);
    first.run_part();
    let reader = PinnedMapsReader::open(&pins);
    let heart = reader.observer_heartbeat();
    assert!(heart.is_alive(now_ns()), "{heart:?}");
    assert_eq!(
        (heart.owner_pid, heart.layout_hash),
        (first.pid(), layout_hash())
    );
    let mut target = stage.start_target("launches", 5);
    target.run_part();
    assert!(value_of_task(&reader.tasks, target.pid()).is_some());
    // A beat lasts longer than the time between two beats.
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        assert!(
            reader.observer_heartbeat().is_alive(now_ns()),
            "it beats all the time"
        );
        thread::sleep(Duration::from_millis(10));
    }

    first.kill();
    thread::sleep(Duration::from_secs(1));
    assert!(
        !reader.observer_heartbeat().is_alive(now_ns()),
        "it is dead"
    );

    let second = observe_with_pins(&stage, &pins);
    second.shared_state().expect("the first is dead");
    assert_eq!(PinnedMapsReader::open(&pins).map_ids(), reader.map_ids());
    let next = reader.observer_heartbeat();
    assert!(next.is_alive(now_ns()), "{next:?}");
    assert_ne!(next.since_ns, heart.since_ns);
    let stale = value_of_task(&reader.tasks, target.pid());
    assert_eq!(stale, None, "nothing is known of it yet");
}

/// An observer that is restarted at once takes over its maps. An observer that stops leaves its maps to a reader.
pub(crate) fn pins_outlive_a_restart() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let pins = bpffs.0.join("zernel");
    let mut first = stage.start_target("observes", 0);
    first.run_part();
    let reader = PinnedMapsReader::open(&pins);
    first.kill();
    let second = observe_with_pins(&stage, &pins);
    second.shared_state().expect("the first is dead");
    assert_eq!(PinnedMapsReader::open(&pins).map_ids(), reader.map_ids());

    reader.beat_as_reader(now_ns());
    drop(second);
    assert_eq!(
        reader.observer_heartbeat().last_beat_ns,
        0,
        "it says that it ends"
    );
    assert_eq!(PinnedMapsReader::open(&pins).map_ids(), reader.map_ids());
    let third = observe_with_pins(&stage, &pins);
    third.shared_state().expect("nobody else observes");
    assert_eq!(PinnedMapsReader::open(&pins).map_ids(), reader.map_ids());
    assert!(reader.observer_heartbeat().is_alive(now_ns()));
    reader.beat_as_reader(0);
    drop(third);
    assert!(!pins.exists(), "nobody reads them");
}

/// A heartbeat as a later version may have it: with more fields than this one.
fn long_heartbeat(last_beat_ns: u64, owner: u32) -> Vec<u8> {
    let mut value = last_beat_ns.to_ne_bytes().to_vec();
    value.extend(owner.to_ne_bytes());
    value.resize(32, 0);
    value
}

/// Creates a BPF array map with one value and pins it.
pub(crate) fn pin_array(path: &Path, value: &[u8]) -> MapHandle {
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

pub(crate) fn an_observer_starts_without_a_bpffs() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let observer = observe_with_pins(&stage, &stage.path().join("zernel"));
    let reason = observer.shared_state().expect_err("there is no bpffs");
    assert!(reason.contains("no bpffs"), "{reason}");
}
