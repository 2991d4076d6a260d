//! Reads shared library files and finds probe sites in them.
//!
//! A probe is attached to an offset in a file. [`Library`] finds the offset of an exported function
//! and chooses the cheapest instruction near the function's entry. At that instruction the stack
//! pointer, the argument registers and memory are still as at the entry. So a [`Site`] is
//! equivalent to the entry, also for return probes.
//!
//! The files belong to the observed processes: they may be damaged, huge, replaced or written to
//! during the read, or not regular files. Each of these cases has its own error.

mod dynamic_loader;
mod elf_image;
mod file_identity;
mod installed_libraries;
mod library_kind;
mod probe_instruction;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use thiserror::Error;

pub use dynamic_loader::{LoaderError, LoaderSymbols};
use elf_image::{Image, ImageError, Symbol, SymbolKind, is_past_end_of_file};
pub use file_identity::FileIdentity;
pub use library_kind::LibraryKind;

/// Largest function that is searched for branches to its own start.
const MAX_FUNCTION_BYTES: u64 = 1 << 20;

/// The reason why a file cannot be used as a library.
#[derive(Debug, Error)]
pub enum LibraryError {
    /// The file could not be opened or read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is a directory, a pipe or a device.
    #[error("{path} is not a regular file", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The content is not that of a library with probe sites.
    #[error("{path} is not a usable library: {reason}", path = path.display())]
    NotALibrary {
        /// The file.
        path: PathBuf,
        /// What is wrong with the content.
        reason: &'static str,
    },
    /// The file was written to during the read.
    #[error("{path} changed while it was read; open it again", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

impl LibraryError {
    /// Whether the path does not exist, as after the exit of its process.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Unreadable { source, .. } => {
                source.kind() == io::ErrorKind::NotFound
                    || source.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
            }
            _ => false,
        }
    }
}

/// The reason why a symbol has no probe site.
#[derive(Debug, Error)]
pub enum SiteError {
    /// The library does not export the symbol.
    #[error("{symbol} is not exported")]
    NotExported {
        /// The requested symbol.
        symbol: String,
    },
    /// The symbol names data.
    #[error("{symbol} is not a function")]
    NotAFunction {
        /// The requested symbol.
        symbol: String,
    },
    /// The symbol is an indirect function (IFUNC): its code only selects the function that callers
    /// reach.
    #[error("{symbol} is an indirect function, selected when the library is loaded")]
    IndirectFunction {
        /// The requested symbol.
        symbol: String,
    },
    /// The address is in no segment that is mapped as code.
    #[error("{symbol} at address {address:#x} is outside the library's code; the file is damaged")]
    OutsideCode {
        /// The requested symbol.
        symbol: String,
        /// The symbol's address.
        address: u64,
    },
    /// The code could not be read.
    #[error("cannot read the code of {symbol}: {source}")]
    Unreadable {
        /// The requested symbol.
        symbol: String,
        /// The system's error.
        source: io::Error,
    },
    /// The file was written to after it was opened.
    #[error("the library changed while {symbol} was looked up; open it again")]
    Changed {
        /// The requested symbol.
        symbol: String,
    },
}

/// Cost of a probe hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TrapCost {
    /// One trap: the kernel emulates the instruction, in about a microsecond.
    Emulated,
    /// Two traps: the CPU single-steps a copy of the instruction, at about ten times the cost.
    SingleStepped,
    /// Unknown for the file's architecture.
    Unknown,
}

/// A probe site: the instruction at which to probe a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Site {
    /// File offset of the instruction.
    pub file_offset: u64,
    /// Distance from the function's entry in bytes.
    pub displacement: u8,
    /// Cost of a hit.
    pub trap: TrapCost,
}

/// An open library.
///
/// It keeps its symbol tables in memory, tens of megabytes for the largest libraries. Look up the
/// needed functions, then drop it.
#[derive(Debug)]
pub struct Library {
    file: File,
    identity: FileIdentity,
    image: Image,
}

impl Library {
    /// Opens a library and reads its symbols.
    ///
    /// The path may be `/proc/PID/map_files/START-END`, which opens the file that a process has
    /// mapped even after its deletion. It may also go through `/proc/PID/root`, but absolute
    /// symbolic links then resolve outside of that root.
    pub fn open(path: &Path) -> Result<Self, LibraryError> {
        let unreadable = |source| LibraryError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let file = open_regular(path).map_err(unreadable)?;
        let file = file.ok_or_else(|| LibraryError::NotAFile {
            path: path.to_owned(),
        })?;
        let identity = FileIdentity::read(&file).map_err(unreadable)?;
        let image = Image::read(&file);
        if FileIdentity::read(&file).map_err(unreadable)? != identity {
            return Err(LibraryError::Changed {
                path: path.to_owned(),
            });
        }
        let image = image.map_err(|error| match error {
            ImageError::Unreadable(source) => unreadable(source),
            ImageError::Malformed(reason) => LibraryError::NotALibrary {
                path: path.to_owned(),
                reason,
            },
        })?;
        Ok(Self {
            file,
            identity,
            image,
        })
    }

    /// Returns the identity of the file.
    #[must_use]
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Drops the symbols and returns the open file.
    #[must_use]
    pub fn into_file(self) -> (File, FileIdentity) {
        (self.file, self.identity)
    }

    /// Returns the mangled names of all exported functions. A function with several versions is
    /// repeated.
    pub fn functions(&self) -> impl Iterator<Item = &str> {
        self.image.functions()
    }

    /// Returns the probe site of one function. For several functions, [`sites`](Self::sites) is
    /// faster.
    pub fn site(&self, name: &str) -> Result<Site, SiteError> {
        self.probe_site(name, self.find(&[name]).get(name))
    }

    /// Returns the probe site of each function, in the order of `names`.
    #[must_use]
    pub fn sites(&self, names: &[&str]) -> Vec<Result<Site, SiteError>> {
        let found = self.find(names);
        names
            .iter()
            .map(|name| self.probe_site(name, found.get(name)))
            .collect()
    }

    /// Looks up symbols by name. Of several versions the default one wins, else the first.
    fn find<'a>(&self, names: &[&'a str]) -> HashMap<&'a str, Symbol> {
        let longest = names.iter().map(|name| name.len()).max().unwrap_or(0);
        let wanted: HashMap<&[u8], &str> =
            names.iter().map(|name| (name.as_bytes(), *name)).collect();
        let mut found: HashMap<&str, Symbol> = HashMap::new();
        for (name, symbol) in self.image.symbols(longest) {
            let Some(name) = name.and_then(|name| wanted.get(name)) else {
                continue;
            };
            found
                .entry(name)
                .and_modify(|known| {
                    if symbol.is_default && !known.is_default {
                        *known = symbol;
                    }
                })
                .or_insert(symbol);
        }
        found
    }

    fn probe_site(&self, name: &str, symbol: Option<&Symbol>) -> Result<Site, SiteError> {
        let name = || name.to_owned();
        let symbol = symbol.ok_or_else(|| SiteError::NotExported { symbol: name() })?;
        match symbol.kind {
            SymbolKind::Function => {}
            SymbolKind::IndirectFunction => {
                return Err(SiteError::IndirectFunction { symbol: name() });
            }
            SymbolKind::Other => return Err(SiteError::NotAFunction { symbol: name() }),
        }
        let outside = || SiteError::OutsideCode {
            symbol: name(),
            address: symbol.address,
        };
        let unreadable = |source| SiteError::Unreadable {
            symbol: name(),
            source,
        };
        let code = self.image.code_at(symbol.address).ok_or_else(outside)?;
        let site = self.choose_site(symbol, code.start, code.end - code.start);
        if FileIdentity::read(&self.file).map_err(unreadable)? != self.identity {
            return Err(SiteError::Changed { symbol: name() });
        }
        site.map_err(|error| match error {
            error if is_past_end_of_file(&error) => outside(),
            error => unreadable(error),
        })
    }

    /// Chooses the cheapest instruction of a function whose entry is at `file_offset`, with
    /// `available` bytes of code from there on.
    fn choose_site(&self, symbol: &Symbol, file_offset: u64, available: u64) -> io::Result<Site> {
        let at = |displacement: usize, trap| Site {
            file_offset: file_offset + displacement as u64,
            displacement: displacement as u8,
            trap,
        };
        let own = match symbol.size {
            0 => available,
            size => size.min(available),
        };
        let window = self.read(file_offset, own.min(probe_instruction::ENTRY_BYTES as u64))?;
        if !self.image.is_x86_64 {
            return Ok(at(0, TrapCost::Unknown));
        }
        match probe_instruction::first_emulated_instruction(&window) {
            Some(0) => Ok(at(0, TrapCost::Emulated)),
            Some(displacement)
                if self.is_executed_once_per_call(symbol, file_offset, own, displacement)? =>
            {
                Ok(at(displacement, TrapCost::Emulated))
            }
            _ => Ok(at(0, TrapCost::SingleStepped)),
        }
    }

    /// Whether every call executes the instruction at `displacement` exactly once, and only calls
    /// do: no symbol and no branch leads between the entry and the instruction. False for a
    /// function of unknown or excessive size.
    fn is_executed_once_per_call(
        &self,
        symbol: &Symbol,
        file_offset: u64,
        length: u64,
        displacement: usize,
    ) -> io::Result<bool> {
        let skipped = symbol.address + 1..symbol.address + displacement as u64 + 1;
        if symbol.size == 0 || length > MAX_FUNCTION_BYTES || self.image.has_symbol_in(&skipped) {
            return Ok(false);
        }
        let function = self.read(file_offset, length)?;
        Ok(probe_instruction::is_executed_once_per_call(
            &function,
            displacement,
        ))
    }

    fn read(&self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length as usize];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }
}

/// Opens a regular file; returns `None` for anything else.
///
/// Opening a device may have side effects, and opening a pipe waits for a writer. So the type is
/// checked through an `O_PATH` handle, which opens nothing.
fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let handle = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let handle = File::from(handle);
    if !handle.metadata()?.is_file() {
        return Ok(None);
    }
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    // `NONBLOCK`: do not wait for the holder of a lease.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(Some(rustix::fs::open(path, flags, Mode::empty())?.into()))
}
