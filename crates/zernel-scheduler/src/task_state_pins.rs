//! The pinned maps of task states and heartbeats, which an observer writes.

use std::fs;
use std::path::{Path, PathBuf};

use libbpf_rs::{MapCore, MapFlags};
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
    /// Where to pin the map of task states, if it is not pinned yet.
    tasks: Option<PathBuf>,
    /// Where to pin the map of heartbeats, if it is not pinned yet.
    heartbeats: Option<PathBuf>,
}

impl TaskStatePins {
    /// Makes an object that is not loaded yet use the pinned maps.
    pub(crate) fn claim(open: &mut OpenMainSkel<'_>) -> Self {
        let directory = Path::new(PIN_DIRECTORY);
        let tasks = directory.join(format!("{TASKS_PIN}{:08x}", layout_hash()));
        let heartbeats = directory.join(HEARTBEAT_PIN);
        let has_tasks = open.maps.zernel_tasks.reuse_pinned_map(&tasks).is_ok();
        let has_heartbeats = open
            .maps
            .zernel_heartbeats
            .reuse_pinned_map(&heartbeats)
            .is_ok();
        Self {
            tasks: (!has_tasks).then_some(tasks),
            heartbeats: (!has_heartbeats).then_some(heartbeats),
        }
    }

    /// Pins the maps that were not pinned.
    pub(crate) fn share(&self, skel: &mut MainSkel<'_>) -> Result<(), libbpf_rs::Error> {
        // It exists if an observer has run.
        let _ = fs::create_dir(PIN_DIRECTORY);
        if let Some(path) = &self.tasks {
            skel.maps.zernel_tasks.pin(path)?;
        }
        if let Some(path) = &self.heartbeats {
            skel.maps.zernel_heartbeats.pin(path)?;
        }
        Ok(())
    }

    /// Removes the pins of this scheduler, unless an observer uses them: it removes them when it ends.
    pub(crate) fn remove(&self, hearts: &impl MapCore) {
        if is_observed(hearts) {
            return;
        }
        for path in self.tasks.iter().chain(&self.heartbeats) {
            let _ = fs::remove_file(path);
        }
        // It stays if it is not empty.
        let _ = fs::remove_dir(PIN_DIRECTORY);
    }
}

fn is_observed(hearts: &impl MapCore) -> bool {
    let value = hearts.lookup(&HEART_OBSERVER.to_ne_bytes(), MapFlags::ANY);
    let heart = value.ok().flatten();
    let heart = heart.and_then(|value| Some(Heartbeat::read_from_prefix(&value).ok()?.0));
    heart.is_some_and(|heart| heart.is_alive(monotonic_ns()))
}
