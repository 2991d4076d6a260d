//! Files of arbitrary content, as libraries and as dynamic loaders.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::MemfdFlags;
use zernel_elf::{FunctionName, Library, LoaderSymbols};
use zernel_testkit::allocation::CountingAllocator;
use zernel_testkit::elf_builder::{CODE_ADDRESS, ElfBuilder, ElfSymbol, global_function};
use zernel_testkit::fuzz::FuzzTarget;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// `endbr64; push %rbp; mov %rdi,%rax; je; pop %rbp; ret; nop; …`
const FUNCTION_CODE: [u8; 16] = [
    0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x48, 0x89, 0xf8, 0x74, 0x01, 0x5d, 0xc3, 0x90, 0xeb, 0xf9, 0xc3,
];

const REQUESTED_NAMES: [FunctionName<'_>; 6] = [
    FunctionName::Exact("cuInit"),
    FunctionName::Exact("cuLaunchKernel"),
    FunctionName::Exact(""),
    FunctionName::Prefix("_ZN5torch8autograd6Engine7executeE"),
    FunctionName::Prefix("_ZN4c10d4Work4waitE"),
    FunctionName::Prefix("_"),
];

const DICTIONARY_WORDS: [&str; 6] = [
    "cuInit\0",
    "cuLaunchKernel",
    "_ZN5torch8autograd6Engine7executeE",
    "_dl_debug_state\0",
    "_r_debug\0",
    "\x7fELF\x02\x01\x01",
];

/// A file in memory whose content changes.
struct MemoryFile(File);

impl MemoryFile {
    fn new() -> Self {
        let file = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC);
        Self(file.expect("memory").into())
    }

    fn set_content(&self, content: &[u8]) -> PathBuf {
        self.0.set_len(content.len() as u64).expect("memory");
        self.0.write_all_at(content, 0).expect("memory");
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

/// Libraries with one, few and many symbols.
fn example_libraries() -> [Vec<u8>; 3] {
    let symbols = |names: &[&'static str]| {
        let names = names.iter().enumerate();
        let symbols = names.map(|(number, name)| ElfSymbol {
            address: CODE_ADDRESS + number as u64 % 4,
            version: 1 + 0x8000 * (number as u16 % 2),
            ..global_function(*name, 12)
        });
        ElfBuilder::new(&FUNCTION_CODE, symbols.collect()).build_file()
    };
    let many: Vec<ElfSymbol> = (0..100)
        .map(|number| global_function(format!("_ZN5torch{number}"), 7))
        .collect();
    [
        symbols(&["cuInit"]),
        symbols(&[
            "cuInit",
            "cuInit",
            "cuLaunchKernel",
            "_ZN5torch8autograd6Engine7executeEi",
            "_ZN5torch8autograd6Engine7executeEj",
            "_ZN4c10d4Work4waitEv",
            "_dl_debug_state",
            "_r_debug",
        ]),
        ElfBuilder::new(&FUNCTION_CODE, many).build_file(),
    ]
}

fn fuzz_target(name: &str) -> FuzzTarget<'_> {
    let target = FuzzTarget::new(name, 60_000).words(DICTIONARY_WORDS);
    example_libraries()
        .into_iter()
        .fold(target, FuzzTarget::input)
}

#[test]
fn fuzz_library() {
    let file = MemoryFile::new();
    let mut usable = 0_u64;
    let outcome = fuzz_target("library").run(|content| {
        let sites = Library::open(&file.set_content(content))
            .and_then(|library| library.find_functions(&REQUESTED_NAMES));
        usable += u64::from(sites.is_ok());
        for site in sites.into_iter().flatten().flatten().flatten() {
            assert!(site.file_offset < content.len() as u64, "{site:?}");
        }
    });
    assert!(usable > outcome.inputs / 5, "{usable} files: {outcome:?}");
}

#[test]
fn fuzz_dynamic_loader() {
    let file = MemoryFile::new();
    let mut found = 0_u64;
    let outcome = fuzz_target("dynamic-loader").run(|content| {
        found += u64::from(LoaderSymbols::read(&file.set_content(content)).is_ok());
    });
    assert!(found > outcome.inputs / 50, "{found} loaders: {outcome:?}");
}
