//! Reads shared library files and finds probe sites in them.
//!
//! A probe is attached to an offset in a file. [`Library`] finds the offset of an exported function and chooses the
//! cheapest instruction near the function's entry. At that instruction the stack pointer, the argument registers and
//! memory are still as at the entry. So probing a [`ProbeSite`] is equivalent to probing the function's entry, also
//! for return probes.
//!
//! The files belong to the observed processes: they may be damaged, huge, replaced or written to during the read, or
//! not regular files. Each of these defects of a file has its own error. Reading a file takes time in proportion to
//! its symbol tables, and both time and memory have limits: see [`LibraryLimit`].

mod dynamic_loader;
mod elf_image;
mod file_identity;
mod installed_libraries;
mod library_kind;
mod limits;
mod probe_instruction;
mod symbol_search;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use dynamic_loader::{LoaderError, LoaderSymbols};
use elf_image::{ElfImage, ImageError, is_past_end_of_file};
pub use file_identity::FileIdentity;
pub use library_kind::LibraryKind;
pub use limits::LibraryLimit;
use limits::{MAX_CODE_BYTES, MAX_FUNCTION_BYTES};
pub use symbol_search::FunctionName;
use symbol_search::{NamedSymbol, Symbol, SymbolKind};

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
        /// What is wrong with the content of the file.
        reason: &'static str,
    },
    /// The file exceeds a limit on what is read of a library.
    #[error("{path} has more than any known library: {limit}", path = path.display())]
    OverLimit {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: LibraryLimit,
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
    /// The kernel may take the instruction at the entry for another one, and the process would crash.
    #[error(
        "{symbol} begins with an instruction that a probe breaks if a 32-bit process maps the library"
    )]
    DiffersIn32BitCode {
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
}

/// Cost of a probe hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TrapCost {
    /// The probe costs one trap: the kernel emulates the instruction, in about a microsecond.
    Emulated,
    /// The probe costs two traps: the CPU single-steps a copy of the instruction, at about ten times the cost of an
    /// emulated one.
    SingleStepped,
    /// Unknown for the file's architecture.
    Unknown,
}

/// A probe site: the instruction at which to probe a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProbeSite {
    /// File offset of the instruction.
    pub file_offset: u64,
    /// Distance from the function's entry.
    #[serde(rename = "displacement")]
    pub bytes_after_entry: u8,
    /// Cost of a hit.
    pub trap: TrapCost,
}

/// An open library. A `Library` keeps no symbols in memory.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    file: File,
    identity: FileIdentity,
    image: ElfImage,
}

/// The probe sites of the functions that one [`FunctionName`] matches. If no function matches, the list has one
/// error.
pub type MatchedSites = Vec<Result<ProbeSite, SiteError>>;

impl Library {
    /// Opens a library and reads its headers.
    ///
    /// The path may be `/proc/PID/map_files/START-END`, which opens the file that a process has mapped even after its
    /// deletion. The path may also lead through `/proc/PID/root`, but absolute symbolic links then resolve outside of
    /// that root.
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
        let image = ElfImage::read(&file);
        unless_file_changed(path, &file, identity, image).map(|image| Self {
            path: path.to_owned(),
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

    /// Returns the open file.
    #[must_use]
    pub fn into_file(self) -> (File, FileIdentity) {
        (self.file, self.identity)
    }

    /// Returns the probe sites of functions, in the order of `names`. Reads the symbol tables
    /// twice at most, so look up all functions at once.
    pub fn find_functions(
        &self,
        names: &[FunctionName<'_>],
    ) -> Result<Vec<MatchedSites>, LibraryError> {
        let found = self.find_sites(names);
        unless_file_changed(&self.path, &self.file, self.identity, found)
    }

    fn find_sites(&self, names: &[FunctionName<'_>]) -> Result<Vec<MatchedSites>, ImageError> {
        let found = self.image.find_symbols(&self.file, names)?;
        let entries: Vec<Vec<_>> = found
            .iter()
            .map(|symbols| symbols.iter().map(|it| self.read_entry(it)).collect())
            .collect();
        let skipped = entries.iter().flatten().flatten();
        let skipped: HashSet<u64> = skipped.flat_map(FunctionEntry::skipped_addresses).collect();
        let other_entries = match skipped.is_empty() {
            true => HashSet::new(),
            false => self.image.addresses_of_symbols(&self.file, &skipped)?,
        };
        let mut code_bytes = 0;
        let mut sites = Vec::with_capacity(names.len());
        for (name, entries) in names.iter().zip(entries) {
            let mut matched = MatchedSites::new();
            for entry in entries {
                matched.push(match entry {
                    Ok(entry) => self.choose_site(&entry, &other_entries, &mut code_bytes)?,
                    Err(error) => Err(error),
                });
            }
            if matched.is_empty() {
                let symbol = name.as_text().to_owned();
                matched.push(Err(SiteError::NotExported { symbol }));
            }
            sites.push(matched);
        }
        Ok(sites)
    }

    /// Reads the first instructions of a function.
    fn read_entry<'a>(&self, found: &'a NamedSymbol) -> Result<FunctionEntry<'a>, SiteError> {
        let NamedSymbol { name, symbol } = found;
        match symbol.kind {
            SymbolKind::Function => {}
            SymbolKind::IndirectFunction => {
                return Err(SiteError::IndirectFunction {
                    symbol: name.clone(),
                });
            }
            SymbolKind::Other => {
                return Err(SiteError::NotAFunction {
                    symbol: name.clone(),
                });
            }
        }
        let code = self.image.code_range_at(symbol.address);
        let code = code.ok_or_else(|| outside_code_error(name, symbol))?;
        let available = code.end - code.start;
        let length = match symbol.size {
            0 => available,
            size => size.min(available),
        };
        let window = length.min(probe_instruction::ENTRY_BYTES as u64);
        let window = self
            .read(code.start, window)
            .map_err(|error| unreadable_code_error(name, symbol, error))?;
        Ok(FunctionEntry {
            name,
            symbol,
            file_offset: code.start,
            length,
            bytes_to_emulated_instruction: match self.image.is_x86_64 {
                true => probe_instruction::first_emulated_instruction(&window),
                false => None,
            },
            differs_in_32_bit_code: probe_instruction::differs_in_32_bit_code(&window),
        })
    }

    /// Chooses the cheapest instruction of a function. `other_entries` contains the addresses
    /// between an entry and a probed instruction that another symbol has. `code_bytes` counts the
    /// code that is decoded.
    fn choose_site(
        &self,
        entry: &FunctionEntry<'_>,
        other_entries: &HashSet<u64>,
        code_bytes: &mut u64,
    ) -> Result<Result<ProbeSite, SiteError>, ImageError> {
        let site_at = |bytes_after_entry: usize, trap| ProbeSite {
            file_offset: entry.file_offset + bytes_after_entry as u64,
            bytes_after_entry: bytes_after_entry as u8,
            trap,
        };
        if !self.image.is_x86_64 {
            return Ok(Ok(site_at(0, TrapCost::Unknown)));
        }
        let single_stepped = || match entry.differs_in_32_bit_code {
            true => Err(SiteError::DiffersIn32BitCode {
                symbol: entry.name.to_owned(),
            }),
            false => Ok(site_at(0, TrapCost::SingleStepped)),
        };
        let mut skipped = entry.skipped_addresses();
        let bytes_after_entry = match entry.bytes_to_emulated_instruction {
            Some(0) => return Ok(Ok(site_at(0, TrapCost::Emulated))),
            Some(bytes_after_entry)
                if entry.has_known_size()
                    && !skipped.any(|address| other_entries.contains(&address)) =>
            {
                bytes_after_entry
            }
            _ => return Ok(single_stepped()),
        };
        *code_bytes += entry.length;
        if *code_bytes > MAX_CODE_BYTES {
            return Err(ImageError::OverLimit(LibraryLimit::CodeBytes));
        }
        let function = match self.read(entry.file_offset, entry.length) {
            Ok(function) => function,
            Err(error) => return Ok(Err(unreadable_code_error(entry.name, entry.symbol, error))),
        };
        let is_executed_once =
            probe_instruction::is_executed_once_per_call(&function, bytes_after_entry);
        Ok(match is_executed_once {
            true => Ok(site_at(bytes_after_entry, TrapCost::Emulated)),
            false => single_stepped(),
        })
    }

    fn read(&self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length as usize];
        #[cfg(test)]
        tests::count_bytes_read(bytes.len());
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }
}

/// The start of a function.
struct FunctionEntry<'a> {
    name: &'a str,
    symbol: &'a Symbol,
    file_offset: u64,
    /// Length of the function's code in the file, in bytes.
    length: u64,
    /// Distance in bytes from the function's entry to its first instruction that the kernel emulates.
    bytes_to_emulated_instruction: Option<usize>,
    /// Whether a single-stepped probe at the entry would break the function, if a 32-bit process maps the library.
    differs_in_32_bit_code: bool,
}

impl FunctionEntry<'_> {
    /// Returns the addresses after the entry, up to and including the emulated instruction. Each call executes the
    /// probed instruction exactly once only if no symbol and no branch leads to it.
    fn skipped_addresses(&self) -> impl Iterator<Item = u64> + use<> {
        let bytes_after_entry = match self.has_known_size() {
            true => self.bytes_to_emulated_instruction.unwrap_or(0),
            false => 0,
        };
        let address = self.symbol.address;
        (1..=bytes_after_entry as u64).map(move |distance| address + distance)
    }

    /// Whether the whole function can be searched for branches.
    fn has_known_size(&self) -> bool {
        self.symbol.size > 0 && self.length <= MAX_FUNCTION_BYTES
    }
}

fn outside_code_error(name: &str, symbol: &Symbol) -> SiteError {
    SiteError::OutsideCode {
        symbol: name.to_owned(),
        address: symbol.address,
    }
}

fn unreadable_code_error(name: &str, symbol: &Symbol, error: io::Error) -> SiteError {
    match is_past_end_of_file(&error) {
        true => outside_code_error(name, symbol),
        false => SiteError::Unreadable {
            symbol: name.to_owned(),
            source: error,
        },
    }
}

/// Returns what was read of a file, or the reason why it could not be read. A write to the file
/// during the read explains any result.
fn unless_file_changed<T>(
    path: &Path,
    file: &File,
    identity: FileIdentity,
    read: Result<T, ImageError>,
) -> Result<T, LibraryError> {
    let path = || path.to_owned();
    let unreadable = |source| LibraryError::Unreadable {
        path: path(),
        source,
    };
    if FileIdentity::read(file).map_err(unreadable)? != identity {
        return Err(LibraryError::Changed { path: path() });
    }
    read.map_err(|error| match error {
        ImageError::Unreadable(source) => unreadable(source),
        ImageError::Malformed(reason) => LibraryError::NotALibrary {
            path: path(),
            reason,
        },
        ImageError::OverLimit(limit) => LibraryError::OverLimit {
            path: path(),
            limit,
        },
    })
}

/// Opens a regular file; returns `None` for anything else.
///
/// Opening a device may have side effects, and opening a pipe waits for a writer. So the type of the file is checked
/// through an `O_PATH` handle, which opens neither.
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
