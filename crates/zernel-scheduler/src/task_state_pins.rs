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
    tasks: PathBuf,
    heartbeats: PathBuf,
    /// The pins that this scheduler made.
    own: Vec<PathBuf>,
}

impl TaskStatePins {
    /// Makes an object that is not loaded yet use the pinned maps.
    pub(crate) fn claim(open: &mut OpenMainSkel<'_>) -> Self {
        let directory = Path::new(PIN_DIRECTORY);
        let tasks = directory.join(format!("{TASKS_PIN}{:08x}", layout_hash()));
        let heartbeats = directory.join(HEARTBEAT_PIN);
        // What is not pinned is not reused.
        let _ = open.maps.zernel_tasks.reuse_pinned_map(&tasks);
        let _ = open.maps.zernel_heartbeats.reuse_pinned_map(&heartbeats);
        Self {
            tasks,
            heartbeats,
            own: Vec::new(),
        }
    }

    /// Pins the maps that are not pinned.
    pub(crate) fn share_maps(&mut self, skel: &mut MainSkel<'_>) -> Result<(), libbpf_rs::Error> {
        // It exists if an observer has run.
        let _ = fs::create_dir(PIN_DIRECTORY);
        let tasks = share_map(&mut skel.maps.zernel_tasks, &self.tasks)?;
        self.own.extend(tasks.then(|| self.tasks.clone()));
        let heartbeats = share_map(&mut skel.maps.zernel_heartbeats, &self.heartbeats)?;
        self.own.extend(heartbeats.then(|| self.heartbeats.clone()));
        Ok(())
    }

    /// Removes the pins of this scheduler, unless an observer uses them: it removes them when it ends.
    pub(crate) fn remove(&self, hearts: &impl MapCore) {
        if is_observed(hearts) {
            return;
        }
        for path in &self.own {
            let _ = fs::remove_file(path);
        }
        // It stays if it is not empty.
        let _ = fs::remove_dir(PIN_DIRECTORY);
    }
}

/// Pins a map unless it is pinned there. Returns whether it was not.
///
/// # Errors
/// Among others: an observer has pinned another map since the scheduler was loaded.
fn share_map(map: &mut MapMut<'_>, path: &Path) -> Result<bool, libbpf_rs::Error> {
    if !path.exists() {
        return map.pin(path).map(|()| true);
    }
    let pinned = MapHandle::from_pinned_path(path)?.info()?.info.id;
    match pinned == map.info()?.info.id {
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

/// Whether an observer writes the maps.
pub(crate) fn is_observed(hearts: &impl MapCore) -> bool {
    let value = hearts.lookup(&HEART_OBSERVER.to_ne_bytes(), MapFlags::ANY);
    let heart = value.ok().flatten();
    let heart = heart.and_then(|value| Some(Heartbeat::read_from_prefix(&value).ok()?.0));
    heart.is_some_and(|heart| heart.is_alive(monotonic_ns()))
}
