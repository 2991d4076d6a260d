//! Finds the hook of a dynamic loader. A probe there shows when a process loads a library.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use object::{Object, ObjectSegment, ObjectSymbol};
use thiserror::Error;

/// The function that a loader calls before and after it changes its list of objects, as a
/// breakpoint for debuggers.
const HOOK_SYMBOL: &[u8] = b"_dl_debug_state";
/// The `struct r_debug` of glibc's loader.
const STATE_SYMBOL: &[u8] = b"_r_debug";
/// Offset of `r_state` in `struct r_debug`, on 64 bits.
const STATE_FIELD_OFFSET: u64 = 24;
/// Above the size of any loader with debug information. Any user can name a file like a loader.
const MAX_FILE_BYTES: u64 = 32 << 20;

/// The reason why a file cannot be used as a loader.
#[derive(Debug, Error)]
pub enum LoaderError {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// The file is larger than any loader.
    #[error("it is larger than any loader, more than {MAX_FILE_BYTES} bytes")]
    TooLarge,
    /// The file is not an ELF file.
    #[error("it is not an ELF file: {0}")]
    NotElf(#[from] object::Error),
    /// The file does not export the hook.
    #[error("it does not export _dl_debug_state")]
    NoHook,
    /// The hook is in no segment of the file.
    #[error("its _dl_debug_state is in no segment")]
    HookOutsideFile,
}

/// The symbols of a dynamic loader that its probe needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderSymbols {
    /// File offset of the hook.
    pub offset: usize,
    /// Distance in memory from the hook to the loader's state; zero if the loader does not export
    /// it.
    pub state_distance: u64,
}

impl LoaderSymbols {
    /// Reads the symbols of the file at `path`. At most 32 MiB are read, even if the
    /// file grows during the read.
    pub fn read(path: &Path) -> Result<Self, LoaderError> {
        let mut bytes = Vec::new();
        File::open(path)?
            .take(MAX_FILE_BYTES + 1)
            .read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(LoaderError::TooLarge);
        }
        Self::parse(&bytes)
    }

    /// Finds the symbols in the content of a loader.
    pub fn parse(loader: &[u8]) -> Result<Self, LoaderError> {
        let file = object::File::parse(loader)?;
        let address = |name| {
            let mut symbols = file.dynamic_symbols();
            let symbol = symbols.find(|symbol| symbol.name_bytes() == Ok(name));
            symbol.map(|symbol| symbol.address())
        };
        let hook = address(HOOK_SYMBOL).ok_or(LoaderError::NoHook)?;
        let offset = file.segments().find_map(|segment| {
            let within = hook.checked_sub(segment.address())?;
            let (start, size) = segment.file_range();
            let offset = start.checked_add(within).filter(|_| within < size)?;
            usize::try_from(offset).ok()
        });
        Ok(Self {
            offset: offset.ok_or(LoaderError::HookOutsideFile)?,
            state_distance: address(STATE_SYMBOL).map_or(0, |state| {
                state.wrapping_add(STATE_FIELD_OFFSET).wrapping_sub(hook)
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_the_loader_hook_is_refused() {
        let garbage = LoaderSymbols::parse(b"no ELF");
        assert!(
            matches!(garbage, Err(LoaderError::NotElf(_))),
            "{garbage:?}"
        );
        let program = LoaderSymbols::read(Path::new("/proc/self/exe"));
        assert!(matches!(program, Err(LoaderError::NoHook)), "{program:?}");
    }

    /// `/dev/zero` has a length of 0 and never ends.
    #[test]
    fn a_file_larger_than_any_loader_is_refused() {
        let endless = LoaderSymbols::read(Path::new("/dev/zero"));
        assert!(matches!(endless, Err(LoaderError::TooLarge)), "{endless:?}");
    }
}
