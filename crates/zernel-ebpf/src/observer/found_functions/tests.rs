//! Functions of library files that any user can make.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;
use zernel_elf::LibraryLimit;
use zernel_testkit::allocation::CountingAllocator;
use zernel_testkit::elf_builder::{CODE_ADDRESS, ElfBuilder, ElfSymbol, global_function};
use zernel_testkit::fuzz::FuzzTarget;

use super::*;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// `push %rbp; pop %rbp; ret`, and again at the next 4 bytes.
const PUSH_POP_RET: [u8; 4] = [0x55, 0x5d, 0xc3, 0x90];

/// The probed functions that a library file with this content has.
fn functions_in(content: &[u8], kind: LibraryKind) -> Result<Vec<FoundFunction>, LibraryError> {
    let file = rustix::fs::memfd_create("library", MemfdFlags::CLOEXEC);
    let file = File::from(file.expect("memory"));
    file.write_all_at(content, 0).expect("memory");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    find_functions(kind, &Library::open(path.as_ref())?)
}

/// The content of a library file that exports a separate function under each of these names.
fn library_exporting(names: impl Iterator<Item = String>) -> Vec<u8> {
    let names: Vec<String> = names.collect();
    let code = PUSH_POP_RET.repeat(names.len());
    let symbols = names.into_iter().enumerate();
    let symbols = symbols.map(|(number, name)| ElfSymbol {
        address: CODE_ADDRESS + 4 * number as u64,
        ..global_function(name, 4)
    });
    ElfBuilder::new(&code, symbols.collect()).build_file()
}

/// The names of the probed functions of a library, each as a compiler would complete it.
fn completed_names(kind: LibraryKind) -> impl Iterator<Item = String> {
    let rows = SYMBOLS.iter().filter(move |row| row.library == kind);
    rows.flat_map(|row| {
        let names = row.names.iter();
        names.map(|name| match row.is_found_by_prefix {
            true => format!("{name}RKSt6vector"),
            false => (*name).to_owned(),
        })
    })
}

#[test]
fn a_library_with_all_functions_is_within_the_limits() {
    for kind in [LibraryKind::TorchCpu, LibraryKind::Cuda, LibraryKind::Nccl] {
        let found = functions_in(&library_exporting(completed_names(kind)), kind)
            .expect("within the limits");
        assert_eq!(found.len(), completed_names(kind).count(), "{kind:?}");
        let attached = found.iter().filter(|it| it.mode == AttachMode::Permanent);
        assert_eq!(attached.count(), found.len(), "{kind:?}");
    }
}

#[test]
fn a_library_with_a_million_matching_symbols_is_refused() {
    let prefix = completed_names(LibraryKind::TorchCpu)
        .next()
        .expect("it has rows");
    let matching = (0..1_000_000).map(|number| format!("{prefix}{number}"));
    let symbols = matching.map(|name| global_function(name, 4)).collect();
    let content = ElfBuilder::new(&PUSH_POP_RET, symbols).build_file();
    let refused = functions_in(&content, LibraryKind::TorchCpu);
    let Err(LibraryError::OverLimit { limit, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(limit, LibraryLimit::MatchesPerName);
}

#[test]
fn fuzz_find_functions() {
    let words: Vec<String> = completed_names(LibraryKind::TorchCpu).collect();
    let target = FuzzTarget::new("find-functions", 20_000)
        .input(library_exporting(completed_names(LibraryKind::TorchCpu)))
        .input(library_exporting(
            completed_names(LibraryKind::TorchCpu).take(3),
        ))
        .words(words.iter().map(String::as_str));
    let mut found = 0;
    let outcome = target.run(|content| {
        let functions = functions_in(content, LibraryKind::TorchCpu);
        let attached = functions.into_iter().flatten();
        found += attached
            .filter(|it| it.mode == AttachMode::Permanent)
            .count() as u64;
    });
    assert!(found > outcome.inputs, "{found} functions: {outcome:?}");
}
