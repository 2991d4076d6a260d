//! Parser of the segments and symbol tables of untrusted ELF files.
//!
//! The file is read with `pread` and never mapped: a mapping of a file that is truncated kills the
//! reader. Every count is checked against a limit before memory is allocated for it.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use object::LittleEndian as LE;
use object::elf::{
    ELFMAG, EM_X86_64, ET_DYN, ET_EXEC, FileHeader64, PF_X, PN_XNUM, PT_INTERP, PT_LOAD,
    ProgramHeader64, SHN_UNDEF, SHT_DYNSYM, SHT_GNU_VERSYM, SHT_STRTAB, SHT_SYMTAB, STB_LOCAL,
    STT_FUNC, STT_GNU_IFUNC, SectionHeader64, Sym64, Versym,
};
use object::pod::{self, Pod};
use object::read::elf::FileHeader;
use thiserror::Error;

/// Limits above any real library. The largest of `PyTorch` have a few hundred thousand symbols.
const MAX_SYMBOLS: u64 = 4 << 20;
const MAX_STRING_BYTES: u64 = 256 << 20;
/// Longest name returned. Names of C++ templates may be longer, but no probe needs them.
const MAX_NAME_BYTES: usize = 4096;

/// The reason why a file cannot be parsed.
#[derive(Debug, Error)]
pub(super) enum ImageError {
    #[error(transparent)]
    Unreadable(io::Error),
    #[error("{0}")]
    Malformed(&'static str),
}

use ImageError::Malformed;

impl From<io::Error> for ImageError {
    fn from(error: io::Error) -> Self {
        if is_past_end_of_file(&error) {
            Malformed("it ends before the data that its headers point to")
        } else {
            Self::Unreadable(error)
        }
    }
}

/// Whether a read failed because its offset was past the end of the file, or not a valid file
/// offset.
pub(super) fn is_past_end_of_file(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | InvalidInput)
}

/// A segment that is mapped as code.
#[derive(Debug)]
struct CodeSegment {
    addresses: Range<u64>,
    file_offset: u64,
}

/// An exported symbol.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    pub(super) kind: SymbolKind,
    pub(super) address: u64,
    /// Size in bytes; zero if unknown.
    pub(super) size: u64,
    /// Whether it is the default version of its name.
    pub(super) is_default: bool,
}

/// The type of a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SymbolKind {
    Function,
    IndirectFunction,
    Other,
}

/// The parts of an ELF file that are needed to find functions.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) is_x86_64: bool,
    code: Vec<CodeSegment>,
    tables: Vec<SymbolTable>,
}

impl Image {
    pub(super) fn read(file: &File) -> Result<Self, ImageError> {
        let header = read_header(file)?;
        let segments = read_segments(file, &header)?;
        let is_program = segments
            .as_slice()
            .iter()
            .any(|segment| segment.p_type.get(LE) == PT_INTERP);
        Ok(Self {
            is_x86_64: header.e_machine.get(LE) == EM_X86_64,
            code: code_segments(segments.as_slice())?,
            tables: read_tables(file, &header, is_program)?,
        })
    }

    /// Returns all exported symbols. The name is `None` if it is longer than `max_name_bytes`.
    pub(super) fn symbols(
        &self,
        max_name_bytes: usize,
    ) -> impl Iterator<Item = (Option<&[u8]>, Symbol)> {
        self.tables
            .iter()
            .flat_map(move |table| table.symbols(max_name_bytes))
    }

    /// Returns the names of all exported functions.
    pub(super) fn functions(&self) -> impl Iterator<Item = &str> {
        self.symbols(MAX_NAME_BYTES)
            .filter(|(_, symbol)| symbol.kind == SymbolKind::Function)
            .filter_map(|(name, _)| str::from_utf8(name?).ok())
    }

    /// Whether a symbol has one of these addresses.
    pub(super) fn has_symbol_in(&self, addresses: &Range<u64>) -> bool {
        self.symbols(0)
            .any(|(_, symbol)| addresses.contains(&symbol.address))
    }

    /// Returns the file range from the code at `address` to the end of its segment.
    pub(super) fn code_at(&self, address: u64) -> Option<Range<u64>> {
        let segment = self
            .code
            .iter()
            .find(|segment| segment.addresses.contains(&address))?;
        let length = segment.addresses.end - segment.addresses.start;
        let start = segment.file_offset + (address - segment.addresses.start);
        Some(start..segment.file_offset + length)
    }
}

/// A symbol table with its names and, if present, its versions.
#[derive(Debug)]
struct SymbolTable {
    symbols: Array<Sym64<LE>>,
    strings: Array<u8>,
    versions: Option<Array<Versym<LE>>>,
}

impl SymbolTable {
    fn symbols(&self, max_name_bytes: usize) -> impl Iterator<Item = (Option<&[u8]>, Symbol)> {
        let versions = self.versions.as_ref().map_or(&[][..], Array::as_slice);
        let symbols = self.symbols.as_slice().iter().enumerate();
        symbols.filter_map(move |(index, symbol)| {
            if symbol.st_bind() == STB_LOCAL || symbol.st_shndx.get(LE) == SHN_UNDEF {
                return None;
            }
            let kind = match symbol.st_type() {
                STT_FUNC => SymbolKind::Function,
                STT_GNU_IFUNC => SymbolKind::IndirectFunction,
                _ => SymbolKind::Other,
            };
            let symbol_of_name = Symbol {
                kind,
                address: symbol.st_value.get(LE),
                size: symbol.st_size.get(LE),
                is_default: !versions
                    .get(index)
                    .is_some_and(|version| version.0.get(LE).is_hidden()),
            };
            let name = self.name(symbol.st_name.get(LE), max_name_bytes);
            Some((name, symbol_of_name))
        })
    }

    /// Returns the name at `offset` if it has at most `longest` bytes. The bound keeps a table of a
    /// million unterminated names from taking hours.
    fn name(&self, offset: u32, longest: usize) -> Option<&[u8]> {
        let rest = self.strings.as_slice().get(offset as usize..)?;
        let rest = rest.get(..=longest).unwrap_or(rest);
        CStr::from_bytes_until_nul(rest).ok().map(CStr::to_bytes)
    }
}

fn read_header(file: &File) -> Result<FileHeader64<LE>, ImageError> {
    let header = match Array::<FileHeader64<LE>>::read(file, 0, 1) {
        Ok(header) => header.as_slice()[0],
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(Malformed("it is too short for an ELF header"));
        }
        Err(error) => return Err(error.into()),
    };
    if header.e_ident.magic != ELFMAG {
        return Err(Malformed("it does not start with the ELF magic number"));
    }
    if !header.is_supported() || header.endian().is_err() {
        return Err(Malformed("it is not a 64-bit little-endian ELF file"));
    }
    if ![ET_DYN, ET_EXEC].contains(&header.e_type.get(LE)) {
        return Err(Malformed("it is neither a shared library nor a program"));
    }
    Ok(header)
}

fn read_segments(
    file: &File,
    header: &FileHeader64<LE>,
) -> Result<Array<ProgramHeader64<LE>>, ImageError> {
    let count = header.e_phnum.get(LE);
    if count == PN_XNUM
        || usize::from(header.e_phentsize.get(LE)) != size_of::<ProgramHeader64<LE>>()
    {
        return Err(Malformed("its program headers have an unknown format"));
    }
    Ok(Array::read(file, header.e_phoff.get(LE), count.into())?)
}

/// Returns the code segments. Overlapping segments are an error, because an address would then mean
/// two file offsets.
fn code_segments(headers: &[ProgramHeader64<LE>]) -> Result<Vec<CodeSegment>, ImageError> {
    let mut code = Vec::new();
    let mut extents = Vec::new();
    let loaded = headers
        .iter()
        .filter(|header| header.p_type.get(LE) == PT_LOAD);
    for header in loaded {
        let start = header.p_vaddr.get(LE);
        let in_file = header.p_filesz.get(LE);
        let in_memory = header.p_memsz.get(LE).max(in_file);
        let file_offset = header.p_offset.get(LE);
        let end = start.checked_add(in_memory);
        let (Some(end), Some(_)) = (end, file_offset.checked_add(in_file)) else {
            return Err(Malformed("one of its segments exceeds the address space"));
        };
        extents.push(start..end);
        if header.p_flags.get(LE).contains(PF_X) {
            code.push(CodeSegment {
                addresses: start..start + in_file,
                file_offset,
            });
        }
    }
    extents.retain(|extent| !extent.is_empty());
    extents.sort_unstable_by_key(|extent| extent.start);
    if extents.is_sorted_by(|one, next| one.end <= next.start) {
        Ok(code)
    } else {
        Err(Malformed("its segments overlap"))
    }
}

/// Reads the table of exported symbols. A program need not export the functions linked into it, so
/// its full symbol table is read too, if present.
fn read_tables(
    file: &File,
    header: &FileHeader64<LE>,
    is_program: bool,
) -> Result<Vec<SymbolTable>, ImageError> {
    let count = header.e_shnum.get(LE);
    if count > 0 && usize::from(header.e_shentsize.get(LE)) != size_of::<SectionHeader64<LE>>() {
        return Err(Malformed("its section headers have an unknown format"));
    }
    let sections = Array::read(file, header.e_shoff.get(LE), count.into())?;
    let sections: &[SectionHeader64<LE>] = sections.as_slice();
    let find = |kind| {
        sections
            .iter()
            .position(|section| section.sh_type.get(LE) == kind)
    };
    let exported = find(SHT_DYNSYM);
    let full = find(SHT_SYMTAB).filter(|_| is_program || exported.is_none());
    if exported.or(full).is_none() {
        return Err(Malformed("it has no symbol table"));
    }
    let tables = exported.into_iter().chain(full);
    tables
        .map(|table| read_table(file, sections, table))
        .collect()
}

fn read_table(
    file: &File,
    sections: &[SectionHeader64<LE>],
    index: usize,
) -> Result<SymbolTable, ImageError> {
    let table = &sections[index];
    let strings = sections
        .get(table.sh_link.get(LE) as usize)
        .filter(|section| section.sh_type.get(LE) == SHT_STRTAB)
        .ok_or(Malformed("one of its symbol tables has no names"))?;
    let versions = sections.iter().find(|section| {
        section.sh_type.get(LE) == SHT_GNU_VERSYM && section.sh_link.get(LE) as usize == index
    });
    Ok(SymbolTable {
        symbols: read_section(file, table, MAX_SYMBOLS)?,
        strings: read_section(file, strings, MAX_STRING_BYTES)?,
        versions: versions
            .map(|section| read_section(file, section, MAX_SYMBOLS))
            .transpose()?,
    })
}

fn read_section<T: Pod>(
    file: &File,
    section: &SectionHeader64<LE>,
    limit: u64,
) -> Result<Array<T>, ImageError> {
    let count = section.sh_size.get(LE) / size_of::<T>() as u64;
    if count > limit {
        return Err(Malformed(
            "its headers claim more symbols than any library has",
        ));
    }
    Ok(Array::read(
        file,
        section.sh_offset.get(LE),
        count as usize,
    )?)
}

/// Records of a file, in memory that is aligned for them.
#[derive(Debug)]
struct Array<T> {
    words: Vec<u64>,
    count: usize,
    record: PhantomData<T>,
}

impl<T: Pod> Array<T> {
    fn read(file: &File, offset: u64, count: usize) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= align_of::<u64>()) };
        let bytes = count * size_of::<T>();
        let mut words = vec![0; bytes.div_ceil(size_of::<u64>())];
        file.read_exact_at(&mut pod::bytes_of_slice_mut(&mut words)[..bytes], offset)?;
        Ok(Self {
            words,
            count,
            record: PhantomData,
        })
    }

    fn as_slice(&self) -> &[T] {
        // Cannot fail: the memory is aligned and large enough for `count` records.
        pod::slice_from_bytes(pod::bytes_of_slice(&self.words), self.count)
            .map_or(&[], |(records, _)| records)
    }
}
