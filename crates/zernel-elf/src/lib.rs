//! A shared library file, and where in it a probe may go.
//!
//! A probe is attached to a file and an offset in it. [`Library`] finds the offset of an exported
//! function, and chooses the cheapest instruction near the function's entry at which the call still
//! looks as the caller made it: stack pointer, argument registers and memory unchanged. So every [`Site`]
//! is as good as the entry itself, for return probes too.
//!
//! The files belong to the processes we look at: they may be broken, huge, replaced or written to
//! while we read, or no files at all. Each of these is an error with a name.

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

/// Longest function that is searched for branches to its own beginning.
const MAX_FUNCTION_BYTES: u64 = 1 << 20;

/// Why a file is of no use as a library.
#[derive(Debug, Error)]
pub enum LibraryError {
    /// It could not be opened or read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is a directory, a pipe or a device.
    #[error("{path} is not a regular file, so no library", path = path.display())]
    NotAFile {
        /// What was opened.
        path: PathBuf,
    },
    /// Its content is not that of a library we could probe.
    #[error("{path} is not a usable library: {reason}", path = path.display())]
    NotALibrary {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Somebody wrote to it.
    #[error("{path} changed while it was read; open it again", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

impl LibraryError {
    /// Whether there is nothing any more at that path, as of a process that has ended.
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

/// Why a symbol has no place for a probe.
#[derive(Debug, Error)]
pub enum SiteError {
    /// The library does not have it, or not for others.
    #[error("{symbol} is not exported")]
    NotExported {
        /// What was asked for.
        symbol: String,
    },
    /// It names data.
    #[error("{symbol} is not a function")]
    NotAFunction {
        /// What was asked for.
        symbol: String,
    },
    /// Its code only chooses the function; what callers reach is another one.
    #[error(
        "{symbol} is chosen when the library is loaded, so its symbol does not lead to its code"
    )]
    IndirectFunction {
        /// What was asked for.
        symbol: String,
    },
    /// Its address is in no part of the file that is mapped as code.
    #[error("{symbol} at address {address:#x} is outside the library's code; the file is damaged")]
    OutsideCode {
        /// What was asked for.
        symbol: String,
        /// Where it should be.
        address: u64,
    },
    /// Its code could not be read.
    #[error("cannot read the code of {symbol}: {source}")]
    Unreadable {
        /// What was asked for.
        symbol: String,
        /// Why.
        source: io::Error,
    },
    /// Somebody wrote to the file after it was opened.
    #[error("the library changed while {symbol} was looked up; open it again")]
    Changed {
        /// What was asked for.
        symbol: String,
    },
}

/// What the kernel has to do each time a probe is hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TrapCost {
    /// One trap: the kernel emulates the instruction. About a microsecond.
    Emulated,
    /// Two traps: a copy of the instruction is single-stepped. About ten times as much.
    SingleStepped,
    /// Not known for the file's architecture.
    Unknown,
}

/// Where to probe a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Site {
    /// Offset in the file of the instruction to probe.
    pub file_offset: u64,
    /// How many bytes that is after the function's entry.
    pub displacement: u8,
    /// What a hit costs.
    pub trap: TrapCost,
}

/// An open library.
///
/// Keeps its symbol tables in memory, which are tens of megabytes for the largest: look up what is
/// needed, then drop it.
#[derive(Debug)]
pub struct Library {
    file: File,
    identity: FileIdentity,
    image: Image,
}

impl Library {
    /// Opens a library and reads its symbols.
    ///
    /// The path may be `/proc/PID/map_files/START-END`, which leads to the very file that a process has
    /// mapped, even after its deletion. It may also lead through `/proc/PID/root`, but absolute links
    /// on the way then lead out of there.
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

    /// Which file it is.
    #[must_use]
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// The open file, when its symbols are not needed any more.
    #[must_use]
    pub fn into_file(self) -> (File, FileIdentity) {
        (self.file, self.identity)
    }

    /// The names of all exported functions, as the linker knows them. Those with several versions
    /// come several times.
    pub fn functions(&self) -> impl Iterator<Item = &str> {
        self.image.functions()
    }

    /// Where to probe one function. For several, [`sites`](Self::sites) is faster.
    pub fn site(&self, name: &str) -> Result<Site, SiteError> {
        self.probe_site(name, self.find(&[name]).get(name))
    }

    /// Where to probe each of these functions, in their order.
    #[must_use]
    pub fn sites(&self, names: &[&str]) -> Vec<Result<Site, SiteError>> {
        let found = self.find(names);
        names
            .iter()
            .map(|name| self.probe_site(name, found.get(name)))
            .collect()
    }

    /// The symbols of these names: of several versions the default one, else the first.
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

    /// The cheapest place for a function whose entry is at `file_offset`, with that many bytes of
    /// code from there on.
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

    /// Whether every call of a function passes an instruction after its entry exactly once, and
    /// nothing else does: no other symbol and no branch leads between them. Of a function of unknown
    /// or excessive size that cannot be said.
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

/// Opens a file, unless it is no regular one. Merely opening a device may set it in motion, and opening
/// a pipe waits for a writer, so what it is gets asked through a handle that opens nothing.
fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let handle = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let handle = File::from(handle);
    if !handle.metadata()?.is_file() {
        return Ok(None);
    }
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    // Without waiting for whoever holds a lease on it.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(Some(rustix::fs::open(path, flags, Mode::empty())?.into()))
}
