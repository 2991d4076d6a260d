//! Maps that a BPF object shares with other programs through a pin in a bpffs.

use std::path::Path;

use libbpf_rs::{MapCore, MapHandle, OpenMapMut, OpenObject};

use crate::capability::innermost_reason;

/// Lets an object that is not loaded yet use the map that is pinned at a path. Returns whether a map is pinned there;
/// an error states why the pinned map cannot be used.
pub(super) fn reuse_pinned(
    object: &mut OpenObject,
    name: &str,
    pin: &Path,
) -> Result<bool, String> {
    if !pin.exists() {
        return Ok(false);
    }
    let mut maps = object.maps_mut();
    let Some(mut map) = maps.find(|map| map.name() == name) else {
        return Err(format!("the BPF object has no map {name}"));
    };
    let pinned = MapHandle::from_pinned_path(pin);
    let pinned = pinned.map_err(|error| format!("it is no map ({})", innermost_reason(&error)))?;
    if !has_same_layout(&map, &pinned) {
        return Err("it is a map of another type or size".to_owned());
    }
    let reused = map.reuse_pinned_map(pin);
    reused.map_err(|error| format!("it cannot be reused ({})", innermost_reason(&error)))?;
    Ok(true)
}

fn has_same_layout(map: &OpenMapMut<'_>, pinned: &MapHandle) -> bool {
    pinned.map_type() == map.map_type()
        && pinned.key_size() == map.key_size()
        && pinned.value_size() == map.value_size()
        && pinned.max_entries() == map.max_entries()
}
