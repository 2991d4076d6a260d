//! Finds symbols by name in the tables of an untrusted file.
//!
//! The tables are read in pieces and not kept. A search reads every symbol once, orders the symbols by the place of
//! their name, and reads the names once from the front. So the work of a search is proportional to the size of the
//! tables (apart from the ordering), and the memory that it needs to the number of symbols, 8 bytes each.

use std::collections::{HashMap, HashSet};
use std::fs::File;

use object::LittleEndian as LE;
use object::elf::{SHN_UNDEF, STB_LOCAL, STT_FUNC, STT_GNU_IFUNC, Sym64};

use crate::elf_image::{ElfImage, ImageError, SymbolTablePlace};
use crate::limits::{LibraryLimit, MAX_MATCHES, MAX_MATCHES_PER_NAME, MAX_NAME_BYTES};

/// Symbols read at once.
const SYMBOLS_PER_READ: usize = 4096;
/// Bytes of names read at once.
const STRING_BYTES_PER_READ: usize = 256 << 10;

/// The name of a function to look up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionName<'a> {
    /// The exported name.
    Exact(&'a str),
    /// The beginning of the exported names of one or more functions.
    Prefix(&'a str),
}

impl<'a> FunctionName<'a> {
    /// Returns the text of the requested name or prefix.
    #[must_use]
    pub fn as_text(self) -> &'a str {
        match self {
            Self::Exact(text) | Self::Prefix(text) => text,
        }
    }
}

/// An exported symbol.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    pub(super) kind: SymbolKind,
    pub(super) address: u64,
    /// Size in bytes; zero if unknown.
    pub(super) size: u64,
    /// Whether the symbol is the default version of its name.
    is_default: bool,
}

/// The type of a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SymbolKind {
    Function,
    IndirectFunction,
    Other,
}

/// A symbol with its exported name.
#[derive(Debug, Clone)]
pub(super) struct NamedSymbol {
    pub(super) name: String,
    pub(super) symbol: Symbol,
}

/// A symbol whose name is still to be compared.
#[derive(Debug, Clone, Copy)]
struct SymbolCandidate {
    /// Offset of the symbol's name in the table of names.
    name_offset: u32,
    /// Index of the symbol in the symbol table.
    symbol_index: u32,
}

impl ElfImage {
    /// Returns the symbols of each name, in the order of `names`: at most one for an exact name, and one per exported
    /// function for a prefix. Of several versions of a symbol it returns the default one, else the first.
    pub(super) fn find_symbols(
        &self,
        file: &File,
        names: &[FunctionName<'_>],
    ) -> Result<Vec<Vec<NamedSymbol>>, ImageError> {
        let wanted = WantedNames::new(names);
        let mut found = vec![Vec::new(); names.len()];
        let mut total = 0;
        for table in &self.symbol_tables {
            let mut matches = table.find_matches(file, &wanted, names.len())?;
            for (list, symbols) in matches.iter_mut().zip(&mut found) {
                total += list.len();
                if list.len() + symbols.len() > MAX_MATCHES_PER_NAME {
                    return Err(ImageError::OverLimit(LibraryLimit::MatchesPerName));
                }
                if total > MAX_MATCHES {
                    return Err(ImageError::OverLimit(LibraryLimit::Matches));
                }
                list.sort_unstable_by_key(|candidate| candidate.symbol_index);
            }
            for ((name, list), symbols) in names.iter().zip(matches).zip(&mut found) {
                for candidate in list {
                    symbols.extend(table.read_match(file, *name, candidate)?);
                }
            }
        }
        Ok(found.into_iter().map(keep_default_versions).collect())
    }

    /// Returns those of `addresses` at which a symbol begins.
    pub(super) fn addresses_of_symbols(
        &self,
        file: &File,
        addresses: &HashSet<u64>,
    ) -> Result<HashSet<u64>, ImageError> {
        let mut found = HashSet::new();
        for table in &self.symbol_tables {
            table.for_each_exported(file, |_, symbol| {
                let address = symbol.st_value.get(LE);
                if addresses.contains(&address) {
                    found.insert(address);
                }
            })?;
        }
        Ok(found)
    }
}

impl SymbolTablePlace {
    /// Returns the symbols that match each wanted name. The search ends with an error at the first
    /// name with too many matches.
    fn find_matches(
        &self,
        file: &File,
        wanted: &WantedNames<'_>,
        names: usize,
    ) -> Result<Vec<Vec<SymbolCandidate>>, ImageError> {
        let mut candidates = Vec::with_capacity(self.symbol_records.record_count as usize);
        self.for_each_exported(file, |index, symbol| {
            let name = symbol.st_name.get(LE);
            candidates.push(SymbolCandidate {
                name_offset: name,
                symbol_index: index,
            });
        })?;
        candidates.sort_unstable_by_key(|candidate| candidate.name_offset);
        let mut matches = vec![Vec::new(); names];
        let mut rest = &candidates[..];
        while let Some(first) = rest.first() {
            let start = u64::from(first.name_offset);
            // A name that begins in this piece of the table may end in the next one.
            let piece = self.string_records.read(
                file,
                start,
                STRING_BYTES_PER_READ + wanted.longest_name_bytes + 1,
            )?;
            let end = start + STRING_BYTES_PER_READ as u64;
            let here = rest.partition_point(|candidate| u64::from(candidate.name_offset) < end);
            let (inside, later) = rest.split_at(here);
            for candidate in inside {
                let offset = (u64::from(candidate.name_offset) - start) as usize;
                let Some(text) = piece.as_slice().get(offset..) else {
                    break;
                };
                for number in wanted.matching_indices(text) {
                    if matches[number].len() == MAX_MATCHES_PER_NAME {
                        return Err(ImageError::OverLimit(LibraryLimit::MatchesPerName));
                    }
                    matches[number].push(*candidate);
                }
            }
            rest = later;
        }
        Ok(matches)
    }

    /// Calls `visit` with the place and the record of every defined symbol that is not local.
    fn for_each_exported(
        &self,
        file: &File,
        mut visit: impl FnMut(u32, &Sym64<LE>),
    ) -> Result<(), ImageError> {
        for first in (0..self.symbol_records.record_count).step_by(SYMBOLS_PER_READ) {
            let piece = self.symbol_records.read(file, first, SYMBOLS_PER_READ)?;
            for (index, symbol) in (first as u32..).zip(piece.as_slice()) {
                if symbol.st_bind() != STB_LOCAL && symbol.st_shndx.get(LE) != SHN_UNDEF {
                    visit(index, symbol);
                }
            }
        }
        Ok(())
    }

    /// Reads a symbol and its whole name. Returns `None` for a symbol whose name does not end
    /// within the table, and for data whose name begins with a prefix of functions.
    fn read_match(
        &self,
        file: &File,
        wanted: FunctionName<'_>,
        candidate: SymbolCandidate,
    ) -> Result<Option<NamedSymbol>, ImageError> {
        let index = u64::from(candidate.symbol_index);
        let records = self.symbol_records.read(file, index, 1)?;
        let Some(record) = records.as_slice().first() else {
            return Ok(None);
        };
        let versions = match &self.versions {
            Some(versions) => Some(versions.read(file, index, 1)?),
            None => None,
        };
        let version = versions.as_ref().and_then(|read| read.as_slice().first());
        let symbol = Symbol {
            kind: match record.st_type() {
                STT_FUNC => SymbolKind::Function,
                STT_GNU_IFUNC => SymbolKind::IndirectFunction,
                _ => SymbolKind::Other,
            },
            address: record.st_value.get(LE),
            size: record.st_size.get(LE),
            is_default: !version.is_some_and(|version| version.0.get(LE).is_hidden()),
        };
        let name = match wanted {
            FunctionName::Exact(name) => Some(name.to_owned()),
            FunctionName::Prefix(_) if symbol.kind != SymbolKind::Function => None,
            FunctionName::Prefix(_) => self.read_name(file, candidate.name_offset)?,
        };
        Ok(name.map(|name| NamedSymbol { name, symbol }))
    }

    /// Reads a name. Returns `None` if it does not end within the table, or is not valid text.
    fn read_name(&self, file: &File, offset: u32) -> Result<Option<String>, ImageError> {
        let read = self
            .string_records
            .read(file, u64::from(offset), MAX_NAME_BYTES + 1)?;
        let bytes = read.as_slice();
        match bytes.iter().position(|byte| *byte == 0) {
            Some(end) => Ok(str::from_utf8(&bytes[..end]).ok().map(str::to_owned)),
            None if bytes.len() > MAX_NAME_BYTES => {
                Err(ImageError::OverLimit(LibraryLimit::NameBytes))
            }
            None => Ok(None),
        }
    }
}

/// Requested names, arranged for the search.
struct WantedNames<'a> {
    exact_names: HashMap<&'a [u8], Vec<usize>>,
    prefixes: Vec<(&'a [u8], usize)>,
    /// Length of the longest name or prefix.
    longest_name_bytes: usize,
}

impl<'a> WantedNames<'a> {
    fn new(names: &[FunctionName<'a>]) -> Self {
        let mut wanted = Self {
            exact_names: HashMap::new(),
            prefixes: Vec::new(),
            longest_name_bytes: 0,
        };
        for (number, name) in names.iter().enumerate() {
            let text = name.as_text().as_bytes();
            wanted.longest_name_bytes = wanted.longest_name_bytes.max(text.len());
            match name {
                FunctionName::Exact(_) => wanted.exact_names.entry(text).or_default().push(number),
                FunctionName::Prefix(_) => wanted.prefixes.push((text, number)),
            }
        }
        wanted
    }

    /// Returns the numbers of the names that match the name at the start of `text`. The comparison looks at no more
    /// bytes of a name than the longest wanted name has.
    fn matching_indices(&self, text: &[u8]) -> impl Iterator<Item = usize> {
        let head = &text[..text.len().min(self.longest_name_bytes + 1)];
        let end = head.iter().position(|byte| *byte == 0);
        let exact = end.and_then(|end| self.exact_names.get(&head[..end]));
        let prefixes = self.prefixes.iter();
        let prefixes = prefixes.filter(|(prefix, _)| text.starts_with(prefix));
        exact
            .into_iter()
            .flatten()
            .copied()
            .chain(prefixes.map(|(_, number)| *number))
    }
}

/// Keeps one symbol per name: the default version, else the first.
fn keep_default_versions(symbols: Vec<NamedSymbol>) -> Vec<NamedSymbol> {
    let mut kept: Vec<NamedSymbol> = Vec::new();
    for new in symbols {
        match kept.iter_mut().find(|known| known.name == new.name) {
            Some(known) if new.symbol.is_default && !known.symbol.is_default => *known = new,
            Some(_) => {}
            None => kept.push(new),
        }
    }
    kept
}
