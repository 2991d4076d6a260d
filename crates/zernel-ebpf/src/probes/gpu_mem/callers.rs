//! The libraries that code addresses of a process belong to.

use std::collections::BTreeMap;

use procfs::process::Process;
use zernel_identity::visit_mapped_regions;

/// Stands for the name of a library that could not be found.
pub(crate) const UNKNOWN_LIBRARY: &str = "unknown";

/// The libraries of a process by code address.
#[derive(Debug, Default)]
pub(crate) struct CallerLibraries {
    names: BTreeMap<u64, String>,
}

impl CallerLibraries {
    /// Name of the library that `address` is in, without its version: `libcudart`.
    pub(crate) fn library_name(&self, address: u64) -> &str {
        self.names
            .get(&address)
            .map_or(UNKNOWN_LIBRARY, String::as_str)
    }

    /// Finds the libraries of code addresses that are not known yet; the process must still run.
    pub(crate) fn resolve_addresses(&mut self, pid: u32, addresses: impl Iterator<Item = u64>) {
        let unknown: Vec<u64> = addresses
            .filter(|address| !self.names.contains_key(address))
            .collect();
        if unknown.is_empty() {
            return;
        }
        let process = i32::try_from(pid).ok().map(Process::new);
        let Some(Ok(process)) = process else { return };
        let mut found = BTreeMap::new();
        let visited = visit_mapped_regions(&process, |region| {
            let Some(path) = region.path else { return };
            for address in &unknown {
                if (region.start..region.end).contains(address) {
                    let file = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
                    found.insert(*address, library_stem(&String::from_utf8_lossy(file)));
                }
            }
        });
        if visited.is_ok() {
            let missing = unknown
                .into_iter()
                .map(|address| (address, UNKNOWN_LIBRARY.to_owned()));
            self.names.extend(missing);
            self.names.append(&mut found);
        }
    }
}

/// Name of a library without version and build hash.
fn library_stem(file: &str) -> String {
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
            assert_eq!(library_stem(file), name);
        }
    }

    #[test]
    fn addresses_of_this_program_have_names() {
        let mut callers = CallerLibraries::default();
        let here = addresses_of_this_program_have_names as *const () as u64;
        callers.resolve_addresses(std::process::id(), [here, 1].into_iter());
        assert_ne!(callers.library_name(here), UNKNOWN_LIBRARY);
        assert_eq!(callers.library_name(1), UNKNOWN_LIBRARY);
    }
}
