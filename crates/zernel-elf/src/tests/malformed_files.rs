//! Damaged, malicious and unusual files.

use std::fs::{self, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use object::{Object, ObjectSection};
use zernel_softgpu::install::Prologue;
use zernel_testkit::elf_builder::{
    CODE_ADDRESS, CODE_OFFSET, ElfBuilder, ElfSymbol, SYMBOL_TYPE_FUNCTION,
    SYMBOL_TYPE_INDIRECT_FUNCTION, global_function, program_header,
};

use super::{cuda_path, install_softgpu, open_content};
use crate::*;

/// `endbr64; push %rbp; pop %rbp; ret`
const ENDBR_PUSH: [u8; 7] = [0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x5d, 0xc3];

const SITE_AT_ENTRY: ProbeSite = ProbeSite {
    file_offset: CODE_OFFSET,
    bytes_after_entry: 0,
    trap: TrapCost::SingleStepped,
};

fn library_with(code: &[u8], symbols: Vec<ElfSymbol>) -> Library {
    open_content(&ElfBuilder::new(code, symbols).build_file()).unwrap()
}

/// Returns the error for a library after `change` was applied to its bytes.
fn refusal_after_change(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("f", 7)]).build_file();
    change(&mut bytes);
    open_content(&bytes).unwrap_err().to_string()
}

#[test]
fn a_minimal_library_has_a_probe_site() {
    let site = library_with(&ENDBR_PUSH, vec![global_function("f", 7)])
        .find_site("f")
        .unwrap();
    let expected = ProbeSite {
        file_offset: CODE_OFFSET + 4,
        bytes_after_entry: 4,
        trap: TrapCost::Emulated,
    };
    assert_eq!(site, expected);
}

#[test]
fn a_file_that_is_not_a_library_is_refused_with_a_reason() {
    for (content, reason) in [
        (&b""[..], "too short"),
        (b"\x7fELF", "too short"),
        (&[b'#'; 100], "ELF magic number"),
    ] {
        let error = open_content(content).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    for (at, value, reason) in [
        (4, 1, "64-bit"),
        (5, 2, "little-endian"),
        (16, 1, "neither a shared library nor a program"),
        (54, 1, "program headers"),
        (58, 1, "section headers"),
        (60, 0, "no symbol table"),
    ] {
        let error = refusal_after_change(|bytes| bytes[at] = value);
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn headers_that_point_outside_the_file_are_refused() {
    let ends = "ends before";
    for (at, value) in [
        (32, 1 << 20),
        (32, u64::MAX),
        (40, 1 << 20),
        (40, u64::MAX - 63),
        (40, i64::MAX as u64),
    ] {
        let error = refusal_after_change(|bytes| {
            bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
        });
        assert!(error.contains(ends), "{error}");
    }
    let symbols = |bytes: &[u8]| bytes.len() - 3 * 64;
    for (field, value, reason) in [
        (24, u64::MAX, ends),
        (24, 1 << 40, ends),
        (32, 1 << 20, ends),
        (32, u64::MAX, ends),
        (32, 1 << 40, ends),
        (40, 0, "no names"),
        (40, u64::MAX, "no names"),
    ] {
        let error = refusal_after_change(|bytes| {
            let at = symbols(bytes) + field;
            bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
        });
        assert!(error.contains(reason), "{field} {value:#x}: {error}");
    }
}

#[test]
fn every_truncated_copy_is_refused() {
    let bytes = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("f", 7)]).build_file();
    for length in 0..bytes.len() {
        assert!(open_content(&bytes[..length]).is_err(), "{length}");
    }
}

#[test]
fn overlapping_and_overflowing_segments_are_refused() {
    let add = |offset, address, size| {
        refusal_after_change(|bytes| {
            bytes[56] = 2;
            bytes[120..176].copy_from_slice(&program_header(offset, address, size));
        })
    };
    assert!(add(0, CODE_ADDRESS + 1, 8).contains("overlap"));
    assert!(add(0, CODE_ADDRESS - 8, 9).contains("overlap"));
    assert!(add(0, u64::MAX, 2).contains("exceeds the address space"));
    assert!(add(u64::MAX, 0x10_0000, 2).contains("exceeds the address space"));
}

#[test]
fn a_symbol_outside_the_code_has_no_probe_site() {
    let at = |address| {
        let symbol = ElfSymbol {
            address,
            ..global_function("f", 7)
        };
        library_with(&ENDBR_PUSH, vec![symbol]).find_site("f")
    };
    let end = CODE_ADDRESS + ENDBR_PUSH.len() as u64;
    for address in [0, CODE_ADDRESS - 1, end, u64::MAX] {
        assert!(matches!(at(address), Err(SiteError::OutsideCode { .. })));
    }
    assert!(at(end - 1).is_ok());
}

#[test]
fn a_symbol_in_a_data_segment_has_no_probe_site() {
    let mut bytes = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("f", 7)]).build_file();
    bytes[68] = 6; // readable and writable
    let site = open_content(&bytes).unwrap().find_site("f");
    assert!(matches!(site, Err(SiteError::OutsideCode { .. })));
}

#[test]
fn a_symbol_past_the_end_of_the_file_has_no_probe_site() {
    let mut bytes = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("f", 0)]).build_file();
    for offset in [1 << 20, i64::MAX as u64 - 100] {
        bytes[64..120].copy_from_slice(&program_header(offset, CODE_ADDRESS, 64));
        let site = open_content(&bytes).unwrap().find_site("f");
        assert!(
            matches!(site, Err(SiteError::OutsideCode { .. })),
            "{site:?}"
        );
    }
}

#[test]
fn a_truncated_function_is_probed_at_its_entry() {
    for length in 1..=4 {
        let site =
            library_with(&ENDBR_PUSH[..length], vec![global_function("f", 100)]).find_site("f");
        assert_eq!(site.unwrap(), SITE_AT_ENTRY, "{length}");
    }
    let site = library_with(&ENDBR_PUSH[..5], vec![global_function("f", 100)]).find_site("f");
    assert_eq!(site.unwrap().bytes_after_entry, 4);
}

#[test]
fn the_probe_site_is_within_the_function() {
    let site = library_with(&ENDBR_PUSH, vec![global_function("f", 4)]).find_site("f");
    assert_eq!(site.unwrap(), SITE_AT_ENTRY);
}

#[test]
fn a_function_of_unknown_or_excessive_size_is_probed_at_its_entry() {
    let site = library_with(&ENDBR_PUSH, vec![global_function("f", 0)]).find_site("f");
    assert_eq!(site.unwrap(), SITE_AT_ENTRY);
    let mut code = ENDBR_PUSH.to_vec();
    code.resize(MAX_FUNCTION_BYTES as usize + 1, 0x90);
    let site = library_with(&code, vec![global_function("f", u64::MAX)]).find_site("f");
    assert_eq!(site.unwrap(), SITE_AT_ENTRY);
}

#[test]
fn a_function_with_a_second_entry_is_probed_at_its_entry() {
    for bytes_after_entry in [1, 4] {
        let inner = ElfSymbol {
            address: CODE_ADDRESS + bytes_after_entry,
            ..global_function("inner", 3)
        };
        let library = library_with(&ENDBR_PUSH, vec![global_function("f", 7), inner]);
        assert_eq!(library.find_site("f").unwrap(), SITE_AT_ENTRY);
    }
    let mut loops = ENDBR_PUSH.to_vec();
    loops.extend([0xeb, 0xfb]); // jmp to the push
    let site = library_with(&loops, vec![global_function("f", 9)]).find_site("f");
    assert_eq!(site.unwrap(), SITE_AT_ENTRY);
}

#[test]
fn symbols_are_selected_by_binding_type_and_version() {
    const WEAK_BINDING: u8 = 2 << 4;
    const LOCAL_BINDING: u8 = 0;
    const UNIQUE_BINDING: u8 = 10 << 4;
    const HIDDEN_VERSION: u16 = 0x8000;
    let with = |name, info| ElfSymbol {
        info,
        ..global_function(name, 7)
    };
    let old = ElfSymbol {
        address: CODE_ADDRESS + 5,
        version: HIDDEN_VERSION | 2,
        ..global_function("versioned", 1)
    };
    let library = library_with(
        &ENDBR_PUSH,
        vec![
            with("weak", WEAK_BINDING | SYMBOL_TYPE_FUNCTION),
            with("unique", UNIQUE_BINDING | SYMBOL_TYPE_FUNCTION),
            with("local", LOCAL_BINDING | SYMBOL_TYPE_FUNCTION),
            with("data", WEAK_BINDING | 1),
            with("chosen", WEAK_BINDING | SYMBOL_TYPE_INDIRECT_FUNCTION),
            old,
            global_function("versioned", 7),
        ],
    );
    assert!(library.find_site("weak").is_ok());
    assert!(library.find_site("unique").is_ok());
    assert!(matches!(
        library.find_site("local"),
        Err(SiteError::NotExported { .. })
    ));
    assert!(matches!(
        library.find_site("data"),
        Err(SiteError::NotAFunction { .. })
    ));
    assert!(matches!(
        library.find_site("chosen"),
        Err(SiteError::IndirectFunction { .. })
    ));
    assert_eq!(library.find_site("versioned").unwrap().bytes_after_entry, 4);
    let versioned = library
        .find_functions(&[FunctionName::Prefix("version")])
        .unwrap();
    assert_eq!(versioned[0].len(), 1, "{versioned:?}");
    assert_eq!(versioned[0][0].as_ref().unwrap().bytes_after_entry, 4);
}

#[test]
fn other_architectures_are_probed_at_the_entry() {
    let mut elf = ElfBuilder::new(&ENDBR_PUSH, vec![global_function("f", 7)]);
    elf.machine = 183; // aarch64
    let site = open_content(&elf.build_file())
        .unwrap()
        .find_site("f")
        .unwrap();
    assert_eq!((site.bytes_after_entry, site.trap), (0, TrapCost::Unknown));
}

/// Opens a file and looks up functions. Returns the number of probe sites, or `None` if the file is
/// refused.
fn open_and_find_sites(path: &Path) -> Option<usize> {
    let names = [
        FunctionName::Exact("cuInit"),
        FunctionName::Exact("cuLaunchKernel"),
        FunctionName::Exact("malloc"),
        FunctionName::Exact(""),
        FunctionName::Prefix("cuMemAlloc"),
    ];
    let sites = Library::open(path).ok()?.find_functions(&names).ok()?;
    Some(sites.iter().flatten().flatten().count())
}

#[test]
fn random_damage_never_panics() {
    let directory = install_softgpu(Prologue::Endbr64);
    let path = cuda_path(&directory);
    let content = fs::read(&path).unwrap();
    let intact = open_and_find_sites(&path);
    assert!(intact.is_some_and(|sites| sites > 2), "{intact:?}");
    let targets = damage_targets(&content);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let seed = std::env::var("ZERNEL_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..4000 {
        let mut damaged = Vec::new();
        for _ in 0..random.u32(1..4) {
            let target = random.choice(&targets).unwrap().clone();
            let at = random.u64(target);
            let any = random.u8(..);
            let value = *random.choice(&[0, 1, 0x7f, 0x80, 0xff, any]).unwrap();
            let length = random.u64(1..=8).min(content.len() as u64 - at);
            file.write_all_at(&vec![value; length as usize], at)
                .unwrap();
            damaged.push((at, length));
        }
        match open_and_find_sites(&path) {
            Some(_) => opened += 1,
            None => refused += 1,
        }
        for (at, length) in damaged {
            let original = &content[at as usize..(at + length) as usize];
            file.write_all_at(original, at).unwrap();
        }
    }
    assert_eq!(open_and_find_sites(&path), intact, "restored");
    assert!(
        opened > 500 && refused > 500,
        "{opened} opened, {refused} refused"
    );
}

/// Returns the ranges to damage: headers, tables and code, and the whole file.
fn damage_targets(content: &[u8]) -> Vec<Range<u64>> {
    let length = content.len() as u64;
    let file = object::File::parse(content).unwrap();
    let sections = u64::from_le_bytes(content[40..48].try_into().unwrap());
    let mut targets = vec![0..64, 64..64 + 56 * 8, sections..length, 0..length];
    for name in [".dynsym", ".dynstr", ".gnu.version", ".text"] {
        let range = file
            .section_by_name(name)
            .and_then(|section| section.file_range());
        targets.extend(range.map(|(start, length)| start..start + length));
    }
    targets
}

#[test]
fn truncation_at_any_length_is_an_error() {
    let directory = install_softgpu(Prologue::Push);
    let path = cuda_path(&directory);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let mut length = file.metadata().unwrap().len();
    let mut random = fastrand::Rng::with_seed(2);
    while length > 0 {
        length -= random.u64(1..=length.min(20_000));
        file.set_len(length).unwrap();
        assert!(
            open_and_find_sites(&path).is_none(),
            "the section headers are at the end of the file"
        );
    }
}
