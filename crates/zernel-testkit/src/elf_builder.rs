//! Builds minimal ELF libraries for tests.

use std::borrow::Cow;

/// Offset of [`ElfBuilder::code`] in the file.
pub const CODE_OFFSET: u64 = 0x200;
/// Address at which [`ElfBuilder::code`] is loaded.
pub const CODE_ADDRESS: u64 = 0x1200;

/// The ELF symbol type of a function.
pub const SYMBOL_TYPE_FUNCTION: u8 = 2;
/// The ELF symbol type of an indirect function.
pub const SYMBOL_TYPE_INDIRECT_FUNCTION: u8 = 10;
const SYMBOL_BINDING_GLOBAL: u8 = 1 << 4;

/// A symbol of an ELF library.
#[derive(Debug, Clone)]
pub struct ElfSymbol {
    /// The name of the symbol.
    pub name: Cow<'static, str>,
    /// The type of the symbol in the lower half, its binding in the upper half.
    pub info: u8,
    /// The address of the symbol.
    pub address: u64,
    /// The size of the symbol in bytes.
    pub size: u64,
    /// The version of the symbol; the highest bit is set if this is not the default version.
    pub version: u16,
}

/// Makes a global function of this size at the start of the code.
pub fn global_function(name: impl Into<Cow<'static, str>>, size: u64) -> ElfSymbol {
    ElfSymbol {
        name: name.into(),
        info: SYMBOL_BINDING_GLOBAL | SYMBOL_TYPE_FUNCTION,
        address: CODE_ADDRESS,
        size,
        version: 1,
    }
}

/// Builds an ELF library with one code segment.
#[derive(Debug, Clone)]
pub struct ElfBuilder {
    /// The number of the library's architecture; x86-64 unless changed.
    pub machine: u16,
    /// The content of the code segment.
    pub code: Vec<u8>,
    /// The symbols that the library exports.
    pub symbols: Vec<ElfSymbol>,
}

impl ElfBuilder {
    /// A builder of a library for x86-64.
    #[must_use]
    pub fn new(code: &[u8], symbols: Vec<ElfSymbol>) -> Self {
        Self {
            machine: 62,
            code: code.to_vec(),
            symbols,
        }
    }

    /// Builds the file: file header, program header, code, symbols, names, versions, section headers.
    #[must_use]
    pub fn build_file(&self) -> Vec<u8> {
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
        let mut bytes = self.file_and_program_headers();
        bytes.resize(CODE_OFFSET as usize, 0);
        bytes.extend(&self.code);
        let mut sections = vec![0; 64];
        for (kind, link, content) in [
            (11, 2, symbols),
            (3, 0, strings),
            (0x6fff_ffff, 1, versions),
        ] {
            sections.extend(section_header(kind, link, bytes.len(), content.len()));
            bytes.extend(content);
        }
        let sections_at = bytes.len() as u64;
        bytes[40..48].copy_from_slice(&sections_at.to_le_bytes());
        bytes.extend(sections);
        bytes
    }

    /// The offset of the symbol table in the file.
    #[must_use]
    pub fn symbols_offset(&self) -> usize {
        CODE_OFFSET as usize + self.code.len()
    }

    fn file_and_program_headers(&self) -> Vec<u8> {
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
        bytes.extend(program_header(
            CODE_OFFSET,
            CODE_ADDRESS,
            self.code.len() as u64,
        ));
        bytes
    }
}

/// The program header of a code segment.
#[must_use]
pub fn program_header(offset: u64, address: u64, size: u64) -> Vec<u8> {
    let mut header = [1_u32, 5].map(u32::to_le_bytes).concat();
    header.extend(
        [offset, address, address, size, size, 1]
            .into_iter()
            .flat_map(u64::to_le_bytes),
    );
    header
}

fn section_header(kind: u32, link: u32, offset: usize, size: usize) -> Vec<u8> {
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
