//! Hints for other schedulers: the class of every thread, in a pinned map in the format of `scx_layered`.
//!
//! The observer shares the map with the scheduler, which may create the map. So the pin of the map stays when the
//! observer ends, and only hints of this program are cleared.

use std::path::{Path, PathBuf};

use libbpf_rs::{MapHandle, OpenObject};

use super::{optional_parts, pinned_map};
use crate::capability::innermost_reason;

/// The section with the switch of the hints.
const SWITCH_SECTION: &str = ".rodata.hints";
pub(super) const HINT_MAP: &str = "scx_layered_task_hint_map";
/// The program that clears the hints of all tasks.
pub(super) const CLEAR_PROGRAM: &str = "clear_hints";
/// Names of the BPF map and of the program that are not loaded if the observer writes no hints.
pub(super) const OPTIONAL_PARTS: [&str; 2] = [HINT_MAP, CLEAR_PROGRAM];

/// A pinned map of hints.
#[derive(Debug)]
pub(super) struct HintMap {
    path: PathBuf,
    is_reused: bool,
}

impl HintMap {
    /// Turns hints on in an object that is not loaded yet, with the map that is pinned at `path`, if there is one.
    pub(super) fn enable_in_object(path: &Path, object: &mut OpenObject) -> Result<Self, String> {
        let is_reused = pinned_map::reuse_pinned(object, HINT_MAP, path)?;
        optional_parts::enable_part(object, SWITCH_SECTION);
        Ok(Self {
            path: path.to_owned(),
            is_reused,
        })
    }

    /// Pins the map of hints of the loaded object, unless the map was pinned before.
    pub(super) fn pin_map(&self, mut map: MapHandle) -> Result<(), String> {
        if self.is_reused {
            return Ok(());
        }
        let pinned = map.pin(&self.path);
        pinned.map_err(|error| {
            let reason = innermost_reason(&error);
            format!("pinning failed ({reason}); the path must be in a bpffs, such as /sys/fs/bpf")
        })
    }
}
