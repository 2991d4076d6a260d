//! The libraries that code addresses of a process belong to.

use std::collections::BTreeMap;

use procfs::process::{MMapPath, Process};

/// Name of a library that is not known.
pub(crate) const UNKNOWN: &str = "unknown";

/// The libraries of a process by code address.
#[derive(Debug, Default)]
pub(crate) struct Callers {
    names: BTreeMap<u64, String>,
}

impl Callers {
    /// Name of the library that `address` is in, without its version: `libcudart`.
    pub(crate) fn name(&self, address: u64) -> &str {
        self.names.get(&address).map_or(UNKNOWN, String::as_str)
    }

    /// Looks up the addresses that are not known yet, while the process runs.
    pub(crate) fn resolve(&mut self, pid: u32, addresses: impl Iterator<Item = u64>) {
        let unknown: Vec<u64> = addresses
            .filter(|address| !self.names.contains_key(address))
            .collect();
        if unknown.is_empty() {
            return;
        }
        let maps = i32::try_from(pid).ok().and_then(|pid| {
            let process = Process::new(pid).ok()?;
            process.maps().ok()
        });
        let Some(maps) = maps else { return };
        for address in unknown {
            let map = maps
                .iter()
                .find(|map| (map.address.0..map.address.1).contains(&address));
            let name = match map.map(|map| &map.pathname) {
                Some(MMapPath::Path(path)) => {
                    path.file_name().map(|name| stem(&name.to_string_lossy()))
                }
                _ => None,
            };
            self.names
                .insert(address, name.unwrap_or_else(|| UNKNOWN.to_owned()));
        }
    }
}

/// Name of a library without version and build hash.
fn stem(file: &str) -> String {
    let name = file.split_once(".so").map_or(file, |(stem, _)| stem);
    match name.rsplit_once('-') {
        Some((stem, hash))
            if hash.len() >= 8 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
        {
            stem.to_owned()
        }
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_hashes_are_removed() {
        for (file, name) in [
            ("libcudart.so.12", "libcudart"),
            ("libcudart-9335f6a2.so.12", "libcudart"),
            ("libnccl-net.so", "libnccl-net"),
            ("python3.12", "python3.12"),
        ] {
            assert_eq!(stem(file), name);
        }
    }

    #[test]
    fn addresses_of_this_program_have_names() {
        let mut callers = Callers::default();
        let here = addresses_of_this_program_have_names as *const () as u64;
        callers.resolve(std::process::id(), [here, 1].into_iter());
        assert_ne!(callers.name(here), UNKNOWN);
        assert_eq!(callers.name(1), UNKNOWN);
    }
}
