//! Parser of the headers of untrusted ELF files: code segments and the places of symbol tables.
//!
//! The file is read with `pread` and never mapped: a mapping of a file that is truncated kills the
//! reader. Every count is checked against a limit and against the length of the file before memory
//! is allocated for it.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use object::LittleEndian as LE;
use object::elf::{
    ELFMAG, EM_X86_64, ET_DYN, ET_EXEC, FileHeader64, PF_X, PN_XNUM, PT_INTERP, PT_LOAD,
    ProgramHeader64, SHT_DYNSYM, SHT_GNU_VERSYM, SHT_STRTAB, SHT_SYMTAB, SectionHeader64, Sym64,
    Versym,
};
use object::pod::{self, Pod};
use object::read::elf::FileHeader;
use thiserror::Error;

use crate::limits::{LibraryLimit, MAX_STRING_BYTES, MAX_SYMBOLS};

/// The reason why a file cannot be parsed.
#[derive(Debug, Error)]
pub(super) enum ImageError {
    #[error(transparent)]
    Unreadable(io::Error),
    #[error("{0}")]
    Malformed(&'static str),
    #[error("{0}")]
    OverLimit(LibraryLimit),
}

use ImageError::{Malformed, OverLimit};

const ENDS_EARLY_REASON: &str = "it ends before the data that its headers point to";

impl From<io::Error> for ImageError {
    fn from(error: io::Error) -> Self {
        if is_past_end_of_file(&error) {
            Malformed(ENDS_EARLY_REASON)
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
    address_range: Range<u64>,
    file_offset: u64,
}

/// The parts of an ELF file that are needed to find functions.
#[derive(Debug)]
pub(super) struct ElfImage {
    pub(super) is_x86_64: bool,
    /// Code segments that are not empty, by address.
    code_segments: Vec<CodeSegment>,
    pub(super) symbol_tables: Vec<SymbolTablePlace>,
}

impl ElfImage {
    pub(super) fn read(file: &File) -> Result<Self, ImageError> {
        let header = read_header(file)?;
        let segments = read_segments(file, &header)?;
        let is_program = segments
            .as_slice()
            .iter()
            .any(|segment| segment.p_type.get(LE) == PT_INTERP);
        Ok(Self {
            is_x86_64: header.e_machine.get(LE) == EM_X86_64,
            code_segments: code_segments(segments.as_slice())?,
            symbol_tables: find_tables(file, &header, is_program)?,
        })
    }

    /// Returns the file range from the code at `address` to the end of its segment.
    pub(super) fn code_range_at(&self, address: u64) -> Option<Range<u64>> {
        let after = self
            .code_segments
            .partition_point(|segment| segment.address_range.start <= address);
        let segment = &self.code_segments[after.checked_sub(1)?];
        if !segment.address_range.contains(&address) {
            return None;
        }
        let length = segment.address_range.end - segment.address_range.start;
        let start = segment.file_offset + (address - segment.address_range.start);
        Some(start..segment.file_offset + length)
    }
}

/// Where a symbol table, its names and its versions are in the file.
#[derive(Debug)]
pub(super) struct SymbolTablePlace {
    pub(super) symbol_records: TableRecords<Sym64<LE>>,
    pub(super) string_records: TableRecords<u8>,
    pub(super) versions: Option<TableRecords<Versym<LE>>>,
}

fn read_header(file: &File) -> Result<FileHeader64<LE>, ImageError> {
    let header = match RecordArray::<FileHeader64<LE>>::read(file, 0, 1) {
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
) -> Result<RecordArray<ProgramHeader64<LE>>, ImageError> {
    let count = header.e_phnum.get(LE);
    if count == PN_XNUM
        || usize::from(header.e_phentsize.get(LE)) != size_of::<ProgramHeader64<LE>>()
    {
        return Err(Malformed("its program headers have an unknown format"));
    }
    Ok(RecordArray::read(
        file,
        header.e_phoff.get(LE),
        count.into(),
    )?)
}

/// Returns the code segments. Overlapping segments are an error, because an address would then mean
/// two file offsets.
fn code_segments(headers: &[ProgramHeader64<LE>]) -> Result<Vec<CodeSegment>, ImageError> {
    let mut code: Vec<CodeSegment> = Vec::new();
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
                address_range: start..start + in_file,
                file_offset,
            });
        }
    }
    extents.retain(|extent| !extent.is_empty());
    extents.sort_unstable_by_key(|extent| extent.start);
    if !extents.is_sorted_by(|one, next| one.end <= next.start) {
        return Err(Malformed("its segments overlap"));
    }
    code.retain(|segment| !segment.address_range.is_empty());
    code.sort_unstable_by_key(|segment| segment.address_range.start);
    Ok(code)
}

/// Finds the table of exported symbols. A program need not export the functions linked into it, so
/// its full symbol table is used too, if present.
fn find_tables(
    file: &File,
    header: &FileHeader64<LE>,
    is_program: bool,
) -> Result<Vec<SymbolTablePlace>, ImageError> {
    let count = header.e_shnum.get(LE);
    if count > 0 && usize::from(header.e_shentsize.get(LE)) != size_of::<SectionHeader64<LE>>() {
        return Err(Malformed("its section headers have an unknown format"));
    }
    let sections = RecordArray::read(file, header.e_shoff.get(LE), count.into())?;
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
    let file_length = file.metadata()?.len();
    let tables = exported.into_iter().chain(full);
    let tables = tables.map(|table| find_table(file_length, sections, table));
    let tables: Vec<SymbolTablePlace> = tables.collect::<Result<_, _>>()?;
    let symbols: u64 = tables
        .iter()
        .map(|table| table.symbol_records.record_count)
        .sum();
    if symbols > MAX_SYMBOLS {
        return Err(OverLimit(LibraryLimit::Symbols));
    }
    let string_bytes: u64 = tables
        .iter()
        .map(|table| table.string_records.record_count)
        .sum();
    if string_bytes > MAX_STRING_BYTES {
        return Err(OverLimit(LibraryLimit::StringBytes));
    }
    Ok(tables)
}

fn find_table(
    file_length: u64,
    sections: &[SectionHeader64<LE>],
    index: usize,
) -> Result<SymbolTablePlace, ImageError> {
    let table = &sections[index];
    let strings = sections
        .get(table.sh_link.get(LE) as usize)
        .filter(|section| section.sh_type.get(LE) == SHT_STRTAB)
        .ok_or(Malformed("one of its symbol tables has no names"))?;
    let versions = sections.iter().find(|section| {
        section.sh_type.get(LE) == SHT_GNU_VERSYM && section.sh_link.get(LE) as usize == index
    });
    Ok(SymbolTablePlace {
        symbol_records: TableRecords::new(table, file_length)?,
        string_records: TableRecords::new(strings, file_length)?,
        versions: versions
            .map(|section| TableRecords::new(section, file_length))
            .transpose()?,
    })
}

/// Where records of one type are in a file. All records are within the file's length at the time of opening.
#[derive(Debug)]
pub(super) struct TableRecords<T> {
    file_offset: u64,
    pub(super) record_count: u64,
    record: PhantomData<T>,
}

impl<T: Pod> TableRecords<T> {
    fn new(section: &SectionHeader64<LE>, file_length: u64) -> Result<Self, ImageError> {
        let (file_offset, length) = (section.sh_offset.get(LE), section.sh_size.get(LE));
        let end = file_offset.checked_add(length);
        if end.is_none_or(|end| end > file_length) {
            return Err(Malformed(ENDS_EARLY_REASON));
        }
        Ok(Self {
            file_offset,
            record_count: length / size_of::<T>() as u64,
            record: PhantomData,
        })
    }

    /// Reads at most `limit` records from `first` on: fewer at the end of the table.
    pub(super) fn read(&self, file: &File, first: u64, limit: usize) -> io::Result<RecordArray<T>> {
        let count = self.record_count.saturating_sub(first).min(limit as u64);
        let offset = self.file_offset + first.min(self.record_count) * size_of::<T>() as u64;
        RecordArray::read(file, offset, count as usize)
    }
}

/// Records that were read from a file, in memory that is aligned for them.
#[derive(Debug)]
pub(super) struct RecordArray<T> {
    words: Vec<u64>,
    count: usize,
    record: PhantomData<T>,
}

impl<T: Pod> RecordArray<T> {
    pub(super) fn read(file: &File, offset: u64, count: usize) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= align_of::<u64>()) };
        let bytes = count * size_of::<T>();
        #[cfg(test)]
        crate::tests::count_bytes_read(bytes);
        let mut words = vec![0; bytes.div_ceil(size_of::<u64>())];
        file.read_exact_at(&mut pod::bytes_of_slice_mut(&mut words)[..bytes], offset)?;
        Ok(Self {
            words,
            count,
            record: PhantomData,
        })
    }

    pub(super) fn as_slice(&self) -> &[T] {
        // Cannot fail: the memory is aligned and large enough for `count` records.
        pod::slice_from_bytes(pod::bytes_of_slice(&self.words), self.count)
            .map_or(&[], |(records, _)| records)
    }
}
