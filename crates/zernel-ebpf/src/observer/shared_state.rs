//! Pins the maps of task states and heartbeats, so that a scheduler can read them.
//!
//! Observer and scheduler start and stop independently. The name of the pinned task states contains a hash of their
//! layout. A heartbeat is pinned beside the task states: when the heartbeat stops, task states are stale and a scheduler
//! must treat them as unknown. The next observer reuses the maps of task states and heartbeats, because a scheduler may
//! be reading them: after the observer was killed, and after it ended while a reader was active. Task states of another
//! layout, which another version left behind, are removed.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, thread};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject};
use procfs::process::{ProcState, Process};
use zernel_phase::shared::{
    HEART_OBSERVER, HEARTBEAT_PIN, HEARTS, Heartbeat, TASKS_PIN, layout_hash,
};
use zerocopy::{FromZeros, IntoBytes};

use super::mapped_array::MappedArray;
use super::observer_heart::ObserverHeart;
use super::{monotonic_ns, pinned_map};
use crate::capability::innermost_reason;
use crate::probe_link::PIN_PREFIX;

const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// A directory of pins that no other observer uses.
#[derive(Debug)]
pub(super) struct PinDirectory {
    directory: PathBuf,
    /// Whether the object reuses task states that another observer left behind.
    pub(super) reuses_tasks: bool,
}

/// The pins of this observer; dropping it removes them unless a scheduler reads them.
#[derive(Debug)]
pub(super) struct ObserverPins {
    directory: PinDirectory,
    heart: ObserverHeart,
}

impl PinDirectory {
    /// Makes an object that is not loaded yet reuse the pinned maps, if there are any. An error says why nothing is
    /// shared.
    pub(super) fn claim_directory(
        directory: &Path,
        object: &mut OpenObject,
    ) -> Result<Self, String> {
        let parent = directory.parent().unwrap_or(directory);
        let is_bpffs = rustix::fs::statfs(parent).is_ok_and(|status| status.f_type == BPF_FS_MAGIC);
        if !is_bpffs {
            return Err(format!("no bpffs is mounted at {}", parent.display()));
        }
        let mut pins = Self {
            directory: directory.to_owned(),
            reuses_tasks: false,
        };
        if let Some(owner) = pins.live_owner() {
            return Err(format!(
                "another observer (pid {owner}) has pinned its task states"
            ));
        }
        match fs::create_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(format!(
                    "{} cannot be created: {error}",
                    directory.display()
                ));
            }
            _ => {}
        }
        pins.remove_other_layouts();
        pins.reuses_tasks = reuse_or_remove_pin(object, "zernel_tasks", &pins.task_map_path());
        reuse_or_remove_pin(object, "zernel_heartbeats", &pins.heartbeat_map_path());
        Ok(pins)
    }

    /// Pins the maps of the loaded object, and starts the heart.
    pub(super) fn pin_maps(
        self,
        mut tasks: MapHandle,
        mut heartbeats: MapHandle,
    ) -> Result<ObserverPins, String> {
        let problem =
            |error: libbpf_rs::Error| format!("pinning failed ({})", innermost_reason(&error));
        let hearts = MappedArray::new(&heartbeats, HEARTS as usize);
        let heart = hearts.and_then(ObserverHeart::start);
        let heart = heart.map_err(|error| format!("no heartbeat can be written ({error})"))?;
        if !self.task_map_path().exists() {
            tasks.pin(self.task_map_path()).map_err(problem)?;
        }
        if !self.heartbeat_map_path().exists() {
            heartbeats.pin(self.heartbeat_map_path()).map_err(problem)?;
        }
        Ok(ObserverPins {
            directory: self,
            heart,
        })
    }

    fn task_map_path(&self) -> PathBuf {
        let hash = layout_hash();
        self.directory.join(format!("{TASKS_PIN}{hash:08x}"))
    }

    fn heartbeat_map_path(&self) -> PathBuf {
        self.directory.join(HEARTBEAT_PIN)
    }

    /// Removes what dead observers left behind: maps of task states with another layout, and links.
    fn remove_other_layouts(&self) {
        let own = self.task_map_path();
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let is_of_tasks = name.starts_with(TASKS_PIN);
            // An observer that is killed while it detaches a link leaves the pin of that link behind.
            let is_link = name.starts_with(PIN_PREFIX);
            if (is_of_tasks && entry.path() != own) || is_link {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Pid of another running observer that uses the directory. An observer that was killed a moment ago is not
    /// running, although its last beat is recent.
    fn live_owner(&self) -> Option<u32> {
        let first = self.read_heartbeat()?;
        if first.is_alive(monotonic_ns()) && is_running(first.owner_pid) {
            return Some(first.owner_pid);
        }
        // The owner's pid may be one of another namespace: the owner runs if it beats again.
        while first.is_alive(monotonic_ns()) {
            thread::sleep(Duration::from_millis(20));
            let next = self.read_heartbeat()?;
            if next.last_beat_ns != first.last_beat_ns {
                return (next.last_beat_ns != 0).then_some(next.owner_pid);
            }
        }
        None
    }

    fn read_heartbeat(&self) -> Option<Heartbeat> {
        let map = MapHandle::from_pinned_path(self.heartbeat_map_path()).ok()?;
        let value = map.lookup(&HEART_OBSERVER.to_ne_bytes(), MapFlags::ANY);
        let value = value.ok()??;
        // An observer of another version may have a longer or a shorter heartbeat.
        let mut heartbeat = Heartbeat::new_zeroed();
        let common = value.len().min(size_of::<Heartbeat>());
        heartbeat.as_mut_bytes()[..common].copy_from_slice(&value[..common]);
        Some(heartbeat)
    }
}

impl ObserverPins {
    /// Path of the pinned map of task states.
    pub(super) fn task_map_path(&self) -> PathBuf {
        self.directory.task_map_path()
    }
}

impl Drop for ObserverPins {
    fn drop(&mut self) {
        // A reader cannot change to another map, so the pin stays and the next observer reuses the map.
        if self.heart.has_reader() {
            return;
        }
        let _ = fs::remove_file(self.directory.task_map_path());
        let _ = fs::remove_file(self.directory.heartbeat_map_path());
        let _ = fs::remove_dir(&self.directory.directory);
    }
}

/// Lets an object use the map that is pinned at `pin`, or removes the pin if the pinned map does not fit the object.
fn reuse_or_remove_pin(object: &mut OpenObject, name: &str, pin: &Path) -> bool {
    let is_reused = pinned_map::reuse_pinned(object, name, pin).unwrap_or(false);
    if !is_reused {
        let _ = fs::remove_file(pin);
    }
    is_reused
}

/// Whether a process with this pid exists and has not been killed.
fn is_running(pid: u32) -> bool {
    let state = i32::try_from(pid)
        .ok()
        .and_then(|pid| Process::new(pid).ok()?.stat().ok()?.state().ok());
    state.is_some_and(|state| !matches!(state, ProcState::Zombie | ProcState::Dead))
}
