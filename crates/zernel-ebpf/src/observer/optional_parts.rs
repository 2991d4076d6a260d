//! Parts of the BPF object that are chosen before it is loaded. The verifier removes the code of the parts that are
//! not chosen.

use libbpf_rs::OpenObject;

/// Sets the switch of a part: the first word of a section of read-only data.
pub(super) fn enable_part(object: &mut OpenObject, section: &str) {
    for mut map in object.maps_mut() {
        if map.name() == section
            && let Some(switch) = map.initial_value_mut()
        {
            switch[..4].copy_from_slice(&1_u32.to_ne_bytes());
        }
    }
}

/// Excludes the maps and programs of an optional part from loading.
pub(super) fn leave_out_part(object: &mut OpenObject, names: &[&str]) -> libbpf_rs::Result<()> {
    let is_named = |name: &std::ffi::OsStr| names.iter().any(|it| name == *it);
    for mut map in object.maps_mut() {
        if is_named(map.name()) {
            map.set_autocreate(false)?;
        }
    }
    for mut program in object.progs_mut() {
        if is_named(program.name()) {
            program.set_autoload(false);
        }
    }
    Ok(())
}
