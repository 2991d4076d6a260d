//! Limits on what is read of a library file.
//!
//! Any user can name a file like a library, so the limits bound the work and the memory that one file can cost. The
//! largest tables known are those of `PyTorch` 2.15: `libtorch_cpu.so` exports 75,939 symbols with 5.2 MB of names,
//! and has 546,122 symbols with 78 MB of names in its full table. Of each probed function `libtorch_cpu.so` has one
//! version, with a name of at most 105 bytes and at most 4,604 bytes of code.
//!
//! With these limits, reading one file takes less than 40 MiB of memory.

use std::fmt;

/// The most symbols in the symbol tables of one file.
pub(crate) const MAX_SYMBOLS: u64 = 2 << 20;
/// The most bytes of names in the symbol tables of one file.
pub(crate) const MAX_STRING_BYTES: u64 = 256 << 20;
/// The most symbols that one requested name may match: versions and, for a prefix, overloads.
pub(crate) const MAX_MATCHES_PER_NAME: usize = 16;
/// The most symbols that all requested names together may match in one file.
pub(crate) const MAX_MATCHES: usize = 1024;
/// Length of a name that begins with a requested prefix.
pub(crate) const MAX_NAME_BYTES: usize = 1024;
/// The most code of one file that is decoded to find branches, in bytes.
pub(crate) const MAX_CODE_BYTES: u64 = 16 << 20;
/// The most code of one function that is decoded to find branches, in bytes. A larger function is probed at its
/// entry.
pub(crate) const MAX_FUNCTION_BYTES: u64 = 1 << 20;

/// A limit that a file exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LibraryLimit {
    /// Symbols in the tables of a file.
    Symbols,
    /// Bytes of names in the tables of a file.
    StringBytes,
    /// Symbols that one requested name matches.
    MatchesPerName,
    /// Symbols that all requested names match.
    Matches,
    /// Length of a name that begins with a requested prefix.
    NameBytes,
    /// Code that is decoded to find branches.
    CodeBytes,
}

impl fmt::Display for LibraryLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Symbols => write!(formatter, "more than {MAX_SYMBOLS} symbols"),
            Self::StringBytes => {
                write!(formatter, "more than {MAX_STRING_BYTES} bytes of names")
            }
            Self::MatchesPerName => write!(
                formatter,
                "more than {MAX_MATCHES_PER_NAME} symbols for one probed function"
            ),
            Self::Matches => write!(
                formatter,
                "more than {MAX_MATCHES} symbols for its probed functions"
            ),
            Self::NameBytes => write!(
                formatter,
                "a probed function with a name of more than {MAX_NAME_BYTES} bytes"
            ),
            Self::CodeBytes => write!(
                formatter,
                "more than {MAX_CODE_BYTES} bytes of code in its probed functions"
            ),
        }
    }
}
