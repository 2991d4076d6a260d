//! Builds minimal ELF libraries for tests.

use std::borrow::Cow;

use tempfile::NamedTempFile;

use crate::{Library, LibraryError};

/// File offset and address of [`Elf::code`].
pub(crate) const CODE_OFFSET: u64 = 0x200;
pub(crate) const CODE_ADDRESS: u64 = 0x1200;

pub(crate) const FUNCTION: u8 = 2;
pub(crate) const INDIRECT_FUNCTION: u8 = 10;
const GLOBAL: u8 = 1 << 4;

/// A symbol: its name, type and binding, address and size.
pub(crate) struct Symbol {
    pub(crate) name: Cow<'static, str>,
    pub(crate) info: u8,
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) version: u16,
}

/// Returns a global function of this size at the start of the code.
pub(crate) fn function(name: impl Into<Cow<'static, str>>, size: u64) -> Symbol {
    Symbol {
        name: name.into(),
        info: GLOBAL | FUNCTION,
        address: CODE_ADDRESS,
        size,
        version: 1,
    }
}

/// A library with one code segment.
pub(crate) struct Elf {
    pub(crate) machine: u16,
    pub(crate) code: Vec<u8>,
    pub(crate) symbols: Vec<Symbol>,
}

impl Elf {
    pub(crate) fn new(code: &[u8], symbols: Vec<Symbol>) -> Self {
        Self {
            machine: 62,
            code: code.to_vec(),
            symbols,
        }
    }

    /// Returns the file: file header, program header, code, symbols, names, versions, section
    /// headers.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut strings = vec![0];
        let mut symbols = vec![0; 24];
        let mut versions = vec![0; 2];
        for symbol in &self.symbols {
            symbols.extend((strings.len() as u32).to_le_bytes());
            symbols.extend([symbol.info, 0, 1, 0]);
            symbols.extend(symbol.address.to_le_bytes());
            symbols.extend(symbol.size.to_le_bytes());
            versions.extend(symbol.version.to_le_bytes());
            strings.extend(symbol.name.bytes().chain([0]));
        }
        let mut bytes = self.headers();
        bytes.resize(CODE_OFFSET as usize, 0);
        bytes.extend(&self.code);
        let mut sections = vec![0; 64];
        for (kind, link, content) in [
            (11, 2, symbols),
            (3, 0, strings),
            (0x6fff_ffff, 1, versions),
        ] {
            sections.extend(section(kind, link, bytes.len(), content.len()));
            bytes.extend(content);
        }
        let sections_at = bytes.len() as u64;
        bytes[40..48].copy_from_slice(&sections_at.to_le_bytes());
        bytes.extend(sections);
        bytes
    }

    /// Returns the file offset of the symbols.
    pub(crate) fn symbols_offset(&self) -> usize {
        CODE_OFFSET as usize + self.code.len()
    }

    fn headers(&self) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(16, 0);
        bytes.extend([3, 0]);
        bytes.extend(self.machine.to_le_bytes());
        bytes.extend([1, 0, 0, 0]);
        bytes.extend([0_u64, 64, 0].into_iter().flat_map(u64::to_le_bytes));
        bytes.extend([0; 4]);
        bytes.extend(
            [64_u16, 56, 1, 64, 4, 0]
                .into_iter()
                .flat_map(u16::to_le_bytes),
        );
        bytes.extend(segment(CODE_OFFSET, CODE_ADDRESS, self.code.len() as u64));
        bytes
    }
}

/// Returns the header of a code segment.
pub(crate) fn segment(offset: u64, address: u64, size: u64) -> Vec<u8> {
    let mut header = [1_u32, 5].map(u32::to_le_bytes).concat();
    header.extend(
        [offset, address, address, size, size, 1]
            .into_iter()
            .flat_map(u64::to_le_bytes),
    );
    header
}

fn section(kind: u32, link: u32, offset: usize, size: usize) -> Vec<u8> {
    let mut header = [0, kind].map(u32::to_le_bytes).concat();
    header.extend(
        [0, 0, offset as u64, size as u64]
            .into_iter()
            .flat_map(u64::to_le_bytes),
    );
    header.extend([link, 0].into_iter().flat_map(u32::to_le_bytes));
    header.extend([1_u64, 0].into_iter().flat_map(u64::to_le_bytes));
    header
}

/// Writes `content` to a file.
pub(crate) fn write(content: &[u8]) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    file
}

/// Writes `content` to a file and opens it as a library.
pub(crate) fn open(content: &[u8]) -> Result<Library, LibraryError> {
    Library::open(write(content).path())
}
