//! The pinned maps of task states and heartbeats, which an observer writes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapMut};
use zernel_phase::shared::{
    HEART_OBSERVER, HEARTBEAT_PIN, Heartbeat, PIN_DIRECTORY, TASKS_PIN, layout_hash,
};
use zerocopy::FromBytes;

use crate::loaded_scheduler::monotonic_ns;
use crate::scheduler::skeleton::{MainSkel, OpenMainSkel};

/// The scheduler reuses the maps of an observer. If there are none, it pins its own, and an observer that starts later
/// reuses those.
#[derive(Debug)]
pub(crate) struct TaskStatePins {
    tasks_path: PathBuf,
    heartbeats_path: PathBuf,
    /// The pins that this scheduler made.
    own_pins: Vec<PathBuf>,
}

impl TaskStatePins {
    /// Makes an object that is not loaded yet use the pinned maps.
    pub(crate) fn reuse_pinned_maps(open_object: &mut OpenMainSkel<'_>) -> Self {
        let directory = Path::new(PIN_DIRECTORY);
        let tasks_path = directory.join(format!("{TASKS_PIN}{:08x}", layout_hash()));
        let heartbeats_path = directory.join(HEARTBEAT_PIN);
        // What is not pinned is not reused.
        let _ = open_object.maps.zernel_tasks.reuse_pinned_map(&tasks_path);
        let _ = open_object
            .maps
            .zernel_heartbeats
            .reuse_pinned_map(&heartbeats_path);
        Self {
            tasks_path,
            heartbeats_path,
            own_pins: Vec::new(),
        }
    }

    /// Pins the maps that are not pinned.
    pub(crate) fn pin_missing_maps(
        &mut self,
        skel: &mut MainSkel<'_>,
    ) -> Result<(), libbpf_rs::Error> {
        // It exists if an observer has run.
        let _ = fs::create_dir(PIN_DIRECTORY);
        let has_pinned_tasks = pin_map_if_missing(&mut skel.maps.zernel_tasks, &self.tasks_path)?;
        self.own_pins
            .extend(has_pinned_tasks.then(|| self.tasks_path.clone()));
        let has_pinned_heartbeats =
            pin_map_if_missing(&mut skel.maps.zernel_heartbeats, &self.heartbeats_path)?;
        self.own_pins
            .extend(has_pinned_heartbeats.then(|| self.heartbeats_path.clone()));
        Ok(())
    }

    /// Removes the pins of this scheduler, unless an observer uses them: it removes them when it ends.
    pub(crate) fn remove_own_pins(&self, heartbeats_map: &impl MapCore) {
        if live_heartbeat(heartbeats_map).is_some() {
            return;
        }
        for path in &self.own_pins {
            let _ = fs::remove_file(path);
        }
        // It stays if it is not empty.
        let _ = fs::remove_dir(PIN_DIRECTORY);
    }
}

/// Pins a map at `path` unless a map is pinned there. Returns whether it pinned the map.
///
/// # Errors
/// Among others: an observer has pinned another map since the scheduler was loaded.
fn pin_map_if_missing(map: &mut MapMut<'_>, path: &Path) -> Result<bool, libbpf_rs::Error> {
    if !path.exists() {
        return map.pin(path).map(|()| true);
    }
    let pinned_map_id = MapHandle::from_pinned_path(path)?.info()?.info.id;
    match pinned_map_id == map.info()?.info.id {
        true => Ok(false),
        false => {
            let problem = format!(
                "an observer has just pinned its own {}; try again",
                path.display()
            );
            Err(io::Error::other(problem).into())
        }
    }
}

/// Whether an observer writes the task states that this scheduler reads. One with another layout writes another map.
pub(crate) fn is_observer_alive(heartbeats_map: &impl MapCore) -> bool {
    let heartbeat = live_heartbeat(heartbeats_map);
    heartbeat.is_some_and(|heartbeat| heartbeat.layout_hash == layout_hash())
}

/// The heartbeat of a running observer.
fn live_heartbeat(heartbeats_map: &impl MapCore) -> Option<Heartbeat> {
    let value = heartbeats_map.lookup(&HEART_OBSERVER.to_ne_bytes(), MapFlags::ANY);
    let heartbeat = value.ok().flatten();
    let heartbeat = heartbeat.and_then(|value| Some(Heartbeat::read_from_prefix(&value).ok()?.0));
    heartbeat.filter(|heartbeat| heartbeat.is_alive(monotonic_ns()))
}
