//! Decides by its name whether a file is an ML library or a dynamic loader.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use zernel_elf::LibraryKind;
use zernel_phase::mirrors;

/// Beginnings of the file names of dynamic loaders: glibc, glibc up to 2.33, musl.
const LOADER_PREFIXES: [&[u8]; 4] = [b"ld-linux", b"ld64.so", b"ld-2.", b"ld-musl-"];

/// The whole file name of the loader of Debian's musl; its other names are links to it.
const MUSL_LOADER_NAME: &[u8] = b"libc.so";

/// What a file is by its name: a kind of ML library, or a dynamic loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum MappedFileKind {
    Library(LibraryKind),
    /// The dynamic loader. A probe on the dynamic loader reports every library that the loader loads.
    Loader,
}

impl MappedFileKind {
    pub(super) fn from_file_name(name: &[u8]) -> Option<Self> {
        let is_loader = name == MUSL_LOADER_NAME
            || LOADER_PREFIXES
                .iter()
                .any(|prefix| name.starts_with(prefix));
        match is_loader {
            true => Some(Self::Loader),
            false => LibraryKind::from_file_name(OsStr::from_bytes(name)).map(Self::Library),
        }
    }
}

mirrors! {
    #[cfg(test)]
    pub(super) const MIRRORS;
    structs {
        /// The beginning of a name as a 64-bit word, and a mask of its bytes.
        pub(super) struct NamePrefix = "prefix" {
            bytes: u64,
            mask: u64,
        }
    }
}

impl NamePrefix {
    fn new(text: &[u8]) -> Self {
        let mut bytes = [0; 8];
        let mut mask = [0; 8];
        for (index, byte) in text.iter().take(8).enumerate() {
            bytes[index] = *byte;
            mask[index] = 0xff;
        }
        Self {
            bytes: u64::from_ne_bytes(bytes),
            mask: u64::from_ne_bytes(mask),
        }
    }
}

/// The prefixes that the kernel filters names by. The kernel compares only the first 8 bytes of a name, so it passes
/// some names that [`MappedFileKind::from_file_name`] then rejects.
pub(super) fn name_prefixes() -> Vec<NamePrefix> {
    let mut loader_name = MUSL_LOADER_NAME.to_vec();
    loader_name.push(0);
    let stems = LibraryKind::ALL
        .into_iter()
        .map(|kind| kind.file_stem().as_bytes());
    let mut prefixes: Vec<NamePrefix> = Vec::new();
    for text in stems.chain(LOADER_PREFIXES).chain([loader_name.as_slice()]) {
        let prefix = NamePrefix::new(text);
        if !prefixes.contains(&prefix) {
            prefixes.push(prefix);
        }
    }
    prefixes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loaders_are_recognised_by_name() {
        for name in [
            "ld-linux-x86-64.so.2",
            "ld-linux-aarch64.so.1",
            "ld-2.31.so",
            "ld-musl-x86_64.so.1",
            "libc.so",
        ] {
            let subject = MappedFileKind::from_file_name(name.as_bytes());
            assert_eq!(subject, Some(MappedFileKind::Loader), "{name}");
        }
        assert_eq!(MappedFileKind::from_file_name(b"libc.so.6"), None);
    }

    #[test]
    fn the_kernel_filter_passes_every_name_of_interest() {
        let passes = |name: &str| {
            let mut word = [0; 8];
            let length = name.len().min(8);
            word[..length].copy_from_slice(&name.as_bytes()[..length]);
            let word = u64::from_ne_bytes(word);
            name_prefixes()
                .iter()
                .any(|prefix| word & prefix.mask == prefix.bytes)
        };
        for kind in LibraryKind::ALL {
            assert!(passes(kind.file_stem()));
        }
        assert!(passes("ld-linux-x86-64.so.2") && passes("libc.so"));
        assert!(!passes("libc.so.6") && !passes("libm.so.6") && !passes("ld"));
    }
}
