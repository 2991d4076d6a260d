//! Pins the map of task states, so that a scheduler can read it.
//!
//! Observer and scheduler start and stop independently. The name of the pin contains a hash of the layout of its
//! values. A heartbeat is pinned beside it: when it stops, task states are stale and a scheduler must treat them as
//! unknown. A map left behind by a killed observer is reused, because a scheduler may be reading it. Maps that a killed observer
//! of another version left behind have another layout, and are removed.

use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::{fs, io};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject};
use zernel_phase::shared::RawTaskState;
use zerocopy::FromBytes;

use super::monotonic_ns;
use crate::capability::reason;
use crate::probes::layout::Heartbeat;

/// Default directory of the pins.
pub(super) const DIRECTORY: &str = "/sys/fs/bpf/zernel";
/// An observer whose heartbeat is older than this is not running.
const HEARTBEAT_TIMEOUT_NS: u64 = 3_000_000_000;
/// Begin of the name of a pinned map of task states.
const TASKS: &str = "tasks-";
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// The pins of this observer; dropping it removes them.
#[derive(Debug)]
pub(super) struct SharedState {
    directory: PathBuf,
}

impl SharedState {
    /// Makes an object that is not loaded yet reuse the pinned map, if there is one. An error says why nothing is
    /// shared.
    pub(super) fn claim(directory: &Path, object: &mut OpenObject) -> Result<Self, String> {
        let parent = directory.parent().unwrap_or(directory);
        let is_bpffs = rustix::fs::statfs(parent).is_ok_and(|status| status.f_type == BPF_FS_MAGIC);
        if !is_bpffs {
            return Err(format!("no bpffs is mounted at {}", parent.display()));
        }
        let shared = Self {
            directory: directory.to_owned(),
        };
        if let Some(owner) = shared.live_owner() {
            std::mem::forget(shared);
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
        shared.remove_other_layouts();
        let tasks = shared.tasks();
        if tasks.exists() {
            for mut map in object.maps_mut() {
                if map.name() == "zernel_tasks" && map.reuse_pinned_map(&tasks).is_err() {
                    let _ = fs::remove_file(&tasks);
                }
            }
        }
        Ok(shared)
    }

    /// Pins the maps of the loaded object.
    pub(super) fn pin(&self, mut tasks: MapHandle, mut heartbeat: MapHandle) -> Result<(), String> {
        let problem = |error: libbpf_rs::Error| format!("pinning failed ({})", reason(&error));
        let _ = fs::remove_file(self.heartbeat());
        heartbeat.pin(self.heartbeat()).map_err(problem)?;
        if !self.tasks().exists() {
            tasks.pin(self.tasks()).map_err(problem)?;
        }
        Ok(())
    }

    /// Path of the pinned map of task states.
    pub(super) fn tasks(&self) -> PathBuf {
        let hash = layout_hash();
        self.directory.join(format!("{TASKS}{hash:08x}"))
    }

    fn heartbeat(&self) -> PathBuf {
        self.directory.join("heartbeat")
    }

    /// Removes maps of task states with another layout, which an observer of another version left behind.
    fn remove_other_layouts(&self) {
        let own = self.tasks();
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let is_of_tasks = name.to_string_lossy().starts_with(TASKS);
            if is_of_tasks && entry.path() != own {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Pid of another running observer that uses the directory.
    fn live_owner(&self) -> Option<u32> {
        let map = MapHandle::from_pinned_path(self.heartbeat()).ok()?;
        let value = map.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY).ok()??;
        // An observer of a later version may have a longer heartbeat.
        let (beat, _) = Heartbeat::read_from_prefix(&value).ok()?;
        let beats = monotonic_ns().saturating_sub(beat.beat_ns) < HEARTBEAT_TIMEOUT_NS;
        beats.then_some(beat.owner)
    }
}

impl Drop for SharedState {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.tasks());
        let _ = fs::remove_file(self.heartbeat());
        let _ = fs::remove_dir(&self.directory);
    }
}

/// A hash of the size and the field offsets of a task state.
fn layout_hash() -> u32 {
    let offsets = [
        size_of::<RawTaskState>(),
        offset_of!(RawTaskState, phase_word),
        offset_of!(RawTaskState, last_gpu_sync_ns),
        offset_of!(RawTaskState, cpu_burst_ns),
        offset_of!(RawTaskState, phase_ns),
        offset_of!(RawTaskState, pid),
        offset_of!(RawTaskState, gpu_id),
        offset_of!(RawTaskState, io_wait_q16),
        offset_of!(RawTaskState, flags),
        offset_of!(RawTaskState, tracker),
    ];
    // FNV-1a, over words.
    offsets.iter().fold(0x811c_9dc5, |hash: u32, offset| {
        (hash ^ *offset as u32).wrapping_mul(0x0100_0193)
    })
}
