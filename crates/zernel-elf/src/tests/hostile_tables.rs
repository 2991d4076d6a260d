//! Symbol tables that are made to cost time or memory.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use tempfile::NamedTempFile;
use zernel_testkit::allocation::{CountingAllocator, peak_bytes};
use zernel_testkit::elf_builder::{CODE_ADDRESS, ElfBuilder, ElfSymbol, global_function};

use super::{bytes_read_by, write_to_file};
use crate::limits::{
    MAX_CODE_BYTES, MAX_FUNCTION_BYTES, MAX_MATCHES_PER_NAME, MAX_NAME_BYTES, MAX_STRING_BYTES,
    MAX_SYMBOLS,
};
use crate::*;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The most memory that reading one library file may take.
const MAX_READ_MEMORY_BYTES: usize = 40 << 20;

/// `endbr64; push %rbp; pop %rbp; ret`
const ENDBR_PUSH: [u8; 7] = [0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x5d, 0xc3];

const ENGINE_EXECUTE_PREFIX: FunctionName<'_> =
    FunctionName::Prefix("_ZN5torch8autograd6Engine7executeE");

/// Looks up functions in a file, and asserts that every part of the file is read three times at
/// most, and that the memory is within its limit.
fn find_within_limits(
    file: &NamedTempFile,
    names: &[FunctionName<'_>],
) -> Result<Vec<MatchedSites>, LibraryError> {
    let find = || Library::open(file.path())?.find_functions(names);
    let ((sites, read), peak) = peak_bytes(|| bytes_read_by(find));
    let length = file.as_file().metadata().unwrap().len();
    // A piece of the names may be read again, and the code at each entry.
    assert!(read <= 3 * length + (1 << 20), "{read} of {length} bytes");
    assert!(peak <= MAX_READ_MEMORY_BYTES, "{peak} bytes of memory");
    sites
}

fn exceeded_limit(result: Result<Vec<MatchedSites>, LibraryError>) -> LibraryLimit {
    match result {
        Err(LibraryError::OverLimit { limit, .. }) => limit,
        other => panic!("{other:?}"),
    }
}

fn file_with_symbols(names: impl Iterator<Item = String>) -> NamedTempFile {
    let symbols: Vec<ElfSymbol> = names.map(|name| global_function(name, 7)).collect();
    write_to_file(&ElfBuilder::new(&ENDBR_PUSH, symbols).build_file())
}

#[test]
fn a_million_symbols_that_match_one_prefix_are_refused() {
    let names = (0..1_000_000).map(|number| format!("{}{number}", ENGINE_EXECUTE_PREFIX.as_text()));
    let limit = exceeded_limit(find_within_limits(
        &file_with_symbols(names),
        &[ENGINE_EXECUTE_PREFIX],
    ));
    assert_eq!(limit, LibraryLimit::MatchesPerName);
}

#[test]
fn matches_up_to_the_limit_are_found() {
    let file = |count| {
        file_with_symbols(
            (0..count).map(|number| format!("{}{number}", ENGINE_EXECUTE_PREFIX.as_text())),
        )
    };
    let sites = find_within_limits(&file(MAX_MATCHES_PER_NAME), &[ENGINE_EXECUTE_PREFIX]).unwrap();
    assert_eq!(sites[0].iter().flatten().count(), MAX_MATCHES_PER_NAME);
    let limit = exceeded_limit(find_within_limits(
        &file(MAX_MATCHES_PER_NAME + 1),
        &[ENGINE_EXECUTE_PREFIX],
    ));
    assert_eq!(limit, LibraryLimit::MatchesPerName);
}

#[test]
fn matches_of_all_names_are_limited() {
    let prefixes: Vec<String> = (0..80).map(|number| format!("f{number}_")).collect();
    let names: Vec<_> = prefixes.iter().map(|it| FunctionName::Prefix(it)).collect();
    let overloads = |prefix: &String| {
        (0..16)
            .map(move |number| format!("{prefix}{number}"))
            .collect()
    };
    let file = file_with_symbols(prefixes.iter().flat_map::<Vec<String>, _>(overloads));
    assert_eq!(
        exceeded_limit(find_within_limits(&file, &names)),
        LibraryLimit::Matches
    );
    let some = find_within_limits(&file, &names[..60]).unwrap();
    assert_eq!(some.iter().flatten().flatten().count(), 60 * 16);
}

#[test]
fn long_unique_names_are_read_once() {
    let long = "x".repeat(1000);
    let names = (0..50_000).map(|number| format!("{number}{long}"));
    let file = file_with_symbols(names.chain([format!("{}i", ENGINE_EXECUTE_PREFIX.as_text())]));
    let sites = find_within_limits(
        &file,
        &[ENGINE_EXECUTE_PREFIX, FunctionName::Exact("cuInit")],
    )
    .unwrap();
    assert!(sites[0][0].is_ok(), "{sites:?}");
    assert!(matches!(sites[1][0], Err(SiteError::NotExported { .. })));
}

/// Returns a file in which every symbol names another place within one string.
fn file_with_overlapping_names() -> NamedTempFile {
    let mut elf = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("x".repeat(1 << 20), 7)]);
    elf.symbols
        .extend((0..200_000).map(|_| global_function(String::new(), 7)));
    let mut bytes = elf.build_file();
    let symbols = elf.symbols_offset();
    for number in 0..200_000_u32 {
        let at = symbols + 24 * (2 + number as usize);
        bytes[at..at + 4].copy_from_slice(&(1 + 5 * number).to_le_bytes());
    }
    write_to_file(&bytes)
}

#[test]
fn overlapping_names_are_read_once() {
    let file = file_with_overlapping_names();
    let sites = find_within_limits(
        &file,
        &[ENGINE_EXECUTE_PREFIX, FunctionName::Exact("cuInit")],
    )
    .unwrap();
    assert!(matches!(sites[0][0], Err(SiteError::NotExported { .. })));
}

/// Every symbol is compared with the names that a loader must have.
#[test]
fn overlapping_names_of_a_loader_are_read_once() {
    let file = file_with_overlapping_names();
    let (symbols, read) = bytes_read_by(|| LoaderSymbols::read(file.path()));
    assert!(matches!(symbols, Err(LoaderError::NoHook)), "{symbols:?}");
    let length = file.as_file().metadata().unwrap().len();
    assert!(read > length / 2 && read < 2 * length, "{read} of {length}");
}

/// A symbol between the entry of a function and its probed instruction is searched for.
#[test]
fn second_entries_of_many_functions_are_searched_for_once() {
    let wanted: Vec<String> = (0..500).map(|number| format!("wanted{number}")).collect();
    let others = (0..100_000).map(|number| format!("other{number}"));
    let file = file_with_symbols(wanted.iter().cloned().chain(others));
    let names: Vec<_> = wanted.iter().map(|it| FunctionName::Exact(it)).collect();
    let sites = find_within_limits(&file, &names).unwrap();
    let found = sites.iter().flatten().flatten();
    assert_eq!(
        found.filter(|site| site.bytes_after_entry == 4).count(),
        500
    );
}

#[test]
fn a_matching_name_that_is_too_long_is_refused() {
    let named = |length: usize| {
        let rest = "v".repeat(length - ENGINE_EXECUTE_PREFIX.as_text().len());
        find_within_limits(
            &file_with_symbols([ENGINE_EXECUTE_PREFIX.as_text().to_owned() + &rest].into_iter()),
            &[ENGINE_EXECUTE_PREFIX],
        )
    };
    assert!(named(MAX_NAME_BYTES).unwrap()[0][0].is_ok());
    assert_eq!(
        exceeded_limit(named(MAX_NAME_BYTES + 1)),
        LibraryLimit::NameBytes
    );
}

#[test]
fn too_much_code_is_refused() {
    let mut code = ENDBR_PUSH.to_vec();
    code.resize(MAX_FUNCTION_BYTES as usize, 0x90);
    let functions = |count: u64| {
        let names: Vec<String> = (0..count).map(|number| format!("f{number}")).collect();
        let symbols = names.iter();
        let symbols = symbols.map(|name| global_function(name.clone(), MAX_FUNCTION_BYTES));
        let file = write_to_file(&ElfBuilder::new(&code, symbols.collect()).build_file());
        let names: Vec<_> = names.iter().map(|it| FunctionName::Exact(it)).collect();
        Library::open(file.path()).unwrap().find_functions(&names)
    };
    let count = MAX_CODE_BYTES / MAX_FUNCTION_BYTES;
    assert_eq!(functions(count).unwrap().len(), count as usize);
    assert_eq!(
        exceeded_limit(functions(count + 1)),
        LibraryLimit::CodeBytes
    );
}

/// Returns a file in which the section of header number `header` has this length. Nothing is written into the
/// section, so the file takes no room on a disk.
fn file_with_section_length(header: usize, length: u64) -> NamedTempFile {
    let bytes = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("f", 7)]).build_file();
    let headers = bytes.len() - 4 * 64;
    let file = write_to_file(&bytes);
    let writer = OpenOptions::new().write(true).open(file.path()).unwrap();
    let start = 1 << 20;
    let range = [start, length].map(u64::to_le_bytes).concat();
    let at = headers + header * 64 + 24;
    writer.write_all_at(&range, at as u64).unwrap();
    writer.set_len(start + length).unwrap();
    file
}

#[test]
fn tables_that_are_too_large_are_refused() {
    for (header, length, expected) in [
        (1, MAX_SYMBOLS * 24, None),
        (1, (MAX_SYMBOLS + 1) * 24, Some(LibraryLimit::Symbols)),
        (2, MAX_STRING_BYTES, None),
        (2, MAX_STRING_BYTES + 1, Some(LibraryLimit::StringBytes)),
    ] {
        let file = file_with_section_length(header, length);
        let sites = find_within_limits(&file, &[ENGINE_EXECUTE_PREFIX]);
        match expected {
            None => assert!(sites.is_ok(), "{sites:?}"),
            Some(limit) => assert_eq!(exceeded_limit(sites), limit),
        }
    }
}

#[test]
fn the_largest_table_takes_bounded_memory() {
    let mut elf = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("f", 7)]);
    elf.symbols
        .extend((1..MAX_SYMBOLS - 1).map(|number| ElfSymbol {
            address: CODE_ADDRESS + number,
            ..global_function("", 1)
        }));
    let sites = find_within_limits(
        &write_to_file(&elf.build_file()),
        &[FunctionName::Exact("f"), ENGINE_EXECUTE_PREFIX],
    )
    .unwrap();
    assert_eq!(sites[0][0].as_ref().unwrap().bytes_after_entry, 0);
}

#[test]
fn a_refusal_names_the_limit() {
    let error = find_within_limits(
        &file_with_section_length(2, MAX_STRING_BYTES + 1),
        &[ENGINE_EXECUTE_PREFIX],
    )
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.ends_with("more than 268435456 bytes of names"),
        "{text}"
    );
}
