//! Finds the function that a dynamic loader calls for debuggers (its hook). A probe on the hook shows when a process
//! loads a library.

use std::io;
use std::path::Path;

use thiserror::Error;

use crate::elf_image::{ElfImage, ImageError};
use crate::{FunctionName, LibraryLimit, open_regular};

/// The function that a loader calls before and after it changes its list of objects, as a
/// breakpoint for debuggers.
const DEBUG_HOOK_SYMBOL: &str = "_dl_debug_state";
/// The `struct r_debug` of glibc's loader.
const DEBUG_STATE_SYMBOL: &str = "_r_debug";
/// Offset of `r_state` in `struct r_debug`, on 64 bits.
const STATE_FIELD_OFFSET: u64 = 24;

/// The reason why a file cannot be used as a loader.
#[derive(Debug, Error)]
pub enum LoaderError {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(io::Error),
    /// The path is a directory, a pipe or a device.
    #[error("it is not a regular file")]
    NotAFile,
    /// The file is not an ELF file with symbols.
    #[error("{0}")]
    NotElf(&'static str),
    /// The file exceeds a limit on what is read of a library.
    #[error("it has more than any known library: {0}")]
    OverLimit(LibraryLimit),
    /// The file does not export the hook.
    #[error("it does not export _dl_debug_state")]
    NoHook,
    /// The hook is in no code segment of the file.
    #[error("its _dl_debug_state is in no code segment")]
    HookOutsideCode,
}

impl From<io::Error> for LoaderError {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

impl From<ImageError> for LoaderError {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Unreadable(error) => Self::Unreadable(error),
            ImageError::Malformed(reason) => Self::NotElf(reason),
            ImageError::OverLimit(limit) => Self::OverLimit(limit),
        }
    }
}

/// The symbols of a dynamic loader that a probe on the loader needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderSymbols {
    /// File offset of the hook.
    pub hook_offset: usize,
    /// Distance in memory from the hook to the loader's state; zero if the loader does not export
    /// it.
    pub hook_to_state_bytes: u64,
}

impl LoaderSymbols {
    /// Reads the symbols of the file at `path`, with the limits of a library.
    pub fn read(path: &Path) -> Result<Self, LoaderError> {
        let file = open_regular(path)?.ok_or(LoaderError::NotAFile)?;
        let image = ElfImage::read(&file)?;
        let names = [DEBUG_HOOK_SYMBOL, DEBUG_STATE_SYMBOL].map(FunctionName::Exact);
        let found = image.find_symbols(&file, &names)?;
        let address = |number: usize| Some(found[number].first()?.symbol.address);
        let hook = address(0).ok_or(LoaderError::NoHook)?;
        let code = image
            .code_range_at(hook)
            .ok_or(LoaderError::HookOutsideCode)?;
        Ok(Self {
            hook_offset: usize::try_from(code.start).map_err(|_| LoaderError::HookOutsideCode)?,
            hook_to_state_bytes: address(1).map_or(0, |state| {
                state.wrapping_add(STATE_FIELD_OFFSET).wrapping_sub(hook)
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use zernel_testkit::elf_builder::{CODE_OFFSET, ElfBuilder, global_function};

    use super::*;
    use crate::tests::write_to_file;

    #[test]
    fn a_file_without_the_loader_hook_is_refused() {
        let garbage = write_to_file(b"no ELF");
        let garbage = LoaderSymbols::read(garbage.path());
        assert!(
            matches!(garbage, Err(LoaderError::NotElf(_))),
            "{garbage:?}"
        );
        let program = LoaderSymbols::read(Path::new("/proc/self/exe"));
        assert!(matches!(program, Err(LoaderError::NoHook)), "{program:?}");
    }

    #[test]
    fn the_hook_of_a_minimal_loader_is_found() {
        let mut elf = ElfBuilder::new(&[0xc3], vec![global_function(DEBUG_HOOK_SYMBOL, 1)]);
        let file = write_to_file(&elf.build_file());
        let expected = LoaderSymbols {
            hook_offset: CODE_OFFSET as usize,
            hook_to_state_bytes: 0,
        };
        assert_eq!(LoaderSymbols::read(file.path()).unwrap(), expected);
        elf.symbols[0].address = 1;
        let outside = LoaderSymbols::read(write_to_file(&elf.build_file()).path());
        assert!(
            matches!(outside, Err(LoaderError::HookOutsideCode)),
            "{outside:?}"
        );
    }

    /// `/dev/zero` has a length of 0 and never ends.
    #[test]
    fn a_file_that_is_not_regular_is_refused() {
        let endless = LoaderSymbols::read(Path::new("/dev/zero"));
        assert!(matches!(endless, Err(LoaderError::NotAFile)), "{endless:?}");
    }
}
